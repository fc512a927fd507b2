"""Formats of weights of other libraries, with plain rounding: what they hold of a float weight, and in how many bits.

Each function takes a weight, float32 ``[N, K]``, and returns a `Rounded`. No data goes in, as with qcut's schemes that
are rounded and not fitted. The formats are published by those who are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.numerics.codebook import lloyd_max
from qcut.numerics.codebook.quantizer import dequantize, quantize_plain
from qcut.numerics.float8 import E4M3


class Rounded(NamedTuple):
    """What a format holds of a weight.

    Attributes:
        weight: the dequantized weight, float32 ``[N, K]``.
        bits: of all that is stored: indices, scales, zero points and tables.
    """

    weight: Tensor
    bits: int


def nf4(weight: Tensor, *, nested: bool = False) -> Rounded:
    """NormalFloat of 4 bits: blocks of 64 neighbours, in the order of memory, times their largest magnitude in float32.

    A weight over its block's largest magnitude takes the nearest of `normal_floats`. If ``nested``, the largest
    magnitudes are quantized in turn ("double quantization"): their mean, one float32, is subtracted, and blocks of 256
    of them take the nearest of `dynamic_floats` times a float32, their largest magnitude.

    Source: Dettmers et al., QLoRA, 2023, section 3; bitsandbytes' ``quantize_4bit``.
    """
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    bits = 4 * weight.numel() + 32 * len(largest)
    values = normal_floats(weight.device)
    codes = nearest(blocks / largest.clamp(min=1e-38)[:, None], values)
    if nested:
        mean = largest.mean()
        rest = largest - mean
        outer = torch.cat([part.abs().amax(0, keepdim=True).expand(len(part)) for part in rest.split(256)])
        table = dynamic_floats(weight.device)
        largest = table[nearest(rest / outer.clamp(min=1e-38), table)] * outer + mean
        bits = 4 * weight.numel() + 8 * len(largest) + 32 * (math.ceil(len(largest) / 256) + 1)
    return Rounded((values[codes] * largest[:, None]).view(weight.shape), bits)


def normal_floats(device: torch.device) -> Tensor:
    """NF4's values, float32 ``[16]``, ascending from -1 to 1: quantiles of the normal distribution.

    Eight are from 0.5 on and seven below, evenly spaced in probability to ``1 - p``, with p the mean of ``1 / 30`` and
    ``1 / 32``, and 0 is exact; all are divided by the largest.
    """
    last = 1 - (1 / 30 + 1 / 32) / 2
    positive, negative = (
        math.sqrt(2) * torch.erfinv(2 * torch.linspace(last, 0.5, n, dtype=torch.float64, device="cpu")[:-1] - 1)
        for n in (9, 8)
    )
    values = torch.cat((positive, positive.new_zeros(1), -negative)).sort().values
    return (values / values.max()).float().to(device)


def dynamic_floats(device: torch.device) -> Tensor:
    """Values of 8 bits for nested scales, float32 ``[256]``, ascending from below -0.99 to 1.

    Each of seven decades from ``1e-6`` to 1 has twice as many values as the one below, evenly spaced, of both signs; 0
    and 1 are added. Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, section 1.3.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float64, device="cpu")
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def plain(weight: Tensor, group: int, levels: str, norm_bits: int, norm_dtype: torch.dtype = torch.float16) -> Rounded:
    """A format that qcut has too, by `qcut.numerics.codebook.quantizer.quantize_plain`, with the scales' own bits.

    Args:
        weight: float32 ``[N, K]``.
        group: columns with a scale.
        levels: see `qcut.schemes.Codebook`.
        norm_bits: of a scale, as the format stores it.
        norm_dtype: of a scale, as qcut stores it.
    """
    found = quantize_plain(weight, 4, group_size=group, levels=levels, norm_dtype=norm_dtype)
    return Rounded(dequantize(found), 4 * weight.numel() + norm_bits * found.norms.numel())


def int4(weight: Tensor, *, symmetric: bool) -> Rounded:
    """4-bit integers in groups of 128 columns with a float16 scale, as GPTQ's, AWQ's and others' files have them.

    Symmetric: ``scale = max |w| / 7.5``, integers -8 to 7, and no zero point is stored. Otherwise the 15 steps span the
    group's least and largest weight, and 0, and each group has a zero point of 4 bits. Integers are rounded to nearest.

    Source: ``Quantizer`` of GPTQ (Frantar et al., 2022); compressed-tensors' ``calculate_qparams``.
    """
    if symmetric:
        return plain(weight, 128, "steps", 16)
    found, groups = [], 0
    for w in weight.split(128, 1):
        low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
        scale = (high - low) / 15
        scale = torch.where(scale > 0, scale, 1.0).half().float()
        zero = (-low / scale).round()
        found.append((((w / scale).round() + zero).clamp(0, 15) - zero) * scale)
        groups += len(scale)
    return Rounded(torch.cat(found, 1), 4 * weight.numel() + 20 * groups)


def q4_0(weight: Tensor) -> Rounded:
    """GGUF's Q4_0: blocks of 32 columns, ``w = d * (q - 8)``, d in float16 and q of 4 bits.

    ``d = m / -8`` with m the weight of largest magnitude, which has q = 0; q is the nearest of ``w / d + 8``, 15 at
    most, before d is rounded. Source: llama.cpp's ``quantize_row_q4_0_ref``, and the package gguf.
    """
    blocks = weight.unflatten(1, (-1, 32))
    d = blocks.gather(2, blocks.abs().argmax(2, keepdim=True)) / -8
    inverse = torch.where(d == 0, 0.0, 1 / d)
    q = (blocks * inverse + 8.5).trunc().clamp(max=15)
    return Rounded((d.half().float() * (q - 8)).flatten(1), 4 * weight.numel() + 16 * d.numel())


_STEPS = 15


def q4_k_like(weight: Tensor) -> Rounded:
    """GGUF's Q4_K: super-blocks of 256 columns, ``w = d * s * q - e * m``.

    q has 4 bits; s and m have 6 bits and are of 32 columns; d and e are float16 and of the super-block. For every 32
    columns 15 steps over the span are tried, and 22 spacings near it: each gives integers, to which the step and the
    least value, 0 at most, are fitted by least squares with the weights ``rms(w) + |w|``. The best of them are rounded
    to 6 bits, and integers are chosen again. *Like*, since the format is exact and the search is of the kind that
    llama.cpp makes, without being the same number by number. A super-block at the end of a row may be shorter here;
    llama.cpp takes another format if the length of rows is no multiple of 256.

    Source: llama.cpp's ``block_q4_K`` and ``quantize_row_q4_K_ref``.
    """
    found, bits = [], 0
    for part in weight.split(256, 1):
        (d, s), (e, m), q = q4_k_fields(part)
        found.append(((d * s)[..., None] * q - (e * m)[..., None]).flatten(1))
        bits += 4 * q.numel() + 6 * (s.numel() + m.numel()) + 16 * (d.numel() + e.numel())
    return Rounded(torch.cat(found, 1), bits)


def q4_k_fields(part: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """What `q4_k_like` stores of super-blocks, one for each row of ``[N, K]``.

    Returns:
        d ``[N, 1]`` and s ``[N, K / 32]``; e and m, of the same shapes; q ``[N, K / 32, 32]``; all of them as float32.
    """
    blocks = part.unflatten(1, (-1, 32))
    step, least = _spaced(blocks)
    (d, s), (e, m) = (_six_bits(each) for each in (step, -least))
    step = (d * s)[..., None]
    q = ((blocks + (e * m)[..., None]) / torch.where(step > 0, step, 1.0)).round().clamp(0, _STEPS)
    return (d, s), (e, m), q


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values from 0 up, ``[N, S]``, as a float16 for each row and integers of 6 bits."""
    scale = (values.amax(1, keepdim=True) / 63).half().float()
    return scale, (values / torch.where(scale > 0, scale, 1.0)).round().clamp(max=63)


def _spaced(x: Tensor) -> tuple[Tensor, Tensor]:
    """Step and least value, at most 0, of 15 steps for weights ``[N, S, 32]``, each ``[N, S]``; see `q4_k_like`."""
    weights = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low = x.amin(-1, keepdim=True).clamp(max=0)
    span = (x.amax(-1, keepdim=True) - low).clamp(min=1e-30)
    step, least = span[..., 0] / _STEPS, low[..., 0]
    q = ((x - low) / step[..., None]).round()
    best = (weights * (step[..., None] * q + low - x).square()).sum(-1)
    total, first = weights.sum(-1), (weights * x).sum(-1)
    for steps in (_STEPS, *(_STEPS - 1 + i / 10 for i in range(21))):
        q = ((x - low) * (steps / span)).round().clamp(0, _STEPS)
        sums = [(weights * each).sum(-1) for each in (q, q * q, q * x)]
        determinant = total * sums[1] - sums[0] ** 2
        slope = (total * sums[2] - first * sums[0]) / determinant
        start = (sums[1] * first - sums[0] * sums[2]) / determinant
        through_zero = start > 0
        slope = torch.where(through_zero, sums[2] / sums[1], slope)
        start = torch.where(through_zero, 0.0, start)
        error = (weights * (slope[..., None] * q + start[..., None] - x).square()).sum(-1)
        better = error < best  # never of NaN, where all q are the same
        best = torch.where(better, error, best)
        step, least = torch.where(better, slope, step), torch.where(better, start, least)
    return step.clamp(min=0), least


def mxfp4(weight: Tensor) -> Rounded:
    """MXFP4: e2m1 times a power of two of 8 bits (e8m0) for each 32 columns.

    ``scale = 2**(floor(log2(max |w|)) - 2)``; values are the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of both signs.

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3.
    """
    return plain(weight, 32, "e2m1", 8)


def nvfp4(weight: Tensor) -> Rounded:
    """NVFP4: e2m1 times an e4m3 scale for each 16 columns and a float32 of the tensor, which is ``448 * 6 / max |w|``.

    Source: compressed-tensors' ``quantization/utils/helpers.py``; `qcut.numerics.codebook.float4` has the formula.
    """
    found = plain(weight, 16, "e2m1", 8, E4M3)
    return found._replace(bits=found.bits + 32)


TILE = (8, 64)
_SWEEPS = 16


def lut_b(weight: Tensor) -> Rounded:
    """LUT-B: 3-bit indices into a table of eight e4m3 values for each tile of 8 rows and 64 columns.

    Tensor cores of NVIDIA's Rubin expand such tiles (``tcgen05`` with decompression). Nothing else is stored: there is
    no scale. Tables come from Lloyd's method on the weights of the tile, from the codebook of the normal distribution
    on, and are rounded to e4m3; then each weight takes the nearest value.

    Source: compressed-tensors' draft of the format (pull request 801), which has such tiles; PTX defines the expansion.
    """
    rows, columns = TILE
    n, k = weight.shape
    tiles = weight.view(n // rows, rows, k // columns, columns).transpose(1, 2).flatten(2).flatten(0, 1)
    normal = torch.tensor(lloyd_max.levels(3), device=weight.device)
    mean, deviation = tiles.mean(1, keepdim=True), tiles.std(1, keepdim=True)
    table = normal * deviation + mean
    for _ in range(_SWEEPS):
        codes = _nearest_of_each(tiles, table)
        counts = torch.zeros_like(table).scatter_add_(1, codes, torch.ones_like(tiles))
        sums = torch.zeros_like(table).scatter_add_(1, codes, tiles)
        table = torch.where(counts > 0, sums / counts, table).sort(1).values
    table = table.clamp(-448, 448).to(E4M3).float()
    found = table.gather(1, _nearest_of_each(tiles, table))
    found = found.view(n // rows, k // columns, rows, columns).transpose(1, 2).reshape(n, k)
    return Rounded(found, 3 * weight.numel() + 8 * table.numel())


def _nearest_of_each(rows: Tensor, tables: Tensor) -> Tensor:
    """Indices of the nearest values of rows ``[R, C]`` in tables ``[R, V]``, ascending."""
    return torch.searchsorted(((tables[:, 1:] + tables[:, :-1]) / 2).contiguous(), rows)


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """Indices of the nearest of ascending values."""
    return torch.searchsorted(lloyd_max.boundaries(values), x)


ROUNDINGS: dict[str, tuple[str, Callable[[Tensor], Rounded]]] = {
    "NF4": ("bitsandbytes, blocks of 64, float32 scales", nf4),
    "NF4 nested": ("bitsandbytes, blocks of 64, scales of 8 bits", lambda w: nf4(w, nested=True)),
    "int4 symmetric": ("GPTQ, groups of 128, no zero points", lambda w: int4(w, symmetric=True)),
    "int4 asymmetric": ("GPTQ and AWQ, groups of 128, zero points", lambda w: int4(w, symmetric=False)),
    "Q4_0": ("GGUF, blocks of 32", q4_0),
    "Q4_K-like": ("GGUF, super-blocks of 256, scales and minima of 6 bits", q4_k_like),
    "MXFP4": ("blocks of 32, e8m0 scales", mxfp4),
    "NVFP4": ("blocks of 16, e4m3 scales", nvfp4),
    "LUT-B": ("3 bits, eight e4m3 values for 8 × 64", lut_b),
}
"""By name, a description and the rounding."""
