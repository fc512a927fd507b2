"""Fits codebook weights to the inputs of their layer, which loses less than rounding to the nearest value.

Rounding minimizes ``||W - W'||``, which is best where all input channels are alike and independent. With H, the second
moment of a layer's inputs, the expected squared error of an output is ``e H e^T``, where e is a row of ``W - W'``. H is
rotated as the weights are, damped, and factored ``H = M M^T``, M upper triangular, so that the error is ``||e M||^2``;
its j-th term is the square of ``M[j, j] * (e[j] + sum_{i < j} e[i] M[i, j] / M[j, j])``. Columns are quantized in
order, each to the codebook value that best cancels the errors of the columns before, so that every term is as small as
the codebook allows. Norms are chosen last, by least squares under H. The result has the same form as that of
`qcut.codebooks.quantizer.quantize`.

Source: Frantar et al., "GPTQ" (2022), section 3; Chee et al., "QuIP" (2023), section 3 (LDLQ, the form used here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qcut.codebooks import lloyd_max, rotation
from qcut.codebooks.quantizer import RotatedCodebook, check_weight, row_chunks, rows_left, stored_norms
from qcut.errors import ConfigError, QuantizationError, ShapeError, layer_prefix

DAMPING = 0.1
"""Share of H's mean diagonal that is added to the diagonal, for texts other than the one H was collected on."""

_BLOCK = 128  # errors pass from column to column within a block, and by one product to later blocks
_CHUNK_ELEMENTS = 1 << 26  # rows are independent: larger chunks take fewer launches for each column
_NORM_FACTORS = tuple(0.85 + 0.025 * i for i in range(11))
_MAX_DAMPING = 1.0
_RIDGE = 1e-6


def fit(
    weight: Tensor,
    second_moment: Tensor,
    bits: int = 4,
    *,
    before: Sequence[RotatedCodebook] = (),
    group_size: int = 128,
    kind: rotation.Kind = "hadamard",
    seed: int = 42,
    norm_dtype: torch.dtype = torch.float16,
    layer: str | None = None,
    damping: float = DAMPING,
    refit: bool = True,
) -> RotatedCodebook:
    """Quantize a weight so that the layer's output changes little on inputs like the calibration's.

    Args:
        weight: ``[N, K]`` float16, bfloat16, float32 or float64, any strides.
        second_moment: floating-point ``[K, K]``: the mean of ``x^T x`` over the layer's inputs, times any factor; see
            `qcut.collect_second_moments`. The tensor is moved to the weight's device.
        bits: 1 to 4.
        before: earlier rotated passes of the same weight, whose remaining error is fitted. Earlier passes are better
            rounded to nearest (`qcut.codebooks.quantizer.quantize`): error feedback leaves an error that is small
            under H, but large in itself.
        group_size: columns of a group; K or more takes whole rows.
        kind: kind of the rotation. A Hadamard group, the shorter last one too, is a power of two.
        seed: seed of the rotation of the group at column 0.
        norm_dtype: float16 or float32.
        layer: name for error messages.
        damping: the mean of H's diagonal, times this factor, is added to the diagonal. The factor is raised tenfold as
            long as float32 cannot factor H.
        refit: choose norms too. At a group's first column, take the multiple of the group's norm that rounds the group
            best; in the end, take the row's norms with the least error under H, where these lower the error. Without
            refit, a norm is the group's own, after the errors of earlier columns have been passed on.

    Returns:
        Tensors on the weight's device.

    Raises:
        ShapeError: the weight is no matrix or empty, or the second moment is not ``[K, K]``.
        DtypeError: the dtype of weight or norms is another.
        QuantizationError: NaN or Inf, a norm beyond float16, or a second moment that cannot be factored.
        ConfigError: another number of bits, a group that the rotation cannot take, or a negative damping.

    Exactness: float32, with the precision that torch is set to use for matrix products. Deterministic; the number
    of rows may change an index where a value lies within rounding of a midpoint.
    """
    check_weight(weight, norm_dtype, layer)
    n, k = weight.shape
    where = layer_prefix(layer)
    parts = rotation.check_groups(k, group_size, kind, layer)
    if second_moment.shape != (k, k):
        raise ShapeError(f"{where}the second moment has shape {list(second_moment.shape)}; allowed: {[k, k]}")
    if not damping >= 0:
        raise ConfigError(f"{where}damping is {damping}; allowed: 0 and more")
    device = weight.device
    second_moment = second_moment.detach().to(device)
    if not second_moment.isfinite().all():
        raise QuantizationError("the second moment holds NaN or Inf; every value must be finite", layer)
    metric = _metric(second_moment, kind, group_size, seed, damping, layer)
    values = lloyd_max.codebook(bits, device)
    indices = torch.empty((n, k), dtype=torch.uint8, device=device)
    norms = torch.empty((n, len(parts)), dtype=norm_dtype, device=device)
    root = torch.tensor([d**0.5 for _, d in parts], device=device)
    for rows in row_chunks(n, k, _CHUNK_ELEMENTS):
        rotated = rotation.rotate_groups(rows_left(weight, before, rows, layer), kind, group_size, seed)
        indices[rows], scales = _feed_back(rotated, metric, values, parts, refit)
        if refit:
            scales = _refit(rotated, values[indices[rows].int()], scales, metric.h, parts)
        norms[rows] = stored_norms(scales * root, norm_dtype, layer)
    return RotatedCodebook(indices, norms, values, group_size, kind, seed)


@dataclass(frozen=True)
class _Metric:
    """H in the rotated columns, symmetric and damped, and its factor with a diagonal of ones.

    ``h = (factor * d) factor^T``, factor upper triangular.
    """

    h: Tensor
    factor: Tensor


def _metric(
    second_moment: Tensor, kind: rotation.Kind, group_size: int, seed: int, damping: float, layer: str | None
) -> _Metric:
    h = second_moment.to(torch.float32, copy=True)
    for _ in range(2):  # the rows of H, then those of its transpose
        for rows in row_chunks(len(h), len(h)):
            h[rows] = rotation.rotate_groups(h[rows], kind, group_size, seed)
        h = h.t().contiguous()
    h = (h + h.t()) / 2
    mean = h.diagonal().mean()
    if not float(mean) > 0:
        raise QuantizationError("the second moment is zero; pass data that reaches the layer", layer)
    added = 0.0
    while True:
        h.diagonal().add_((damping - added) * mean)
        added = damping
        # Reversing rows and columns before and after the factorization gives an upper factor instead of a lower one.
        lower, failed = torch.linalg.cholesky_ex(h.flip(0, 1))
        if not int(failed):
            break
        damping = max(10 * damping, 1e-6)
        if damping > _MAX_DAMPING:
            raise QuantizationError("the second moment has no factorization; it must be positive semidefinite", layer)
    factor = lower.flip(0, 1)
    return _Metric(h, factor.div_(factor.diagonal().clone()))


def _feed_back(
    w: Tensor, metric: _Metric, values: Tensor, parts: list[tuple[int, int]], refit: bool
) -> tuple[Tensor, Tensor]:
    """uint8 ``[R, K]`` indices and float32 ``[R, G]`` scales (norms over sqrt(d)) of rotated rows ``[R, K]``."""
    edges = lloyd_max.boundaries(values)
    factor = metric.factor
    # Transposed, so that a column of the weight is contiguous.
    error = torch.zeros(w.shape[1], w.shape[0], device=w.device)
    indices = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales = torch.empty((len(w), len(parts)), device=w.device)
    for g, (first, d) in enumerate(parts):
        group = slice(first, first + d)
        fed = factor[:first, group].t() @ error[:first]
        # The real numbers with which the group would leave no error.
        wanted = torch.linalg.solve_triangular(factor[group, group].t(), fed, upper=False, unitriangular=True)
        wanted = (wanted + w[:, group].t()).contiguous()
        scale = torch.linalg.vector_norm(wanted, dim=0) * d**-0.5
        if refit:
            scale = _best_scale(wanted, scale, values, edges)
        scales[:, g] = scale
        divisor = torch.where(scale > 0, scale, 1.0)
        for start in range(first, first + d, _BLOCK):
            block = slice(start, min(start + _BLOCK, first + d))
            exact = w[:, block].t().contiguous()
            target = exact + fed[block.start - first : block.stop - first]
            target += factor[first:start, block].t() @ error[first:start]
            inside = factor[block, block]
            chosen = torch.empty(target.shape, dtype=torch.uint8, device=w.device)
            for j in range(len(target)):
                index = torch.searchsorted(edges, target[j] / divisor, out_int32=True)
                chosen[j] = index
                e = torch.addcmul(exact[j], values[index], scale, value=-1.0)
                error[start + j] = e
                target[j + 1 :].addr_(inside[j, j + 1 :], e)
            indices[:, block] = chosen.t()
    return indices, scales


def _best_scale(w: Tensor, scale: Tensor, values: Tensor, edges: Tensor) -> Tensor:
    """``[R]``: the multiple of each scale that rounds columns ``[d, R]`` with the least squared error."""
    best, least = scale, torch.full_like(scale, torch.inf)
    for factor in _NORM_FACTORS:
        tried = scale * factor
        divisor = torch.where(tried > 0, tried, 1.0)
        error = (w - values[torch.searchsorted(edges, w / divisor, out_int32=True)] * tried).square().sum(0)
        best = torch.where(error < least, tried, best)
        least = torch.minimum(error, least)
    return best


def _refit(w: Tensor, chosen: Tensor, scales: Tensor, h: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    """``[R, G]`` scales of codebook values ``[R, K]`` by least squares under h, in rows where that is better."""
    sizes = torch.tensor([d for _, d in parts], device=w.device)
    left = w - chosen * scales.repeat_interleave(sizes, 1, output_size=w.shape[1])
    slope = left @ h
    before = (slope * left).sum(1)
    toward = torch.stack([(slope[:, f : f + d] * chosen[:, f : f + d]).sum(1) for f, d in parts], 1)
    normal = torch.empty((len(w), len(parts), len(parts)), device=w.device)
    for g, (first, d) in enumerate(parts):
        product = (chosen[:, first : first + d] @ h[first : first + d, first:]).mul_(chosen[:, first:])
        row = torch.stack([product[:, f - first : f - first + e].sum(1) for f, e in parts[g:]], 1)
        normal[:, g, g:] = row
        normal[:, g:, g] = row
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal += _RIDGE * diagonal.mean(1, keepdim=True)
    better = scales + torch.linalg.solve_ex(normal, toward).result
    left = w - chosen * better.repeat_interleave(sizes, 1, output_size=w.shape[1])
    after = ((left @ h) * left).sum(1)
    return torch.where(((after < before) & (better >= 0).all(1))[:, None], better, scales)
