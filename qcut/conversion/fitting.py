"""Whether a scheme serves a layer, and which near one does if it does not."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from qcut.errors import ConfigError, QuantizationError
from qcut.layers.linear import Linear
from qcut.models.modules import weight_nk
from qcut.schemes import LEAST_ROTATED_GROUP, W8A8, Codebook, Scheme, W8A8Rotated


class Fit(NamedTuple):
    """The scheme that a layer gets, or None if it stays, and why this is not the requested one."""

    scheme: Scheme | None
    reason: str = ""


def fitting_scheme(module: nn.Module, scheme: Scheme, allow_growth: bool = False) -> Fit:
    """The scheme for a linear layer: the one given, the same with another rotation or without, or none.

    A layer stays in float where K is beyond the scheme's exact range, or odd with a codebook of pairs, or where its
    quantized form would take as many bytes as it has now or more.

    Args:
        module: a layer that qcut can replace.
        scheme: the scheme for the whole model; no float.
        allow_growth: take layers too that do not get smaller.
    """
    n, k = weight_nk(module).shape
    served, note = rotatable(scheme, k)
    if isinstance(served, Codebook) and served.pairs:
        from qcut.numerics.codebook.quantizer import check_even

        try:
            check_even(k, served.group_columns(k), None)
        except ConfigError as error:
            return Fit(None, str(error))
    bias = module._parameters.get("bias") is not None
    try:
        after = _layer_bytes(k, n, bias, served)
    except QuantizationError as error:
        return Fit(None, str(error))
    before = sum(p.nbytes for p in module._parameters.values() if p is not None)
    if after >= before and not allow_growth:
        bits = [8 * size / (n * k) for size in (after, before)]
        return Fit(None, f"{served.name} would take {bits[0]:.1f} bits a weight ({n} x {k}), and it has {bits[1]:.1f}")
    return Fit(served, note)


def rotatable(scheme: Scheme, k: int) -> tuple[Scheme, str]:
    """A scheme with a rotation that takes K columns, and why it is not the one given.

    A codebook gets the rotation ``qr``, which takes any number. `W8A8Rotated` gets the largest smaller group that
    leaves a power of two as the last group, or no rotation.
    """
    if isinstance(scheme, W8A8Rotated):
        return _rotatable_int8(scheme, k)
    if isinstance(scheme, Codebook) and scheme.rotation == "hadamard":
        from qcut.numerics.codebook.rotation import check_group_size

        try:
            check_group_size(k, scheme.group_columns(k), scheme.rotation)
        except ConfigError:
            whole = scheme.group_size is None or k < scheme.group_size
            last = k if whole else k % scheme.group_columns(k)
            return replace(scheme, rotation="qr"), f"rotation qr: a group of {last} of its {k} columns is no power of 2"
    return scheme, ""


def _rotatable_int8(scheme: W8A8Rotated, k: int) -> tuple[Scheme, str]:
    from qcut.layers.rotated import can_rotate_groups

    size = min(scheme.group_columns(k), 1 << k.bit_length())
    if can_rotate_groups(size, k):
        return scheme, ""
    reason = f"a group of {k % min(size, k) or k} of its {k} columns is no power of 2"
    size = 1 << (size.bit_length() - 1)
    while size >= LEAST_ROTATED_GROUP:
        if can_rotate_groups(size, k):
            return replace(scheme, group_size=size), f"groups of {size}: {reason}"
        size //= 2
    return W8A8(), f"no rotation: {reason}, nor of smaller groups"


@lru_cache(maxsize=4096)
def _layer_bytes(k: int, n: int, bias: bool, scheme: Scheme) -> int:
    """Bytes of a quantized layer."""
    return Linear(k, n, bias, scheme, device="meta").weight_bytes
