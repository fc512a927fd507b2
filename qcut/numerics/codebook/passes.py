"""Quantizes a weight in the passes of a codebook scheme, and derives a scheme from given passes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from qcut.errors import ConfigError, QuantizationError, QuantizationWarning, ShapeError, layer_prefix
from qcut.numerics.checks import out_of_range
from qcut.numerics.codebook import float4, pairs, rotation
from qcut.numerics.codebook.fitting.curvature import Curvature, as_curvature
from qcut.numerics.codebook.fitting.fit import fit_experts
from qcut.numerics.codebook.quantizer import RotatedCodebook, check_even, quantize, quantize_plain
from qcut.numerics.float8 import E4M3
from qcut.schemes import Codebook, Scheme, parse_scheme

NORM_DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "e4m3": E4M3}
"""By `qcut.schemes.Codebook.norm_dtype`, the dtype of stored norms."""


def quantize_weight(
    weight: Tensor, scheme: Codebook, *, second_moment: Tensor | Curvature | None = None, layer: str | None = None
) -> list[RotatedCodebook]:
    """Quantize one weight ``[N, K]``: see `quantize_weights`."""
    return quantize_weights([weight], scheme, [second_moment], [layer])[0]


def quantize_weights(
    weights: Sequence[Tensor],
    scheme: Codebook,
    second_moments: Sequence[Tensor | Curvature | None],
    layers: Sequence[str | None],
    row_absmaxes: Sequence[Tensor | None] | None = None,
) -> list[list[RotatedCodebook]]:
    """Quantize weights of one size in the passes of a scheme; those that are fitted, together.

    Args:
        weights: of ``[N, K]`` float16, bfloat16, float32 or float64, any strides, on one device.
        scheme: a codebook scheme.
        second_moments: of each, ``E[x x^T]`` of the layer's input, ``[K, K]``, or the loss's curvature by the weight,
            to fit indices and norms; None rounds to nearest.
        layers: names for error messages.
        row_absmaxes: of each, see `qcut.numerics.codebook.quantizer.quantize_plain`; or None for whole weights.

    Returns:
        The passes of each weight; bitwise those of the weight by itself.

    Raises:
        ConfigError: a second moment without a rotation, or a group that the rotation cannot take.
        QuantizationError: see `qcut.numerics.codebook.quantizer.quantize`; or a weight so small that its norms
            underflow.
    """
    common: dict[str, Any] = {
        "group_size": scheme.group_columns(weights[0].shape[1]),
        "norm_dtype": NORM_DTYPES[scheme.norm_dtype],
    }
    rotated = scheme.rotation != rotation.NO_ROTATION
    moments = [None if moment is None else as_curvature(moment) for moment in second_moments]
    fitted = [e for e, moment in enumerate(moments) if moment is not None]
    if fitted and not rotated:
        where = layer_prefix(layers[fitted[0]])
        raise ConfigError(f"{where}scheme {scheme.name} got a second moment; rotated codebooks take one")
    passes: list[list[RotatedCodebook]] = [[] for _ in weights]
    row_absmaxes = [None] * len(weights) if row_absmaxes is None else row_absmaxes
    for p, (bits, seed) in enumerate(zip(scheme.widths, scheme.seeds, strict=True)):
        options: dict[str, Any] = {"kind": scheme.rotation, "seed": seed, "in_pairs": scheme.pairs, **common}
        made: dict[int, RotatedCodebook] = {}
        if fitted and p + 1 == len(scheme.widths):
            found = fit_experts(
                [weights[e] for e in fitted],
                [moment for moment in moments if moment is not None],
                bits,
                before=[passes[e] for e in fitted],
                layers=[layers[e] for e in fitted],
                **options,
            )
            made |= zip(fitted, found, strict=True)
        for e, (weight, before, layer, absmax) in enumerate(zip(weights, passes, layers, row_absmaxes, strict=True)):
            if e in made:
                q = made[e]
            elif rotated:
                q = quantize(weight, bits, before=before, layer=layer, **options)
            else:
                plain = {"before": before, "levels": scheme.levels, "layer": layer, "row_absmax": absmax, **common}
                q = quantize_plain(weight, bits, **plain)
            before.append(q)
    for weight, own, layer in zip(weights, passes, layers, strict=True):
        _check_size(weight, own, layer)
    return passes


_LEAST_NORMS = {
    torch.float16: (2.0**-18, 2.0**-14),
    torch.float32: (2.0**-60, 2.0**-60),
    E4M3: (2.0**-6, 2.0**-6),
}
"""The least that a weight's largest norm may be, of one pass and of two, so that rounding norms costs less than codes.

float16 has steps of ``2**-24`` down there. float32 norms are roots of sums of squares, which would underflow. e4m3 has
its least normal number there.
"""


def _check_size(weight: Tensor, passes: Sequence[RotatedCodebook], layer: str | None) -> None:
    """Refuse a weight with norms that underflow, and warn of single rows with norms that do."""
    norms = passes[0].norms
    by_row, least = norms.float().amax(1), _LEAST_NORMS[norms.dtype][len(passes) - 1]
    low = (by_row < least).nonzero().flatten()
    low = low[weight[low].ne(0).any(1)]
    dtype, largest = str(norms.dtype).removeprefix("torch."), float(by_row.max())
    if len(low) and largest < least:
        raise QuantizationError(
            f"the weight's largest norm of a group, or scale, is {largest:.4g} in {dtype}; allowed: {least:.4g} and "
            "more, or only zeros",
            layer,
        )
    if len(low):
        advice = ', which qcut.Codebook(..., norm_dtype="fp32") avoids' if dtype == "float16" else ""
        warnings.warn(
            f"{layer_prefix(layer)}{len(low)} of {len(norms)} rows, the first is row {int(low[0])}, are too small for "
            f"norms of {dtype} (theirs are at most {largest:.4g}): they lose bits or become 0{advice}",
            QuantizationWarning,
            stacklevel=2,
        )


def codebook_scheme(scheme: str | Scheme, name: str | None) -> Codebook:
    """Return a scheme if it is a codebook scheme.

    Raises:
        ConfigError: the scheme is another.
    """
    scheme = parse_scheme(scheme)
    if not isinstance(scheme, Codebook):
        raise ConfigError(
            f"{layer_prefix(name)}CodebookLinear has no scheme {scheme.name!r}; use codebook4 or the like"
        )
    return scheme


def scheme_of(passes: Sequence[RotatedCodebook], scheme: str | Scheme, name: str | None) -> Codebook:
    """The scheme of given passes: width, groups, rotation, seeds and norms are the passes', all else is ``scheme``'s.

    Raises:
        ConfigError: the passes do not go together, are more than two, or have a codebook of another width.
        ShapeError: the shape of the norms, or of their row scale, does not fit the indices.
    """
    scheme = codebook_scheme(scheme, name)
    where = layer_prefix(name)
    if len(passes) not in (1, 2):
        raise ConfigError(f"{where}{len(passes)} passes; allowed: 1 or 2")
    first = passes[0]
    n, k = first.indices.shape
    by_dtype = {dtype: norm for norm, dtype in NORM_DTYPES.items()}
    if first.norms.dtype not in by_dtype:
        raise ConfigError(f"{where}norms of {first.norms.dtype}; allowed: {', '.join(map(str, by_dtype))}")
    for q in passes:
        if (q.norm_scale is not None) != (q.norms.dtype is E4M3):
            raise ConfigError(f"{where}norm_scale goes with norms of {E4M3}, and only with them")
        if (q.indices.shape, q.group_size, q.rotation, q.norms.dtype) != (
            first.indices.shape,
            first.group_size,
            first.rotation,
            first.norms.dtype,
        ):
            raise ConfigError(f"{where}passes differ in shape, group size, rotation or the dtype of their norms")
        if not is_codebook(q.values):
            raise ConfigError(f"{where}a codebook of {len(q.values)} values; allowed: 4, 8, 16, or 256 pairs")
        groups = len(rotation.groups(k, q.group_size))
        if q.norms.shape != (n, groups):
            raise ShapeError(f"{where}norms have shape {list(q.norms.shape)}; allowed: [{n}, {groups}]")
        if q.norm_scale is not None and q.norm_scale.shape != (n,):
            raise ShapeError(f"{where}norm_scale has shape {list(q.norm_scale.shape)}; allowed: [{n}]")
    check_values(passes, name)
    in_pairs = pairs.are_pairs(first.values)
    if in_pairs:
        if len(passes) > 1:
            raise ConfigError(f"{where}{len(passes)} passes of pairs; allowed: 1")
        check_even(k, first.group_size, name)
    widths = [4 if pairs.are_pairs(q.values) else len(q.values).bit_length() - 1 for q in passes]
    return replace(
        scheme,
        pairs=in_pairs,
        bits=widths[0],
        residual_bits=widths[1] if len(passes) == 2 else None,
        group_size=None if scheme.group_size is None and first.group_size >= k else first.group_size,
        rotation=first.rotation,
        seed=scheme.seed if first.rotation == rotation.NO_ROTATION else first.seed,
        residual_seed=passes[1].seed if len(passes) == 2 and scheme.rotation != "none" else scheme.residual_seed,
        norm_dtype=cast(Any, by_dtype[first.norms.dtype]),
    )


def check_values(passes: Sequence[RotatedCodebook], name: str | None) -> None:
    """Check the codebooks of passes.

    Raises:
        ConfigError: values do not ascend, pairs are not the same with other signs, or two passes of one width have
            different codebooks.
    """
    where = layer_prefix(name)
    for q in passes:
        if pairs.are_pairs(q.values):
            if not pairs.are_symmetric(q.values):
                raise ConfigError(f"{where}a codebook of pairs; allowed: {pairs.SYMMETRIC}")
            continue
        ordered = bool((q.values[1:] > q.values[:-1]).all()) and bool(q.values.isfinite().all())
        if not ordered:
            raise ConfigError(f"{where}codebook {q.values.tolist()}; allowed: finite values, ascending")
    same_width = len(passes) == 2 and len(passes[0].values) == len(passes[1].values)
    if same_width and not torch.equal(passes[0].values, passes[1].values.to(passes[0].values.device)):
        raise ConfigError(f"{where}two passes of one width with different codebooks; allowed: one codebook for both")


def is_codebook(values: Tensor) -> bool:
    """Whether a tensor has the shape of a codebook: 4, 8 or 16 values, or 256 pairs."""
    return values.shape in ((4,), (8,), (16,), (pairs.COUNT, 2))


def check_norms(norms: Tensor, norm_scale: Tensor | None, name: str | None) -> None:
    """Check the norms of passes, and the row scale of e4m3 norms.

    Raises:
        QuantizationError: a norm is negative, NaN or Inf; or a scale is outside its bounds.
    """
    if out_of_range(norms, 0.0):
        raise QuantizationError("norms hold NaN, Inf or a negative number; allowed: finite, 0 and more", name)
    if norm_scale is not None and (problem := scale_problem(norm_scale)):
        raise QuantizationError(f"norm_scale: {problem}", name)


def scale_problem(norm_scale: Tensor) -> str | None:
    """What is wrong with the row scale of e4m3 norms, or None."""
    least, most = float4.LEAST_NORM_SCALE, float4.MOST_NORM_SCALE
    found = out_of_range(norm_scale, least, most)
    return f"found {found}; {least:.3g} to {most:.3g} are allowed" if found else None
