"""Prefill attention to the keys and values in a cache, with ``mma.sync``, on every architecture.

Device code: ``include/qcut/attention/prompt_mma.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.attention.prompt import HEAD, prompt_arguments, prompt_params, raw_bytes
from qcut.emitters.attention.scores import PLAIN, Scores
from qcut.emitters.core.arch import SMEM_LIMITS, architecture
from qcut.emitters.core.constraints import HALF_X, Constraint, can_make
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import include
from qcut.emitters.decoder.cache import CACHE, SCALED, cache_name, cache_template

FAMILY = "prompt_mma"
KEYS = (64, 32, 16)
"""Keys of a block."""

CONSTRAINTS = (
    HALF_X,
    CACHE,
    HEAD,
    Constraint("keys", "are 16, 32 or 64", lambda k: k.keys in KEYS),
    Constraint(
        "shared_memory",
        f"holds queries and two stages: {SMEM_LIMITS}",
        lambda k: k.smem_bytes <= architecture(k.arch).smem_bytes,
    ),
)
"""Constraints of `PromptMma`."""


@dataclass(frozen=True)
class PromptMma(Kernel):
    """Causal attention of chunks; see `qcut.emitters.attention.prompt`.

    Attributes:
        x: element type of queries and results, f16 or bf16.
        cache: of keys: x, s8 or u4 (queries are then rotated).
        head: columns of a head.
        arch: real architecture.
        keys: keys of a block.
        values: type of values; None: that of keys.
        scores: a window, a softcap, sinks.
    """

    x: DType
    cache: DType
    head: int
    arch: str
    keys: int = 64
    values: DType | None = None
    scores: Scores = PLAIN

    constraints = CONSTRAINTS

    @classmethod
    def for_shape(
        cls, x: DType, cache: DType, head: int, arch: str, values: DType | None = None, scores: Scores = PLAIN
    ) -> PromptMma:
        """Return the kernel with blocks of as many keys as registers and shared memory allow.

        Raises:
            EmitError: see `CONSTRAINTS`.
        """
        keys = [n for n in KEYS if n < 64 or head <= 128]
        fitting = (n for n in keys[:-1] if can_make(cls, x, cache, head, arch, n, values))
        return cls(x, cache, head, arch, next(fitting, keys[-1]), values, scores)

    @classmethod
    def is_legal(cls, x: DType, cache: DType, head: int, arch: str, values: DType | None = None) -> bool:
        """Whether `for_shape` has a kernel."""
        return can_make(cls.for_shape, x, cache, head, arch, values)

    @property
    def name(self) -> str:
        """``qcut_prompt_mma_{arch}_{x}_{cache}_h{head}_{rows}x{keys}``, and `Scores.suffix`."""
        arch = self.arch.replace("_", "")
        types = f"{self.x.value}_{cache_name(self.cache, self.values)}"
        return f"qcut_{FAMILY}_{arch}_{types}_h{self.head}_{self.rows}x{self.keys}{self.scores.suffix}"

    @property
    def columns(self) -> int:
        """Columns of a product."""
        return -(-self.head // 16) * 16

    @property
    def rows(self) -> int:
        """Queries of a tile: 16 of each warp."""
        return 64

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return 128

    @property
    def smem_bytes(self) -> int:
        """Shared memory: queries, two stages of keys, values and scales, and int8 rows before they are converted."""
        row = 128 * -(-self.columns // 64)
        raw = raw_bytes(self.cache, self.values, self.columns, self.keys, in_turns=False)
        scales, raw = (12 * self.keys, 2 * raw) if self.cache in SCALED else (0, 0)
        return self.rows * row + 2 * (2 * self.keys * row + scales) + raw

    def grid(self, count: int, sm_count: int) -> tuple[int, int, int]:
        """CTAs of a launch over so many tiles: one for each."""
        return (count, 1, 1)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order: see `qcut.emitters.attention.prompt.prompt_params`."""
        return prompt_params(self.x, self.cache, self.values, self.scores)

    def emit(self) -> KernelSource:
        """Text of the kernel. Everything is read after the previous kernel's end."""
        params = self.params()
        types = f"{self.x.cpp}, {cache_template(self.cache, self.values)}"
        tile = f"qcut::PromptMmaTile<{types}, {self.head}, {self.columns}, {self.keys}{self.scores.template()}>"
        return self._source(
            f"qcut::prompt_attention_mma<{tile}>(\n      {{{prompt_arguments(params, self.scores)}}});",
            device_code=include("attention/prompt_mma.cuh"),
            ctas_per_sm=2,
            smem_bytes=self.smem_bytes,
        )
