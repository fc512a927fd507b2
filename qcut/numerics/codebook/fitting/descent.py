"""Improves the indices and scales of a fitted codebook weight, one after the other, under the metric of the fit.

The error of a weight is ``tr(G E H E^T)``, E the rotated weight minus its codebook values times their scales, H and G
symmetric and positive definite; without G it is that of single rows, ``e H e^T``. `indices` goes through the columns
and gives each place the value that is best while all others stay; `scales` solves for all scales at given indices.
Neither raises the error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcut.numerics.chunks import row_chunks
from qcut.numerics.codebook import lloyd_max, pairs
from qcut.numerics.codebook.fitting.feedback import each
from qcut.numerics.codebook.rotation import per_column

_BLOCK = 128
_ROW_SETS = 4  # rows of one set do not see each other's changes
_STEPS = 16  # of conjugate gradients at most: a scale has few neighbours that matter
_ENOUGH = 1e-9  # of the first residual, squared
_TINY = 1e-30


def indices(
    w: Tensor, chosen: Tensor, scales: Tensor, h: Tensor, g: Tensor | None, values: Tensor, parts: list[tuple[int, int]]
) -> Tensor:
    """Go once through all places of the weights of E experts.

    Args:
        w: rotated rows, float32 ``[E, N, K]``.
        chosen: uint8 indices ``[E, N, K]``.
        scales: ``[E, N, G]``.
        h: the inputs' metrics, ``[E, K, K]``.
        g: the outputs' metrics, ``[E, N, N]``; None for rows by themselves.
        values: codebook, ``[2**bits]`` or of pairs.
        parts: the groups.

    Returns:
        uint8 ``[E, N, K]``. With g, rows are taken in four sets, and the indices of a set that is worse off stay.
    """
    error = _left(w, chosen, scales, values, parts)
    if g is None:
        return _sweep(chosen, scales, each(torch.mm, error, h), h, values, parts)

    def growth(change: Tensor, slope: Tensor, g: Tensor, h: Tensor) -> Tensor:
        # The error grows by 2 <change, slope> + tr(G change H change^T).
        return 2 * (change * slope).sum() + ((g @ change @ h) * change).sum()

    chosen = chosen.clone()
    for first in range(min(_ROW_SETS, w.shape[1])):
        rows = slice(first, None, _ROW_SETS)
        slope = each(lambda g, error, h: (g @ error) @ h, g[:, rows], error, h)
        own = slope / g.diagonal(dim1=1, dim2=2)[:, rows, None]
        found = _sweep(chosen[:, rows], scales[:, rows], own, h, values, parts)
        change = _left(w[:, rows], found, scales[:, rows], values, parts) - error[:, rows]
        better = (each(growth, change, slope, g[:, rows, rows], h) < 0)[:, None, None]
        chosen[:, rows] = torch.where(better, found, chosen[:, rows])
        error[:, rows] += torch.where(better, change, 0.0)
    return chosen


def scales(
    w: Tensor, chosen: Tensor, scales: Tensor, h: Tensor, g: Tensor | None, values: Tensor, parts: list[tuple[int, int]]
) -> Tensor:
    """Least squares for the scales of given indices.

    Args:
        w: rotated rows, float32 ``[N, K]``.
        chosen: uint8 indices ``[N, K]``.
        scales: ``[N, G]`` to start from.
        h: the inputs' metric, ``[K, K]``.
        g: the outputs' metric, ``[N, N]``; None for rows by themselves.
        values: codebook.
        parts: the groups.

    Returns:
        ``[N, G]``; the given scales if the result has a larger error or a negative scale: of the row without g, of
        the whole weight with it.
    """
    c = pairs.look_up(values, chosen)
    slope = (w - c * per_column(scales, parts)) @ h
    if g is not None:
        return _scales_together(c, g @ slope, scales, h, g, parts)
    found = [
        _scales_of_rows(c[rows], slope[rows], scales[rows], h, parts)
        for rows in row_chunks(len(c), max(h.shape[0], len(parts) ** 2))
    ]
    return torch.cat(found)


def _scales_of_rows(c: Tensor, slope: Tensor, scales: Tensor, h: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    """`scales` of rows by themselves, from the normal equations of each row.

    Args:
        c: codebook values ``[R, K]``.
        slope: errors times h, ``[R, K]``.
        scales: ``[R, G]``.
        h: ``[K, K]``.
        parts: the groups.
    """
    normal = torch.empty(len(c), len(parts), len(parts), device=c.device, dtype=torch.float32)
    for i, (first, d) in enumerate(parts):
        own = c[:, first : first + d] @ h[first : first + d, first:]
        normal[:, i, i:] = normal[:, i:, i] = _by_group(own * c[:, first:], parts[i:])
    right = _by_group(slope * c, parts)
    factor, failed = torch.linalg.cholesky_ex(normal)
    step = torch.cholesky_solve(right[..., None], factor)[..., 0]
    # The error falls by 2 <step, right> - step normal step^T.
    fall = ((2 * right - (normal @ step[..., None])[..., 0]) * step).sum(1)
    better = (failed == 0) & (fall > 0) & (scales + step >= 0).all(1)
    return torch.where(better[:, None], scales + step, scales)


def _scales_together(
    c: Tensor, slope: Tensor, scales: Tensor, h: Tensor, g: Tensor, parts: list[tuple[int, int]]
) -> Tensor:
    """`scales` of rows that matter together, by conjugate gradients; slope is g times errors times h."""
    squares = [((c[:, f : f + d] @ h[f : f + d, f : f + d]) * c[:, f : f + d]).sum(1) for f, d in parts]
    own = (torch.stack(squares, 1) * g.diagonal()[:, None]).clamp_min(_TINY)
    right = _by_group(slope * c, parts)
    step, r = torch.zeros_like(scales), right
    z = r / own
    p, size = z, (r * z).sum()
    enough = _ENOUGH * size
    for _ in range(_STEPS):
        if bool(size <= enough):
            break
        turned = _by_group(((g @ (c * per_column(p, parts))) @ h) * c, parts)
        length = size / (p * turned).sum().clamp_min(_TINY)
        step, r = step + length * p, r - length * turned
        z = r / own
        was, size = size, (r * z).sum()
        p = z + size / was.clamp_min(_TINY) * p
    # The error falls by 2 <step, right> - <step, (right - r)>.
    better = (((right + r) * step).sum() > 0) & (scales + step >= 0).all()
    return torch.where(better, scales + step, scales)


def _by_group(x: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    """``[R, G]``: the sums of columns ``[R, K]`` in each group; only the last may be shorter."""
    d, last = parts[0][1], parts[-1][1]
    if d == last:
        return x.unflatten(1, (-1, d)).sum(2)
    return torch.cat((x[:, :-last].unflatten(1, (-1, d)).sum(2), x[:, -last:].sum(1, keepdim=True)), 1)


def _left(w: Tensor, chosen: Tensor, scales: Tensor, values: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    return w - pairs.look_up(values, chosen) * per_column(scales, parts)


def _sweep(
    chosen: Tensor, scales: Tensor, slope: Tensor, h: Tensor, values: Tensor, parts: list[tuple[int, int]]
) -> Tensor:
    """Better indices of rows by themselves, slope ``[E, R, K]`` half the derivative of the error by the errors."""
    if pairs.are_pairs(values):
        return _sweep_pairs(chosen, scales, slope, h, values, parts)
    cells = lloyd_max.Cells(values)
    # Transposed, so that a column of a weight is contiguous.
    columns = per_column(scales, parts).mT.contiguous()
    divisor = torch.where(columns > 0, columns, 1.0)
    found = chosen.mT.contiguous()
    taken = values[found.int()] * columns
    slope = slope.mT.contiguous()
    inverse = 1 / h.diagonal(dim1=1, dim2=2)[..., None]
    for block in _blocks(taken):
        inside, before, local = h[:, block, block, None], taken[:, block].clone(), slope[:, block].clone()
        for j in range(local.shape[1]):
            at = block.start + j
            target = torch.addcmul(taken[:, at], local[:, j], inverse[:, at])
            index = cells.nearest(target.div_(divisor[:, at]))
            value = values[index] * columns[:, at]
            change = value - taken[:, at]
            local[:, j + 1 :].addcmul_(inside[:, j, j + 1 :], change[:, None], value=-1.0)
            taken[:, at], found[:, at] = value, index
        _pass_on(slope, h, block, taken[:, block] - before)
    return found.mT.contiguous()


def _sweep_pairs(
    chosen: Tensor, scales: Tensor, slope: Tensor, h: Tensor, values: Tensor, parts: list[tuple[int, int]]
) -> Tensor:
    """`_sweep` with two columns at a time."""
    columns = per_column(scales, parts).mT.contiguous()
    found = pairs.join(chosen)
    taken = (pairs.look_up(values, chosen).mT * columns).contiguous()
    slope = slope.mT.contiguous()
    diagonal = h.diagonal(dim1=1, dim2=2)
    upper, lower, mixed = diagonal[:, ::2], diagonal[:, 1::2], h.diagonal(1, 1, 2)[:, ::2]
    forms = torch.stack((upper, mixed, lower), -1)[:, :, None]
    inverses = torch.stack((lower, -mixed, -mixed, upper), -1) / (upper * lower - mixed**2)[..., None]
    inverses = inverses.unflatten(-1, (2, 2))[..., None]
    for block in _blocks(taken):
        inside, before, local = h[:, block, block, None], taken[:, block].clone(), slope[:, block].clone()
        for j in range(0, local.shape[1], 2):
            at = slice(block.start + j, block.start + j + 2)
            p = at.start // 2
            wanted = taken[:, at].clone()
            for i in range(2):
                wanted.addcmul_(inverses[:, p, i], local[:, j + i, None])
            index = pairs.best(wanted.mT, columns[:, at.start], forms[:, p], values)
            value = values[index].mT * columns[:, at]
            change = value - taken[:, at]
            for i in range(2):
                local[:, j + 2 :].addcmul_(inside[:, j + i, j + 2 :], change[:, i, None], value=-1.0)
            taken[:, at], found[..., p] = value, index.to(torch.uint8)
        _pass_on(slope, h, block, taken[:, block] - before)
    return pairs.split(found)


def _blocks(columns: Tensor) -> list[slice]:
    """Slices of the columns of ``[E, K, R]``."""
    k = columns.shape[1]
    return [slice(start, min(start + _BLOCK, k)) for start in range(0, k, _BLOCK)]


def _pass_on(slope: Tensor, h: Tensor, block: slice, change: Tensor) -> None:
    """Let the slopes of later columns know of a block's change ``[E, B, R]``."""
    for mine, metric, of_block in zip(slope, h, change, strict=True):
        mine[block.stop :] -= metric[block.stop :, block] @ of_block
