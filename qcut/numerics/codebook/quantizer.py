"""The quantizer of codebook weights, rotated or plain, and its inverse, in plain torch on any device.

Per output row n and group g of d columns, Pi the group's rotation::

    r = (W[n, g] / ||W[n, g]||_2) Pi^T * sqrt(d)
    f = the one of MULTIPLES with the least ||r - f * codebook[idx(f)]||_2, idx(f)[j] the index nearest to r[j] / f,
        or that one times one of CLOSER, if that leaves less
    idx[n, g] = idx(f), c = codebook[idx[n, g]]
    norm[n, g] = ||W[n, g]||_2 * <r, c> / <c, c>
    W'[n, g] = norm[n, g] / sqrt(d) * c Pi

Without a rotation the norms are plain scales: ``W'[n, g] = norm[n, g] * codebook[idx[n, g]]``. A residual pass
quantizes the error of the first pass, ``W - W'``, in the same way, with a seed, a codebook and norms of its own; the
weight is the sum of the passes. `qcut.numerics.codebook.fitting.fit` chooses indices and norms with calibration data
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qcut.errors import ConfigError, DtypeError, QuantizationError, ShapeError, layer_prefix
from qcut.models.modules import WEIGHT_DTYPES
from qcut.numerics.chunks import row_chunks
from qcut.numerics.codebook import float4, lloyd_max, pairs, rotation
from qcut.numerics.codebook.rotation import NO_ROTATION, Kind, per_column
from qcut.numerics.float8 import E4M3

NORM_DTYPES = (torch.float16, torch.float32)
MULTIPLES, CLOSER = (0.85, 0.95, 1.05, 1.15), (0.96, 1.04)
"""Of a group's root mean square: what its codebook values may be multiplied by when they are chosen; then, of the best
of these."""
_CACHED = 1 << 20  # elements


@dataclass(frozen=True)
class RotatedCodebook:
    """A weight ``[N, K]`` as indices into a codebook, a norm for each row and group, and a rotation for each group.

    Attributes:
        indices: uint8 ``[N, K]``, not packed; of pairs, four bits of the index of a pair in each of its two columns.
        norms: float16 or float32 ``[N, G]``, or float8_e4m3fn with ``norm_scale``.
        values: float32 ``[2**bits]``, ascending; or pairs, ``[256, 2]``, see `qcut.numerics.codebook.pairs`.
        group_size: columns of a group; the last group may have fewer.
        rotation: kind of the rotation, see `qcut.numerics.codebook.rotation.rotate`; `NO_ROTATION` for plain scales.
        seed: seed of the group at column 0; the seed of any group is ``seed`` plus the group's first column.
        norm_scale: float64 ``[N]``, multiplied into e4m3 norms (`qcut.numerics.codebook.float4.float_norms`); else
            None.
    """

    indices: Tensor
    norms: Tensor
    values: Tensor
    group_size: int
    rotation: Kind
    seed: int
    norm_scale: Tensor | None = None

    def float_norms(self, rows: slice = slice(None)) -> Tensor:
        """float32 ``[R, G]``: what the codebook values of some rows, or of all, are multiplied by."""
        return float4.float_norms(self.norms[rows], None if self.norm_scale is None else self.norm_scale[rows])


def quantize(
    weight: Tensor,
    bits: int = 4,
    *,
    before: Sequence[RotatedCodebook] = (),
    group_size: int = 128,
    kind: Kind = "hadamard",
    seed: int = 42,
    norm_dtype: torch.dtype = torch.float16,
    layer: str | None = None,
    in_pairs: bool = False,
) -> RotatedCodebook:
    """Quantize a weight, or the error that earlier passes left, to the nearest codebook values of its rotated groups.

    A group has the norm with the least squared error: of some multiples the best, then, for its indices, the best of
    all.

    Args:
        weight: ``[N, K]`` float16, bfloat16, float32 or float64, any strides.
        bits: 1 to 4.
        before: earlier rotated passes of the same weight, subtracted in float32, one after the other.
        group_size: columns of a group; K or more takes whole rows.
        kind: kind of the rotation. A Hadamard group, the shorter last one too, is a power of two.
        seed: seed of the group at column 0; see `RotatedCodebook`.
        norm_dtype: float16 or float32. The indices do not depend on it.
        layer: name for error messages.
        in_pairs: take the codebook of pairs, with 4 bits and groups of an even number of columns.

    Returns:
        Tensors on the weight's device.

    Raises:
        ShapeError: no matrix, or an empty one.
        DtypeError: another dtype of weight or norms.
        QuantizationError: NaN or Inf, or a norm beyond float16.
        ConfigError: another number of bits, a group size below 1, a group that the rotation cannot take, or an odd
            group with pairs.

    Exactness: float32; between devices an index may differ where a rotated value lies within rounding of a midpoint,
    a norm by its last bit, and a group where two multiples round it equally well.

    Source: docs/schemes.md, section 4; Lloyd-Max (`qcut.numerics.codebook.lloyd_max`).
    """
    check_weight(weight, norm_dtype, layer)
    n, k = weight.shape
    parts = rotation.check_groups(k, group_size, kind, layer)
    values = codebook(bits, in_pairs, k, group_size, weight.device, layer)
    indices = torch.empty((n, k), dtype=torch.uint8, device=weight.device)
    norms = torch.empty((n, len(parts)), dtype=norm_dtype, device=weight.device)
    whole = k // parts[0][1]
    alike = [slice(whole)] if whole == len(parts) else [slice(whole), slice(whole, None)]  # the last may be shorter
    # What fits a processor's cache is rounded several times in less time than it is read once from memory.
    for rows in row_chunks(n, k, _CACHED if weight.device.type == "cpu" else None):
        left = rows_left(weight, before, rows, layer)
        exact = torch.stack([torch.linalg.vector_norm(left[:, first : first + d], dim=1) for first, d in parts], 1)
        # A row of zeros stays zero, because its norm is 0.
        rotated = rotation.rotate_groups(
            left / per_column(torch.where(exact > 0, exact, 1.0), parts), kind, group_size, seed
        )
        rotated *= per_column(
            torch.tensor([d**0.5 for _, d in parts], device=weight.device, dtype=torch.float32), parts
        )
        for groups in alike:
            columns = slice(parts[groups][0][0], sum(parts[groups][-1]))
            nearest, multiples = _rounded(rotated[:, columns].unflatten(1, (-1, parts[groups][0][1])), values)
            indices[rows, columns] = nearest.flatten(1)
            exact[:, groups] *= multiples
        norms[rows] = stored_norms(exact, norm_dtype, layer)
    return RotatedCodebook(indices, norms, values, group_size, kind, seed)


def _rounded(numbers: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[R, G, d]`` and float32 ``[R, G]``: the indices of groups of numbers, and what their values are times."""

    def nearest(multiples: Tensor) -> Tensor:
        return nearest_indices(numbers / multiples[..., None], values)

    def squared_error(multiples: Tensor) -> Tensor:
        chosen = pairs.look_up(values, nearest(multiples))
        return torch.addcmul(numbers, chosen, multiples[..., None], value=-1.0).square_().sum(2)

    indices = nearest(best_multiple(numbers.new_ones(numbers.shape[:2]), squared_error))
    chosen = pairs.look_up(values, indices)
    return indices, (numbers * chosen).sum(2) / chosen.square_().sum(2)


def best_multiple(scales: Tensor, squared_error: Callable[[Tensor], Tensor]) -> Tensor:
    """Of `MULTIPLES` of each scale, and then `CLOSER` ones of the best, that with the least error.

    Args:
        scales: to be multiplied.
        squared_error: gives the error of each scale.
    """
    best, least = scales, torch.full_like(scales, torch.inf)
    for factors in (MULTIPLES, CLOSER):
        for tried in [best * factor for factor in factors]:
            error = squared_error(tried)
            best = torch.where(error < least, tried, best)
            least = torch.minimum(error, least)
    return best


def quantize_plain(
    weight: Tensor,
    bits: int,
    *,
    before: Sequence[RotatedCodebook] = (),
    group_size: int,
    levels: str,
    norm_dtype: torch.dtype = torch.float16,
    layer: str | None = None,
    row_absmax: Tensor | None = None,
) -> RotatedCodebook:
    """Quantize a weight, or the error that earlier passes left, without a rotation.

    With ``steps`` the values are ``c = -2**(b - 1) … 2**(b - 1) - 1``, ``norm = max |W[n, g]| / (2**(b - 1) - 1 / 2)``
    rounded to its dtype, and ``idx = clamp(rne(W / norm)) + 2**(b - 1)``. With ``normal``, the Lloyd-Max codebook,
    ``norm`` is the root of the group's mean square, and idx is the index of the value nearest to ``W / norm``. With
    ``e2m1`` both are those of `qcut.numerics.codebook.float4`.

    Args:
        weight: ``[N, K]`` float16, bfloat16, float32 or float64, any strides.
        bits: 2, 3 or 4.
        before: earlier passes of the same weight, subtracted in float32, one after the other.
        group_size: columns of a group; K or more takes whole rows.
        levels: see `qcut.schemes.Codebook`.
        norm_dtype: float16 or float32; or, with ``e2m1``, float8_e4m3fn of NVFP4.
        layer: name for error messages.
        row_absmax: float32 ``[N]``, the maximum over the columns of whole rows, if the weight has only some of
            them; NVFP4's global scale is then that of the whole rows. Other formats do not read it.

    Returns:
        Tensors on the weight's device, with the rotation `NO_ROTATION`.

    Raises:
        ShapeError: no matrix, or an empty one.
        DtypeError: another dtype of weight or norms.
        QuantizationError: NaN or Inf, or a norm beyond float16; or ``row_absmax`` is not of the weight's rows.

    Exactness: bitwise with ``steps`` and ``e2m1``.
    """
    e4m3 = levels == "e2m1" and norm_dtype is E4M3
    check_weight(weight, torch.float32 if e4m3 else norm_dtype, layer)
    n, k = weight.shape
    parts, half = rotation.groups(k, group_size), 1 << (bits - 1)
    device = weight.device
    values = fixed_values(levels, bits, device)
    values = lloyd_max.codebook(bits, device) if values is None else values
    bounds = float4.boundaries(device) if levels == "e2m1" else lloyd_max.boundaries(values)
    indices = torch.empty((n, k), dtype=torch.uint8, device=device)
    norms = torch.empty((n, len(parts)), dtype=norm_dtype, device=device)
    whole = float4.global_scale(_largest(weight, row_absmax, layer)) if e4m3 else None
    norm_scale = None if whole is None else whole.double().reciprocal().expand(n).clone()
    for rows in row_chunks(n, k):
        w = rows_left(weight, before, rows, layer)
        for g, (first, d) in enumerate(parts):
            group = w[:, first : first + d]
            if whole is not None:
                scale = float4.e4m3_norms(group.abs().amax(1), whole).float()
            elif levels == "steps":
                scale = group.abs().amax(1) / torch.full((), half - 0.5, device=device, dtype=torch.float32)
            elif levels == "e2m1":
                scale = float4.scales(group.abs().amax(1))
            else:
                scale = group.square().mean(1).sqrt()
            norms[rows, g] = stored_norms(scale, norm_dtype, layer)
            step = norms[rows, g].float()[:, None]
            step = step if whole is None else step / whole
            relative = group / torch.where(step > 0, step, 1.0)
            if levels == "steps":
                nearest = relative.round().clamp(-half, half - 1) + half
            else:
                nearest = torch.searchsorted(bounds, relative.contiguous())
            indices[rows, first : first + d] = nearest.to(torch.uint8)
    return RotatedCodebook(indices, norms, values, group_size, NO_ROTATION, 0, norm_scale)


def _largest(weight: Tensor, row_absmax: Tensor | None, layer: str | None) -> Tensor:
    """The largest magnitude of a weight, or of the whole rows that it has columns of, float32 ``[]``.

    Raises:
        QuantizationError: NaN or Inf, or ``row_absmax`` is not of the weight's rows.
    """
    absmax = torch.cat([finite_rows(weight, rows, layer).abs().amax(1) for rows in row_chunks(*weight.shape)])
    if row_absmax is None:
        return absmax.amax()
    if row_absmax.shape != absmax.shape or not bool(((row_absmax >= absmax) & row_absmax.isfinite()).all()):
        raise QuantizationError("row_absmax is not that of finite rows which hold these columns", layer)
    return row_absmax.amax()


def fixed_values(levels: str, bits: int, device: torch.device) -> Tensor | None:
    """The values that levels always have, float32 ``[2**bits]``; None for ``normal``, where values may differ."""
    if levels == "steps":
        half = 1 << (bits - 1)
        return torch.arange(-half, half, device=device, dtype=torch.int64).float()
    return float4.values(device) if levels == "e2m1" else None


def dequantize(q: RotatedCodebook | Sequence[RotatedCodebook]) -> Tensor:
    """The weight that indices stand for, float32 ``[N, K]``; several passes are added in order.

    Raises:
        ShapeError: norms and indices do not fit each other or the codebook, passes differ in shape, or there is none.
        ConfigError: see `quantize`.
    """
    passes = (q,) if isinstance(q, RotatedCodebook) else tuple(q)
    if len({one.indices.shape for one in passes}) != 1:
        shapes = [list(one.indices.shape) for one in passes]
        raise ShapeError(f"passes of shapes {shapes}; allowed: one pass or more, of one shape")
    for one in passes:
        _check_tensors(one)
    n, k = passes[0].indices.shape
    out = torch.empty((n, k), device=passes[0].indices.device, dtype=torch.float32)
    for rows in row_chunks(n, k):
        out[rows] = dequantize_rows(passes[0], rows)
        for one in passes[1:]:
            out[rows] += dequantize_rows(one, rows)
    return out


def dequantize_rows(q: RotatedCodebook, rows: slice) -> Tensor:
    """float32 ``[R, K]``: some rows of the weight that one pass stands for, without checks."""
    values = pairs.look_up(q.values, q.indices[rows])
    scales = column_scales(q.float_norms(rows), q.indices.shape[1], q.group_size, q.rotation)
    if q.rotation == NO_ROTATION:
        return values.mul_(scales).add_(0.0)  # makes -0 a 0 in groups of zeros
    return rotation.rotate_groups_back(values, q.rotation, q.group_size, q.seed).mul_(scales)


def column_scales(norms: Tensor, k: int, group_size: int, kind: Kind) -> Tensor:
    """The factor of the codebook value in each column, float32 ``[R, K]``.

    Args:
        norms: float16 or float32 ``[R, G]``.
        k: number of columns.
        group_size: columns of a group.
        kind: kind of the rotation; norms of rotated groups are divided by the root of the group's columns.
    """
    parts = rotation.groups(k, group_size)
    scales = norms.float()
    if kind != NO_ROTATION:
        scales = scales * torch.tensor([d**-0.5 for _, d in parts], device=norms.device, dtype=torch.float32)
    return per_column(scales, parts)


def codebook(bits: int, in_pairs: bool, k: int, group_size: int, device: torch.device, layer: str | None) -> Tensor:
    """The Lloyd-Max codebook, float32 ``[2**bits]``, or that of pairs, ``[256, 2]``.

    Raises:
        ConfigError: another number of bits, or an odd group with pairs.
    """
    if not in_pairs:
        return lloyd_max.codebook(bits, device)
    if bits != 4:
        raise ConfigError(f"{layer_prefix(layer)}pairs of {bits} bits a value; allowed: 4")
    check_even(k, group_size, layer)
    return pairs.codebook(device)


def check_even(k: int, group_size: int, layer: str | None) -> None:
    """Check that all groups of K columns have an even number of columns, as pairs need.

    Raises:
        ConfigError: a group is odd.
    """
    if k % 2 or min(group_size, k) % 2:
        raise ConfigError(
            f"{layer_prefix(layer)}groups of {min(group_size, k)} of {k} columns; pairs take even numbers"
        )


def nearest_indices(rotated: Tensor, values: Tensor) -> Tensor:
    """uint8 ``[R, K]``: the indices of the codebook's values, or pairs of values, nearest to numbers ``[R, K]``."""
    if pairs.are_pairs(values):
        return pairs.split(pairs.nearest(rotated.unflatten(-1, (-1, 2)), values))
    return lloyd_max.Cells(values).nearest(rotated).to(torch.uint8)


def check_weight(weight: Tensor, norm_dtype: torch.dtype, layer: str | None) -> None:
    """Check the shape of a weight and the dtypes of weight and norms.

    Raises:
        ShapeError: no matrix, or an empty one.
        DtypeError: another dtype than `WEIGHT_DTYPES` and `NORM_DTYPES`.
    """
    where = layer_prefix(layer)
    if weight.dim() != 2 or not weight.numel():
        raise ShapeError(f"{where}the weight has shape {list(weight.shape)}; allowed: [N, K] with N, K >= 1")
    if weight.dtype not in WEIGHT_DTYPES or norm_dtype not in NORM_DTYPES:
        wrong = weight.dtype if weight.dtype not in WEIGHT_DTYPES else norm_dtype
        raise DtypeError(f"{where}{wrong}; allowed: weights of {WEIGHT_DTYPES}, norms of {NORM_DTYPES}")


def rows_left(weight: Tensor, before: Sequence[RotatedCodebook], rows: slice, layer: str | None) -> Tensor:
    """float32 ``[R, K]``: some rows of a weight, minus the weights that the passes ``before`` stand for.

    Raises:
        QuantizationError: NaN or Inf in the weight.
    """
    left = finite_rows(weight, rows, layer)
    for q in before:
        left = left - dequantize_rows(q, rows)
    return left


def finite_rows(weight: Tensor, rows: slice, layer: str | None) -> Tensor:
    """float32 ``[R, K]``: some rows of a weight.

    Raises:
        QuantizationError: NaN or Inf.
    """
    w = weight.detach()[rows].float().contiguous()
    if not w.isfinite().all():
        raise QuantizationError("weight holds NaN or Inf; every value must be finite in float32", layer)
    return w


def stored_norms(norms: Tensor, dtype: torch.dtype, layer: str | None) -> Tensor:
    """Convert norms to the dtype they are stored in.

    Raises:
        QuantizationError: a norm is beyond float16.
    """
    largest = float(norms.abs().max())
    if largest > torch.finfo(dtype).max:
        raise QuantizationError(f"a group's norm is {largest:.4g}; {dtype} holds less: use float32", layer)
    return norms.to(dtype)


def _check_tensors(q: RotatedCodebook) -> None:
    n, k = q.indices.shape
    if q.rotation != NO_ROTATION:
        rotation.check_group_size(k, q.group_size, q.rotation)
    parts = rotation.groups(k, q.group_size)
    if q.norms.shape != (n, len(parts)):
        raise ShapeError(f"norms have shape {list(q.norms.shape)}; allowed: {[n, len(parts)]}")
    if q.norm_scale is not None and q.norm_scale.shape != (n,):
        raise ShapeError(f"norm_scale has shape {list(q.norm_scale.shape)}; allowed: {[n]}")
    most = 16 if pairs.are_pairs(q.values) else len(q.values)
    if q.indices.numel() and int(q.indices.max()) >= most:
        raise ShapeError(f"an index is {int(q.indices.max())}; the codebook has {most} values")
    if pairs.are_pairs(q.values):
        check_even(k, q.group_size, None)
