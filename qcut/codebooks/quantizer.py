"""The quantizer of rotated codebook weights, and its inverse, in plain torch on any device.

Per output row n and group g of d columns, Pi the group's rotation::

    norm[n, g] = ||W[n, g]||_2
    r = (W[n, g] / norm[n, g]) Pi^T * sqrt(d)
    idx[n, g, j] = searchsorted(midpoints of the codebook, r[j])
    W'[n, g] = norm[n, g] / sqrt(d) * codebook[idx[n, g]] Pi

A residual pass is the same of what the first pass left, ``W - W'``, with a seed, a codebook and norms of its own; the
weight is the sum of the passes. `qcut.codebooks.fit` chooses indices and norms with calibration data instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from qcut.codebooks import lloyd_max as codebook
from qcut.codebooks import rotation
from qcut.errors import ConfigError, DtypeError, QuantizationError, ShapeError, layer_prefix
from qcut.models.modules import WEIGHT_DTYPES

NORM_DTYPES = (torch.float16, torch.float32)

Strategy = Literal["different", "shared", "alternating", "per_layer"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
RESIDUAL_SEED = 1042

_LAYER_STRIDE = 10_007
_CHUNK_ELEMENTS = 1 << 24  # weights are read in pieces: no float32 copy of a whole one exists


@dataclass(frozen=True)
class RotatedCodebook:
    """A weight ``[N, K]`` as indices into a codebook, a norm for each row and group, and a rotation for each group.

    Attributes:
        indices: uint8 ``[N, K]``, not packed.
        norms: float16 or float32 ``[N, G]``.
        values: float32 ``[2**bits]``, ascending.
        group_size: columns of a group; the last may have fewer.
        rotation: see `qcut.codebooks.rotation.rotate`.
        seed: of the group at column 0; that of another is ``seed`` plus its first column.
    """

    indices: Tensor
    norms: Tensor
    values: Tensor
    group_size: int
    rotation: rotation.Kind
    seed: int


def pass_seeds(
    seed: int, residual_seed: int = RESIDUAL_SEED, strategy: Strategy = "different", layer_index: int = 0
) -> tuple[int, int]:
    """The seeds of a layer's first and residual pass.

    - ``different`` and ``alternating``: ``(seed, residual_seed)``. The two differ from the third pass on, where
      ``alternating`` starts over; there is none here.
    - ``shared``: ``(seed, seed)``.
    - ``per_layer``: both of ``different`` plus ``10007 * layer_index``.

    Args:
        seed: of the first pass.
        residual_seed: of the residual pass.
        strategy: one of `STRATEGIES`.
        layer_index: position of the layer among those that are quantized, in the order of ``named_modules``.

    Raises:
        ConfigError: another strategy.

    Source: the turboquant-model package, ``quantize_model``.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"rotation strategy {strategy!r}; allowed: {', '.join(STRATEGIES)}")
    if strategy == "shared":
        return seed, seed
    offset = _LAYER_STRIDE * layer_index if strategy == "per_layer" else 0
    return seed + offset, residual_seed + offset


def quantize(
    weight: Tensor,
    bits: int = 4,
    *,
    group_size: int = 128,
    kind: rotation.Kind = "hadamard",
    seed: int = 42,
    norm_dtype: torch.dtype = torch.float16,
    layer: str | None = None,
    refit: bool = False,
) -> RotatedCodebook:
    """Quantize a weight to the nearest codebook values of its rotated groups.

    Args:
        weight: ``[N, K]`` float16, bfloat16, float32 or float64, any strides.
        bits: 1 to 4.
        group_size: columns of a group; K or more takes whole rows.
        kind: rotation; a Hadamard group, the shorter last one too, is a power of two.
        seed: see `RotatedCodebook`.
        norm_dtype: float16 or float32. The indices do not depend on it.
        layer: name for error messages.
        refit: store, for the same indices, the norm that leaves the least squared error in its group,
            ``norm * <r, c> / <c, c>`` with c the codebook values chosen. It is no longer the group's norm.

    Returns:
        Tensors on the weight's device.

    Raises:
        ShapeError: no matrix, or an empty one.
        DtypeError: another dtype of weight or norms.
        QuantizationError: NaN or Inf, or a norm beyond float16.
        ConfigError: another number of bits, a group size below 1, a group that the rotation cannot take.

    Exactness: float32; an index may differ between devices where a rotated value lies within rounding of a midpoint.

    Source: schemes.md section 4; Lloyd-Max (`qcut.codebooks.lloyd_max`).
    """
    (only,) = _quantize_passes(weight, ((bits, seed),), group_size, kind, norm_dtype, layer, refit)
    return only


def quantize_residual(
    weight: Tensor,
    bits: int = 4,
    residual_bits: int = 4,
    *,
    group_size: int = 128,
    kind: rotation.Kind = "hadamard",
    seed: int = 42,
    residual_seed: int = RESIDUAL_SEED,
    strategy: Strategy = "different",
    layer_index: int = 0,
    norm_dtype: torch.dtype = torch.float16,
    layer: str | None = None,
    refit: bool = False,
) -> tuple[RotatedCodebook, RotatedCodebook]:
    """Quantize a weight in two passes: `quantize`, then `quantize` of what that leaves in float32.

    Errors and exactness are those of `quantize` and `pass_seeds`.

    Args:
        weight: see `quantize`, as for ``group_size``, ``kind``, ``norm_dtype``, ``layer`` and ``refit``.
        bits: 1 to 4, of the first pass.
        residual_bits: 1 to 4, of the second pass.
        group_size: of both passes.
        kind: of both passes.
        seed: see `pass_seeds`, as for ``residual_seed``, ``strategy`` and ``layer_index``.
        residual_seed: of the second pass.
        strategy: of the seeds.
        layer_index: of the layer.
        norm_dtype: of both passes.
        layer: name for error messages.
        refit: of both passes.

    Returns:
        The passes; `dequantize` adds them up.
    """
    first, second = pass_seeds(seed, residual_seed, strategy, layer_index)
    passes = ((bits, first), (residual_bits, second))
    one, two = _quantize_passes(weight, passes, group_size, kind, norm_dtype, layer, refit)
    return one, two


def dequantize(q: RotatedCodebook | Sequence[RotatedCodebook]) -> Tensor:
    """float32 ``[N, K]``: the weight that the indices stand for; of several passes, their sum in order.

    Raises:
        ShapeError: norms or indices that do not fit each other or the codebook, passes of different shapes, or none.
        ConfigError: see `quantize`.
    """
    passes = (q,) if isinstance(q, RotatedCodebook) else tuple(q)
    if len({one.indices.shape for one in passes}) != 1:
        shapes = [list(one.indices.shape) for one in passes]
        raise ShapeError(f"passes of shapes {shapes}; allowed: one pass or more, of one shape")
    for one in passes:
        _check_tensors(one)
    n, k = passes[0].indices.shape
    out = torch.empty((n, k), device=passes[0].indices.device)
    for rows in row_chunks(n, k):
        out[rows] = dequantize_rows(passes[0], rows)
        for one in passes[1:]:
            out[rows] += dequantize_rows(one, rows)
    return out


def dequantize_rows(q: RotatedCodebook, rows: slice) -> Tensor:
    """float32 ``[R, K]``: some rows of `dequantize` of one pass, unchecked."""
    parts = rotation.groups(q.indices.shape[1], q.group_size)
    values = q.values[q.indices[rows].int()]
    back = rotation.rotate_groups_back(values, q.rotation, q.group_size, q.seed)
    scale = q.norms[rows].float() * rsqrt_sizes(parts, back)
    return back.mul_(per_column(scale, parts))


def check_weight(weight: Tensor, norm_dtype: torch.dtype, layer: str | None) -> None:
    """Raise what `quantize` raises of a weight's shape and the dtypes."""
    where = layer_prefix(layer)
    if weight.dim() != 2 or not weight.numel():
        raise ShapeError(f"{where}the weight has shape {list(weight.shape)}; allowed: [N, K] with N, K >= 1")
    if weight.dtype not in WEIGHT_DTYPES or norm_dtype not in NORM_DTYPES:
        found = weight.dtype if weight.dtype not in WEIGHT_DTYPES else norm_dtype
        raise DtypeError(f"{where}{found}; allowed: weights of {WEIGHT_DTYPES}, norms of {NORM_DTYPES}")


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
    """Norms in the dtype they are stored in.

    Raises:
        QuantizationError: one is beyond float16.
    """
    largest = float(norms.abs().max())
    if largest > torch.finfo(dtype).max:
        raise QuantizationError(f"a group's norm is {largest:.4g}; {dtype} holds less: use float32", layer)
    return norms.to(dtype)


def row_chunks(n: int, k: int, elements: int | None = None) -> Iterator[slice]:
    """The rows of ``[n, k]`` in pieces of at most so many elements, or single rows."""
    rows = max(1, (_CHUNK_ELEMENTS if elements is None else elements) // k)
    return (slice(first, min(first + rows, n)) for first in range(0, n, rows))


def _quantize_passes(
    weight: Tensor,
    passes: Sequence[tuple[int, int]],
    group_size: int,
    kind: rotation.Kind,
    norm_dtype: torch.dtype,
    layer: str | None,
    refit: bool,
) -> tuple[RotatedCodebook, ...]:
    """One result for each (bits, seed), each of what those before it leave."""
    check_weight(weight, norm_dtype, layer)
    n, k = weight.shape
    parts = rotation.check_groups(k, group_size, kind, layer)
    device = weight.device
    results = [
        RotatedCodebook(
            torch.empty((n, k), dtype=torch.uint8, device=device),
            torch.empty((n, len(parts)), dtype=norm_dtype, device=device),
            codebook.codebook(bits, device),
            group_size,
            kind,
            seed,
        )
        for bits, seed in passes
    ]
    for rows in row_chunks(n, k):
        left = finite_rows(weight, rows, layer)
        for i, q in enumerate(results):
            q.indices[rows], norms = _nearest(left, q, parts, refit)
            q.norms[rows] = stored_norms(norms, norm_dtype, layer)
            if i + 1 < len(results):
                left = left - dequantize_rows(q, rows)
    return tuple(results)


def _nearest(w: Tensor, q: RotatedCodebook, parts: list[tuple[int, int]], refit: bool) -> tuple[Tensor, Tensor]:
    """uint8 ``[R, K]`` and float32 ``[R, G]``: indices and norms of float32 rows with q's rotation and codebook."""
    norms = torch.stack([torch.linalg.vector_norm(w[:, first : first + d], dim=1) for first, d in parts], 1)
    # A zero row stays zero: its norm is.
    unit = w / per_column(torch.where(norms > 0, norms, 1.0), parts)
    rotated = rotation.rotate_groups(unit, q.rotation, q.group_size, q.seed)
    rotated *= per_column(torch.tensor([[d**0.5 for _, d in parts]], device=w.device), parts)
    indices = torch.searchsorted(codebook.boundaries(q.values), rotated, out_int32=True)
    if refit:
        chosen = q.values[indices]
        for g, (first, d) in enumerate(parts):
            columns = slice(first, first + d)
            c = chosen[:, columns]
            norms[:, g] *= (rotated[:, columns] * c).sum(1) / c.square().sum(1)
    return indices.to(torch.uint8), norms


def per_column(per_group: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    """``[R, K]``: a value of each group, ``[R, G]``, at each of its columns."""
    sizes = torch.tensor([d for _, d in parts], device=per_group.device)
    return per_group.repeat_interleave(sizes, 1, output_size=parts[-1][0] + parts[-1][1])


def rsqrt_sizes(parts: list[tuple[int, int]], like: Tensor) -> Tensor:
    """float32 ``[G]`` on another tensor's device: one over the root of each group's columns."""
    return torch.tensor([d**-0.5 for _, d in parts], device=like.device)


def _check_tensors(q: RotatedCodebook) -> None:
    n, k = q.indices.shape
    parts = rotation.check_groups(k, q.group_size, q.rotation)
    if q.norms.shape != (n, len(parts)):
        raise ShapeError(f"norms have shape {list(q.norms.shape)}; allowed: {[n, len(parts)]}")
    if q.indices.numel() and int(q.indices.max()) >= len(q.values):
        raise ShapeError(f"an index is {int(q.indices.max())}; the codebook has {len(q.values)} values")
