"""Prefill attention to the keys and values in a cache, with ``wgmma`` on Hopper.

Device code: ``include/qcut/attention/prompt_wgmma.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.attention.prompt import HEAD, prompt_arguments, prompt_params, raw_bytes
from qcut.emitters.attention.scores import PLAIN, Scores
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import HALF_X, Constraint, can_make
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import include
from qcut.emitters.decoder.cache import CACHE, SCALED, cache_name, cache_template

FAMILY = "prompt_wgmma"
ARCH = "sm_90a"
COLUMNS = (64, 80, 96, 128, 160, 192, 256)
"""Columns of a product: a head and zeros."""
MIN_SLOTS, MAX_SLOTS = 3, 8
"""Slots in shared memory: keys and values of a block, and the keys of the next block."""
PARTS = (1, 2, 4, 8)
REGISTERS = 216
"""Registers of a thread that multiplies."""
RAW_TILES = 3
"""Tiles of int8 rows in flight, including the one that is converted."""


def _columns(head: int) -> int:
    return next((n for n in COLUMNS if n >= head), 0)


def _row_bytes(head: int) -> int:
    """Bytes of a row in shared memory: blocks of 64 columns."""
    return 128 * -(-_columns(head) // 64)


def _fixed_bytes(kernel: PromptWgmma) -> int:
    """Shared memory without slots: queries, two barriers, and int8 rows before they are converted."""
    tile = raw_bytes(kernel.cache, kernel.values, _columns(kernel.head), kernel.keys, in_turns=True)
    raw = RAW_TILES * tile if kernel.cache in SCALED else 0
    return kernel.rows * _row_bytes(kernel.head) + raw + 16


def _slot_bytes(kernel: PromptWgmma) -> int:
    """Shared memory of a slot: keys or values, three float32 of each key of a compressed cache, two barriers."""
    scales = 12 * kernel.keys if kernel.cache in SCALED else 0
    return kernel.keys * _row_bytes(kernel.head) + scales + 16


def _slots(kernel: PromptWgmma) -> int:
    """Slots of keys or of values."""
    return min(MAX_SLOTS, (architecture(ARCH).smem_bytes - _fixed_bytes(kernel)) // _slot_bytes(kernel))


CONSTRAINTS = (
    Constraint("arch", f"is {ARCH}", lambda k: k.arch == ARCH),
    HALF_X,
    CACHE,
    HEAD,
    Constraint("groups", "are 1 or 2 warpgroups", lambda k: k.groups in (1, 2)),
    Constraint("keys", "are 64, 80 or 128", lambda k: k.keys in (64, 80, 128)),
    Constraint("parts", "are 1, 2, 4 or 8: a portable cluster", lambda k: k.parts in PARTS),
    Constraint("one_group", "has the rows of all shared places", lambda k: k.parts == 1 or k.groups == 1),
    Constraint(
        "registers",
        f"hold scores, weights and weighted values: {REGISTERS} of a thread",
        lambda k: k.keys // 2 + k.keys // 4 + _columns(k.head) // 2 + 28 <= REGISTERS,
    ),
    Constraint("shared_memory", f"has {MIN_SLOTS} slots next to the queries", lambda k: _slots(k) >= MIN_SLOTS),
)
"""Constraints of `PromptWgmma`."""


@dataclass(frozen=True)
class PromptWgmma(Kernel):
    """Causal attention of chunks; see `qcut.emitters.attention.prompt`.

    Attributes:
        x: element type of queries and results, f16 or bf16.
        cache: of keys: x, s8 or u4 (queries are then rotated).
        head: columns of a head.
        arch: sm_90a.
        groups: warpgroups that multiply, 64 rows each.
        keys: keys of a block.
        parts: CTAs of a cluster, which divide the positions of a tile.
        values: type of values; None: that of keys.
        scores: a window, a softcap, sinks.
    """

    x: DType
    cache: DType
    head: int
    arch: str
    groups: int = 2
    keys: int = 128
    parts: int = 1
    values: DType | None = None
    scores: Scores = PLAIN

    constraints = CONSTRAINTS

    @classmethod
    def for_shape(
        cls,
        x: DType,
        cache: DType,
        head: int,
        arch: str,
        groups: int = 2,
        parts: int = 1,
        values: DType | None = None,
        scores: Scores = PLAIN,
    ) -> PromptWgmma:
        """Return the kernel with blocks of as many keys as registers allow.

        Raises:
            EmitError: see `CONSTRAINTS`.
        """
        keys = 128 if head <= 128 else 64 if cache in SCALED else 80
        return cls(x, cache, head, arch, groups, keys, parts, values, scores)

    @classmethod
    def is_legal(
        cls, x: DType, cache: DType, head: int, arch: str, groups: int = 2, values: DType | None = None
    ) -> bool:
        """Whether `for_shape` has a kernel."""
        return can_make(cls.for_shape, x, cache, head, arch, groups, values=values)

    @property
    def name(self) -> str:
        """``qcut_prompt_wgmma_{arch}_{x}_{cache}_h{head}_{rows}x{keys}``, ``_c{parts}``, `Scores.suffix`."""
        arch, cluster = self.arch.replace("_", ""), f"_c{self.parts}" if self.parts > 1 else ""
        shape = f"h{self.head}_{self.rows}x{self.keys}{cluster}{self.scores.suffix}"
        return f"qcut_{FAMILY}_{arch}_{self.x.value}_{cache_name(self.cache, self.values)}_{shape}"

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return 64 * self.groups

    @property
    def block(self) -> int:
        """Threads of a CTA: one more warpgroup copies."""
        return 128 * self.groups + 128

    @property
    def smem_bytes(self) -> int:
        """Shared memory."""
        return _fixed_bytes(self) + _slots(self) * _slot_bytes(self)

    def grid(self, count: int, sm_count: int) -> tuple[int, int, int]:
        """CTAs of a launch over so many tiles: a cluster for each tile, or a CTA for each multiprocessor."""
        return (count * self.parts if self.parts > 1 else min(count, sm_count), 1, 1)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order: see `qcut.emitters.attention.prompt.prompt_params`."""
        return prompt_params(self.x, self.cache, self.values, self.scores)

    def emit(self) -> KernelSource:
        """Text of the kernel. Everything is read after the previous kernel's end."""
        params = self.params()
        sizes = ", ".join(map(str, (self.head, _columns(self.head), self.groups, self.keys, _slots(self), self.parts)))
        types = f"{self.x.cpp}, {cache_template(self.cache, self.values)}"
        tile = f"qcut::PromptTile<{types}, {sizes}{self.scores.template()}>"
        return self._source(
            f"qcut::prompt_attention_wgmma<{tile}>(\n      {{{prompt_arguments(params, self.scores)}}});",
            device_code=include("attention/prompt_wgmma.cuh"),
            ctas_per_sm=1,
            smem_bytes=self.smem_bytes,
            cluster=self.parts,
        )
