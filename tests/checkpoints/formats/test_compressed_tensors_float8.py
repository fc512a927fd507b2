"""8-bit floats of compressed-tensors, held against that library's own compressor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.engine.engine import Engine
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from tests.checkpoints.formats import samples
from tests.support.decoders import theirs

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import FP8, FP8_BLOCK, FP8_DYNAMIC
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp

FIRST = "model.layers.0.self_attn.q_proj"
ONE_SCALE = {**FP8, "input_activations": FP8_DYNAMIC["input_activations"]}
STATIC_ROWS = {**FP8_DYNAMIC, "input_activations": FP8["input_activations"]}
PRESETS = {
    "fp8_dynamic": FP8_DYNAMIC,
    "fp8_dynamic, one scale": ONE_SCALE,
    "fp8_static": FP8,
    "fp8_static, rows": STATIC_ROWS,
    "fp8": {"weights": FP8_DYNAMIC["weights"]},
}
"""By the scheme that they are read as."""


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

    def of(name: str, weight: Tensor) -> samples.Packed:
        rows = weight if args.strategy == "channel" else weight.reshape(1, -1)
        scale, _ = calculate_qparams(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), args)
        scale = scale if args.strategy == "channel" else scale.flatten()
        scheme = QuantizationScheme(targets=["Linear"], **preset)
        packed = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        if "input_activations" in preset and not preset["input_activations"].dynamic:
            packed["input_scale"] = samples.input_scale(name)[None]
        exact = packed["weight"].double() * packed["weight_scale"].double().reshape(-1, 1)
        assert torch.equal(FloatQuantizationCompressor.decompress(dict(packed), scheme)["weight"], exact.float())
        return packed, exact

    return of


def tokens_of(preset: dict[str, QuantizationArgs]) -> samples.Tokens | None:
    """What the library makes of tokens."""
    args = preset.get("input_activations")
    if args is None:
        return None

    def of(name: str, x: Tensor) -> Tensor:
        scale, zero_point = samples.input_scale(name)[None], torch.zeros(1)
        if args.dynamic:
            scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
        return fake_quantize(x, scale, zero_point.float(), args)

    return of


@pytest.mark.parametrize("case", PRESETS)
def test_weights_and_tokens_are_the_librarys(tmp_path: Path, case: str) -> None:
    preset = PRESETS[case]
    expected = samples.write(tmp_path, config(preset), compress(preset))
    samples.assert_weights(tmp_path, expected, case.split(",")[0], tokens_of(preset))


@samples.newer_experts
@pytest.mark.parametrize("preset", [FP8_DYNAMIC, FP8], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", samples.MIXTURES)
def test_experts_are_the_librarys(tmp_path: Path, family: str, preset: dict[str, QuantizationArgs]) -> None:
    expected = samples.write_mixture(tmp_path, family, config(preset), compress(preset))
    samples.assert_expert_weights(tmp_path, expected, "fp8", tokens_of(preset))


TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({"strategy": None}, "fp8_static"),  # the library's default
        ({"dynamic": True}, "fp8"),
        ({"strategy": None, "dynamic": True}, "fp8"),
        ({"strategy": None, "group_size": -1}, "fp8"),
        ({"strategy": "token", "dynamic": True, "symmetric": False}, "fp8"),
        ({"strategy": "token", "dynamic": True, "num_bits": 4}, "fp8"),
        ({"strategy": "token", "dynamic": [True]}, "fp8"),
        ({"strategy": "token", "dynamic": 1}, "fp8"),
    ],
)
def test_tokens_of_other_kinds_stay_float(tmp_path: Path, changes: dict[str, Any], scheme: str) -> None:
    described = config(FP8)
    described["config_groups"]["group_0"]["input_activations"] = {**TOKENS, **changes}
    expected = samples.write(tmp_path, described, compress(FP8))
    samples.assert_weights(tmp_path, expected, scheme, tokens_of(FP8) if scheme == "fp8_static" else None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [[], [1]])
def test_input_scales_of_16_bits(tmp_path: Path, dtype: torch.dtype, shape: list[int]) -> None:
    samples.write(tmp_path, config(FP8), compress(FP8))
    samples.change(tmp_path, changed("input_scale", lambda s: s.to(dtype).reshape(shape)))
    layer = samples.loaded(tmp_path).get_submodule(FIRST)
    scale = samples.input_scale(FIRST)[None].to(dtype).float()
    assert torch.equal(layer.input_scale, scale)
    assert torch.equal(layer.col_scale, scale * layer.weight_scale)


@pytest.mark.parametrize("preset", [FP8_DYNAMIC, FP8], ids=["dynamic", "static"])
def test_engine_serves_layers_with_own_scales(tmp_path: Path, preset: dict[str, QuantizationArgs]) -> None:
    """Projections are joined only if they have no scales of tokens, which differ."""
    samples.write(tmp_path, config(preset), compress(preset))
    model = qcut.load(tmp_path, dtype=torch.float32, progress=False)
    prompt = samples.IDS[0].tolist()
    want = theirs(model, prompt, 8)
    engine = Engine(model)
    attention = engine.decoder.blocks[0].attention.projections
    assert len(attention) == (3 if preset is FP8 else 1)
    assert engine.generate([prompt], 8)[0].tokens == want
    assert theirs(model, prompt, 8) == want


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
    ("edit", "text"),
    [
        (lambda s: s * 0, r"found 0\.0 at \[0\]; finite values from 1\.17549e-38 are needed"),
        (lambda s: -s, r"found -0\.0\d* at \[0\]; finite values from 1"),
        (lambda s: s * float("nan"), r"found nan at \[0\]; finite values from 1"),
        (lambda s: s * float("inf"), r"found inf at \[0\]; finite values from 1"),
        (lambda s: torch.full_like(s, 2.0**-127), r"found 5\.87.*e-39 at \[0\]; finite values from 1"),
        (lambda s: s.repeat(2), r"found F32 \[2\]; needed: F16 or BF16 or F32 \[1\] or \[\]"),
        (lambda s: s.double(), r"found F64 \[1\]; needed: F16 or BF16 or F32 \[1\] or \[\]"),
        (lambda s: s.to(torch.float8_e4m3fn), r"found F8_E4M3 \[1\]; needed"),
        (None, r"is missing; needed: F16 or BF16 or F32 \[1\] or \[\]"),
    ],
)
def test_bad_input_scales_are_refused(tmp_path: Path, edit: Callable[[Tensor], Tensor] | None, text: str) -> None:
    samples.write(tmp_path, config(FP8), compress(FP8))
    key = f"{FIRST}.input_scale"
    samples.change(tmp_path, changed("input_scale", edit) if edit else lambda t: t.pop(key))
    samples.refused(tmp_path, CheckpointError, rf"tensor '{key}': {text}")


@pytest.mark.parametrize(("scale", "found"), [(2.0**-126, "0|.*e-4"), (2.0**126, "inf")])
def test_scales_with_no_normal_product_are_refused(tmp_path: Path, scale: float, found: str) -> None:
    samples.write(tmp_path, config(FP8), compress(FP8))
    samples.change(tmp_path, changed("input_scale", lambda s: torch.full_like(s, scale)))
    samples.change(tmp_path, changed("weight_scale", lambda s: s * (1e6 if scale > 1 else 1e-3)))
    samples.refused(tmp_path, CheckpointError, rf"q_proj': (input|col)_scale: .*({found})")


def test_input_scales_of_dynamic_tokens_are_unused(tmp_path: Path) -> None:
    samples.write(tmp_path, config(), compress(STATIC_ROWS))
    layers = samples.loaded(tmp_path).modules()
    assert {layer.scheme.name for layer in layers if isinstance(layer, qcut.Linear)} == {"fp8_dynamic"}


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
