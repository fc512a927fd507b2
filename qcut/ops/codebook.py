"""The operators of ``torch.ops.qcut`` on codebook weights: rotate tokens, multiply them, and the whole layer.

``rotate_tokens`` and ``codebook_gemm`` are the kernels, ``codebook_gemv`` both of them for one token: CUDA runs
`qcut.cuda.codebook`, the CPU the same arithmetic in plain torch. ``codebook_linear`` is a layer in plain torch on
every device, the explicit path. Memory layouts: `qcut.codebooks.layout`. `qcut.ops` imports this module; what it says
of operators holds here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from qcut.codebooks import layout as codebook_layout
from qcut.codebooks import products as codebook_numerics
from qcut.codebooks import rotation
from qcut.codebooks.layout import UNIT_COLUMNS, UNIT_ROWS, Geometry
from qcut.codebooks.tokens import rotate_tokens
from qcut.config import K_MAX, check_activation
from qcut.errors import ConfigError, QuantizationError, ShapeError
from qcut.ops.registry import FLOAT_DTYPES, check_dtype, check_tensor, define

TOKEN_DTYPES = (torch.float16, torch.bfloat16, torch.int8)
KINDS = (*rotation.KINDS, rotation.NO_ROTATION)

_U8, _F16, _F32 = (torch.uint8,), (torch.float16,), (torch.float32,)


class CodebookCall(NamedTuple):
    """One layer at one number of rows, for ``qcut.cuda.codebook.prebuild``.

    Attributes:
        dtype: of the layer's input and output.
        n: output channels.
        units: units along K, of all passes.
        m: rows.
        bits: of an index.
        slots: norms of a unit's row.
        bias: whether there is a bias.
        activation: fused after it.
        int8: whether products are of int8.
        kind: of the rotation.
        group_size: columns of a group.
        k: columns of the input.
        passes: of the weight.
    """

    dtype: torch.dtype
    n: int
    units: int
    m: int
    bits: int
    slots: int
    bias: bool
    activation: str
    int8: bool
    kind: str
    group_size: int
    k: int
    passes: int


# ── rotate_tokens ────────────────────────────────────────────────────────────────────────────────


def _check_rotate(
    x: Tensor, operands: Tensor, kind: str, group_size: int, seeds: Sequence[int], out_dtype: torch.dtype
) -> None:
    op = "rotate_tokens"
    check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
    if x.dim() != 2 or x.shape[1] < 1:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [M, K] with K >= 1")
    _check_rotation(op, kind, x.shape[1], group_size, seeds)
    check_dtype(op, "out_dtype", out_dtype, TOKEN_DTYPES)
    if out_dtype is not torch.int8:
        check_dtype(op, f"x, with tokens of {str(out_dtype).removeprefix('torch.')},", x.dtype, (out_dtype,))
    check_tensor(op, "operands", operands, (operands.dtype,), tuple(operands.shape), x.device)


def _check_rotation(op: str, kind: str, k: int, group_size: int, seeds: Sequence[int]) -> None:
    if kind not in KINDS:
        raise ConfigError(f"qcut::{op}: kind is {kind!r}; allowed: {', '.join(KINDS)}")
    if kind != rotation.NO_ROTATION:
        rotation.check_group_size(k, group_size, kind)
    Geometry(k, group_size)
    if not seeds:
        raise ConfigError(f"qcut::{op}: no seed; allowed: one for each pass")


def _rotate_fake(
    x: Tensor, operands: Tensor, kind: str, group_size: int, seeds: Sequence[int], out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    per_block = 128 // out_dtype.itemsize
    blocks = Geometry(k, group_size).k_padded * len(seeds) // per_block
    rows = m if out_dtype is torch.int8 else 0
    return (
        x.new_empty((blocks, (m + 7) // 8, 8, per_block), dtype=out_dtype),
        x.new_empty((rows,), dtype=torch.float32),
    )


def _rotate_cpu(
    x: Tensor, operands: Tensor, kind: str, group_size: int, seeds: Sequence[int], out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if len(x) == 0:
        return _rotate_fake(x, operands, kind, group_size, seeds, out_dtype)
    rows, scale = rotate_tokens(x, cast(rotation.Kind, kind), group_size, tuple(seeds), out_dtype)
    return codebook_layout.to_blocks(rows), x.new_empty(0, dtype=torch.float32) if scale is None else scale


define(
    "rotate_tokens(Tensor x, Tensor operands, str kind, int group_size, int[] seeds, ScalarType out_dtype) "
    "-> (Tensor, Tensor)",
    _check_rotate,
    _rotate_fake,
    _rotate_cpu,
    cuda="cuda.codebook",
)

# ── codebook_gemm ────────────────────────────────────────────────────────────────────────────────


def _check_gemm(
    x: Tensor,
    row_scale: Tensor | None,
    m: int,
    units: Tensor,
    norms: Tensor,
    fold: Tensor | None,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    op = "codebook_gemm"
    check_dtype(op, "x", x.dtype, TOKEN_DTYPES)
    per_block = 128 // x.element_size()
    shape = ("kb", (m + 7) // 8, 8, per_block)
    if x.dim() != 4 or x.shape[1:] != shape[1:] or x.shape[0] * per_block % UNIT_COLUMNS or not len(x):
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: {list(shape)}, whole units of 128 columns")
    units_k = len(x) * per_block // UNIT_COLUMNS
    _check_product(op, x.device, m, units_k, units, norms, col_scale, book, bias, bits, activation, residual, out_dtype)
    int8 = x.dtype is torch.int8
    for name, vector, extent in (
        ("row_scale", row_scale, m),
        ("fold", fold, codebook_layout.row_tiles(len(col_scale)) * UNIT_ROWS),
    ):
        if (vector is not None) != int8:
            raise ConfigError(f"qcut::{op}: {name} goes with int8 tokens, and only with them")
        if vector is not None:
            check_tensor(op, name, vector, _F32, (extent,), x.device)
    if int8 and units_k * UNIT_COLUMNS > K_MAX:
        raise QuantizationError(
            f"qcut::{op}: {units_k * UNIT_COLUMNS} columns, padding included; int32 sums are exact to {K_MAX}"
        )


def _check_product(
    op: str,
    device: torch.device,
    m: int,
    units_k: int,
    units: Tensor,
    norms: Tensor,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    """What products with codebook weights ask of all but their tokens."""
    if col_scale.dim() != 1 or not len(col_scale):
        raise ShapeError(f"qcut::{op}: col_scale has shape {list(col_scale.shape)}; allowed: [N] with N >= 1")
    n, tiles = len(col_scale), codebook_layout.row_tiles(len(col_scale))
    check_tensor(op, "col_scale", col_scale, _F32, (n,), device)
    check_tensor(op, "units", units, _U8, (tiles, units_k, codebook_layout.unit_bytes(bits)), device)
    slots = norms.shape[2] if norms.dim() == 5 else 0
    if slots not in (1, 2, 4):
        allowed = f"[{tiles}, {units_k}, 1 or 2 or 4, 8, 2]"
        raise ShapeError(f"qcut::{op}: norms have shape {list(norms.shape)}; allowed: {allowed}")
    check_tensor(op, "norms", norms, _F16, (tiles, units_k, slots, 8, 2), device)
    if len(book) != 8:
        raise ConfigError(f"qcut::{op}: book has {len(book)} words; allowed: 8, of two 16-bit values each")
    if bias is not None:
        check_tensor(op, "bias", bias, _F32, (n,), device)
    check_activation(activation)
    check_dtype(op, "out_dtype", out_dtype, FLOAT_DTYPES)
    if residual is not None:
        check_tensor(op, "residual", residual, (out_dtype,), (m, n), device)


def _gemm_fake(
    x: Tensor,
    row_scale: Tensor | None,
    m: int,
    units: Tensor,
    norms: Tensor,
    fold: Tensor | None,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((m, len(col_scale)), dtype=out_dtype)


def _gemm_cpu(
    x: Tensor,
    row_scale: Tensor | None,
    m: int,
    units: Tensor,
    norms: Tensor,
    fold: Tensor | None,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if m == 0:
        return x.new_empty((0, len(col_scale)), dtype=out_dtype)
    values = codebook_numerics.unpack_book(book, torch.float16 if x.dtype is torch.int8 else x.dtype, x.device)
    return codebook_numerics.codebook_gemm_ref(
        codebook_layout.from_blocks(x, m),
        row_scale,
        units,
        norms,
        fold,
        col_scale,
        values,
        bias,
        bits,
        activation,
        residual,
        out_dtype,
    )


define(
    "codebook_gemm(Tensor x, Tensor? row_scale, SymInt m, Tensor units, Tensor norms, Tensor? fold, Tensor col_scale, "
    "int[] book, Tensor? bias, int bits, str activation, Tensor? residual, ScalarType out_dtype) -> Tensor",
    _check_gemm,
    _gemm_fake,
    _gemm_cpu,
    cuda="cuda.codebook",
)

# ── codebook_gemv ────────────────────────────────────────────────────────────────────────────────


def can_rotate(kind: str, group_size: int, k: int) -> bool:
    """Whether ``codebook_gemv`` takes a rotation: Hadamard groups of 32, 64 or 128 columns, all of one size."""
    geometry = Geometry(k, group_size)
    return kind == "hadamard" and geometry.full == geometry.slot and k % geometry.full == 0


def _check_gemv(
    x: Tensor,
    operands: Tensor,
    group_size: int,
    seeds: Sequence[int],
    units: Tensor,
    norms: Tensor,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    op = "codebook_gemv"
    check_dtype(op, "x", x.dtype, (torch.float16, torch.bfloat16))
    if x.dim() != 2 or x.shape[0] != 1 or x.shape[1] < 1:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [1, K] with K >= 1")
    k = x.shape[1]
    if not can_rotate("hadamard", group_size, k):
        raise ConfigError(f"qcut::{op}: groups of {group_size} of {k} columns; allowed: whole ones of 32, 64 or 128")
    if not seeds:
        raise ConfigError(f"qcut::{op}: no seed; allowed: one for each pass")
    geometry = Geometry(k, group_size)
    check_tensor(op, "operands", operands, (torch.int32,), (len(seeds), geometry.k_padded // 32), x.device)
    units_k = len(seeds) * geometry.units
    _check_product(op, x.device, 1, units_k, units, norms, col_scale, book, bias, bits, activation, residual, out_dtype)
    if norms.shape[2] != UNIT_COLUMNS // geometry.slot:
        slots = UNIT_COLUMNS // geometry.slot
        raise ShapeError(f"qcut::{op}: {norms.shape[2]} norms a unit; groups of {geometry.full} columns have {slots}")


def _gemv_fake(
    x: Tensor,
    operands: Tensor,
    group_size: int,
    seeds: Sequence[int],
    units: Tensor,
    norms: Tensor,
    col_scale: Tensor,
    book: Sequence[int],
    bias: Tensor | None,
    bits: int,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((1, len(col_scale)), dtype=out_dtype)


def _gemv_cpu(
    x: Tensor, operands: Tensor, group_size: int, seeds: Sequence[int], units: Tensor, norms: Tensor, *rest: Any
) -> Tensor:
    blocks, _ = _rotate_cpu(x, operands, "hadamard", group_size, seeds, x.dtype)
    return _gemm_cpu(blocks, None, 1, units, norms, None, *rest)


define(
    "codebook_gemv(Tensor x, Tensor operands, int group_size, int[] seeds, Tensor units, Tensor norms, "
    "Tensor col_scale, int[] book, Tensor? bias, int bits, str activation, Tensor? residual, ScalarType out_dtype) "
    "-> Tensor",
    _check_gemv,
    _gemv_fake,
    _gemv_cpu,
    cuda="cuda.codebook",
)

# ── codebook_linear ──────────────────────────────────────────────────────────────────────────────


def _check_linear(
    x: Tensor,
    units: Sequence[Tensor],
    packed_norms: Sequence[Tensor],
    fold: Sequence[Tensor],
    col_scale: Sequence[Tensor],
    norms: Tensor,
    codebooks: Sequence[Tensor],
    bias: Tensor | None,
    bits: Sequence[int],
    kind: str,
    group_size: int,
    seeds: Sequence[int],
    activation: str,
) -> None:
    op = "codebook_linear"
    check_dtype(op, "x", x.dtype, FLOAT_DTYPES)
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ShapeError(f"qcut::{op}: x has shape {list(x.shape)}; allowed: [..., K] with K >= 1")
    k = x.shape[-1]
    _check_rotation(op, kind, k, group_size, seeds)
    sets = len(units)
    if sets not in (1, len(seeds)) or any(len(part) != sets for part in (packed_norms, col_scale, codebooks, bits)):
        raise ConfigError(f"qcut::{op}: {sets} sets of weights and {len(seeds)} passes; one of each, or one of all")
    if len(fold) not in (0, sets):
        raise ConfigError(f"qcut::{op}: {len(fold)} folds; allowed: {sets} with int8 products, else none")
    geometry, n = Geometry(k, group_size), len(norms)
    passes = len(seeds) // sets
    tiles, units_k, slots = codebook_layout.row_tiles(n), passes * geometry.units, UNIT_COLUMNS // geometry.slot
    check_tensor(op, "norms", norms, (torch.float16, torch.float32), (n, len(seeds) * geometry.groups), x.device)
    for i in range(sets):
        check_tensor(op, "units", units[i], _U8, (tiles, units_k, codebook_layout.unit_bytes(bits[i])), x.device)
        check_tensor(op, "packed_norms", packed_norms[i], _F16, (tiles, units_k, slots, 8, 2), x.device)
        check_tensor(op, "col_scale", col_scale[i], _F32, (n,), x.device)
        check_tensor(op, "codebook", codebooks[i], _F32, (1 << bits[i],), x.device)
    for one in fold:
        check_tensor(op, "fold", one, _F32, (tiles * UNIT_ROWS,), x.device)
    if bias is not None:
        check_tensor(op, "bias", bias, _F32, (n,), x.device)
    check_activation(activation)


def _linear_fake(
    x: Tensor,
    units: Sequence[Tensor],
    packed_norms: Sequence[Tensor],
    fold: Sequence[Tensor],
    col_scale: Sequence[Tensor],
    norms: Tensor,
    codebooks: Sequence[Tensor],
    bias: Tensor | None,
    bits: Sequence[int],
    kind: str,
    group_size: int,
    seeds: Sequence[int],
    activation: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], len(norms)))


def _linear(
    x: Tensor,
    units: Sequence[Tensor],
    packed_norms: Sequence[Tensor],
    fold: Sequence[Tensor],
    col_scale: Sequence[Tensor],
    norms: Tensor,
    codebooks: Sequence[Tensor],
    bias: Tensor | None,
    bits: Sequence[int],
    kind: str,
    group_size: int,
    seeds: Sequence[int],
    activation: str,
) -> Tensor:
    m, k, of = math.prod(x.shape[:-1]), x.shape[-1], cast(rotation.Kind, kind)
    if m == 0:
        return x.new_empty((*x.shape[:-1], len(norms)))
    rows = x.reshape(m, k)
    if fold:
        y = codebook_numerics.codebook_linear_s8_ref(
            rows, units, packed_norms, fold, col_scale, codebooks, bias, bits, of, group_size, seeds, activation
        )
    else:
        y = codebook_numerics.codebook_linear_ref(
            rows, units, norms, codebooks, bias, bits, of, group_size, seeds, activation
        )
    return y.view(*x.shape[:-1], len(norms))


define(
    "codebook_linear(Tensor x, Tensor[] units, Tensor[] packed_norms, Tensor[] fold, Tensor[] col_scale, Tensor norms, "
    "Tensor[] codebooks, Tensor? bias, int[] bits, str kind, int group_size, int[] seeds, str activation) -> Tensor",
    _check_linear,
    _linear_fake,
    _linear,
    cuda=None,
)


def stream_state(device: torch.device) -> tuple[int, int] | None:
    """The current stream of the current CUDA device, and which graph it is being captured into (0 for none).

    None on another device than the current one.
    """
    if device.index != torch.cuda.current_device():
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    if not torch.cuda.is_current_stream_capturing():
        return stream, 0
    from qcut.jit.device import capture_id

    return stream, capture_id(stream)
