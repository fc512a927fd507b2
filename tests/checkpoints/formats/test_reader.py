"""Doors of the reader: single layers, the engine, the command's loader, classifiers that are tied, shards."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import qcut
from qcut.checkpoints.contents import contents
from qcut.checkpoints.detect import detect
from qcut.checkpoints.formats.reader import format_of, layer_of
from qcut.checkpoints.pretrained import load_pretrained
from qcut.errors import CheckpointError, UnsupportedError
from tests.checkpoints.formats import samples
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


def test_shards(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack, attention_bias=True, mlp_bias=True)
    model = qcut.load(tmp_path, dtype=torch.float32, progress=False)
    assert model.get_submodule(FIRST).bias is not None
    whole = model(samples.IDS).logits
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"stray": torch.ones(1)}, tmp_path / "stray.safetensors")  # not in the index
    assert torch.equal(samples.loaded(tmp_path)(samples.IDS).logits, whole)
    index["weight_map"]["x"] = "../a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    samples.refused(tmp_path, CheckpointError, r"found the file name '\.\./a\.safetensors'")


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
    assert samples.loaded(tmp_path).get_submodule(FIRST).scheme.name == "int4_g32_shifted_ordered"


def test_what_is_not_foreign(tmp_path: Path) -> None:
    assert detect(tmp_path / "nothing") is None
    assert detect(tmp_path) is None
    samples.llama().save_pretrained(tmp_path)
    assert detect(tmp_path) is None
    (tmp_path / "x.gguf").write_bytes(b"not one")
    with pytest.raises(CheckpointError, match=r"x\.gguf: not a GGUF file"):
        qcut.load(tmp_path / "x.gguf", progress=False)


COMPUTED = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
    "model.layers.1.self_attn.rotary_emb.cos_cached": (1, 1, 64, 16),
    "model.rotary_emb.inv_freq": (8,),
    "model.layers.0.self_attn.masked_bias": (),
}


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_buffers_that_models_compute_are_passed_over(tmp_path: Path, kind: str) -> None:
    pack = samples.gptq if kind == "gptq" else samples.awq
    config = {"quant_method": kind, "bits": 4, "group_size": 32}
    samples.write(tmp_path, config, lambda _, w: pack(w, 32) if kind == "awq" else pack(w, size=32))
    expected = qcut.load(tmp_path, progress=False)(samples.IDS).logits
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    wrong = {name: torch.full(shape, 7.0, dtype=torch.float16) for name, shape in COMPUTED.items()}
    save_file({**tensors, **wrong}, path)
    assert torch.equal(qcut.load(tmp_path, progress=False)(samples.IDS).logits, expected)
    save_file({**tensors, "model.layers.0.self_attn.extra": torch.ones(8)}, path)
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.extra'"):
        qcut.load(tmp_path, progress=False)


VALUES: list[Any] = [None, True, -1, 0, 3, 10**12, 2.5, "", "x", [], ["re:["], {}, {"num_bits": 4}, [[]]]
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq", "pack_dtype": "int32"},
    "awq": {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "bitsandbytes": {"load_in_4bit": True, "load_in_8bit": False, "llm_int8_threshold": 6.0},
    "compressed-tensors": {
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    },
}


@pytest.mark.parametrize("method", CONFIGS)
def test_unknown_fields_that_hold_something_are_refused(method: str) -> None:
    config = {"quant_method": method, **CONFIGS[method]}
    for value in (None, False, "", [], {}):
        format_of({**config, "a_new_field": value}, "x")
    for value in (1, True, "hadamard", [1], {"rank": 8}):
        with pytest.raises(UnsupportedError, match="found the field 'a_new_field' with"):
            format_of({**config, "a_new_field": value}, "x")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ((), {"quantization_status": "frozen"}, None),
        ((), {"quantization_status": "calibration"}, "quantization_status is 'calibration'; compressed, frozen"),
        ((), {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is .*sparse-24"),
        ((), {"sparsity_config": ["sparse"]}, "sparsity_config is"),
        ((), {"transform_config": {"config_groups": {}}}, "transform_config is"),
        ((), {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        (("config_groups", "group_0"), {"rotation": "hadamard"}, "config_groups.group_0: found the field 'rotation'"),
        (("config_groups", "group_0", "weights"), {"zeros": [2, 2]}, "weights: found the field 'zeros'"),
        (("config_groups", "group_0", "weights"), {"actorder": "rows"}, "actorder is 'rows'; group and weight"),
        (("config_groups", "group_0", "weights"), {"actorder": "static"}, None),
    ],
)
def test_fields_of_compressed_tensors(at: tuple[str, ...], value: dict[str, Any], message: str | None) -> None:
    config = copy.deepcopy({"quant_method": "compressed-tensors", **CONFIGS["compressed-tensors"]})
    place = config
    for key in at:
        place = place[key]
    place.update(value)
    if message is None:
        format_of(config, "x")
        return
    with pytest.raises(UnsupportedError, match=message):
        format_of(config, "x")


def test_columns_in_another_order_want_their_groups() -> None:
    tensors, _ = samples.gptq(torch.randn(32, 64), size=32)
    tensors.pop("g_idx", None)
    config = {"quant_method": "gptq", **CONFIGS["gptq"]}
    assert layer_of(format_of(config, "x"), "layer", tensors, 32, 64).out_features == 32
    with pytest.raises(CheckpointError, match=r"'layer.g_idx': is missing; needed: .*desc_act is true"):
        layer_of(format_of({**config, "desc_act": True}, "x"), "layer", tensors, 32, 64)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_beside_a_model_are_refused(tmp_path: Path, name: str) -> None:
    samples.write(tmp_path, {"quant_method": "gptq", **CONFIGS["gptq"]}, lambda _, w: samples.gptq(w, size=32))
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{name}: an adapter next to a model; allowed:"):
        qcut.load(tmp_path, progress=False)


def test_tied_tensors_may_not_differ(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    samples.refused(tmp_path, CheckpointError, r"'model\.embed_tokens\.weight' and 'lm_head\.weight' differ")
    samples.change(tmp_path, lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}))
    model = samples.loaded(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_files_beside_the_model_are_not_read(tmp_path: Path) -> None:
    samples.write(tmp_path, CONFIG, pack)
    save_file({"layers.0.wq": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    samples.loaded(tmp_path)
    assert list(contents(tmp_path).files) == ["model.safetensors"]


def places(data: Any) -> Iterator[tuple[Any, ...]]:
    """Ways to every value within."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield (key,)
        yield from ((key, *rest) for rest in places(value))


@pytest.mark.parametrize("method", CONFIGS)
def test_configurations_of_unexpected_values(method: str) -> None:
    format_of(CONFIGS[method], "c", method)
    for way in places(CONFIGS[method]):
        for value in VALUES:
            config = copy.deepcopy(CONFIGS[method])
            at = config
            for key in way[:-1]:
                at = at[key]
            at[way[-1]] = value
            with contextlib.suppress(CheckpointError, UnsupportedError):
                format_of(config, "c", method)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_tensors_of_unexpected_shapes_and_dtypes(method: str) -> None:
    form = format_of(CONFIGS[method], "c", method)
    weight = torch.randn(64, 64)
    packed, _ = samples.gptq(weight, size=32) if method == "gptq" else samples.awq(weight, 32)
    layer_of(form, "l", packed, 64, 64)
    for key, tensor in packed.items():
        others = [
            tensor[:1],
            tensor[None],
            tensor.flatten(),
            tensor[..., :0],
            torch.tensor(1.0),
            tensor.t().contiguous(),
        ]
        others += [tensor.to(dtype) for dtype in (torch.float64, torch.int8, torch.bool, torch.complex64, torch.uint16)]
        for other in others:
            if other.shape == tensor.shape and other.dtype == tensor.dtype:
                continue
            with pytest.raises(CheckpointError, match=f"tensors: tensor 'l.{key}': found"):
                layer_of(form, "l", {**packed, key: other}, 64, 64)
        with contextlib.suppress(CheckpointError, UnsupportedError):
            layer_of(form, "l", {**packed, key: torch.full_like(tensor, -1)}, 64, 64)
