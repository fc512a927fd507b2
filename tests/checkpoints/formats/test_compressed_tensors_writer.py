"""Quantized models written as compressed-tensors, read by that library, by transformers with it, and by qcut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import qcut
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.experts.linear_stack import LinearStack
from tests.checkpoints.formats import samples
from tests.support.decoders import small
from tests.support.mixtures import mixture_batches, tiny_mixture

FLOAT8 = ("fp8_dynamic", "fp8_static")
"""With tokens that transformers quantizes, too."""
SCHEMES = ("w8a8", "w8a16", "fp8", "int4", "int4_g16", "mxfp4", "nvfp4")
EVEN = {"hidden_size": 96, "intermediate_size": 64}
"""Sizes of a small model that groups of 16 and 32 divide."""


def quantized(kind: str = "llama", scheme: str = "w8a8", **changes: Any) -> torch.nn.Module:
    model = small(kind, **changes)
    calibration = qcut.calibrate(model, [samples.IDS], progress=False) if scheme.endswith("_static") else None
    qcut.quantize(model, scheme, calibration=calibration, allow_growth=True, progress=False)
    return model


def mixture(kind: str, scheme: str) -> Any:
    model, static = tiny_mixture(kind), scheme.endswith("_static")
    calibration = qcut.calibrate(model, mixture_batches(), progress=False) if static else None
    qcut.quantize(model, scheme, calibration=calibration, allow_growth=True, progress=False)
    return model


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The weights that the library makes of a folder's tensors, by layer."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(config).config_groups.values()
    states: dict[str, dict[str, Tensor]] = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            layer, _, key = name.rpartition(".")
            states.setdefault(layer, {})[key] = tensor
    found = {}
    for layer, state in states.items():
        if "weight_scale" in state:
            named = [group for group in groups if any(match_name(layer, target) for target in group.targets)]
            (group,) = named or [group for group in groups if "Linear" in group.targets]
            state.pop("bias", None)
            compressor = BaseCompressor.get_value_from_registry(group.format)
            found[layer] = compressor.decompress(state, group)["weight"]
    return found


def assert_same(found: Tensor, ours: Tensor, name: str) -> None:
    """The library multiplies in the type of the scales, and rounds once."""
    assert torch.equal(found, ours.to(found.dtype)), name


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "fp8", "fp8_dynamic", "fp8_static", "int4"])
@pytest.mark.parametrize("shard", [1 << 30, 20_000])
def test_what_is_written_is_read_bit_for_bit(tmp_path: Path, kind: str, scheme: str, shard: int) -> None:
    model = quantized(kind, scheme)
    qcut.save_compressed_tensors(model, tmp_path, max_shard_bytes=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == 20_000)
    again = qcut.load(tmp_path, progress=False)
    with torch.no_grad():
        assert torch.equal(again(samples.IDS).logits, model(samples.IDS).logits)
    qcut.save_compressed_tensors(model, tmp_path, max_shard_bytes=shard)  # over itself
    with pytest.raises(CheckpointError, match="of another checkpoint; give another directory"):
        qcut.save_compressed_tensors(model, tmp_path, max_shard_bytes=40_000)


@pytest.mark.parametrize("scheme", [*SCHEMES, *FLOAT8])
def test_the_librarys_own_decompression(tmp_path: Path, scheme: str) -> None:
    model = quantized("llama", scheme, **EVEN, attention_bias=True)
    qcut.save_compressed_tensors(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    layers = {name: m for name, m in model.named_modules() if isinstance(m, qcut.Linear)}
    assert len(layers) == 2 * 7 + ("lm_head" in layers)
    assert ("lm_head" in config["ignore"]) != ("lm_head" in layers)
    found = weights_of(tmp_path)
    assert set(found) == set(layers)
    for name, layer in layers.items():
        assert_same(found[name], layer.dequantized_weight(), name)
    again = samples.loaded(tmp_path)
    if scheme in ("fp8", *FLOAT8):
        read = {m.scheme.name for m in again.modules() if isinstance(m, qcut.Linear)}
        assert read == {scheme}
    with torch.no_grad():
        assert torch.equal(again(samples.IDS).logits, model(samples.IDS).logits)


@pytest.mark.parametrize("scheme", FLOAT8)
def test_transformers_quantizes_tokens_to_floats_too(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = quantized("llama", scheme, **EVEN)
    qcut.save_compressed_tensors(model, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = model(samples.IDS).logits, read(samples.IDS).logits
    assert float((theirs - ours).norm() / ours.norm()) < 0.1
    for name, layer in model.named_modules():
        if isinstance(layer, qcut.Linear) and scheme == "fp8_static":
            assert float(read.get_submodule(name).input_scale) == float(layer.input_scale)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_it(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = quantized("llama", scheme, **EVEN)
    qcut.save_compressed_tensors(model, tmp_path)
    # The library makes bfloat16 of floats of 4 bits.
    dtype = torch.bfloat16 if scheme.endswith("fp4") else torch.float32
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    read(samples.IDS)  # decompresses the weights
    for name, layer in model.named_modules():
        if isinstance(layer, qcut.Linear):
            assert_same(read.get_submodule(name).weight, layer.dequantized_weight(), name)


def test_a_model_of_several_schemes(tmp_path: Path) -> None:
    model = small("llama", **EVEN)
    for scheme, part in zip(SCHEMES[:6], ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), strict=True):
        qcut.quantize(model, scheme, include=[f"*.{part}"], allow_growth=True, progress=False)
    qcut.quantize(model, "nvfp4", include=["*.down_proj"], allow_growth=True, progress=False)
    qcut.save_compressed_tensors(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in groups].count(["Linear"]) == 1
    assert len(groups) == 7
    found = weights_of(tmp_path)
    for name, layer in model.named_modules():
        if isinstance(layer, qcut.Linear):
            assert_same(found[name], layer.dequantized_weight(), name)
    again = qcut.load(tmp_path, progress=False)
    with torch.no_grad():
        assert torch.equal(again(samples.IDS).logits, model(samples.IDS).logits)


@pytest.mark.parametrize("scheme", [*SCHEMES[:4], "int4_g32", *SCHEMES[5:]])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_experts_are_written_as_their_family_has_them(tmp_path: Path, kind: str, scheme: str) -> None:
    model = mixture(kind, scheme)
    qcut.save_compressed_tensors(model, tmp_path, max_shard_bytes=100_000)
    found, block = weights_of(tmp_path), "mlp" if kind == "Qwen3Moe" else "block_sparse_moe"
    pieces = {"up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    if kind == "Mixtral":
        pieces = {"up": ("w1", "w3"), "down": ("w2",)}
    for i, layer in enumerate(model.model.layers):
        for part, called in pieces.items():
            weight = getattr(layer.mlp.experts, part).dequantized_weight()
            for e, rows in enumerate(weight):
                for name, want in zip(called, rows.chunk(len(called)), strict=True):
                    full = f"model.layers.{i}.{block}.experts.{e}.{name}"
                    assert_same(found.pop(full), want, full)
    assert set(found) == {name for name, m in model.named_modules() if isinstance(m, qcut.Linear)}
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert f"model.layers.0.{block}.gate" in ignored
    again = qcut.load(tmp_path, progress=False)
    assert sum(isinstance(module, LinearStack) for module in again.modules()) == 4
    with torch.no_grad():
        assert torch.equal(again(samples.IDS).logits, model(samples.IDS).logits)


@pytest.mark.parametrize("scheme", FLOAT8)
def test_tokens_of_experts_are_read_as_float(tmp_path: Path, scheme: str) -> None:
    model = mixture("Qwen3Moe", scheme)
    qcut.save_compressed_tensors(model, tmp_path)
    again, layers = samples.loaded(tmp_path), dict(model.named_modules())
    read = {n: m for n, m in again.named_modules() if isinstance(m, qcut.Linear | LinearStack)}
    assert {name: m.scheme.name for name, m in read.items()} == {
        name: "fp8" if isinstance(m, LinearStack) else scheme for name, m in read.items()
    }
    assert sum(isinstance(m, LinearStack) for m in read.values()) == 4
    assert all(torch.equal(m.dequantized_weight(), layers[n].dequantized_weight()) for n, m in read.items())


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


def with_float_experts() -> Any:
    model = tiny_mixture()
    qcut.quantize(model, "w8a8", skip=["*experts*"], allow_growth=True, progress=False)
    return model


def with_a_quantized_table() -> Any:
    model = small("llama")
    qcut.quantize(model, "w8a8", embeddings="w8a16", allow_growth=True, progress=False)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quantized(scheme="codebook4_g16"), r"layer 'model.* is .*; only w8a8, w8a16, fp8, fp8_dynamic"),
        (lambda: quantized(scheme="int4_g16"), r"down_proj' is int4_g16 with 76 columns; only .* that divide"),
        (lambda: quantized(scheme="int4_int8"), r"layer 'model.* is int4_int8 .*; only w8a8"),
        (lambda: quantized("gpt2"), r"layer 'transformer.h.0.attn.c_attn' is a Conv1D"),
        (lambda: small("llama"), "no layer is quantized; w8a8, w8a16, fp8, fp8_dynamic"),
        (
            lambda: mixture("GptOss", "mxfp4"),
            "experts 'model.* checkpoints of GptOssForCausalLM have no layer for each",
        ),
        (with_float_experts, r"experts 'model\.layers\.0\.mlp\.experts' are in float; quantize them, too"),
        (with_a_quantized_table, "a quantized embedding; the format is written only with floating ones"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        qcut.save_compressed_tensors(make(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_groups_of_zeros_are_written_as_zeros(tmp_path: Path, scheme: str) -> None:
    model = small("llama", **EVEN)
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight[0] = 0
        weight[1, :32] = 0
        weight[2, 32:] *= 2.0**-20
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    qcut.save_compressed_tensors(model, tmp_path)
    layer = model.model.layers[0].mlp.down_proj
    assert not layer.dequantized_weight()[0].any()
    assert_same(weights_of(tmp_path)["model.layers.0.mlp.down_proj"], layer.dequantized_weight(), "down_proj")
    again = qcut.load(tmp_path, progress=False).model.layers[0].mlp.down_proj
    assert torch.equal(again.dequantized_weight(), layer.dequantized_weight())
