"""The configuration, the codebook and the quantizer of the turboquant-model package.

`qcut.checkpoints.formats.turboquant.reader` and `qcut.checkpoints.formats.turboquant.writer` are for its directories.
The quantizer is that of `qcut.numerics.codebook.quantizer` except in four things, which matter only for the
package's own bits:

- The codebook is where Lloyd's iteration stands after 200 steps, which at 4 bits is not yet its end.
- Midpoints are taken before the values are rounded to float32.
- A norm is at least 1e-8.
- A residual pass is given what the first pass left once that was rounded to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from qcut.errors import ConfigError, UnsupportedError
from qcut.numerics.chunks import row_chunks
from qcut.numerics.codebook import lloyd_max, rotation
from qcut.numerics.codebook.quantizer import (
    RotatedCodebook,
    check_weight,
    dequantize_rows,
    finite_rows,
    stored_norms,
)

BITS = (2, 3, 4)
NORM_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
"""The ``norm_codec`` that qcut reads and writes, and what the norms are stored in."""

Strategy = Literal["different", "shared", "alternating", "per_layer"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""The package's ways to draw the seeds of a layer's passes; see `pass_seeds`."""
RESIDUAL_SEED = 1042

_LAYER_STRIDE = 10_007
_STEPS, _LIMIT = 200, 3.5
_LEAST_NORM = 1e-8


@dataclass(frozen=True)
class Config:
    """``turboquant_config.json``, field by field.

    Attributes:
        bit_width: of the indices, 2 to 4; an index takes half a byte at any width.
        group_size: columns that share a norm and a rotation; None takes whole rows.
        seed: of the rotations; see `pass_seeds`.
        skip_embeddings: linear layers with ``embed`` in their name stay in float.
        skip_lm_head: linear layers with ``lm_head`` in their name stay in float.
        residual_bit_width: of a second pass over what the first one left, or None.
        residual_seed: of the second pass.
        rotation: ``qr`` or ``hadamard``.
        rotation_strategy: see `pass_seeds`.
        norm_codec: ``fp32`` or ``fp16``.
        entropy_coding: False; compressed indices are not read.
        cpu_offload_pass2: how that package runs the second pass; it changes no number, and qcut does not heed it.
        embedding_quant: ``none``; quantized embedding tables are not read.
        embedding_group_size: of them.

    Raises:
        ConfigError: a value of another type or range.
        UnsupportedError: a value that the package knows and qcut does not.
    """

    bit_width: int = 4
    group_size: int | None = 128
    seed: int = 42
    skip_embeddings: bool = False
    skip_lm_head: bool = False
    residual_bit_width: int | None = None
    residual_seed: int = RESIDUAL_SEED
    rotation: str = "qr"
    rotation_strategy: str = "different"
    norm_codec: str = "fp32"
    entropy_coding: bool = False
    cpu_offload_pass2: bool = False
    embedding_quant: str = "none"
    embedding_group_size: int = 32

    def __post_init__(self) -> None:
        for name, allowed in _UNSUPPORTED.items():
            if (value := getattr(self, name)) not in allowed:
                raise UnsupportedError(f"{name} is {value!r}; qcut reads {' and '.join(map(repr, allowed))}")
        for name, value in asdict(self).items():
            if name in _CHOICES:
                ok = any(type(value) is type(one) and value == one for one in _CHOICES[name])
                allowed_text = ", ".join(map(repr, _CHOICES[name]))
            elif name in _BOOLEANS:
                ok, allowed_text = isinstance(value, bool), "true, false"
            else:
                least = 1 if "group_size" in name else 0
                ok = type(value) is int and least <= value < 1 << 62
                allowed_text = f"{'null, ' if name == 'group_size' else ''}whole numbers from {least}"
                ok = ok or (value is None and name == "group_size")
            if not ok:
                raise ConfigError(f"{name} is {value!r}; allowed: {allowed_text}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        """Reads what `to_json` or the package wrote; keys that are missing take their defaults.

        Raises:
            ConfigError: see the class.
            UnsupportedError: see the class; or a key that qcut does not know and that is not null, false or empty.
        """
        known = {field.name for field in fields(cls)}
        for key, value in data.items():
            if key not in known and value not in (None, False, "", [], {}):
                raise UnsupportedError(f"{key} is {value!r}; qcut knows {', '.join(sorted(known))}")
        return cls(**{key: value for key, value in data.items() if key in known})

    def to_json(self) -> dict[str, Any]:
        """Plain data, in the package's order."""
        return asdict(self)


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "entropy_coding": (False,),
    "norm_codec": tuple(NORM_DTYPES),
    "embedding_quant": ("none",),
}
_BOOLEANS = ("skip_embeddings", "skip_lm_head", "entropy_coding", "cpu_offload_pass2")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "bit_width": BITS,
    "residual_bit_width": (None, *BITS),
    "rotation": rotation.KINDS,
    "rotation_strategy": STRATEGIES,
    **{name: _UNSUPPORTED[name] for name in ("norm_codec", "embedding_quant")},
}


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


def codebook(bits: int, device: torch.device | str | None = None) -> Tensor:
    """float32 ``[2**bits]``: the codebook that the package writes.

    Lloyd's iteration for N(0, 1), 200 steps from ``2**bits`` equal intervals of [-3.5, 3.5].

    Args:
        bits: 2, 3 or 4.
        device: of the result.

    Raises:
        ConfigError: another number of bits.

    Exactness: bitwise at 4 bits, which a file of the package confirms. By the same rule at 2 and 3 bits, where the
    iteration has come to its end, so that the values are also those of `qcut.numerics.codebook.lloyd_max.codebook` to
    within 1e-6.
    """
    return torch.tensor(_iterate(bits)[0], dtype=torch.float32, device=device)


def quantize(
    weight: Tensor, config: Config, layer_index: int = 0, *, layer: str | None = None
) -> tuple[RotatedCodebook, ...]:
    """Quantize a weight as the package does.

    Args:
        weight: ``[N, K]`` float16, bfloat16, float32 or float64, any strides.
        config: of the model.
        layer_index: position among the quantized layers, in the order of ``named_modules``; ``per_layer`` needs it.
        layer: name for error messages.

    Returns:
        One pass, or two with ``residual_bit_width``, on the weight's device. With ``norm_codec`` ``fp16`` the first
        pass's norms are rounded to float16, the second's are not; two passes hold float32.

    Raises:
        ShapeError: no matrix, or an empty one.
        DtypeError: another dtype.
        QuantizationError: NaN or Inf, or a norm beyond float16.
        ConfigError: a group that the rotation cannot take.

    Exactness: float32. An index may differ from the package's where a rotated value lies within rounding of a
    midpoint; in a group of zeros the norm is 1e-8 and indices mean nothing.

    Source: the turboquant-model package, ``quantize_model``.
    """
    dtype = NORM_DTYPES[config.norm_codec]
    check_weight(weight, dtype, layer)
    n, k = weight.shape
    size = config.group_size or k
    kind: rotation.Kind = "qr" if config.rotation == "qr" else "hadamard"
    parts = rotation.check_groups(k, size, kind, layer)
    device = weight.device
    seeds = pass_seeds(config.seed, config.residual_seed, config.rotation_strategy, layer_index)  # type: ignore[arg-type]
    widths = (config.bit_width, config.residual_bit_width)
    results, edges = [], []
    for bits, seed in zip(widths, seeds, strict=True):
        if bits is not None:
            indices = torch.empty((n, k), dtype=torch.uint8, device=device)
            norms = torch.empty((n, len(parts)), dtype=torch.float32, device=device)
            results.append(RotatedCodebook(indices, norms, codebook(bits, device), size, kind, seed))
            edges.append(torch.tensor(_iterate(bits)[1], dtype=torch.float32, device=device))
    sizes = torch.tensor([d for _, d in parts], device=device, dtype=torch.int64)
    for rows in row_chunks(n, k):
        left = finite_rows(weight, rows, layer)
        for q, midpoints in zip(results, edges, strict=True):
            norms = torch.stack([left[:, first : first + d].norm(dim=1) for first, d in parts], 1).clamp(_LEAST_NORM)
            unit = left / norms.repeat_interleave(sizes, 1, output_size=k)
            rotated = rotation.rotate_groups(unit, kind, size, q.seed)
            rotated *= sizes.sqrt().repeat_interleave(sizes, output_size=k)
            q.indices[rows] = torch.searchsorted(midpoints, rotated, out_int32=True).to(torch.uint8)
            q.norms[rows] = norms
            if q is not results[-1]:
                left = left - dequantize_rows(q, rows).bfloat16().float()
    if dtype is torch.float32:
        return tuple(results)
    # The package rounds the first pass's norms when it saves, and the second's never.
    first, *rest = results
    stored = stored_norms(first.norms, dtype, layer)
    return replace(first, norms=stored.float() if rest else stored), *rest


@cache
def _iterate(bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The values of the package's codebook in float64, and the midpoints between them."""
    if bits not in BITS:
        raise ConfigError(f"a codebook of {bits} bits; allowed: {', '.join(map(str, BITS))}")
    count = 1 << bits
    inner = [_LIMIT * (2 * i / count - 1) for i in range(1, count)]
    values: list[float] = []
    for _ in range(_STEPS):
        values = lloyd_max.centroids((-math.inf, *inner, math.inf))
        inner = lloyd_max.midpoints(values)
    return tuple(values), tuple(inner)
