"""W8A8 written as compressed-tensors, read by that library, by transformers with it, and by qcut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import qcut
from qcut.errors import CheckpointError, UnsupportedError
from tests.checkpoints.formats import samples
from tests.support.decoders import small


def quantized(kind: str = "llama", scheme: str = "w8a8") -> torch.nn.Module:
    model = small(kind)
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("shard", [1 << 30, 20_000])
def test_what_is_written_is_read_bit_for_bit(tmp_path: Path, kind: str, shard: int) -> None:
    model = quantized(kind)
    qcut.save_compressed_tensors(model, tmp_path, max_shard_bytes=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == 20_000)
    again = qcut.load(tmp_path, progress=False)
    with torch.no_grad():
        assert torch.equal(again(samples.IDS).logits, model(samples.IDS).logits)
    qcut.save_compressed_tensors(model, tmp_path, max_shard_bytes=shard)  # over itself
    with pytest.raises(CheckpointError, match="of another checkpoint; give another directory"):
        qcut.save_compressed_tensors(model, tmp_path, max_shard_bytes=40_000)


def test_the_librarys_own_decompression(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = quantized()
    qcut.save_compressed_tensors(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    tensors = load_file(tmp_path / "model.safetensors")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, qcut.Linear)}
    assert len(layers) == 2 * 7 + ("lm_head" in layers)
    assert ("lm_head" in config["ignore"]) != ("lm_head" in layers)
    for name, layer in layers.items():
        state = {key: tensors[f"{name}.{key}"] for key in ("weight", "weight_scale")}
        assert torch.equal(IntQuantizationCompressor.decompress(state, scheme)["weight"], layer.dequantized_weight())


def test_transformers_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = quantized()
    qcut.save_compressed_tensors(model, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    read(samples.IDS)  # decompresses the weights
    for name, layer in model.named_modules():
        if isinstance(layer, qcut.Linear):
            assert torch.equal(read.get_submodule(name).weight, layer.dequantized_weight()), name


def simulated(model: torch.nn.Module, kind: str, divisor: float) -> torch.Tensor:
    """Logits in float of a model's dequantized weights, tokens rounded to steps of their largest over that."""

    def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        step = inputs[0].abs().amax(-1, keepdim=True) / divisor
        return (inputs[0] / step).round().clamp(-128, 127) * step

    plain = small(kind)
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, qcut.Linear):
                plain.get_submodule(name).weight.copy_(layer.dequantized_weight())
                plain.get_submodule(name).register_forward_pre_hook(rounded)
        return plain(samples.IDS).logits


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_differ_by_how_tokens_are_rounded_alone(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = quantized(kind)
    qcut.save_compressed_tensors(model, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = model(samples.IDS).logits, read(samples.IDS).logits
    torch.testing.assert_close(ours, simulated(model, kind, 127), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(theirs, simulated(model, kind, 127.5), rtol=1e-4, atol=1e-4)
    assert float((theirs - ours).norm() / ours.norm()) < 0.05
    assert not torch.equal(theirs, ours)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda scheme=scheme: quantized(scheme=scheme), r"layer 'model.* is .*; only w8a8 is")
            for scheme in ("w8a16", "int4", "codebook4_g16")
        ),
        (lambda: quantized("gpt2"), r"layer 'transformer.h.0.attn.c_attn' is a Conv1D"),
        (lambda: small("llama"), "no layer is w8a8"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        qcut.save_compressed_tensors(make(), tmp_path)
    assert not list(tmp_path.iterdir())
