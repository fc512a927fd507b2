"""4-bit floats of compressed-tensors, held against that library's own compressor and the format's definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.checkpoints.formats.floats.e2m1 import LEVELS, codes_of
from qcut.checkpoints.formats.reader import format_of, layer_of
from qcut.errors import CheckpointError, QcutError, UnsupportedError
from tests.checkpoints.formats import samples

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4, MXFP4A16
from compressed_tensors.quantization.utils import calculate_qparams

FIRST = "model.layers.0.self_attn.q_proj"
SCHEME = "mxfp4"


def stored(args: QuantizationArgs | None) -> dict[str, Any] | None:
    """Arguments as the library writes them into a configuration."""
    return None if args is None else args.model_dump(mode="json", exclude_unset=True)


def config(preset: dict[str, QuantizationArgs] = MXFP4A16, **changes: Any) -> dict[str, Any]:
    group = {key: stored(preset.get(key)) for key in ("weights", "input_activations")}
    group["weights"] = {**(group["weights"] or {}), **changes}
    form = "mxfp4-pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"format": form, "targets": ["Linear"], **group}},
        "ignore": ["lm_head"],
    }


def compress(_: str, weight: Tensor) -> samples.Packed:
    """A layer as the library compresses it, and the library's own decompression."""
    weight, args = weight.half(), MXFP4A16["weights"]
    groups = weight.view(len(weight), -1, 32)
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    back = MXFP4PackedCompressor.decompress(dict(packed), scheme)["weight"]
    return packed, back.double()


def test_codes_are_the_librarys() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    expected = unpack_fp4_from_uint8(packed, 16, 32, dtype=torch.float32)
    found = LEVELS[codes_of(packed).int()]
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("preset", [MXFP4A16, MXFP4])
def test_weights_are_the_librarys(tmp_path: Path, preset: dict[str, QuantizationArgs]) -> None:
    expected = samples.write(tmp_path, config(preset), compress)
    model = samples.loaded(tmp_path)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        assert layer.scheme.name == SCHEME
        assert torch.equal(layer.dequantized_weight().double(), module.weight), name
    samples.assert_serves(model, expected, tmp_path / "saved")


@samples.newer_experts
@pytest.mark.parametrize("family", samples.MIXTURES)
def test_experts_are_the_librarys(tmp_path: Path, family: str) -> None:
    expected = samples.write_mixture(tmp_path, family, config(), compress)
    model = samples.loaded(tmp_path)
    for name, module in samples.expert_modules(expected).items():
        experts = model.get_submodule(name)
        assert experts.up.scheme.name == experts.down.scheme.name == SCHEME
        assert torch.equal(experts.up.dequantized_weight().double(), module.gate_up_proj), name
        assert torch.equal(experts.down.dequantized_weight().double(), module.down_proj), name
    samples.assert_serves(model, expected, tmp_path / "saved")


@samples.newer_experts
def test_integers_and_floats_share_no_stack(tmp_path: Path) -> None:
    both = config()
    four = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    targets = [r"re:.*experts\.1\..*"]
    both["config_groups"]["group_1"] = {"format": "pack-quantized", "targets": targets, "weights": four}
    samples.write_mixture(
        tmp_path,
        "mixtral",
        {**both, "format": "mixed-precision"},
        lambda name, w: samples.compressed_tensors(w, 32) if "experts.1." in name else compress(name, w),
    )
    text = r"'.*experts\.1\.\w+' has 4 bits .*scheme w8a16, and '.*experts\.0\.\w+' has 4 bits .* levels \[0.0, 0.5"
    samples.refused(tmp_path, UnsupportedError, text)


def wide(name: str, weight: Tensor) -> samples.Packed:
    """Scales over 24 powers of two in each row, and groups of zeros with scales that nothing holds."""
    packed, _ = compress(name, weight)
    exponents = torch.arange(weight.shape[1] // 32).remainder(2) * 24 + 80
    scales = exponents.to(torch.uint8).expand(len(weight), -1).clone()
    packed["weight_packed"][::3, -16:] = 0x88
    scales[::3, -1] = torch.tensor([0, 254], dtype=torch.uint8)[torch.arange(len(scales[::3])) % 2]
    values = LEVELS[codes_of(packed["weight_packed"]).int()].double()
    exact = values * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    return {**packed, "weight_scale": scales}, exact


def test_scales_24_powers_apart_are_exact(tmp_path: Path) -> None:
    expected = samples.write(tmp_path, config(), wide)
    model = qcut.load(tmp_path, progress=False)
    for name, module in samples.linears(expected).items():
        layer = model.get_submodule(name)
        assert torch.equal(layer.dequantized_weight().double(), module.weight), name
        x = torch.randn(3, layer.in_features)
        exact, sizes = x.double() @ module.weight.t(), x.double().abs() @ module.weight.abs().t()
        assert ((layer(x).double() - exact).abs() <= layer.in_features * 2.0**-24 * sizes).all()


def scaled(place: tuple[int, int], exponent: int) -> Callable[[dict[str, Tensor]], None]:
    """Sets one of the first layer's scales."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{FIRST}.weight_scale"][place] = exponent

    return edit


@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (scaled((3, 1), 255), CheckpointError, r"q_proj.weight_scale': found 255 at \[3, 1\], which is NaN"),
        (scaled((2, 0), 253), UnsupportedError, r"q_proj.weight_scale': found 253 at \[2, 0\]; up to 252"),
        (
            scaled((1, 1), 7),
            UnsupportedError,
            r"found 2\*\*-120 at \[1, 1\], in a row with 2\*\*.*; .* 2\*\*24 apart",
        ),
        (
            lambda t: t.update({f"{FIRST}.weight_scale": t[f"{FIRST}.weight_scale"].half()}),
            CheckpointError,
            "found F16",
        ),
        (
            lambda t: t.update({f"{FIRST}.weight_packed": t[f"{FIRST}.weight_packed"][:, 1:].contiguous()}),
            CheckpointError,
            r"found U8 \[64, 31\]; needed: U8 \[64, 32\]",
        ),
        (lambda t: t.pop(f"{FIRST}.weight_scale"), CheckpointError, "weight_scale': is missing"),
        (
            lambda t: t.update({f"{FIRST}.weight_global_scale": torch.ones(1)}),
            CheckpointError,
            "weight_global_scale': the format has none of that name",
        ),
    ],
)
def test_bad_tensors_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], error: type[QcutError], text: str
) -> None:
    samples.write(tmp_path, config(), compress)
    samples.change(tmp_path, edit)
    samples.refused(tmp_path, error, text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"group_size": 16}, "'group_size': 16"),
        ({"num_bits": 8}, "'num_bits': 8"),
        ({"type": "int"}, "'type': 'int'"),
        ({"symmetric": False}, "'symmetric': False"),
        ({"strategy": "channel"}, "'strategy': 'channel'"),
        ({"actorder": "group"}, "actorder 'group'"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    samples.write(tmp_path, config(**changes), compress)
    samples.refused(tmp_path, UnsupportedError, f"weights are .*{text}.*mxfp4-pack-quantized is served of")


def test_static_tokens_are_refused(tmp_path: Path) -> None:
    described = config(MXFP4)
    described["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    samples.write(tmp_path, described, compress)
    samples.refused(tmp_path, UnsupportedError, "input_activations are float, dynamic False; none, or dynamic ones")


def test_scales_25_powers_apart_are_refused() -> None:
    form, (tensors, _) = format_of(config(), "here"), compress("", torch.randn(8, 64))
    tensors["weight_scale"][:] = torch.tensor([100, 124], dtype=torch.uint8)
    layer_of(form, "one", tensors, 8, 64)
    tensors["weight_scale"][5, 1] += 1
    with pytest.raises(UnsupportedError, match=r"'one.weight_scale': found 2\*\*-27 at \[5, 0\], .* 2\*\*-2;"):
        layer_of(form, "one", tensors, 8, 64)


def test_rows_of_no_whole_groups_are_refused() -> None:
    form, (tensors, _) = format_of(config(), "here"), compress("", torch.randn(8, 96))
    with pytest.raises(UnsupportedError, match=r"here: layer 'one' has 80 columns; a multiple of 32 is served"):
        layer_of(form, "one", tensors, 8, 80, "here")
