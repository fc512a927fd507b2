"""The operators on codebook weights, on the CPU: what they compute, their fakes, what they refuse."""

from __future__ import annotations

from itertools import product as product_of
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut import errors
from qcut.layers.codebook import CodebookLinear
from qcut.numerics import int8 as numerics
from qcut.numerics.codebook import layout as codebook_layout
from qcut.numerics.codebook import tokens as rotated_tokens
from qcut.numerics.codebook.layout import Geometry, to_blocks
from qcut.numerics.codebook.passes import quantize_weight
from qcut.numerics.codebook.products import pack_book, unpack_book
from qcut.numerics.codebook.rotation import rotate_groups
from qcut.ops.codebook import QuantizeRotatedOp, RotateTokensOp, can_rotate
from qcut.schemes import K_MAX, padded_k, parse_scheme
from tests.support.oracles import FLOATS, NAN

HALVES = (torch.float16, torch.bfloat16)
OPS = torch.ops.qcut


def rotate_arguments(x: Tensor, out: torch.dtype, kind: str = "hadamard", size: int = 64, seeds=(1,)) -> list[Any]:
    matrices = x.dtype if x.dtype in HALVES else torch.float16
    operands = rotated_tokens.operands(kind, size, x.shape[1], seeds, matrices)
    return [x, operands, kind, size, list(seeds), out]


def product(
    bits: int = 4,
    tokens: torch.dtype = torch.float16,
    m: int = 11,
    n: int = 70,
    k: int = 200,
    size: int = 64,
    *,
    kind: str = "hadamard",
    bias: bool = True,
    activation: str = "none",
    residual: bool = False,
    out: torch.dtype = torch.float32,
) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor, Geometry]]:
    """Arguments of codebook_gemm, and tokens, indices and relative norms in plain order.

    Rows past m of the tokens are NaN, or 127.
    """
    torch.manual_seed(bits + m + n)
    geometry = Geometry(k, size, kind)
    indices = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    norms = (torch.rand(n, geometry.groups) + 0.1).half()
    norms[n // 2] = 0
    exponents = codebook_layout.row_exponents(norms)
    packed_norms = codebook_layout.pack_norms(norms, exponents, geometry)
    values = torch.randn(1 << bits).sort().values
    book = pack_book(values, torch.bfloat16 if tokens is torch.bfloat16 else torch.float16)
    padded = torch.zeros(m, geometry.k_padded)
    padded[:, geometry.columns()] = torch.randn(m, k)
    int8 = tokens is torch.int8
    rows = (padded * 40).round().clamp(-127, 127).to(torch.int8) if int8 else padded.to(tokens)
    whole = torch.full((-(-m // 8) * 8, geometry.k_padded), 127 if int8 else NAN).to(tokens)
    whole[:m] = rows
    arguments = {
        "x": to_blocks(whole),
        "row_scale": torch.rand(m) if int8 else None,
        "m": m,
        "units": codebook_layout.pack_units(indices, bits, geometry),
        "norms": packed_norms,
        "fold": codebook_layout.fold_scales(packed_norms, unpack_book(book, torch.float16, "cpu")) if int8 else None,
        "col_scale": torch.rand(n) + 0.5,
        "book": list(book),
        "bias": torch.randn(n) if bias else None,
        "bits": bits,
        "activation": activation,
        "residual": torch.randn(m, n).to(out) if residual else None,
        "out_dtype": out,
    }
    return arguments, (rows, indices, norms.float() / exponents[:, None], geometry)


# ── rotate_tokens ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["hadamard", "qr", "none"])
def test_rotated_tokens_lie_in_blocks(kind):
    for dtype, out in product_of(FLOATS, (*HALVES, torch.int8)):
        if out not in (torch.int8, dtype):
            with pytest.raises(errors.DtypeError, match=r"rotate_tokens: x, with tokens of .*allowed: "):
                OPS.rotate_tokens(*rotate_arguments(torch.randn(3, 96).to(dtype), out))
            continue
        x = torch.randn(11, 96).to(dtype)
        blocks, scale = OPS.rotate_tokens(*rotate_arguments(x, out, kind, 64, (1, 5)))
        rows, want_scale = rotated_tokens.rotate_tokens(x, kind, 64, (1, 5), out)
        assert blocks.shape == (2 * 128 * out.itemsize // 128, 2, 8, 128 // out.itemsize)
        assert torch.equal(codebook_layout.from_blocks(blocks, 11), rows)
        assert scale.dtype is torch.float32
        assert torch.equal(scale, want_scale) if out is torch.int8 else scale.shape == (0,)


@pytest.mark.parametrize("group", [5, 16])
def test_unrotated_tokens_in_slots_of_sixteen_columns(group):
    for out in (torch.float16, torch.int8):
        x = torch.randn(11, 93).half()
        geometry = Geometry(93, group, "none")
        blocks, _ = OPS.rotate_tokens(*rotate_arguments(x, out, "none", group, (0, 0)))
        rows = codebook_layout.from_blocks(blocks, 11).view(11, 2, geometry.k_padded)
        plain = x if out is torch.float16 else numerics.quantize_per_token_ref(x, 93)[0]
        want = torch.zeros_like(rows)
        want[:, :, geometry.columns()] = plain[:, None]
        assert geometry.k_padded == (384 if group == 5 else 128)
        assert torch.equal(rows, want)


def test_no_tokens_to_rotate():
    blocks, scale = OPS.rotate_tokens(*rotate_arguments(torch.empty(0, 96), torch.int8))
    assert (blocks.shape, scale.shape) == ((1, 0, 8, 128), (0,))


# ── codebook_gemm ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tokens", HALVES)
def test_products_of_16_bits(bits, tokens):
    for size, (m, n) in product_of((32, 64, 200), ((1, 1), (11, 70), (8, 64))):
        arguments, (rows, indices, norms, geometry) = product(
            bits, tokens, m, n, size=size, activation="relu", residual=True
        )
        values = unpack_book(arguments["book"], tokens, "cpu").double()
        group = torch.arange(200) // geometry.full
        weight = values[indices.long()] * norms.double()[:, group]
        v = (rows.double()[:, geometry.columns()] @ weight.t()).float() * arguments["col_scale"]
        want = (v + arguments["bias"]).relu() + arguments["residual"]
        got = OPS.codebook_gemm(**arguments)
        assert got.dtype is torch.float32
        # The oracle sums in another order: float64's rounding, then float32's last bit.
        assert (got - want).abs().max() <= 2.0**-22 * max(1.0, float(v.abs().max()))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_products_of_int8(bits):
    for out, activation in product_of(FLOATS, ("none", "relu", "silu")):
        arguments, (rows, indices, norms, geometry) = product(
            bits, torch.int8, activation=activation, residual=True, out=out
        )
        values = unpack_book(arguments["book"], torch.float16, "cpu").double()
        group = torch.arange(200) // geometry.full
        factor = (norms * arguments["fold"][:70, None])[:, group]
        weight = (values[indices.long()] * factor.double()).round().long()
        assert int(weight.abs().max()) == 127
        acc = (rows.long()[:, geometry.columns()] @ weight.t()).to(torch.int32)
        v = acc.float() * arguments["row_scale"][:, None] * arguments["col_scale"] + arguments["bias"]
        want = (numerics.apply_activation(v, activation) + arguments["residual"].float()).to(out)
        assert torch.equal(OPS.codebook_gemm(**arguments), want)


@pytest.mark.parametrize("tokens", [*HALVES, torch.int8])
def test_products_with_a_norm_for_each_sixteen_columns(tokens):
    for size, (m, n, k) in product_of((16, 5), ((1, 1, 16), (11, 71, 201), (8, 64, 384))):
        arguments, (rows, indices, norms, geometry) = product(4, tokens, m, n, k, size, kind="none")
        assert arguments["norms"].shape[2] == 8
        values = unpack_book(arguments["book"], torch.float16 if tokens is torch.int8 else tokens, "cpu").double()
        group, x = torch.arange(k) // geometry.full, rows[:, geometry.columns()].double()
        weight = values[indices.long()] * norms.double()[:, group]
        scale = torch.ones(m)
        if tokens is torch.int8:
            factor = (norms * arguments["fold"][:n, None])[:, group]
            weight, scale = (values[indices.long()] * factor.double()).round(), arguments["row_scale"]
        v = (x @ weight.t()).float() * scale[:, None] * arguments["col_scale"]
        got = OPS.codebook_gemm(**arguments)
        assert (got - (v + arguments["bias"])).abs().max() <= 2.0**-22 * max(1.0, float(v.abs().max()))


def test_layers_make_valid_arguments_of_several_passes():
    weight = torch.randn(20, 160)
    passes = quantize_weight(weight, parse_scheme("codebook4+4_int8"))
    layer = CodebookLinear.from_passes(passes, None, "codebook4+4_int8")
    x = torch.randn(3, 160)
    blocks, scale = OPS.rotate_tokens(*rotate_arguments(x, torch.int8, size=128, seeds=(42, 1042)))
    book = pack_book(layer.codebook, torch.float16)
    y = OPS.codebook_gemm(
        blocks,
        scale,
        3,
        layer.units,
        layer.packed_norms,
        layer.fold,
        layer.col_scale,
        book,
        None,
        4,
        "none",
        None,
        torch.float32,
    )
    assert torch.equal(y, layer(x))
    assert numerics.sqnr_db(x @ weight.t(), y) > 30


def test_a_book_is_sixteen_values():
    values = torch.tensor([-1.5, -0.25, 0.25, 1.5])
    for dtype in HALVES:
        book = pack_book(values, dtype)
        assert len(book) == 8
        assert unpack_book(book, dtype, "cpu").tolist() == [*values.tolist(), *[0.0] * 12]
        low, high = values[:2].to(dtype).view(torch.int16).int().tolist()
        assert book[0] & 0xFFFFFFFF == (low & 0xFFFF) | (high & 0xFFFF) << 16


# ── codebook_gemv ────────────────────────────────────────────────────────────────────────────────


def one_token(scheme: str = "codebook4+4", k: int = 256, n: int = 70, dtype: torch.dtype = torch.float16) -> Any:
    """A layer, one token, and the arguments of codebook_gemv and only the last of these."""
    torch.manual_seed(n)
    layer = CodebookLinear.from_float(torch.nn.Linear(k, n), scheme)
    book = list(pack_book(layer.codebook, torch.float16 if layer.int8 else dtype))
    last = [layer.col_scale, book, layer.bias, layer.set_bits[0], "relu", torch.randn(1, n).to(dtype), dtype]
    x = torch.randn(1, k).to(dtype)
    signs = rotated_tokens.operands("hadamard", layer.group_size, k, layer.scheme.seeds, dtype)
    seeds = list(layer.scheme.seeds)
    return layer, x, [x, signs, layer.group_size, seeds, layer.units, layer.packed_norms, layer.fold, *last], last


@pytest.mark.parametrize(
    "scheme",
    [
        *("codebook4", "codebook3+3_g64", "codebook2_g32", "codebook4_int8"),
        *("codebook4_pairs", "codebook4_pairs_g32_int8"),
    ],
)
@pytest.mark.parametrize("dtype", HALVES)
def test_one_token_is_rotated_and_multiplied(scheme, dtype):
    layer, x, arguments, last = one_token(scheme, dtype=dtype)
    tokens = torch.int8 if layer.int8 else dtype
    blocks, scale = OPS.rotate_tokens(x, *arguments[1:2], "hadamard", *arguments[2:4], tokens)
    row_scale = scale if layer.int8 else None
    want = OPS.codebook_gemm(blocks, row_scale, 1, layer.units, layer.packed_norms, layer.fold, *last)
    assert torch.equal(OPS.codebook_gemv(*arguments), want)


def test_what_one_token_kernels_rotate():
    for kind, size, k, can in (
        ("hadamard", 128, 4096, True),
        ("hadamard", 64, 192, True),
        ("hadamard", 32, 32, True),
        ("hadamard", 4096, 64, True),  # the row is the group
        ("hadamard", 128, 4160, False),
        ("hadamard", 256, 4096, False),
        ("hadamard", 16, 64, False),
        ("qr", 128, 4096, False),
        ("none", 128, 4096, False),
    ):
        assert can_rotate(kind, size, k) == can


@pytest.mark.parametrize(
    ("place", "change", "error", "message"),
    [
        (0, torch.zeros(2, 256).half(), errors.ShapeError, r"x has shape \[2, 256\]; allowed: \[1, K\]"),
        (0, torch.zeros(1, 256), errors.DtypeError, "x is float32; allowed: float16, bfloat16"),
        (0, torch.zeros(1, 320).half(), errors.ConfigError, "groups of 128 of 320 columns; allowed: whole ones"),
        (1, torch.zeros(2, 9, dtype=torch.int32), errors.ShapeError, r"operands has shape .*; allowed: \[2, 8\]"),
        (2, 64, errors.ShapeError, "1 norms a unit; groups of 64 columns have 2"),
        (3, [], errors.ConfigError, "no seed; allowed: one for each pass"),
        (3, [1], errors.ShapeError, "operands has shape"),
        (4, torch.zeros(8, 4, 768, dtype=torch.uint8), errors.ShapeError, "units has shape"),
        (6, torch.zeros(79), errors.ShapeError, r"fold has shape .*; allowed: \[128\]"),
        (9, torch.zeros(71), errors.ShapeError, "bias has shape"),
    ],
)
def test_codebook_gemv_refuses(place, change, error, message):
    _, _, arguments, _ = one_token()
    arguments[place] = change
    with pytest.raises(error, match=f"codebook_gemv: .*{message}"):
        OPS.codebook_gemv(*arguments)


# ── quantize_rotated ─────────────────────────────────────────────────────────────────────────────


def quantize_arguments(x: Tensor, size: int = 64, seed: int = 1) -> list[Any]:
    return [x, rotated_tokens.operands("hadamard", size, x.shape[1], (seed,), torch.float16), size, seed]


def test_quantized_rotated_tokens_lie_in_rows():
    for dtype, (m, k, size) in product_of(FLOATS, ((3, 256, 128), (1, 136, 64), (5, 20 + 12, 32), (2, 8, 128))):
        x = (torch.randn(m, k + 1) * 30).to(dtype)[:, 1:]
        x[0, 0] = NAN
        q, scale = OPS.quantize_rotated(*quantize_arguments(x, size))
        rotated = rotate_groups(x, "hadamard", size, 1)
        want, want_scale = numerics.quantize_per_token_ref(rotated, padded_k(k))
        assert torch.equal(q, want)
        assert torch.equal(scale.isnan(), want_scale.isnan())
        assert torch.equal(scale.nan_to_num(), want_scale.nan_to_num())
        assert scale.isnan().tolist() == [True, *[False] * (m - 1)]
        torch.testing.assert_close(rotated[1:].norm(dim=1), x[1:].float().norm(dim=1))
    q, scale = OPS.quantize_rotated(*quantize_arguments(torch.empty(0, 96)))
    assert (q.shape, scale.shape) == ((0, 96), (0,))


# ── w8a8_rotated_linear ──────────────────────────────────────────────────────────────────────────


def one_rotated(k: int = 96, n: int = 20) -> dict[str, Any]:
    """Arguments of ``w8a8_rotated_linear`` by name."""
    names = ("x", "operands", "group_size", "seed")
    rotation = dict(zip(names, quantize_arguments(torch.randn(1, k).bfloat16(), 32), strict=True))
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return {**rotation, "qweight": weight, "weight_scale": torch.rand(n), "bias": torch.randn(n), "activation": "relu"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_rotated_token_is_that_of_two_operators():
    arguments = one_rotated()
    *rotation, weight, scale, bias, activation = arguments.values()
    q, q_scale = OPS.quantize_rotated(*rotation)
    want = OPS.int8_linear(q, q_scale, weight, scale, bias, activation, torch.bfloat16)
    for op in (OPS.w8a8_rotated_linear.default, OPS.w8a8_rotated_linear.early_read):
        assert torch.equal(op(*arguments.values()), want)
    torch.library.opcheck(OPS.w8a8_rotated_linear.default, tuple(arguments.values()))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(2, 96).half()}, errors.ShapeError, r"x has shape \[2, 96\]; allowed: \[1, K\]"),
        ({"x": torch.zeros(1, 96)}, errors.DtypeError, "x is float32; allowed: float16, bfloat16"),
        ({"group_size": 64}, errors.ConfigError, "groups of 64 of 96 columns; allowed: whole ones of 32, 64 or 128"),
        ({"operands": torch.zeros(1, 3).int()}, errors.ShapeError, r"operands has shape \[1, 3\]"),
        ({"qweight": torch.zeros(0, 96).char()}, errors.ShapeError, r"qweight has shape \[0, 96\]; allowed: \[N, K\]"),
        ({"qweight": torch.zeros(20, 80).char()}, errors.ShapeError, r"qweight has shape \[20, 80\]"),
        ({"weight_scale": torch.zeros(19)}, errors.ShapeError, r"weight_scale has shape \[19\]"),
        ({"bias": torch.zeros(20).half()}, errors.DtypeError, "bias is float16; allowed: float32"),
    ],
)
def test_one_rotated_token_refuses(changes, error, message):
    with pytest.raises(error, match=f"^qcut::w8a8_rotated_linear: {message}"):
        OPS.w8a8_rotated_linear(*{**one_rotated(), **changes}.values())


# ── registration ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck():
    for out in (torch.float16, torch.int8):
        x = torch.randn(11, 96).half()
        torch.library.opcheck(OPS.rotate_tokens.default, tuple(rotate_arguments(x, out)))
        arguments, _ = product(tokens=out, m=5, n=20)
        torch.library.opcheck(OPS.codebook_gemm.default, tuple(arguments.values()))
    torch.library.opcheck(OPS.quantize_rotated.default, tuple(quantize_arguments(torch.randn(3, 72))))
    torch.library.opcheck(OPS.codebook_gemv.default, tuple(one_token()[2]))
    layer = quantized("codebook4+3")
    torch.library.opcheck(OPS.codebook_linear.default, layer_arguments(layer, torch.randn(2, 3, 64)))


def quantized(scheme: str) -> Any:
    return CodebookLinear.from_float(torch.nn.Linear(64, 20), scheme)


def layer_arguments(layer: Any, x: Tensor) -> tuple[Any, ...]:
    sets = layer.sets()
    units, packed_norms, fold, col_scale, codebooks = (list(part) for part in zip(*sets, strict=True))
    return (
        *(x, units, packed_norms, fold if layer.int8 else [], col_scale, layer.norms, codebooks, layer.bias),
        *(layer.set_bits, layer.kind, layer.group_size, list(layer.scheme.seeds), layer.activation),
    )


def test_the_whole_layer_is_one_operator():
    for scheme in ("codebook4", "codebook4+3_int8"):
        layer = quantized(scheme)
        x = torch.randn(2, 3, 64)
        assert torch.equal(OPS.codebook_linear(*layer_arguments(layer, x)), layer(x))


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"group_size": 16}, errors.ConfigError, "group_size is 16; allowed: 32 and more"),
        ({"group_size": 48}, errors.ConfigError, "a Hadamard rotation of 48 columns"),
        ({"x": torch.zeros(2, 3, 96)}, errors.ShapeError, r"x has shape \[2, 3, 96\]; allowed: \[M, K\]"),
        ({"x": torch.zeros(2, 96, dtype=torch.int32)}, errors.DtypeError, "x is int32"),
        ({"x": torch.zeros(1, K_MAX + 1)}, errors.QuantizationError, f"{K_MAX}"),
        ({"operands": torch.zeros(1, 3, dtype=torch.int32)}, errors.ShapeError, r"operands has shape \[1, 3\]"),
    ],
)
def test_quantize_rotated_refuses(changes, error, message):
    names = ("x", "operands", "group_size", "seed")
    arguments = dict(zip(names, quantize_arguments(torch.randn(2, 96)), strict=True))
    with pytest.raises(error, match=message):
        QuantizeRotatedOp(**{**arguments, **changes}).check()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kind": "fft"}, errors.ConfigError, "kind is 'fft'; allowed: hadamard, qr, none"),
        ({"seeds": []}, errors.ConfigError, "no seed"),
        ({"group_size": 96}, errors.ConfigError, "a Hadamard rotation of 96 columns"),
        ({"group_size": 0}, errors.ConfigError, "group_size"),
        ({"x": torch.zeros(2, 3, 96)}, errors.ShapeError, r"x has shape \[2, 3, 96\]; allowed: \[M, K\]"),
        ({"x": torch.zeros(2, 96, dtype=torch.int32)}, errors.DtypeError, "x is int32"),
        ({"out_dtype": torch.float32}, errors.DtypeError, "out_dtype is float32; allowed: float16, bfloat16, int8"),
        ({"operands": torch.zeros(1, 4, dtype=torch.int32, device="meta")}, errors.DeviceError, "operands is on meta"),
        ({"operands": torch.zeros(1, 4)}, errors.DtypeError, "operands is float32; allowed: int32"),
        ({"operands": torch.zeros(1, 3, dtype=torch.int32)}, errors.ShapeError, r"operands has shape \[1, 3\]"),
    ],
)
def test_rotate_tokens_refuses(changes, error, message):
    names = ("x", "operands", "kind", "group_size", "seeds", "out_dtype")
    arguments = dict(zip(names, rotate_arguments(torch.randn(2, 96), torch.int8), strict=True))
    with pytest.raises(error, match=message):
        RotateTokensOp(**{**arguments, **changes}).check()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"m": 20}, errors.ShapeError, r"x has shape .*allowed: \['kb', 3, 8, 64\]"),
        ({"x": torch.zeros(3, 2, 8, 64).half()}, errors.ShapeError, "whole units of 128 columns"),
        ({"x": torch.zeros(4, 2, 8, 64)}, errors.DtypeError, "x is float32; allowed: float16, bfloat16, int8"),
        ({"bits": 5}, errors.ConfigError, "indices of 5 bits"),
        ({"bits": 3}, errors.ShapeError, r"units has shape \[8, 2, 1024\]; allowed: \[8, 2, 768\]"),
        ({"col_scale": torch.zeros(0)}, errors.ShapeError, "col_scale has shape"),
        (
            {"norms": torch.zeros(8, 2, 3, 8, 2).half()},
            errors.ShapeError,
            r"norms have shape .*; allowed: \[8, 2, 1 or 2 or 4 or 8, 8, 2\]",
        ),
        ({"norms": torch.zeros(8, 2, 2, 8, 2)}, errors.DtypeError, "norms is float32; allowed: float16"),
        ({"book": [1, 2]}, errors.ConfigError, "book has 2 words; allowed: 8, of two 16-bit values each, or 64"),
        (
            {"book": [1] * 64, "bits": 3, "units": torch.zeros(8, 2, 768, dtype=torch.uint8)},
            errors.ConfigError,
            "a book of pairs goes with 4 bits and without offsets; bits is 3",
        ),
        ({"row_scale": torch.ones(11)}, errors.ConfigError, "row_scale goes with int8 tokens"),
        ({"fold": torch.ones(128)}, errors.ConfigError, "fold goes with int8 tokens"),
        ({"bias": torch.ones(71)}, errors.ShapeError, r"bias has shape \[71\]; allowed: \[70\]"),
        ({"activation": "gelu"}, errors.ConfigError, "activation 'gelu' does not exist"),
        ({"out_dtype": torch.int8}, errors.DtypeError, "out_dtype is int8"),
        ({"residual": torch.ones(11, 70).half()}, errors.DtypeError, "residual is float16; allowed: float32"),
    ],
)
def test_codebook_gemm_refuses(changes, error, message):
    arguments, _ = product()
    with pytest.raises(error, match=message):
        OPS.codebook_gemm(**{**arguments, **changes})


def test_int8_products_need_their_scales_and_exact_sums():
    arguments, _ = product(tokens=torch.int8)
    for missing in ("row_scale", "fold"):
        with pytest.raises(errors.ConfigError, match=f"{missing} goes with int8 tokens"):
            OPS.codebook_gemm(**{**arguments, missing: None})
    units = 1025
    large = {
        "x": torch.empty(units, 2, 8, 128, dtype=torch.int8, device="meta"),
        "units": torch.empty(8, units, 1024, dtype=torch.uint8, device="meta"),
        "norms": torch.empty(8, units, 1, 8, 2, dtype=torch.float16, device="meta"),
        **{key: arguments[key].to("meta") for key in ("row_scale", "fold", "col_scale", "bias")},
    }
    with pytest.raises(errors.QuantizationError, match="131200 columns, padding included; int32 sums are exact to"):
        OPS.codebook_gemm(**{**arguments, **large})


def test_codebook_linear_refuses():
    layer = quantized("codebook4+3")
    names = ("x", "units", "packed_norms", "fold", "col_scale", "norms", "codebooks", "bias", "bits")
    for name, change, error, message in (
        ("x", torch.randn(2, 63), errors.ConfigError, "a Hadamard rotation of 63 columns"),
        ("units", [layer.units] * 3, errors.ConfigError, "3 sets of weights and 2 passes"),
        ("fold", [torch.ones(1)], errors.ConfigError, "1 folds; allowed: 2 with int8 products, else none"),
        ("norms", layer.norms[:, :1], errors.ShapeError, "norms has shape"),
        ("codebooks", [layer.codebook, layer.codebook], errors.ShapeError, "codebook has shape"),
        ("bias", layer.bias[1:], errors.ShapeError, "bias has shape"),
        ("codebooks", [torch.ones(256, 2)] * 2, errors.ShapeError, "codebook has shape"),
    ):
        arguments = list(layer_arguments(layer, torch.randn(2, 64)))
        arguments[names.index(name)] = change
        with pytest.raises(error, match=message):
            OPS.codebook_linear(*arguments)
