"""Products with codebook weights in plain torch: the definition that kernels are compared with.

`codebook_gemm_ref` is one kernel's product: rotated tokens in 16 or 8 bits, norms relative to their row's power of two,
the codebook in 16 bits. `codebook_linear_ref` is a whole layer on any device, with the float32 codebook and the norms
as stored; `codebook_linear_s8_ref` is a whole layer on the kernel's integers.

Source: docs/schemes.md, section 4; `qcut.numerics.codebook.layout` for the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.numerics import int8
from qcut.numerics.codebook import layout, pairs, rotation
from qcut.numerics.codebook.layout import Geometry
from qcut.numerics.codebook.quantizer import column_scales
from qcut.numerics.codebook.rotation import NO_ROTATION, Kind
from qcut.numerics.codebook.tokens import rotate_tokens

_CHUNK_ELEMENTS = 1 << 22  # weights are unpacked in pieces, so that no float copy of a whole weight exists


def pack_book(values: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """Pack a codebook as kernels take it: values of a 16-bit type, two to a signed 32-bit word.

    Args:
        values: float32 ``[2**bits]``, or pairs, ``[256, 2]``; the host reads the values.
        dtype: float16, or bfloat16 for bfloat16 tokens.

    Returns:
        8 integers for 16 values, padded with zeros; 64 for the pairs with positive values. Each has the first of its
        two values in the lower half.

    Raises:
        ConfigError: pairs that are not the same with other signs.
    """
    if pairs.are_pairs(values):
        if not pairs.are_symmetric(values):
            raise ConfigError(f"a codebook of pairs; allowed: {pairs.SYMMETRIC}")
        quadrant = values[: pairs.POINTS].detach().cpu().to(dtype).contiguous()
        return tuple(quadrant.view(torch.int32).flatten().tolist())
    padded = torch.zeros(16, dtype=dtype, device="cpu")
    padded[: len(values)] = values.detach().cpu().to(dtype)
    return tuple(padded.view(torch.int32).tolist())


def unpack_book(book: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[16]`` of dtype, or pairs, ``[256, 2]``: the inverse of `pack_book`."""
    values = torch.tensor(list(book), dtype=torch.int32, device=device).view(dtype)
    return pairs.with_signs(values.view(-1, 2)) if is_pair_book(book) else values


def is_pair_book(book: Sequence[int]) -> bool:
    """Whether words of `pack_book` are of pairs."""
    return len(book) == pairs.POINTS


def is_mirrored_book(book: Sequence[int]) -> bool:
    """Whether 16 values of `pack_book` are mirrored, bit by bit.

    Value i is value 15 - i with the other sign, and values 0 to 7 have the sign bit, zeros too. Kernels can then decode
    indices of 4 bits by sign and magnitude.
    """
    if is_pair_book(book):
        return False
    words = [word & 0xFFFFFFFF for word in book]
    pairs_of_words = zip(words[:4], words[:3:-1], strict=True)
    mirrored = all(low ^ 0x80008000 == (high >> 16 | high << 16) & 0xFFFFFFFF for low, high in pairs_of_words)
    return mirrored and all(low & 0x80008000 == 0x80008000 for low in words[:4])


def has_one_table(values: Tensor) -> bool:
    """Whether rows with one norm have the same int8 values, whatever the norm is; see `layout.int8_weight`.

    ``norm * fold`` is ``127 / max |value|`` up to three roundings to float32, less than ``2**-22`` of it. All rows have
    the same values if that difference carries none past a midpoint between integers.

    Args:
        values: ``[16]``, the codebook, which kernels take in float16.
    """
    exact = values.detach().cpu().half().double()
    exact = exact * (127 / exact.abs().max())
    to_midpoint = (exact - exact.floor() - 0.5).abs()
    return bool((to_midpoint > exact.abs() * 2.0**-22).all())


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

        acc = sum_k x[m, k] * norm[n, slot(k)] * (values[idx[n, k]] + offset[n, slot(k)])
        v = act(acc * col_scale[n] + bias[n]) + residual[m, n]

    With int8 tokens the weights are `qcut.numerics.codebook.layout.int8_weight`, acc is int32, and the rest
    `qcut.numerics.int8.gemm_s8_ref` with ``row_scale``.

    Args:
        x: float16, bfloat16 or int8 ``[M, 128 units]``; M may be 0.
        row_scale: float32 ``[M]`` with int8 tokens, else None.
        units: uint8 ``[row_tiles(N), units, unit_bytes(bits)]``.
        norms: float16 ``[row_tiles(N), units, slots, 8, 2]``, or with offsets ``[..., 4]`` (only with 16-bit tokens).
        fold: float32 ``[16 row_tiles(N)]`` with int8 tokens, else None.
        col_scale: float32 ``[N]``.
        values: the codebook, ``[16]``, or pairs, ``[256, 2]``, in float16 or x's dtype.
        bias: float32 ``[N]``.
        bits: bits of an index.
        activation: see `qcut.schemes.ACTIVATIONS`.
        residual: ``out_dtype`` ``[M, N]``.
        out_dtype: float16, bfloat16 or float32.

    Returns:
        ``out_dtype`` ``[M, N]``.

    Exactness: bitwise with int8 tokens and the activations ``none`` and ``relu``. With 16-bit tokens acc is the
    float64 sum rounded once; kernels differ from acc by the error of float32 sums and by one 16-bit rounding of each
    weight.
    """
    m, n = len(x), len(col_scale)
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    for tiles, rows in _tile_chunks(n, units.shape[1] * layout.UNIT_COLUMNS):
        r = rows.stop - rows.start
        if fold is not None:
            padded = slice(rows.start, rows.start + (tiles.stop - tiles.start) * layout.UNIT_ROWS)
            weight = layout.int8_weight(units[tiles], bits, norms[tiles], values, fold[padded])[:r]
            acc = int8.matmul_s8(x, weight).float()
        else:
            weight = layout.rotated_weight(units[tiles], bits, norms[tiles], values)[:r]
            acc = (x.double() @ weight.t()).float()
        out[:, rows] = int8.epilogue_ref(
            acc,
            row_scale=row_scale,
            col_scale=col_scale[rows],
            bias=None if bias is None else bias[rows],
            activation=activation,
            residual=None if residual is None else residual[:, rows],
            out_dtype=out_dtype,
        )
    return out


def codebook_linear_ref(
    x: Tensor,
    units: Sequence[Tensor],
    norms: Tensor,
    codebooks: Sequence[Tensor],
    bias: Tensor | None,
    bits: Sequence[int],
    kind: Kind,
    group_size: int,
    seeds: Sequence[int],
    activation: str,
) -> Tensor:
    """``y = act(sum over passes, groups of (x[g] Pi_g^T) · (norm / sqrt(d) * codebook[idx]) + bias)`` in float32.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32.
        units: for each set, uint8 units; a set holds all passes along K, or one pass.
        norms: float16 or float32 ``[N, passes * G]``, as stored.
        codebooks: for each set, float32 ``[2**bits]``, or pairs, ``[256, 2]``.
        bias: float32 ``[N]``.
        bits: for each set, the bits of an index.
        kind: kind of the rotation.
        group_size: columns of a group.
        seeds: a seed for each pass.
        activation: see `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[M, N]`` of x's dtype.

    Exactness: float32; within ``1e-4`` of a float64 computation, relative to the largest output.
    """
    m, k = x.shape
    n, geometry = len(norms), Geometry(k, group_size, kind)
    v = torch.zeros((m, n), device=x.device, dtype=torch.float32)
    for p, seed in enumerate(seeds):
        tokens = x.float() if kind == NO_ROTATION else rotation.rotate_groups(x, kind, group_size, seed)
        i = p if len(units) > 1 else 0
        along_k = slice(None) if len(units) > 1 else slice(p * geometry.units, (p + 1) * geometry.units)
        groups = slice(p * geometry.groups, (p + 1) * geometry.groups)
        for tiles, rows in _tile_chunks(n, k):
            indices = layout.unpack_units(units[i][tiles, along_k], bits[i], rows.stop - rows.start, geometry)
            weight = pairs.look_up(codebooks[i], indices).mul_(column_scales(norms[rows, groups], k, group_size, kind))
            v[:, rows] += tokens @ weight.t()
    if bias is not None:
        v += bias
    return int8.apply_activation(v, activation).to(x.dtype)


def codebook_linear_s8_ref(
    x: Tensor,
    units: Sequence[Tensor],
    packed_norms: Sequence[Tensor],
    fold: Sequence[Tensor],
    col_scale: Sequence[Tensor],
    codebooks: Sequence[Tensor],
    bias: Tensor | None,
    bits: Sequence[int],
    kind: Kind,
    group_size: int,
    seeds: Sequence[int],
    activation: str,
) -> Tensor:
    """The layer on int8 products: tokens quantized after the rotation, then `codebook_gemm_ref` of each set.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32.
        units: for each set, uint8 units; a set holds all passes along K, or one pass.
        packed_norms: for each set, float16; see `qcut.numerics.codebook.layout.pack_norms`.
        fold: for each set, float32; see `qcut.numerics.codebook.layout.fold_scales`.
        col_scale: for each set, float32 ``[N]``.
        codebooks: for each set, float32 ``[2**bits]``, or pairs, ``[256, 2]``.
        bias: float32 ``[N]``.
        bits: for each set, the bits of an index.
        kind: kind of the rotation.
        group_size: columns of a group.
        seeds: a seed for each pass.
        activation: see `qcut.schemes.ACTIVATIONS`.

    Returns:
        ``[M, N]`` of x's dtype.

    Raises:
        ShapeError: no set of passes.

    Exactness: with one set and the activations ``none`` and ``relu``, the result equals the kernels' bitwise.
    """
    rows, row_scale = rotate_tokens(x, kind, group_size, tuple(seeds), torch.int8)
    last = len(units) - 1
    total: Tensor | None = None
    first_column = 0
    for i in range(len(units)):
        columns = units[i].shape[1] * layout.UNIT_COLUMNS
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
    return total if last == 0 else int8.apply_activation(total, activation).to(x.dtype)


def _tile_chunks(n: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Slices of 16-row tiles, and of the rows they hold, in pieces of whole 64-row blocks."""
    step = max(1, _CHUNK_ELEMENTS // (columns * layout.ROW_ALIGNMENT)) * layout.ROW_ALIGNMENT
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        tile = first // layout.UNIT_ROWS
        yield slice(tile, tile + layout.row_tiles(rows.stop - rows.start)), rows
