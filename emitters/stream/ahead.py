"""What a kernel of few tokens asks the L2 for when it has no load left of its own: what the next product reads first.

Device code: ``Ahead`` in ``include/qcut/core/streaming.cuh``.
"""

from __future__ import annotations

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.source import Param

UNIT_BYTES = 16
"""Addresses and sizes of bulk copies are multiples of this."""
MOST_BYTES = UNIT_BYTES * 0xFFFF
"""Most bytes of a part: the instruction counts units in 16 bits."""

_PARAMS = (
    Param("ahead", "ptr", "const char*"),
    Param("ahead_stride", "i64"),
    Param("ahead_bytes", "i32"),
    Param("ahead_parts", "i32"),
)

AHEAD = Constraint(
    "ahead",
    "is for architectures with bulk copies and dependent launch",
    lambda p, t, arch: not t.ahead or architecture(arch).pdl,
)
"""Of tiles that may ask for memory ahead."""


def ahead_params(ahead: bool) -> tuple[Param, ...]:
    """Arguments after all others of a kernel that asks ahead: address, bytes between parts, bytes of a part, parts.

    Address and bytes between parts are multiples of `UNIT_BYTES`, and so are bytes of a part, up to `MOST_BYTES`.
    """
    return _PARAMS * ahead


def ahead_argument(ahead: bool) -> str:
    """The last argument of the device code's function."""
    return f", qcut::Ahead{{{', '.join(param.name for param in _PARAMS)}}}" * ahead
