"""The quantizer of rotated codebook weights, and its inverse, in plain torch on any device.

Per output row n and group g of d columns, Pi the group's rotation::

    norm[n, g] = ||W[n, g]||_2
    r = (W[n, g] / norm[n, g]) Pi^T * sqrt(d)
    idx[n, g, j] = searchsorted(midpoints of the codebook, r[j])
    W'[n, g] = norm[n, g] / sqrt(d) * codebook[idx[n, g]] Pi
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcut import codebook, rotation
from qcut.errors import ConfigError, DtypeError, QuantizationError, ShapeError

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NORM_DTYPES = (torch.float16, torch.float32)


@dataclass(frozen=True)
class RotatedCodebook:
    """A weight ``[N, K]`` as indices into a codebook, a norm for each row and group, and a rotation for each group.

    Attributes:
        indices: uint8 ``[N, K]``, not packed.
        norms: float16 or float32 ``[N, G]``.
        values: float32 ``[2**bits]``, ascending.
        group_size: columns of a group; the last may have fewer.
        rotation: see `qcut.rotation.rotate`.
        seed: of the group at column 0; that of another is ``seed`` plus its first column.
    """

    indices: Tensor
    norms: Tensor
    values: Tensor
    group_size: int
    rotation: rotation.Kind
    seed: int


def quantize(
    weight: Tensor,
    bits: int = 4,
    *,
    group_size: int = 128,
    kind: rotation.Kind = "hadamard",
    seed: int = 42,
    norm_dtype: torch.dtype = torch.float16,
    layer: str | None = None,
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

    Returns:
        Tensors on the weight's device.

    Raises:
        ShapeError: no matrix, or an empty one.
        DtypeError: another dtype of weight or norms.
        QuantizationError: NaN or Inf, or a norm beyond float16.
        ConfigError: another number of bits, a group size below 1, a group that the rotation cannot take.

    Exactness: float32; an index may differ between devices where a rotated value lies within rounding of a midpoint.

    Source: schemes.md section 4; Lloyd-Max (`qcut.codebook`).
    """
    where = f"layer {layer!r}: " if layer else ""
    if weight.dim() != 2 or not weight.numel():
        raise ShapeError(f"{where}the weight has shape {list(weight.shape)}; allowed: [N, K] with N, K >= 1")
    if weight.dtype not in WEIGHT_DTYPES or norm_dtype not in NORM_DTYPES:
        found = weight.dtype if weight.dtype not in WEIGHT_DTYPES else norm_dtype
        raise DtypeError(f"{where}{found}; allowed: weights of {WEIGHT_DTYPES}, norms of {NORM_DTYPES}")
    values = codebook.codebook(bits, weight.device)
    edges = codebook.boundaries(values)
    w = weight.detach().float()
    if not w.isfinite().all():
        raise QuantizationError("weight holds NaN or Inf; every value must be finite in float32", layer)
    indices = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    parts = rotation.groups(w.shape[1], group_size)
    norms = torch.empty((len(w), len(parts)), device=w.device)
    for g, (first, d) in enumerate(parts):
        group = w[:, first : first + d]
        norm = torch.linalg.vector_norm(group, dim=1)
        # A zero row stays zero: its norm is.
        unit = group / torch.where(norm > 0, norm, 1.0)[:, None]
        rotated = rotation.rotate(unit, kind, seed + first) * d**0.5
        indices[:, first : first + d] = torch.searchsorted(edges, rotated.contiguous()).to(torch.uint8)
        norms[:, g] = norm
    if norms.max() > torch.finfo(norm_dtype).max:
        raise QuantizationError(f"a group's norm is {norms.max():.4g}; {norm_dtype} holds less: use float32", layer)
    return RotatedCodebook(indices, norms.to(norm_dtype), values, group_size, kind, seed)


def dequantize(q: RotatedCodebook) -> Tensor:
    """float32 ``[N, K]``: the weight that the indices stand for.

    Raises:
        ShapeError: norms or indices that do not fit each other or the codebook.
        ConfigError: see `quantize`.
    """
    n, k = q.indices.shape
    parts = rotation.groups(k, q.group_size)
    if q.norms.shape != (n, len(parts)):
        raise ShapeError(f"norms have shape {list(q.norms.shape)}; allowed: {[n, len(parts)]}")
    if q.indices.numel() and int(q.indices.max()) >= len(q.values):
        raise ShapeError(f"an index is {int(q.indices.max())}; the codebook has {len(q.values)} values")
    if q.rotation not in rotation.KINDS:
        raise ConfigError(f"rotation {q.rotation!r}; allowed: {', '.join(rotation.KINDS)}")
    out = torch.empty((n, k), device=q.indices.device)
    for g, (first, d) in enumerate(parts):
        looked_up = q.values[q.indices[:, first : first + d].long()]
        group = rotation.rotate_back(looked_up, q.rotation, q.seed + first)
        out[:, first : first + d] = group * (q.norms[:, g : g + 1].float() * d**-0.5)
    return out
