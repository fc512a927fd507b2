"""Attention of several new tokens of each sequence in one launch, as drafted tokens are verified.

Device code: ``include/qcut/attention/append_tokens.cuh``. A kernel does for several tokens of each sequence what
`qcut.emitters.attention.append.AttentionAppend` does for one, and reads the cache once for those that one CTA has.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.attention.append import AttentionAppend
from qcut.emitters.attention.mma import MAX_GROUP, SMEM_STATIC, smem_bytes
from qcut.emitters.core.constraints import Constraint, can_make
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import KernelSource, Param
from qcut.emitters.decoder.cache import cache_bits

FAMILY = "attention_append_tokens"
MAX_ROWS = 8
"""Most tokens of a sequence."""


def _smem_bytes(kernel: AttentionAppendTokens, tokens: int) -> int:
    attention = kernel.step.attention
    columns = tokens * attention.group
    queries = 2 * columns * (attention.head + 8)
    new_rows = kernel.rows * (attention.head * cache_bits(attention.cache, attention.values) // 8 + 8)
    return (
        smem_bytes(attention, columns) + queries + new_rows + 8 * MAX_GROUP + 56
    )  # 48 of these: what alignment may add


CONSTRAINTS = (
    Constraint("rows", f"are 2 to {MAX_ROWS} tokens of each sequence", lambda k: 2 <= k.rows <= MAX_ROWS),
    Constraint(
        "shared_memory",
        "holds a record of each warp and query, and the new rows: 48 KB",
        lambda k: _smem_bytes(k, 1) <= SMEM_STATIC,
    ),
)
"""Constraints of `AttentionAppendTokens`."""


@dataclass(frozen=True)
class AttentionAppendTokens(Kernel):
    """``RotateAndAppend`` of some tokens of each sequence, and ``AttentionMma`` of each of them over the cache.

    Operands are those of ``step``, with an element for each token, a sequence's tokens side by side. The tokens of a
    sequence have consecutive slots. The first token without the next slot of the cache, and tokens after it, are not
    stored; their results are unspecified. A token's position lies before the slots of the tokens after it.

    Attributes:
        step: the kernel for one token; its form's group is all queries of a head of keys, or more than 4.
        rows: tokens of each sequence, 2 to 8.

    Exactness: bitwise the kernels if new values are finite and a window, if any, leaves no position of the sequence
    out. Otherwise, a window's sums are added in another order.
    """

    step: AttentionAppend
    rows: int

    constraints = CONSTRAINTS

    @classmethod
    def is_legal(cls, step: AttentionAppend, rows: int) -> bool:
        """Whether there is such a kernel."""
        return can_make(cls, step, rows)

    @property
    def tokens(self) -> int:
        """Tokens of a CTA: as many as the columns of a product and shared memory hold."""
        most = min(self.rows, MAX_GROUP // self.step.attention.group)
        most = next(n for n in range(most, 0, -1) if n == 1 or _smem_bytes(self, n) <= SMEM_STATIC)
        return -(-self.rows // -(-self.rows // most))

    @property
    def name(self) -> str:
        """The name of the step's kernel with ``_tokens`` in the family's name and ``_x{rows}``."""
        return f"{self.step.name.replace('_append_', '_append_tokens_', 1)}_x{self.rows}"

    @property
    def arch(self) -> str:  # type: ignore[override]
        """Architecture of the attention."""
        return self.step.arch

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return self.step.block

    def grid(self, batch: int, kv_heads: int, queries: int, parts: int) -> tuple[int, int, int]:
        """CTAs of a launch for ``batch`` sequences; with a cluster, ``parts`` is the cluster's size."""
        x, y, z = self.step.attention.grid(batch, kv_heads, queries, parts)
        return (x, y * -(-self.rows // self.tokens), z)

    def workspace_floats(self, batch: int, kv_heads: int, queries: int, parts: int) -> int:
        """float32 of workspace: see `qcut.emitters.attention.mma.AttentionMma.workspace_floats`."""
        of_one = self.step.attention.workspace_floats(batch, kv_heads, queries, parts)
        return of_one * -(-self.rows // self.tokens) * self.tokens

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order: those of `qcut.emitters.attention.append.AttentionAppend`."""
        return self.step.params()

    def emit(self) -> KernelSource:
        """Text of the kernel. Only settled operands are read before the previous kernel's end."""
        attention, own = self.step.attention, f"{self.tokens}, {self.rows}, "
        before = f"{attention.template}, "
        return self._source(
            self.step.call(f"AppendTokens<{before}{own}{self.step.template.removeprefix(before)}>"),
            device_code=self.step.device_code("append_tokens.cuh"),
            ctas_per_sm=attention.resident,
            cluster=attention.cluster,
        )
