"""Fits codebook weights to what their layer reads and to what the loss feels, which loses less than rounding.

Rounding minimizes ``||W - W'||``, which is best where all input channels are alike and independent. With H, the second
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

import torch
from torch import Tensor

from qcut.errors import ConfigError, QuantizationError, ShapeError, layer_prefix
from qcut.numerics.chunks import row_chunks
from qcut.numerics.codebook import rotation
from qcut.numerics.codebook.fitting import descent, feedback, pair_feedback
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


def fit(
    weight: Tensor,
    second_moment: Tensor,
    bits: int = 4,
    *,
    output_moment: Tensor | None = None,
    before: Sequence[RotatedCodebook] = (),
    group_size: int = 128,
    kind: rotation.Kind = "hadamard",
    seed: int = 42,
    norm_dtype: torch.dtype = torch.float16,
    layer: str | None = None,
    damping: float = DAMPING,
    sweeps: int = SWEEPS,
    refit: bool = True,
    in_pairs: bool = False,
) -> RotatedCodebook:
    """Quantize a weight so that the layer's output, or the loss, changes little on inputs like the calibration's.

    Args:
        weight: ``[N, K]`` float16, bfloat16, float32 or float64, any strides.
        second_moment: floating-point ``[K, K]``: the mean of ``x^T x`` over the layer's inputs, times any factor; see
            `qcut.collect_second_moments` and `qcut.collect_curvature`. The tensor is moved to the weight's device.
        bits: 1 to 4.
        output_moment: floating-point ``[N, N]``: the mean of ``g^T g`` over the loss's derivatives by the layer's
            outputs, times any factor; None fits every row by itself.
        before: earlier rotated passes of the same weight, whose remaining error is fitted. Earlier passes are better
            rounded to nearest (`qcut.numerics.codebook.quantizer.quantize`): error feedback leaves an error that is
            small under H, but large in itself.
        group_size: columns of a group; K or more takes whole rows.
        kind: kind of the rotation. A Hadamard group, the shorter last one too, is a power of two.
        seed: seed of the rotation of the group at column 0.
        norm_dtype: float16 or float32.
        layer: name for error messages.
        damping: the mean of each moment's diagonal, times this factor, is added to the diagonal. The factor is raised
            tenfold as long as float32 cannot factor the moment.
        sweeps: rounds of coordinate descent; 0 for feedback only.
        refit: choose norms too. At a group's first column, take the multiple of the group's norm that rounds the group
            best; after each round over the indices, take the norms with the least error, where these lower the error.
            Without refit, a norm is the group's own, after the errors of earlier columns have been passed on.
        in_pairs: take the codebook of pairs, with 4 bits and groups of an even number of columns.

    Returns:
        Tensors on the weight's device.

    Raises:
        ShapeError: the weight is no matrix or empty, or a moment is not ``[K, K]`` or ``[N, N]``.
        DtypeError: the dtype of weight or norms is another.
        QuantizationError: NaN or Inf, a norm beyond float16, or a moment that cannot be factored.
        ConfigError: another number of bits, a group that the rotation cannot take, an odd group with pairs, or a
            negative damping or number of sweeps.

    Exactness: float32, with the precision that torch is set to use for matrix products. Deterministic; the number
    of rows may change an index where a value lies within rounding of a midpoint.

    Cost: ``2 N K^2`` operations for the feedback, as many for each sweep, in K steps; with an output moment
    ``2 N K (N + K)`` each, in ``N + K`` steps for the feedback and 4 K for each sweep.
    """
    check_weight(weight, norm_dtype, layer)
    n, k = weight.shape
    where = layer_prefix(layer)
    parts = rotation.check_groups(k, group_size, kind, layer)
    for what, moment, size in (("second moment", second_moment, k), ("output moment", output_moment, n)):
        if moment is not None and moment.shape != (size, size):
            raise ShapeError(f"{where}the {what} has shape {list(moment.shape)}; allowed: {[size, size]}")
    if not damping >= 0:
        raise ConfigError(f"{where}damping is {damping}; allowed: 0 and more")
    if sweeps < 0:
        raise ConfigError(f"{where}sweeps is {sweeps}; allowed: 0 and more")
    device = weight.device
    h = _rotated(_finite(second_moment, "second moment", device, layer), kind, group_size, seed)
    h, u = _damped(h, damping, layer)
    g = v = None
    if output_moment is not None:
        g, v = _damped(_finite(output_moment, "output moment", device, layer), damping, layer)
    values = codebook(bits, in_pairs, k, group_size, device, layer)
    forms = pair_feedback.metrics(h, u) if in_pairs else None
    indices = torch.empty((n, k), dtype=torch.uint8, device=device)
    norms = torch.empty((n, len(parts)), dtype=norm_dtype, device=device)
    root = torch.tensor([d**0.5 for _, d in parts], device=device, dtype=torch.float32)
    # With an output moment, rows are not independent.
    for rows in row_chunks(n, k, _CHUNK_ELEMENTS if g is None else n * k):
        rotated = rotation.rotate_groups(rows_left(weight, before, rows, layer), kind, group_size, seed)
        if forms is None:
            chosen, scales = feedback.by_columns(rotated, u, values, parts, refit)
        else:
            chosen, scales = pair_feedback.by_columns(rotated, u, forms, values, parts, refit)
        if refit:
            scales = descent.scales(rotated, chosen, scales, h, None, values, parts)
        if v is not None:
            columns = rotation.per_column(scales, parts)
            if forms is None:
                chosen = feedback.by_antidiagonals(rotated, columns, u, v, values)
            else:
                chosen = pair_feedback.by_antidiagonals(rotated, columns, u, v, forms, values)
            if refit:
                scales = descent.scales(rotated, chosen, scales, h, g, values, parts)
        for _ in range(sweeps):
            chosen = descent.indices(rotated, chosen, scales, h, g, values, parts)
            if refit:
                scales = descent.scales(rotated, chosen, scales, h, g, values, parts)
        indices[rows] = chosen
        norms[rows] = stored_norms(scales * root, norm_dtype, layer)
    return RotatedCodebook(indices, norms, values, group_size, kind, seed)


def _finite(moment: Tensor, what: str, device: torch.device, layer: str | None) -> Tensor:
    """A moment in float32 on a device, in memory of its own."""
    moment = moment.detach().to(device)
    if not moment.isfinite().all():
        raise QuantizationError(f"the {what} holds NaN or Inf; every value must be finite", layer)
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
