"""The end of a step of speculative decoding: accepts drafted tokens and drafts the next ones from the text.

Device code: ``include/qcut/decoder/accept.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import KernelSource, Param

_UNROLL = 8
"""Loads of the text that a thread has in flight."""

_MOST = 8
"""Tokens of the longest n-gram, each in a register."""


@dataclass(frozen=True)
class AcceptTokens(Kernel):
    """Accepted tokens and the next drafts of each sequence, as `qcut.ops.next_token.AcceptOp` defines them.

    Attributes:
        arch: real architecture.

    Exactness: bitwise.
    """

    arch: str

    @property
    def name(self) -> str:
        """``qcut_accept_{arch}``."""
        return f"qcut_accept_{self.arch.replace('_', '')}"

    @property
    def block(self) -> int:
        """Threads of a CTA, which compare as many places of a text at a time."""
        return 256

    def grid(self, sequences: int) -> tuple[int, int, int]:
        """CTAs for so many sequences."""
        return (sequences, 1, 1)

    def params(self) -> tuple[Param, ...]:
        """``chosen``, int64 ``[sequences, read]``; ``tokens``, int64 ``[width, sequences]``, ``width`` up to 16.

        ``counts``, ``positions`` and ``slots``, int32 ``[sequences]``; ``text``, int32 ``[sequences, capacity]``;
        ``ends``, int32 ``[sequences]``. Then ``read``, ``width``, ``capacity``, ``context``, ``least`` and ``most``, up
        to 8. ``host_copy``, int64 ``[turns, sequences, width + 2]`` in pinned host memory, or null; ``turn``, int32
        ``[sequences]``, and ``turns``, both read with ``host_copy`` only.
        """
        return (
            Param("chosen", "ptr", "const long long*"),
            Param("tokens", "ptr", "long long*"),
            *(Param(name, "ptr", "int*") for name in ("counts", "positions", "slots", "text", "ends")),
            *(Param(name, "i32") for name in ("read", "width", "capacity", "context", "least", "most")),
            Param("host_copy", "ptr", "long long*"),
            Param("turn", "ptr", "int*"),
            Param("turns", "i32"),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        return self._call(f"accept_tokens<{self.block}, {_MOST}, {_UNROLL}>", "decoder/accept.cuh")
