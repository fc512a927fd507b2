"""Products with codebook weights as plain torch: the definition that kernels are held to.

Two of them. `codebook_gemm_ref` is the kernel's own: rotated tokens in 16 or 8 bits, norms relative to their row's
power of two, the codebook in 16 bits. `codebook_linear_ref` is the whole layer on any device; with 16-bit products it
takes the weights for what they are, float32 codebook and stored norms, and with int8 products it is the kernel's
integers.

Source: schemes.md, section 4; `qcut.codebooks.layout` for the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from qcut.codebooks import layout as codebook_layout
from qcut.codebooks import lloyd_max as codebook
from qcut.codebooks import quantizer as rotated_codebook
from qcut.codebooks import rotation
from qcut.codebooks.layout import Geometry
from qcut.codebooks.quantizer import RotatedCodebook
from qcut.codebooks.tokens import rotate_tokens
from qcut.errors import ShapeError
from qcut.numerics import int8 as numerics

NO_ROTATION = cast(rotation.Kind, "none")
"""The kind of `RotatedCodebook` whose norms are plain scales: ``W'[n, g] = norm[n, g] * codebook[idx[n, g]]``."""

_CHUNK_ELEMENTS = 1 << 22  # weights are unpacked in pieces: no float copy of a whole one exists


def quantize_plain(
    weight: Tensor,
    bits: int,
    *,
    group_size: int,
    uniform: bool,
    norm_dtype: torch.dtype = torch.float16,
    layer: str | None = None,
) -> RotatedCodebook:
    """Quantize a weight without a rotation.

    Equal steps: values ``c = -2**(b - 1) … 2**(b - 1) - 1``, ``norm = max |W[n, g]| / (2**(b - 1) - 1)`` rounded to
    its dtype, ``idx = clamp(rne(W / norm)) + 2**(b - 1)``. Otherwise the Lloyd-Max codebook, ``norm`` the root of the
    group's mean square, the nearest of the values to ``W / norm``.

    Args:
        weight: ``[N, K]`` float16, bfloat16, float32 or float64, any strides.
        bits: 2, 3 or 4.
        group_size: columns of a group; K or more takes whole rows.
        uniform: equal steps.
        norm_dtype: float16 or float32.
        layer: name for error messages.

    Returns:
        Tensors on the weight's device, with the rotation `NO_ROTATION`.

    Raises:
        ShapeError: no matrix, or an empty one.
        DtypeError: another dtype of weight or norms.
        QuantizationError: NaN or Inf, or a norm beyond float16.

    Exactness: bitwise with equal steps.
    """
    rotated_codebook.check_weight(weight, norm_dtype, layer)
    n, k = weight.shape
    parts, half = rotation.groups(k, group_size), 1 << (bits - 1)
    device = weight.device
    values = torch.arange(-half, half, device=device).float() if uniform else codebook.codebook(bits, device)
    indices = torch.empty((n, k), dtype=torch.uint8, device=device)
    norms = torch.empty((n, len(parts)), dtype=norm_dtype, device=device)
    for rows in rotated_codebook.row_chunks(n, k):
        w = rotated_codebook.finite_rows(weight, rows, layer)
        for g, (first, d) in enumerate(parts):
            group = w[:, first : first + d]
            largest = torch.full((), half - 1.0, device=device)
            scale = group.abs().amax(1) / largest if uniform else group.square().mean(1).sqrt()
            norms[rows, g] = rotated_codebook.stored_norms(scale, norm_dtype, layer)
            step = norms[rows, g].float()[:, None]
            relative = group / torch.where(step > 0, step, 1.0)
            if uniform:
                found = relative.round().clamp(-half, half - 1) + half
            else:
                found = torch.searchsorted(codebook.boundaries(values), relative.contiguous())
            indices[rows, first : first + d] = found.to(torch.uint8)
    return RotatedCodebook(indices, norms, values, group_size, NO_ROTATION, 0)


def dequantize(passes: Sequence[RotatedCodebook]) -> Tensor:
    """float32 ``[N, K]``: the weight that passes stand for; `qcut.codebooks.quantizer.dequantize` and `NO_ROTATION`."""
    if passes[0].rotation != NO_ROTATION:
        return rotated_codebook.dequantize(passes)
    n, k = passes[0].indices.shape
    out = torch.zeros((n, k), device=passes[0].indices.device)
    for rows in rotated_codebook.row_chunks(n, k):
        for q in passes:
            values = q.values[q.indices[rows].int()]
            out[rows] += values.mul_(_column_scales(q.norms[rows], k, q.group_size, q.rotation))
    return out


def pack_book(values: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """A codebook as kernels take it: 16 values of a 16-bit type, zeros behind the last, two to a signed 32-bit word.

    Args:
        values: float32 ``[2**bits]``; read on the host.
        dtype: float16, or bfloat16 for bfloat16 tokens.

    Returns:
        8 integers, the first value of each in its lower half.
    """
    padded = torch.zeros(16, dtype=dtype)
    padded[: len(values)] = values.detach().cpu().to(dtype)
    return tuple(padded.view(torch.int32).tolist())


def unpack_book(book: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[16]`` of dtype: the inverse of `pack_book`."""
    return torch.tensor(list(book), dtype=torch.int32, device=device).view(dtype)


def codebook_gemm_ref(
    x: Tensor,
    row_scale: Tensor | None,
    units: Tensor,
    norms: Tensor,
    fold: Tensor | None,
    col_scale: Tensor,
    values: Tensor,
    bias: Tensor | None,
    bits: int,
    activation: str,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of rotated tokens with codebook weights, as kernels compute it.

    ::

        acc = sum_k x[m, k] * norm[n, slot(k)] * values[idx[n, k]]
        v = act(acc * col_scale[n] + bias[n]) + residual[m, n]

    With int8 tokens the weights are `qcut.codebooks.layout.int8_weight`, acc is int32, and the rest
    `qcut.numerics.gemm_s8_ref` with ``row_scale``.

    Args:
        x: float16, bfloat16 or int8 ``[M, 128 units]``; M may be 0.
        row_scale: float32 ``[M]`` with int8 tokens, else None.
        units: uint8 ``[row_tiles(N), units, unit_bytes(bits)]``.
        norms: float16 ``[row_tiles(N), units, slots, 8, 2]``.
        fold: float32 ``[16 row_tiles(N)]`` with int8 tokens, else None.
        col_scale: float32 ``[N]``.
        values: 16 of them, in float16 or x's dtype.
        bias: float32 ``[N]``.
        bits: of an index.
        activation: see `qcut.config.ACTIVATIONS`.
        residual: ``out_dtype`` ``[M, N]``.
        out_dtype: float16, bfloat16 or float32.

    Returns:
        ``out_dtype`` ``[M, N]``.

    Exactness: bitwise with int8 tokens and the activations ``none`` and ``relu``; with 16-bit tokens acc is the
    float64 sum rounded once, and kernels are within float32 summation and one 16-bit rounding of each weight of it.
    """
    m, n = len(x), len(col_scale)
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    for tiles, rows in _tile_chunks(n, units.shape[1] * codebook_layout.UNIT_COLUMNS):
        r = rows.stop - rows.start
        added = None if bias is None else bias[rows]
        before = None if residual is None else residual[:, rows]
        scale = col_scale[rows]
        if fold is not None:
            padded = slice(rows.start, rows.start + (tiles.stop - tiles.start) * codebook_layout.UNIT_ROWS)
            weight = codebook_layout.int8_weight(units[tiles], bits, norms[tiles], values, fold[padded])[:r]
            out[:, rows] = numerics.gemm_s8_ref(
                x,
                weight,
                row_scale=row_scale,
                col_scale=scale,
                bias=added,
                activation=activation,
                residual=before,
                out_dtype=out_dtype,
            )
            continue
        weight = codebook_layout.rotated_weight(units[tiles], bits, norms[tiles], values)[:r]
        v = (x.double() @ weight.t()).float() * scale
        if added is not None:
            v += added
        v = numerics.apply_activation(v, activation)
        out[:, rows] = v if before is None else v + before.float()
    return out


def codebook_linear_ref(
    x: Tensor,
    units: Sequence[Tensor],
    norms: Tensor,
    codebooks: Sequence[Tensor],
    bias: Tensor | None,
    bits: Sequence[int],
    kind: rotation.Kind,
    group_size: int,
    seeds: Sequence[int],
    activation: str,
) -> Tensor:
    """``y = act(sum over passes, groups of (x[g] Pi_g^T) · (norm / sqrt(d) * codebook[idx]) + bias)`` in float32.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32.
        units: uint8, of each set of passes: one with all passes along K, or one a pass.
        norms: float16 or float32 ``[N, passes * G]``, as stored.
        codebooks: float32, of each set.
        bias: float32 ``[N]``.
        bits: of each set.
        kind: of the rotation.
        group_size: columns of a group.
        seeds: of each pass.
        activation: see `qcut.config.ACTIVATIONS`.

    Returns:
        ``[M, N]`` of x's dtype.

    Exactness: float32; within ``1e-4`` of the same in float64, relative to the largest output.
    """
    m, k = x.shape
    n, geometry = len(norms), Geometry(k, group_size)
    v = torch.zeros((m, n), device=x.device)
    for p, seed in enumerate(seeds):
        tokens = x.float() if kind == NO_ROTATION else rotation.rotate_groups(x, kind, group_size, seed)
        i = p if len(units) > 1 else 0
        along_k = slice(None) if len(units) > 1 else slice(p * geometry.units, (p + 1) * geometry.units)
        groups = slice(p * geometry.groups, (p + 1) * geometry.groups)
        for tiles, rows in _tile_chunks(n, k):
            indices = codebook_layout.unpack_units(units[i][tiles, along_k], bits[i], rows.stop - rows.start, geometry)
            weight = codebooks[i][indices.int()].mul_(_column_scales(norms[rows, groups], k, group_size, kind))
            v[:, rows] += tokens @ weight.t()
    if bias is not None:
        v += bias
    return numerics.apply_activation(v, activation).to(x.dtype)


def codebook_linear_s8_ref(
    x: Tensor,
    units: Sequence[Tensor],
    packed_norms: Sequence[Tensor],
    fold: Sequence[Tensor],
    col_scale: Sequence[Tensor],
    codebooks: Sequence[Tensor],
    bias: Tensor | None,
    bits: Sequence[int],
    kind: rotation.Kind,
    group_size: int,
    seeds: Sequence[int],
    activation: str,
) -> Tensor:
    """The layer on int8 products: tokens quantized after the rotation, then `codebook_gemm_ref` of each set.

    Args (the others and Returns as `codebook_linear_ref`):
        packed_norms: float16, of each set; see `qcut.codebooks.layout.pack_norms`.
        fold: float32, of each set; see `qcut.codebooks.layout.fold_scales`.
        col_scale: float32 ``[N]``, of each set.

    Exactness: with one set, and the activations ``none`` and ``relu``, bitwise that of the kernels.
    """
    rows, row_scale = rotate_tokens(x, kind, group_size, tuple(seeds), torch.int8)
    last = len(units) - 1
    total: Tensor | None = None
    first_column = 0
    for i in range(len(units)):
        columns = units[i].shape[1] * codebook_layout.UNIT_COLUMNS
        total = codebook_gemm_ref(
            rows[:, first_column : first_column + columns],
            row_scale,
            units[i],
            packed_norms[i],
            fold[i],
            col_scale[i],
            unpack_book(pack_book(codebooks[i], torch.float16), torch.float16, x.device),
            bias if i == last else None,
            bits[i],
            activation if last == 0 else "none",
            total,
            x.dtype if last == 0 else torch.float32,
        )
        first_column += columns
    if total is None:
        raise ShapeError("a codebook layer without weights")
    return total if last == 0 else numerics.apply_activation(total, activation).to(x.dtype)


def _tile_chunks(n: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of 16 rows, and the rows they hold, in pieces of whole blocks of 64 rows."""
    step = max(1, _CHUNK_ELEMENTS // (columns * codebook_layout.ROW_ALIGNMENT)) * codebook_layout.ROW_ALIGNMENT
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        tile = first // codebook_layout.UNIT_ROWS
        yield slice(tile, tile + codebook_layout.row_tiles(rows.stop - rows.start)), rows


def _column_scales(norms: Tensor, k: int, group_size: int, kind: rotation.Kind) -> Tensor:
    """float32 ``[R, K]``: what multiplies the codebook's value in each column."""
    parts = rotation.groups(k, group_size)
    scale = norms.float()
    if kind != NO_ROTATION:
        scale = scale * rotated_codebook.rsqrt_sizes(parts, scale)
    return rotated_codebook.per_column(scale, parts)
