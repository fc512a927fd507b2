"""Parts of a layer: slices of its stored tensors, with rotations that know where a part begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qcut
from qcut.errors import CheckpointError, QuantizationError, UnsupportedError
from qcut.layers.parallel import CUT, part_layer, part_scheme, part_shapes, refuse_parts

N, K, PARTS = 48, 512, 2
SCHEMES = (
    *("w8a8", "w8a16", "fp8_dynamic", "int16x8"),
    *("codebook4", "codebook3_g64", "codebook4+2", "codebook4_pairs_int8", "int4", "nvfp4"),
)


@pytest.fixture(scope="module")
def module() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(K, N)


def columns(part: int) -> slice:
    return slice(part * K // PARTS, (part + 1) * K // PARTS)


def of_columns(whole: qcut.Linear, part: int) -> dict[str, torch.Tensor]:
    """The stored tensors of one part, cut from those of the whole layer."""
    cut = {}
    for key, tensor in whole.state_dict().items():
        along = CUT.get(key, ())
        if key == "qweight":
            tensor = tensor[:, :K]
        if key != "bias":
            cut[key] = tensor.chunk(PARTS, 1)[part] if 1 in along else tensor
    return cut


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shard_of_columns_equals_quantizing_those_columns(module: nn.Linear, scheme: str) -> None:
    whole = qcut.Linear.from_float(module, scheme)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    total = whole.bias.expand(5, N)
    for part in range(PARTS):
        own, at = part_scheme(whole.scheme, columns(part).start, K // PARTS), columns(part)
        piece = nn.Linear(K // PARTS, N, bias=False)
        piece.weight = nn.Parameter(module.weight[:, at])
        absmax = module.weight.detach().abs().amax(1)
        made = qcut.Linear.from_float(piece, own, row_absmax=absmax)
        cut = part_layer(own, N, K // PARTS, of_columns(whole, part), "h.down")
        for (name, buffer), (_, other) in zip(made.named_buffers(), cut.named_buffers(), strict=True):
            assert torch.equal(buffer, other), (part, name)
        for key, (shape, dtype) in part_shapes(own, N, K // PARTS).items():
            assert (list(of_columns(whole, part)[key].shape), of_columns(whole, part)[key].dtype) == (shape, dtype)
        assert torch.allclose(made.dequantized_weight(), whole.dequantized_weight()[:, at], atol=1e-6)
        total = total + made(x[:, at])
    atol = 0.2 if scheme == "fp8_dynamic" else 0.1 if whole.scheme.int8_products else 1e-4
    torch.testing.assert_close(total, whole(x), rtol=0, atol=atol)


def test_rotated_parts_add_up(module: nn.Linear) -> None:
    whole = qcut.Linear.from_float(module, "w8a8_rotated_g64")
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    stored = quantized = whole.bias.expand(5, N)
    for part in range(PARTS):
        own, at = part_scheme(whole.scheme, columns(part).start, K // PARTS), columns(part)
        cut = part_layer(own, N, K // PARTS, of_columns(whole, part), "h.down")
        assert torch.allclose(cut.dequantized_weight(), whole.dequantized_weight()[:, at], atol=1e-6)
        piece = nn.Linear(K // PARTS, N, bias=False)
        piece.weight = nn.Parameter(module.weight[:, at])
        made = qcut.Linear.from_float(piece, own, row_absmax=module.weight.detach().abs().amax(1))
        assert bool((made.weight_scale <= cut.weight_scale).all())  # of the part's own columns
        stored, quantized = stored + cut(x[:, at]), quantized + made(x[:, at])
    for total in (stored, quantized):
        torch.testing.assert_close(total, whole(x), rtol=0, atol=0.1)
    for first, k in ((32, 64), (0, 96)):
        with pytest.raises(UnsupportedError, match=rf"w8a8_rotated_g64 in parts of {k} input channels, groups of 64;"):
            part_scheme(whole.scheme, first, k)


def test_static_parts_have_column_sums_of_their_own(module: nn.Linear) -> None:
    whole = qcut.Linear.from_float(module, "w8a8_static", static_range=qcut.StaticRange(-3.0, 4.0))
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    parts = [part_layer(whole.scheme, N, K // PARTS, of_columns(whole, part)) for part in range(PARTS)]
    assert torch.equal(sum(part.colsum for part in parts), whole.colsum)
    total = sum(part(x[:, columns(i)]) for i, part in enumerate(parts)) + whole.bias
    # The integers are those of the whole layer: float32 sums of two parts are all that differs.
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-5)


def test_static_parts_of_fp8_add_up(module: nn.Linear) -> None:
    whole = qcut.Linear.from_float(module, "fp8_static", static_range=qcut.StaticRange(-3.0, 4.0))
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    parts = [part_layer(whole.scheme, N, K // PARTS, of_columns(whole, part)) for part in range(PARTS)]
    total = sum(part(x[:, columns(i)]) for i, part in enumerate(parts)) + whole.bias
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "first", "k"),
    [("codebook4", 64, 128), ("codebook4", 0, 64), ("codebook4_rows", 0, 256), ("codebook3_g4", 0, 4)],
)
def test_shards_ending_inside_groups_or_bytes_are_refused(scheme: str, first: int, k: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"'h.down': {scheme} in parts of {k} input channels"):
        part_scheme(qcut.schemes.parse_scheme(scheme), first, k, "h.down")


def test_a_broken_part_is_refused(module: nn.Linear) -> None:
    tensors = of_columns(qcut.Linear.from_float(module, "w8a8"), 0)
    scheme = qcut.schemes.parse_scheme("w8a8")
    with pytest.raises(CheckpointError, match=r"'h\.down': weight_scale: found -1"):
        part_layer(scheme, N, K // PARTS, tensors | {"weight_scale": torch.full((N,), -1.0)}, "h.down")
    with pytest.raises(CheckpointError, match=r"(?s)'h\.down'.*weight_scale"):
        part_layer(scheme, N, K // PARTS, tensors | {"weight_scale": torch.ones(N + 1)}, "h.down")


@pytest.mark.parametrize("factor", [0.5, float("nan"), float("inf")])
def test_absmax_of_other_rows_is_refused(module: nn.Linear, factor: float) -> None:
    absmax = module.weight.detach().abs().amax(1) * factor
    with pytest.raises(QuantizationError, match=r"'h\.down'.*row_absmax"):
        qcut.Linear.from_float(module, "w8a8", row_absmax=absmax, name="h.down")


def test_what_needs_whole_layers_is_refused(module: nn.Linear) -> None:
    layer = qcut.Linear.from_float(module, "w8a8", name="h.down")
    refuse_parts(layer, "saving")
    layer.parts = 2
    with pytest.raises(UnsupportedError, match=r"'h\.down': saving: the process has one of 2 parts"):
        refuse_parts(layer, "saving")
