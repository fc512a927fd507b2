"""Element types of a KV cache: their names in kernels, and the kernels' arguments."""

from __future__ import annotations

from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.source import DType, Param

SCALED = (DType.S8, DType.U4)
"""Types with a scale for each token and head; keys and values may differ."""
ROTATED_HEADS = (32, 64, 128, 256)
"""Sizes of a head in a 4-bit cache, which has rotated keys."""


def value_type(keys: DType, values: DType | None) -> DType:
    """Type of values; by default that of keys."""
    return keys if values is None else values


def cache_name(keys: DType, values: DType | None) -> str:
    """``{keys}``, then the type of values if it differs."""
    other = "" if values in (None, keys) else value_type(keys, values).value
    return keys.value + other


def serves_cache(x: DType, keys: DType, values: DType | None, head: int) -> bool:
    """Whether keys and values of these types go with queries of type x: x for both, or scaled ones for both."""
    types = (keys, value_type(keys, values))
    if DType.U4 in types and head not in ROTATED_HEADS:
        return False
    return types == (x, x) or all(kind in SCALED for kind in types)


CACHE = Constraint(
    "cache",
    "is x's type, s8, or u4 of heads of 32, 64, 128 or 256",
    lambda kernel: serves_cache(kernel.x, kernel.cache, kernel.values, kernel.head),
)
"""Constraint of kernels that read or write a cache; takes the kernel."""


def cache_bits(keys: DType, values: DType | None) -> int:
    """Bits of a column of a key and of a value together."""
    return keys.bits + value_type(keys, values).bits


def cache_params(keys: DType, values: DType | None, *, writes: bool) -> tuple[tuple[Param, ...], tuple[Param, ...]]:
    """``keys, values``, and ``key_scales, value_scales``, none for types without scales."""
    const = "" if writes else "const "
    kinds = {"key": keys, "value": value_type(keys, values)}
    rows = tuple(Param(f"{name}s", "ptr", f"{const}{kind.cpp}*") for name, kind in kinds.items())
    if keys not in SCALED:
        return rows, ()
    scales = {DType.S8: "float", DType.U4: "unsigned short"}
    return rows, tuple(Param(f"{name}_scales", "ptr", f"{const}{scales[kind]}*") for name, kind in kinds.items())


def guide_params(keys: DType) -> tuple[Param, ...]:
    """``guide``: KV calibration by which kernels round the 4-bit keys that they write."""
    return (Param("guide", "ptr", "const void*"),) if keys is DType.U4 else ()


def cache_template(keys: DType, values: DType | None) -> str:
    """Template arguments of the two types."""
    return f"{keys.cpp}, {value_type(keys, values).cpp}"
