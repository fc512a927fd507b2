"""Rounds rotated weights to pairs of codebook values so that each pair cancels the errors of those before it.

`qcut.numerics.codebook.fitting.feedback` with two neighbouring columns at a time. Columns j and j + 1 of a row add
``D[j] (e U)[j]^2 + D[j + 1] (e U)[j + 1]^2`` to the error ``e U D U^T e^T``, and the second term holds
``U[j, j + 1] e[j]``. Both terms together are a quadratic form of the distance between the pair and what is wanted, and
the best of the 256 pairs under that form is taken.

Source: Frantar et al., "GPTQ" (2022), section 3; Tseng et al., "QuIP#" (2024), section 4 (blocks of columns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.numerics.codebook import pairs
from qcut.numerics.codebook.fitting import feedback
from qcut.numerics.codebook.fitting.feedback import each


def metrics(h: Tensor, factor: Tensor) -> Tensor:
    """``[K / 2, 3]``: the quadratic form of each pair of columns, as `qcut.numerics.codebook.pairs.best` takes it.

    Args:
        h: the inputs' metric ``U D U^T``, ``[K, K]``.
        factor: U.
    """
    pivots = torch.linalg.solve_triangular(factor.square(), h.diagonal()[:, None], upper=True, unitriangular=True)
    first, second = pivots[::2, 0], pivots[1::2, 0]
    within = factor.diagonal(1)[::2]
    return torch.stack((first + second * within.square(), second * within, second), 1)


def by_columns(
    w: Tensor, factor: Tensor, forms: Tensor, values: Tensor, parts: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Choose scales group by group and pairs one after the other, each row by itself, for E experts at a time.

    Args:
        w: rotated rows, float32 ``[E, R, K]``.
        factor: U of the inputs' metrics, ``[E, K, K]``.
        forms: results of `metrics`, ``[E, K / 2, 3]``.
        values: pairs, ``[256, 2]``.
        parts: the groups, of even numbers of columns; see `qcut.numerics.codebook.rotation.groups`.

    Returns:
        uint8 indices ``[E, R, K]`` and float32 scales ``[E, R, G]``, which are norms over sqrt(d).
    """

    def rounded(numbers: Tensor) -> Tensor:
        nearest = pairs.nearest(numbers.mT.unflatten(-1, (-1, 2)), values)
        return values[nearest.int()].flatten(-2).mT

    experts, rows, k = w.shape
    # Transposed, so that a column of a weight is contiguous.
    error = torch.zeros(experts, k, rows, device=w.device, dtype=torch.float32)
    indices = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales = torch.empty((experts, rows, len(parts)), device=w.device, dtype=torch.float32)
    for g, (first, d) in enumerate(parts):
        group = slice(first, first + d)
        fed, scale = feedback.begin_group(w, factor, error, group, rounded)
        scales[..., g] = scale
        for start in range(first, first + d, feedback.BLOCK):
            block = slice(start, min(start + feedback.BLOCK, first + d))
            exact = w[..., block].mT.contiguous()
            target = exact + fed[:, block.start - first : block.stop - first]
            target += each(torch.mm, factor[:, first:start, block].mT, error[:, first:start])
            inside = factor[:, block, block, None]
            chosen = torch.empty((experts, rows, target.shape[1] // 2), dtype=torch.uint8, device=w.device)
            for j in range(0, target.shape[1], 2):
                two = slice(j, j + 2)
                wanted = _without_own_feedback(target[:, two].mT, exact[:, j], inside[:, j, j + 1])
                at = pairs.best(wanted, scale, forms[:, None, (start + j) // 2], values)
                chosen[..., j // 2] = at
                e = torch.addcmul(exact[:, two], values[at].mT, scale[:, None], value=-1.0)
                error[:, start + j : start + j + 2] = e
                for i in range(2):
                    target[:, j + 2 :].addcmul_(inside[:, j + i, j + 2 :], e[:, i, None])
            indices[..., block] = pairs.split(chosen)
    return indices, scales


def by_antidiagonals(w: Tensor, columns: Tensor, u: Tensor, v: Tensor, forms: Tensor, values: Tensor) -> Tensor:
    """Choose pairs of values so that errors cancel over columns and over rows.

    Args:
        w: rotated rows, float32 ``[N, K]``.
        columns: factor of the codebook value at each place, ``[N, K]``, equal within a pair.
        u: U of the inputs' metric, ``[K, K]``.
        v: V of the outputs' metric, ``[N, N]``.
        forms: result of `metrics` of the inputs' metric.
        values: pairs, ``[256, 2]``.

    Returns:
        uint8 indices ``[N, K]``. ``N + K / 2 - 1`` steps.
    """
    n, k = w.shape
    count = k // 2
    # Pair (i, s - i) of a matrix of `count` pairs lies at i (count - 1) + s; pairs of step s are count - 1 apart.
    w = w.contiguous().view(n * count, 2)
    scale = columns[:, ::2].contiguous().flatten()
    indices = torch.empty(n * count, dtype=torch.uint8, device=w.device)
    # Rows in the order in which a step's pairs need them; a pair's own two columns are left out.
    later = (
        torch.arange(k, device=w.device, dtype=torch.int64)
        >= 2 * torch.arange(1, count + 1, device=w.device, dtype=torch.int64)[:, None]
    )
    first, second = (torch.where(later, u[e::2], 0.0).flip(0) for e in (0, 1))
    within, forms = u.diagonal(1)[::2].flip(0), forms.flip(0)
    v = v.triu(1).flip(0)
    from_columns = torch.zeros(n, k, device=w.device, dtype=torch.float32)
    from_rows = torch.zeros(2, count, n, device=w.device, dtype=torch.float32)
    for s in range(n + count - 1):
        low, high = max(0, s - count + 1), min(n - 1, s) + 1  # the rows of this step
        left = s - high + 1  # its first pair
        at = slice(low * (count - 1) + s, (high - 1) * (count - 1) + s + 1, max(count - 1, 1))
        here = slice(count - 1 - s + low, count - 1 - s + high)
        passed = from_columns.view(n * count, 2)[at]
        up = slice(left * (n - 1) + s, (left + high - low - 1) * (n - 1) + s + 1, max(n - 1, 1))
        above = from_rows.flatten(1)[:, up].flip(1).t()
        exact = w[at]
        wanted = _without_own_feedback(exact + passed + above, exact[:, 0], within[here])
        joined = pairs.best(wanted, scale[at], forms[here], values)
        indices[at] = joined.to(torch.uint8)
        error = exact - values[joined] * scale[at][:, None]
        gathered = error + passed
        gathered[:, 1] += within[here] * error[:, 0]
        for e, rows in ((0, first), (1, second)):
            from_columns[low:high, 2 * left + 2 :].addcmul_(error[:, e, None], rows[here, 2 * left + 2 :])
            from_rows[e, left : left + high - low, low + 1 :].addcmul_(
                gathered[:, e].flip(0)[:, None], v[n - 1 - s + left : n - 1 - s + left + high - low, low + 1 :]
            )
    return pairs.split(indices.view(n, count))


def _without_own_feedback(target: Tensor, exact: Tensor, within: Tensor) -> Tensor:
    """``[..., R, 2]``: the target of a pair with an error measured by `metrics`.

    Args:
        target: ``[..., R, 2]``, the numbers and what values before pass on to them.
        exact: ``[..., R]``, the first numbers themselves.
        within: U between the two columns.
    """
    first, second = target.unbind(-1)
    return torch.stack((first, second - within * (first - exact)), -1)
