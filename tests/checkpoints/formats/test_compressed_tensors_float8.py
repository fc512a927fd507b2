"""8-bit floats of compressed-tensors, held against that library's own compressor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.errors import CheckpointError, QcutError, UnsupportedError
from tests.checkpoints.formats import samples

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import FP8, FP8_BLOCK, FP8_DYNAMIC
from compressed_tensors.quantization.utils import calculate_qparams

FIRST = "model.layers.0.self_attn.q_proj"
PRESETS = {"rows": FP8_DYNAMIC, "static": FP8, "weights": {"weights": FP8_DYNAMIC["weights"]}}


def stored(args: QuantizationArgs | None) -> dict[str, Any] | None:
    return None if args is None else args.model_dump(mode="json", exclude_unset=True)


def config(preset: dict[str, QuantizationArgs] = FP8_DYNAMIC, **changes: Any) -> dict[str, Any]:
    group = {key: stored(preset.get(key)) for key in ("weights", "input_activations")}
    group["weights"] = {**(group["weights"] or {}), **changes}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"format": "float-quantized", "targets": ["Linear"], **group}},
        "ignore": ["lm_head"],
    }


def compress(preset: dict[str, QuantizationArgs]) -> Callable[[str, Tensor], samples.Packed]:
    """A layer as the library compresses it, and its values in the format's definition."""
    args = preset["weights"]

    def of(_: str, weight: Tensor) -> samples.Packed:
        rows = weight if args.strategy == "channel" else weight.reshape(1, -1)
        scale, _ = calculate_qparams(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), args)
        scale = scale if args.strategy == "channel" else scale.flatten()
        scheme = QuantizationScheme(targets=["Linear"], **preset)
        packed = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        if "input_activations" in preset and not preset["input_activations"].dynamic:
            packed["input_scale"] = torch.tensor([0.25])
        exact = packed["weight"].double() * packed["weight_scale"].double().reshape(-1, 1)
        assert torch.equal(FloatQuantizationCompressor.decompress(dict(packed), scheme)["weight"], exact.float())
        return packed, exact

    return of


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_weights_are_the_librarys(tmp_path: Path, preset: dict[str, QuantizationArgs]) -> None:
    expected = samples.write(tmp_path, config(preset), compress(preset))
    samples.assert_weights(tmp_path, expected, "fp8")


@samples.newer_experts
@pytest.mark.parametrize("family", samples.MIXTURES)
def test_experts_are_the_librarys(tmp_path: Path, family: str) -> None:
    expected = samples.write_mixture(tmp_path, family, config(), compress(FP8_DYNAMIC))
    samples.assert_expert_weights(tmp_path, expected, "fp8")


def compress_blocks(_: str, weight: Tensor) -> samples.Packed:
    """A layer in blocks as the library compresses it."""
    args = FP8_BLOCK["weights"]
    rows, columns = args.block_structure
    blocks = weight.view(len(weight) // rows, rows, -1, columns)
    scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    scheme = QuantizationScheme(targets=["Linear"], **FP8_BLOCK)
    packed = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    each = packed["weight_scale"].double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    exact = packed["weight"].double() * each
    assert torch.equal(FloatQuantizationCompressor.decompress(dict(packed), scheme)["weight"], exact.float())
    return packed, exact


def test_blocks_are_the_librarys(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 256, "num_key_value_heads": 4}
    expected = samples.write(tmp_path, config(FP8_BLOCK), compress_blocks, **sizes)
    model = samples.loaded(tmp_path)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        assert layer.scheme.name == "fp8_blocks"
        assert torch.equal(layer.dequantized_weight(), module.weight.float()), name
    samples.assert_serves(model, expected, tmp_path / "saved")


def changed(key: str, edit: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{FIRST}.{key}"] = edit(tensors[f"{FIRST}.{key}"])

    return change


def with_nan(weight: Tensor) -> Tensor:
    bits = weight.view(torch.uint8).clone()
    bits[3, 5] = 0x7F
    return bits.view(weight.dtype)


@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (changed("weight", with_nan), CheckpointError, r"q_proj.*found nan at \[3, 5\]; finite values"),
        (changed("weight", lambda w: w.to(torch.float8_e5m2)), CheckpointError, "found F8_E5M2"),
        (changed("weight", lambda w: w[:, 1:].contiguous()), CheckpointError, r"found F8_E4M3 \[64, 63\]; needed"),
        (changed("weight_scale", lambda s: s * float("nan")), CheckpointError, "weight_scale': found nan"),
        (changed("weight_scale", lambda s: -s), CheckpointError, "found -.*; values above 0"),
        (changed("weight_scale", lambda s: s.repeat(1, 2)), CheckpointError, r"found F32 \[64, 2\]; needed"),
        (lambda t: t.pop(f"{FIRST}.weight_scale"), CheckpointError, "weight"),
        (
            lambda t: t.update({f"{FIRST}.weight_zero_point": torch.zeros(64, 1)}),
            CheckpointError,
            "weight_zero_point': the format has none of that name",
        ),
    ],
)
def test_bad_tensors_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], error: type[QcutError], text: str
) -> None:
    samples.write(tmp_path, config(), compress(FP8_DYNAMIC))
    samples.change(tmp_path, edit)
    samples.refused(tmp_path, error, text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_bits": 4}, "'num_bits': 4"),
        ({"type": "int"}, "'type': 'int'"),
        ({"symmetric": False}, "'symmetric': False"),
        ({"strategy": "block"}, "the strategy 'block'"),
        ({"strategy": "group", "group_size": 32}, "the strategy 'group'"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    samples.write(tmp_path, config(**changes), compress(FP8_DYNAMIC))
    samples.refused(tmp_path, UnsupportedError, f"weights are .*{text}.*float-quantized is served of")


def test_integer_tokens_are_refused(tmp_path: Path) -> None:
    described = config()
    described["config_groups"]["group_0"]["input_activations"]["type"] = "int"
    samples.write(tmp_path, described, compress(FP8_DYNAMIC))
    samples.refused(tmp_path, UnsupportedError, "input_activations are int, dynamic True; none, or ones of type float")
