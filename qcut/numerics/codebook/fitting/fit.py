"""Fits codebook weights to what their layer reads and to what the loss feels, which loses less than rounding.

Rounding minimizes ``||W - W'||``, which is best if all input channels are alike and independent. With H, the second
moment of a layer's inputs, the expected squared error of an output is ``e H e^T``, where e is a row of ``E = W - W'``.
With G too, the second moment of the loss's derivatives by the outputs, the expected loss grows by ``tr(G E H E^T) / 2``
(with H weighted as `qcut.collect_curvature` weights it). H is rotated as the weights are; both are damped.

1. Indices and scales by error feedback along the rows (`qcut.numerics.codebook.fitting.feedback`, of pairs
   `qcut.numerics.codebook.fitting.pair_feedback`), as if G were the identity.
2. With G, indices again, by feedback along rows and columns.
3. Sweeps of coordinate descent over the indices, and least squares for the scales in between
   (`qcut.numerics.codebook.fitting.descent`).

The result has the same form as that of `qcut.numerics.codebook.quantizer.quantize`.

Source: Frantar et al., "GPTQ" (2022), section 3; Chee et al., "QuIP" (2023), section 3; Tseng et al., "YAQA" (2025),
sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcut.errors import ConfigError, QuantizationError, ShapeError, layer_prefix
from qcut.numerics.chunks import row_chunks
from qcut.numerics.codebook import rotation
from qcut.numerics.codebook.fitting import descent, feedback, pair_feedback
from qcut.numerics.codebook.fitting.curvature import Curvature
from qcut.numerics.codebook.fitting.feedback import each
from qcut.numerics.codebook.quantizer import (
    RotatedCodebook,
    check_weight,
    codebook,
    rows_left,
    stored_norms,
)

DAMPING = 0.1
"""Share of a moment's mean diagonal that is added to the diagonal, for texts other than the one it was collected on."""
SWEEPS = 2
"""Rounds of coordinate descent."""

_CHUNK_ELEMENTS = 1 << 26  # rows are independent: larger chunks take fewer launches for each column
_MAX_DAMPING = 1.0
_MOST_BYTES = 2 << 30
_MOST_ROWS = 1 << 13


def fit(
    weight: Tensor,
    second_moment: Tensor,
    bits: int = 4,
    *,
    output_moment: Tensor | None = None,
    before: Sequence[RotatedCodebook] = (),
    layer: str | None = None,
    **options: Any,
) -> RotatedCodebook:
    """Fit one weight: the only expert of `fit_experts`, which has the other arguments, the result and the errors.

    Args:
        weight: ``[N, K]``.
        second_moment: ``[K, K]``, `Curvature.inputs`.
        bits: 1 to 4.
        output_moment: ``[N, N]`` or None, `Curvature.outputs`.
        before: earlier rotated passes of the same weight.
        layer: name for error messages.
        **options: of `fit_experts`.
    """
    moment = Curvature(second_moment, output_moment)
    return fit_experts([weight], [moment], bits, before=[before], layers=[layer], **options)[0]


def fit_experts(
    weights: Sequence[Tensor],
    moments: Sequence[Curvature],
    bits: int = 4,
    *,
    before: Sequence[Sequence[RotatedCodebook]] | None = None,
    group_size: int = 128,
    kind: rotation.Kind = "hadamard",
    seed: int = 42,
    norm_dtype: torch.dtype = torch.float16,
    layers: Sequence[str | None] | None = None,
    damping: float = DAMPING,
    sweeps: int = SWEEPS,
    in_pairs: bool = False,
) -> list[RotatedCodebook]:
    """Quantize weights so that their layers' outputs, or the loss, change little on inputs like the calibration's.

    Weights of one size go through their columns together, as many as `experts_at_once` allows.

    Args:
        weights: E of ``[N, K]`` float16, bfloat16, float32 or float64, any strides, on one device.
        moments: of each, floating point: ``inputs`` ``[K, K]``, the mean of ``x^T x`` over the layer's inputs, times
            any factor (`qcut.collect_second_moments`, `qcut.collect_curvature`), and ``outputs`` ``[N, N]``, the mean
            of ``g^T g`` over the loss's derivatives by the layer's outputs, times any factor; None fits every row by
            itself. Moments are moved to the weights' device.
        bits: 1 to 4.
        before: of each, earlier rotated passes of the same weight; what they leave as error is fitted. Earlier passes
            are better rounded to nearest (`qcut.numerics.codebook.quantizer.quantize`): error feedback leaves an error
            that is small under H, but large in itself.
        group_size: columns of a group; K or more takes whole rows.
        kind: kind of the rotation. A Hadamard group, the shorter last one too, is a power of two.
        seed: seed of the rotation of the group at column 0.
        norm_dtype: float16 or float32.
        layers: names for error messages.
        damping: the mean of each moment's diagonal, times this factor, is added to the diagonal. The factor is raised
            tenfold as long as float32 cannot factor the moment.
        sweeps: rounds of coordinate descent; 0 for feedback only.
        in_pairs: take the codebook of pairs, with 4 bits and groups of an even number of columns.

    Returns:
        A codebook weight for each, tensors on the weights' device.

    Raises:
        ShapeError: a weight is no matrix or empty or of another size than the first, a moment is not ``[K, K]`` or
            ``[N, N]``, or the lists differ in length.
        DtypeError: the dtype of weight or norms is another.
        QuantizationError: NaN or Inf, a norm beyond float16, or a moment that cannot be factored.
        ConfigError: another number of bits, a group that the rotation cannot take, an odd group with pairs, or a
            negative damping or number of sweeps.

    Exactness: float32, with the precision that torch is set to use for matrix products. Deterministic; the number
    of rows may change an index where a value lies within rounding of a midpoint. The result of a weight is bitwise the
    same whatever other weights are fitted with it, on processors with fused multiply-add.

    Cost: for each weight, ``2 N K^2`` operations for the feedback, as many for each sweep, in K steps that all weights
    take together; with an output moment ``2 N K (N + K)`` each, in ``N + K`` steps for the feedback, of each weight by
    itself, and 4 K for each sweep.
    """
    before = [()] * len(weights) if before is None else before
    layers = [None] * len(weights) if layers is None else layers
    if not len(weights) == len(moments) == len(before) == len(layers):
        counts = f"{len(weights)} weights, {len(moments)} moments, passes of {len(before)} and {len(layers)} names"
        raise ShapeError(f"{counts}; allowed: as many of each")
    for weight, moment, layer in zip(weights, moments, layers, strict=True):
        _check(weight, moment, weights[0].shape, norm_dtype, layer)
        rotation.check_groups(weight.shape[1], group_size, kind, layer)
        if not damping >= 0:
            raise ConfigError(f"{layer_prefix(layer)}damping is {damping}; allowed: 0 and more")
        if sweeps < 0:
            raise ConfigError(f"{layer_prefix(layer)}sweeps is {sweeps}; allowed: 0 and more")
    how = _How(bits, group_size, kind, seed, norm_dtype, damping, sweeps, in_pairs)
    found: list[RotatedCodebook] = []
    experts = [_Expert(*one) for one in zip(weights, moments, before, layers, strict=True)]
    # Weights with rows that matter together go by themselves.
    for _, alike in groupby(experts, lambda one: one.moment.outputs is None):
        group = list(alike)
        n, k = group[0].weight.shape
        count = experts_at_once(n, k, group[0].weight.device)
        for first in range(0, len(group), count):
            found += _fit(group[first : first + count], how)
    return found


def experts_at_once(n: int, k: int, device: torch.device) -> int:
    """How many weights ``[N, K]`` are fitted together: as many as have float32 intermediates of up to two gigabytes.

    On a processor, up to 8,192 rows in all: what a column passes on stays in the cache, and a step has enough to do.
    """
    most = _MOST_BYTES // (4 * k * (3 * k + 9 * n))
    return max(1, min(most, _MOST_ROWS // n) if device.type == "cpu" else most)


class _How(NamedTuple):
    """The options of `fit_experts`."""

    bits: int
    group_size: int
    kind: rotation.Kind
    seed: int
    norm_dtype: torch.dtype
    damping: float
    sweeps: int
    in_pairs: bool


class _Expert(NamedTuple):
    weight: Tensor
    moment: Curvature
    before: Sequence[RotatedCodebook]
    layer: str | None


def _fit(experts: Sequence[_Expert], how: _How) -> list[RotatedCodebook]:
    """Fit checked weights of one size together."""
    n, k = experts[0].weight.shape
    device, rotated_by = experts[0].weight.device, (how.kind, how.group_size, how.seed)
    parts = rotation.groups(k, how.group_size)
    values = codebook(how.bits, how.in_pairs, k, how.group_size, device, experts[0].layer)
    h, u = torch.empty((2, len(experts), k, k), device=device, dtype=torch.float32)
    for e, (_, moment, _, layer) in enumerate(experts):
        h[e], u[e] = _damped(_rotated(_finite(moment.inputs, "second", device, layer), *rotated_by), how.damping, layer)
    g = v = None
    if experts[0].moment.outputs is not None:
        g, v = torch.empty((2, len(experts), n, n), device=device, dtype=torch.float32)
        for e, (_, moment, _, layer) in enumerate(experts):
            assert moment.outputs is not None
            g[e], v[e] = _damped(_finite(moment.outputs, "output", device, layer), how.damping, layer)
    forms = each(pair_feedback.metrics, h, u) if how.in_pairs else None
    indices = torch.empty((len(experts), n, k), dtype=torch.uint8, device=device)
    norms = torch.empty((len(experts), n, len(parts)), dtype=how.norm_dtype, device=device)
    root = torch.tensor([d**0.5 for _, d in parts], device=device, dtype=torch.float32)

    def best_scales(w: Tensor, chosen: Tensor, scales: Tensor, g: Tensor | None) -> Tensor:
        if g is None:
            return each(lambda w, c, s, h: descent.scales(w, c, s, h, None, values, parts), w, chosen, scales, h)
        return each(lambda w, c, s, h, g: descent.scales(w, c, s, h, g, values, parts), w, chosen, scales, h, g)

    # With an output moment, rows are not independent.
    for rows in row_chunks(n, k, _CHUNK_ELEMENTS if g is None else n * k):
        w = torch.stack(
            [rotation.rotate_groups(rows_left(one.weight, one.before, rows, one.layer), *rotated_by) for one in experts]
        )
        if forms is None:
            chosen, scales = feedback.by_columns(w, u, values, parts)
        else:
            chosen, scales = pair_feedback.by_columns(w, u, forms, values, parts)
        scales = best_scales(w, chosen, scales, None)
        if g is not None and v is not None:
            columns = rotation.per_column(scales, parts)
            if forms is None:
                chosen = each(partial(feedback.by_antidiagonals, values=values), w, columns, u, v)
            else:
                chosen = each(partial(pair_feedback.by_antidiagonals, values=values), w, columns, u, v, forms)
            scales = best_scales(w, chosen, scales, g)
        for _ in range(how.sweeps):
            chosen = descent.indices(w, chosen, scales, h, g, values, parts)
            scales = best_scales(w, chosen, scales, g)
        indices[:, rows] = chosen
        for e, one in enumerate(experts):
            norms[e, rows] = stored_norms(scales[e] * root, how.norm_dtype, one.layer)
    fitted = zip(indices, norms, strict=True)
    return [RotatedCodebook(i.clone(), s.clone(), values, how.group_size, how.kind, how.seed) for i, s in fitted]


def _check(weight: Tensor, moment: Curvature, shape: torch.Size, norm_dtype: torch.dtype, layer: str | None) -> None:
    """Check the sizes of a weight and its moments, and the weight's dtype; the errors are those of `fit_experts`."""
    where = layer_prefix(layer)
    check_weight(weight, norm_dtype, layer)
    if weight.shape != shape:
        raise ShapeError(f"{where}the weight has shape {list(weight.shape)}; allowed: that of the first, {list(shape)}")
    n, k = shape
    for what, held, size in (("second moment", moment.inputs, k), ("output moment", moment.outputs, n)):
        if held is not None and held.shape != (size, size):
            raise ShapeError(f"{where}the {what} has shape {list(held.shape)}; allowed: {[size, size]}")


def _finite(moment: Tensor, what: str, device: torch.device, layer: str | None) -> Tensor:
    """A moment in float32 on a device, in memory of its own."""
    moment = moment.detach().to(device)
    if not moment.isfinite().all():
        raise QuantizationError(f"the {what} moment holds NaN or Inf; every value must be finite", layer)
    return moment.to(torch.float32, copy=True)


def _rotated(h: Tensor, kind: rotation.Kind, group_size: int, seed: int) -> Tensor:
    for _ in range(2):  # the rows of H, then those of its transpose
        for rows in row_chunks(len(h), len(h)):
            h[rows] = rotation.rotate_groups(h[rows], kind, group_size, seed)
        h = h.t().contiguous()
    return h


def _damped(h: Tensor, damping: float, layer: str | None) -> tuple[Tensor, Tensor]:
    """A moment, symmetric and damped, and its factor (`qcut.numerics.codebook.fitting.feedback.unit_factor`)."""
    h = (h + h.t()) / 2
    mean = h.diagonal().mean()
    if not float(mean) > 0:
        raise QuantizationError("the second moment is zero; pass data that reaches the layer", layer)
    added = 0.0
    while True:
        h.diagonal().add_((damping - added) * mean)
        added = damping
        factor = feedback.unit_factor(h)
        if factor is not None:
            return h, factor
        damping = max(10 * damping, 1e-6)
        if damping > _MAX_DAMPING:
            raise QuantizationError("the second moment has no factorization; it must be positive semidefinite", layer)
