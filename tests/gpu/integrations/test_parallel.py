"""``from_pretrained(tp_plan="auto")`` under torchrun on two GPUs, which talk through NCCL, held to one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qcut.layers.linear import Linear
from tests.support.parallel import PROCESSES, Job, answers, config_of, is_rowwise, rows_for, run, slices

SCHEMES = ("w8a8", "w8a16", "w8a8_static", "codebook4", "codebook4_int8")


def _on_one(folder: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cuda:0"}, **options)


@pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    common = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**(sizes | common | {"attention_bias": True}))).save_pretrained(tmp_path / "llama")
    folder = str(tmp_path / "llama")
    jobs = [
        Job(scheme, folder, {"scheme": scheme, "calibrated": scheme.endswith("static")}, dtype="float16")
        for scheme in SCHEMES
    ]
    models = {job.name: _on_one(folder, **config_of(job)) for job in jobs}
    models["w8a8"].save_pretrained(tmp_path / "saved")
    jobs.append(Job("stored w8a8", str(tmp_path / "saved"), dtype="float16"))
    first, second = run(jobs, tmp_path, cpu=False, timeout=900.0)
    plain, _ = answers(_on_one(folder, dtype=torch.float16))
    for scheme, model in models.items():
        logits, _ = answers(model)
        for one in (first[scheme], second[scheme]):
            assert "error" not in one, one["error"]
            assert (one["logits"] - logits).abs().max() < (logits - plain).abs().max()
            assert one["tokens"] == first[scheme]["tokens"]
        for name, layer in model.named_modules():
            if not isinstance(layer, Linear):
                continue
            parts = [one[scheme]["layers"][name] for one in (first, second)]
            for rank, part in enumerate(parts):
                expected = slices(layer, is_rowwise(name), rank)
                assert part["state"].keys() == expected.keys()
                assert all(torch.equal(part["state"][key], t.cpu()) for key, t in expected.items()), (scheme, name)
            if is_rowwise(name):
                assert torch.equal(parts[0]["hooked"], parts[0]["own"] + parts[1]["own"])
            elif layer.scheme.int8_products:
                with torch.no_grad():
                    y = layer(rows_for(name, layer.in_features, torch.float16).cuda()).cpu()
                assert torch.equal(torch.cat([part["hooked"] for part in parts], -1), y)
    for one in (first, second):
        assert torch.equal(one["stored w8a8"]["logits"], one["w8a8"]["logits"])
