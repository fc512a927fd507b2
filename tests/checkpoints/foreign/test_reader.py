"""Doors of the reader: single layers, the engine, the command's loader, classifiers that are tied, shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import qcut
from qcut.checkpoints.foreign.reader import format_of, layer_of, reader_of
from qcut.checkpoints.pretrained import load_pretrained
from qcut.errors import CheckpointError
from tests.checkpoints.foreign import samples
from tests.support import ROOT

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
FIRST = "model.layers.0.self_attn.q_proj"


def pack(name: str, weight: Tensor) -> samples.Packed:
    """Columns of one order for layers that read the same rows."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    return samples.gptq(weight, size=32, order=order)


def test_one_layer_of_given_tensors() -> None:
    packed, exact = pack("", torch.randn(64, 96))
    tensors = {key: t.contiguous() for key, t in packed.items()} | {"bias": torch.ones(64).half()}
    layer = layer_of(format_of(CONFIG, "c"), "l", tensors, 64, 96)
    assert torch.equal(layer.dequantized_weight().double(), exact)
    assert torch.equal(layer.bias, torch.ones(64))
    with pytest.raises(CheckpointError, match=r"tensors: tensor 'l.qweight': found I32 .12, 64.; needed: I32 .16, 64."):
        layer_of(format_of(CONFIG, "c"), "l", tensors, 64, 128)


def test_the_engine_runs_it(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack)
    model = samples.loaded(tmp_path)
    prompt = samples.IDS[:, :5]
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    engine = qcut.Engine(model, context=32)
    assert engine.generate([prompt[0].tolist()], max_new_tokens=6)[0].tokens == expected


def test_the_commands_loader_reads_it(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "gpt2-5m" / file, tmp_path)
    model, _ = load_pretrained(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert model.get_submodule(FIRST).scheme.name == "int4_g32_shifted_ordered"


def test_layers_without_a_model(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack)
    reader = reader_of(tmp_path)
    assert reader is not None
    with reader.layers() as (form, tensors):
        own = {key.removeprefix(f"{FIRST}."): t.read() for key, t in tensors.items() if key.startswith(FIRST)}
        assert layer_of(form, FIRST, own, 64, 64).scheme.name == "int4_g32_shifted_ordered"


def test_shards(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack)
    whole = qcut.load(tmp_path, progress=False)(samples.IDS).logits
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"stray": torch.ones(1)}, tmp_path / "stray.safetensors")  # not in the index
    assert torch.equal(qcut.load(tmp_path, progress=False)(samples.IDS).logits, whole)
    index["weight_map"]["x"] = "../a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    samples.refused(tmp_path, CheckpointError, r"found the file '\.\./a\.safetensors'")


def test_a_tied_classifier_stays_float(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack, tie_word_embeddings=True)
    samples.change(tmp_path, lambda t: t.pop("lm_head.weight", None))
    model = qcut.load(tmp_path, progress=False)
    assert model.get_submodule("lm_head").weight is model.get_submodule("model.embed_tokens").weight


def test_a_quantized_classifier_beside_a_float_table(tmp_path: Path) -> None:
    model = samples.write(tmp_path, CONFIG, pack, tie_word_embeddings=True)
    packed, exact = pack("", model.lm_head.weight.detach().float())

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.pop("lm_head.weight", None)
        tensors.update({f"lm_head.{key}": t.contiguous() for key, t in packed.items()})

    samples.change(tmp_path, edit)
    again = samples.loaded(tmp_path)
    assert torch.equal(again.get_submodule("lm_head").dequantized_weight().double(), exact)
    assert torch.equal(again.get_submodule("model.embed_tokens").weight.double(), model.model.embed_tokens.weight)


def test_a_bias_that_is_missing(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack, attention_bias=True)
    samples.change(tmp_path, lambda t: t.pop(f"{FIRST}.bias"))
    samples.refused(tmp_path, CheckpointError, r"q_proj\.bias': is missing")


def test_a_configuration_without_quantized_layers(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, lambda _, weight: ({"weight": weight.half()}, weight))
    samples.refused(tmp_path, CheckpointError, r"a quantization_config, and no layer has quantized tensors")


def test_older_files_beside_the_configuration(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config.pop("quantization_config")
    del quantization["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(quantization))
    assert qcut.load(tmp_path, progress=False).get_submodule(FIRST).scheme.name == "int4_g32_shifted_ordered"


def test_what_is_not_foreign(tmp_path: Path) -> None:
    assert reader_of(tmp_path / "nothing") is None
    assert reader_of(tmp_path) is None
    samples.llama().save_pretrained(tmp_path)
    assert reader_of(tmp_path) is None
    (tmp_path / "x.gguf").write_bytes(b"not one")
    with pytest.raises(CheckpointError, match=r"x\.gguf: not a GGUF file"):
        qcut.load(tmp_path / "x.gguf", progress=False)
