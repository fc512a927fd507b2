"""The kernel that splits int16 tokens into rows of int8 halves, for products of many tokens.

Device code: ``include/qcut/decoder/split_halves.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import KernelSource, Param
from qcut.emitters.core.text import flag

THREADS = 256
_COLUMNS = 16


@dataclass(frozen=True)
class SplitHalves(Kernel):
    """x ``[m, k]`` int16 with a row stride in elements, to q, int8 in blocks of 16 rows with k_padded columns.

    q is as `qcut.numerics.int16.in_blocks` describes, zero beyond k; rows of tokens past m are not written.

    Attributes:
        arch: real architecture.
        aligned: k is a multiple of 16, and rows of x start at multiples of 16 bytes; False loads single elements.

    Exactness: bitwise.
    """

    arch: str
    aligned: bool = True

    @property
    def name(self) -> str:
        """``qcut_split_halves_{arch}``, and ``_u`` where rows are unaligned."""
        return f"qcut_split_halves_{self.arch.replace('_', '')}{'' if self.aligned else '_u'}"

    def grid(self, m: int, k_padded: int) -> tuple[int, int, int]:
        """CTAs for m rows, a thread for each 16 columns."""
        return (-(-m * (k_padded // _COLUMNS) // THREADS), 1, 1)

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return THREADS

    def params(self) -> tuple[Param, ...]:
        """``x, q, x_stride, m, k, k_padded``; k_padded is a multiple of 16."""
        return (
            Param("x", "ptr", "const short*"),
            Param("q", "ptr", "int8_t*"),
            Param("x_stride", "i64"),
            *(Param(size, "i32") for size in ("m", "k", "k_padded")),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        return self._call(f"split_rows<{THREADS}, {flag(self.aligned)}>", "decoder/split_halves.cuh")
