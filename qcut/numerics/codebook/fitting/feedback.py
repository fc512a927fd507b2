"""Rounds rotated weights to codebook values so that each value cancels the errors of those before it.

With ``H = U D U^T``, U upper triangular with a diagonal of ones, the error of a row is
``e H e^T = sum_j D[j] (e U)[j]^2``, and ``(e U)[j] = e[j] + sum_{i < j} e[i] U[i, j]``: the value of column j that
comes nearest to ``w[j]`` plus what the columns before pass on makes the term as small as the codebook allows. Where
rows matter together, with ``G = V C V^T``, the error is ``tr(G E H E^T) = sum_ij C[i] D[j] (V^T E U)[i, j]^2``, and
values before (i, j) are those of no larger row and no larger column. The values of an antidiagonal do not wait for each
other.

Source: Frantar et al., "GPTQ" (2022), section 3; Chee et al., "QuIP" (2023), section 3 (LDLQ); Tseng et al., "YAQA"
(2025), section 4 (both sides).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qcut.numerics.codebook import lloyd_max
from qcut.numerics.codebook.quantizer import best_multiple

BLOCK = 128
"""Errors pass from column to column within a block of so many, and by one product to later blocks."""


def unit_factor(h: Tensor) -> Tensor | None:
    """U of ``h = U D U^T``, upper triangular with a diagonal of ones; None if h is not positive definite."""
    # Reversing rows and columns before and after the factorization gives an upper factor instead of a lower one.
    lower, failed = torch.linalg.cholesky_ex(h.flip(0, 1))
    if int(failed):
        return None
    factor = lower.flip(0, 1)
    return factor.div_(factor.diagonal().clone())


def by_columns(w: Tensor, factor: Tensor, values: Tensor, parts: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Choose scales group by group and values column by column, each row by itself, for E experts at a time.

    Args:
        w: rotated rows, float32 ``[E, R, K]``.
        factor: U of the inputs' metrics, ``[E, K, K]``.
        values: codebook.
        parts: the groups, see `qcut.numerics.codebook.rotation.groups`.

    Returns:
        uint8 indices ``[E, R, K]`` and float32 scales ``[E, R, G]``, which are norms over sqrt(d).
    """
    cells = lloyd_max.Cells(values)

    def rounded(numbers: Tensor) -> Tensor:
        return values.index_select(0, cells.nearest(numbers).flatten()).view(numbers.shape)

    experts, rows, k = w.shape
    # Transposed, so that a column of a weight is contiguous.
    error = torch.zeros(experts, k, rows, device=w.device, dtype=torch.float32)
    indices = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales = torch.empty((experts, rows, len(parts)), device=w.device, dtype=torch.float32)
    for g, (first, d) in enumerate(parts):
        group = slice(first, first + d)
        fed, scale = begin_group(w, factor, error, group, rounded)
        scales[..., g] = scale
        divisor = torch.where(scale > 0, scale, 1.0)
        for start in range(first, first + d, BLOCK):
            block = slice(start, min(start + BLOCK, first + d))
            exact = w[..., block].mT.contiguous()
            target = exact + fed[:, block.start - first : block.stop - first]
            target += each(torch.mm, factor[:, first:start, block].mT, error[:, first:start])
            inside = factor[:, block, block, None]
            chosen = torch.empty(target.shape, dtype=torch.uint8, device=w.device)
            for j in range(target.shape[1]):
                index = cells.nearest(target[:, j] / divisor)
                chosen[:, j] = index
                e = torch.addcmul(exact[:, j], values[index], scale, value=-1.0)
                error[:, start + j] = e
                target[:, j + 1 :].addcmul_(inside[:, j, j + 1 :], e[:, None])
            indices[..., block] = chosen.mT
    return indices, scales


def by_antidiagonals(w: Tensor, columns: Tensor, u: Tensor, v: Tensor, values: Tensor) -> Tensor:
    """Choose values so that errors cancel over columns and over rows.

    Args:
        w: rotated rows, float32 ``[N, K]``.
        columns: factor of the codebook value at each place, ``[N, K]``.
        u: U of the inputs' metric, ``[K, K]``.
        v: V of the outputs' metric, ``[N, N]``.
        values: codebook.

    Returns:
        uint8 indices ``[N, K]``. ``N + K - 1`` steps, ``2 N K (N + K)`` operations.
    """
    n, k = w.shape
    edges = lloyd_max.boundaries(values)
    # Place (i, s - i) of a matrix of k columns lies at i (k - 1) + s; places of step s are k - 1 apart.
    w = w.contiguous().flatten()
    columns = columns.contiguous().flatten()
    divisor = torch.where(columns > 0, columns, 1.0)
    indices = torch.empty(n * k, dtype=torch.uint8, device=w.device)
    u, v = u.triu(1).flip(0), v.triu(1).flip(0)  # rows in the order in which a step's places need them
    from_columns = torch.zeros(n, k, device=w.device, dtype=torch.float32)
    from_rows = torch.zeros(k, n, device=w.device, dtype=torch.float32)
    for s in range(n + k - 1):
        low, high = max(0, s - k + 1), min(n - 1, s) + 1  # the rows of this step
        left = s - high + 1  # its first column
        at = slice(low * (k - 1) + s, (high - 1) * (k - 1) + s + 1, max(k - 1, 1))
        passed = from_columns.flatten()[at]
        above = from_rows.flatten()[left * (n - 1) + s : (left + high - low - 1) * (n - 1) + s + 1 : max(n - 1, 1)]
        target = (w[at] + passed).add_(above.flip(0))
        index = torch.searchsorted(edges, target / divisor[at], out_int32=True)
        indices[at] = index.to(torch.uint8)
        error = torch.addcmul(w[at], values[index], columns[at], value=-1.0)
        gathered = (error + passed).flip(0)
        from_columns[low:high, left + 1 :].addcmul_(error[:, None], u[k - 1 - s + low : k - 1 - s + high, left + 1 :])
        from_rows[left : left + high - low, low + 1 :].addcmul_(
            gathered[:, None], v[n - 1 - s + left : n - 1 - s + left + high - low, low + 1 :]
        )
    return indices.view(n, k)


def begin_group(
    w: Tensor, factor: Tensor, error: Tensor, group: slice, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """What the columns before a group pass on to it, and the group's scales.

    Args:
        w: rotated rows, float32 ``[E, R, K]``.
        factor: U of the inputs' metrics, ``[E, K, K]``.
        error: errors of the columns before, ``[E, K, R]``.
        group: the group's columns.
        rounded: rounds numbers ``[E, d, R]`` to codebook values, to choose the multiple of a norm that rounds best.

    Returns:
        ``[E, d, R]``, and scales ``[E, R]``.
    """
    fed = each(torch.mm, factor[:, : group.start, group].mT, error[:, : group.start])

    def without_error(u: Tensor, passed: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(u.t(), passed, upper=False, unitriangular=True)

    # The real numbers with which the group would leave no error.
    wanted = (each(without_error, factor[:, group, group], fed) + w[..., group].mT).contiguous()
    norm = each(lambda one: torch.linalg.vector_norm(one, dim=0), wanted)
    scale = norm * (group.stop - group.start) ** -0.5
    return fed, _best_scale(wanted, scale, rounded)


def _best_scale(w: Tensor, scale: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """``[E, R]``: the multiple of each scale that rounds columns ``[E, d, R]`` with the least squared error."""

    def squared_error(tried: Tensor) -> Tensor:
        divisor = torch.where(tried > 0, tried, 1.0)[:, None]
        squares = torch.addcmul(w, rounded(w / divisor), tried[:, None], value=-1.0).square_()
        return each(lambda one: one.sum(0), squares)

    return best_multiple(scale, squared_error)


def each(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The results of a function for each expert of tensors ``[E, ...]``, stacked.

    For sums and products: a call for all experts may add up in another order than one for a single expert does.
    """
    if len(tensors[0]) == 1:
        return function(*(one[0] for one in tensors))[None]
    return torch.stack([function(*one) for one in zip(*tensors, strict=True)])
