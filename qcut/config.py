"""Schemes and ranges as frozen data with a JSON round trip. Imports no torch.

A scheme says how one layer computes; `parse_scheme` turns the names users type into scheme objects.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from qcut.errors import ConfigError

K_MAX = 131_071
"""Largest K whose int8 products cannot overflow int32: 2**14 * K < 2**31."""
K_MAX_ZERO_POINT = 66_311
"""The same where a zero point makes one factor span 255: 255 * 127 * K < 2**31."""
K_ALIGNMENT = 16
"""int8 rows are zero padded to a multiple of this many columns (bytes): one 16-byte vector load."""

ACTIVATIONS = ("none", "relu", "gelu_erf", "gelu_tanh", "silu")
"""Names of the elementwise functions a layer can fuse after its bias."""


def padded_k(k: int) -> int:
    """Columns of an int8 operand that holds `k` values: k rounded up to `K_ALIGNMENT`."""
    return (k + K_ALIGNMENT - 1) // K_ALIGNMENT * K_ALIGNMENT


def check_activation(activation: str) -> str:
    """Returns `activation`, or raises `ConfigError` listing the names that exist."""
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} does not exist; use one of {', '.join(ACTIVATIONS)}")
    return activation


class Scheme(ABC):
    """How one layer computes. Subclasses are frozen dataclasses: hashable, comparable, plain data."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """The name users type and reports print; `parse_scheme` reads it back."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON file; `scheme_from_json` reads it back."""


@dataclass(frozen=True)
class W8A8(Scheme):
    """int8 weights and int8 activations, int32 accumulation.

    Attributes:
        mode: ``dynamic`` scales each token by its own largest magnitude (symmetric); ``static``
            uses one calibrated `StaticRange` per layer (asymmetric, a zero point).
    """

    mode: Literal["dynamic", "static"] = "dynamic"
    kind: ClassVar[str] = "w8a8"

    def __post_init__(self) -> None:
        if self.mode not in ("dynamic", "static"):
            raise ConfigError(f"W8A8 mode {self.mode!r} does not exist; use 'dynamic' or 'static'")

    @property
    def name(self) -> str:
        """``w8a8`` or ``w8a8_static``."""
        return "w8a8" if self.mode == "dynamic" else "w8a8_static"

    def to_json(self) -> dict[str, Any]:
        """``{"kind": "w8a8", "mode": …}``."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class W8A16(Scheme):
    """int8 weights, dequantized in registers; activations keep their floating-point type."""

    kind: ClassVar[str] = "w8a16"

    @property
    def name(self) -> str:
        """``w8a16``."""
        return self.kind

    def to_json(self) -> dict[str, Any]:
        """``{"kind": "w8a16"}``."""
        return {"kind": self.kind}


@dataclass(frozen=True)
class Float(Scheme):
    """The layer stays as it is, in the model's own floating-point type."""

    kind: ClassVar[str] = "fp16"

    @property
    def name(self) -> str:
        """``fp16``."""
        return self.kind

    def to_json(self) -> dict[str, Any]:
        """``{"kind": "fp16"}``."""
        return {"kind": self.kind}


_BY_NAME: dict[str, Scheme] = {s.name: s for s in (W8A8("dynamic"), W8A8("static"), W8A16(), Float())}
SCHEME_NAMES = tuple(_BY_NAME)
"""Every name `parse_scheme` knows."""


def parse_scheme(scheme: str | Scheme) -> Scheme:
    """The scheme object for a name; a scheme object passes through.

    Raises:
        ConfigError: the name does not exist; the message lists those that do.
    """
    if isinstance(scheme, Scheme):
        return scheme
    try:
        return _BY_NAME[scheme]
    except (KeyError, TypeError):
        raise ConfigError(f"scheme {scheme!r} does not exist; use one of {', '.join(SCHEME_NAMES)}") from None


def scheme_from_json(data: dict[str, Any]) -> Scheme:
    """Reads what `Scheme.to_json` wrote.

    Raises:
        ConfigError: not a mapping, an unknown kind, or fields the kind does not have.
    """
    classes: dict[str, type[Scheme]] = {cls.kind: cls for cls in (W8A8, W8A16, Float)}
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in classes:
        raise ConfigError(f"not a scheme: {data!r}; 'kind' is one of {', '.join(classes)}")
    try:
        return classes[kind](**{key: value for key, value in data.items() if key != "kind"})
    except TypeError:
        raise ConfigError(f"scheme of kind {kind!r} has unknown fields: {data!r}") from None


@dataclass(frozen=True)
class StaticRange:
    """Calibrated range ``[lo, hi]`` of a layer's input; ``lo <= 0 <= hi`` so that zero is exact.

    Raises:
        ConfigError: a bound is not finite, or zero lies outside the range.
    """

    lo: float
    hi: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lo) and math.isfinite(self.hi) and self.lo <= 0.0 <= self.hi):
            raise ConfigError(f"static range [{self.lo}, {self.hi}] is not finite with lo <= 0 <= hi")

    @classmethod
    def including_zero(cls, lo: float, hi: float) -> StaticRange:
        """The smallest valid range that holds ``[lo, hi]``."""
        return cls(min(lo, 0.0), max(hi, 0.0))

    def to_json(self) -> dict[str, float]:
        """``{"lo": …, "hi": …}``; JSON keeps Python floats exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StaticRange:
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: fields are missing, not numbers, or do not form a valid range.
        """
        try:
            lo, hi = float(data["lo"]), float(data["hi"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"not a static range: {data!r}; it holds two numbers, 'lo' and 'hi'") from None
        return cls(lo, hi)
