"""Rotary positions for queries and keys, and keys and values of new tokens into the cache.

Device code: ``include/qcut/decoder/append.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qcut.emitters.core.constraints import FLOAT_X, Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, include
from qcut.emitters.decoder.cache import CACHE, cache_name, cache_params, cache_template, guide_params

Rotary = Literal["none", "half", "interleaved"]
ROTARY: tuple[Rotary, ...] = ("none", "half", "interleaved")
"""Pairs of columns that rotary positions rotate: i and ``i + head / 2``, or 2 i and 2 i + 1."""
_PAIRS = {"none": "kNone", "half": "kHalves", "interleaved": "kNeighbours"}
MANY_TOKENS = 256
"""Number of tokens from which a thread has several heads of its token."""
CONSTRAINTS = (
    FLOAT_X,
    CACHE,
    Constraint("aligned", "is true of u4", lambda k: k.aligned or DType.U4 not in (k.cache, k.values)),
    Constraint("head", "is 2 to 256 columns, an even number", lambda k: 2 <= k.head <= 256 and k.head % 2 == 0),
    Constraint("rotary", f"is {', '.join(ROTARY)}", lambda k: k.rotary in ROTARY),
)
"""Constraints of `RotateAndAppend`."""


@dataclass(frozen=True)
class RotateAndAppend(Kernel):
    """Rotary positions for queries, in place, and keys; keys and values of new tokens into the cache.

    q ``[tokens, heads, head]``, k and v ``[tokens, kv_heads, head]``, with strides between tokens; cos and sin
    ``[context, head]`` of x's type hold the factors of each column, equal for both columns of a pair. Token i belongs
    to sequence ``i // length``; its row of the tables is ``positions[i]``, its row of the cache ``[sequences, kv_heads,
    context, head]`` is ``slots[i]``.

    Attributes:
        x: element type of queries, keys, values and tables.
        cache: of the cache's keys: x, or s8 with a float32 scale ``[sequences, kv_heads, context]`` for each token and
            head, or u4 with a word of 16 bits; queries are then rotated like the keys.
        head: columns of a head.
        rotary: see `ROTARY`; with none, the kernel only stores keys and values.
        arch: real architecture.
        many: whether the kernel is meant for `MANY_TOKENS` tokens and more; results are the same.
        aligned: rows of q, k and v, tables and caches start at multiples of `vector` elements. False reads single ones.
        values: type of values; None: that of keys.
        ring: a token's row of the cache is ``slots[i] % context``, its slot below ``ring``, an argument.

    Exactness: bitwise equal to eager arithmetic in x's type, which rounds each product and the sum; s8 is bitwise
    ``qcut.numerics.int8.quantize_per_token_ref`` of each head, u4 is bitwise that of `qcut.numerics.int4`.
    """

    x: DType
    cache: DType
    head: int
    rotary: Rotary
    arch: str
    many: bool = False
    aligned: bool = True
    values: DType | None = None
    ring: bool = False

    constraints = CONSTRAINTS

    @property
    def name(self) -> str:
        """``qcut_append_{arch}_{x}_{cache}_h{head}``, ``_rope`` or ``_rope_pairs``, ``_m``, ``_u``, ``_ring``."""
        flags = {"half": "_rope", "interleaved": "_rope_pairs"}.get(self.rotary, "")
        flags += "_m" * self.many + "_u" * (not self.aligned) + "_ring" * self.ring
        cache = cache_name(self.cache, self.values)
        return f"qcut_append_{self.arch.replace('_', '')}_{self.x.value}_{cache}_h{self.head}{flags}"

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return 128

    @staticmethod
    def widest(head: int, element_size: int) -> int:
        """Elements that can be read at once: the power of two that divides half a head, 16 bytes at most."""
        return min((head & -head) // 2, 16 // element_size)

    @property
    def vector(self) -> int:
        """Elements that are read at once."""
        return self.widest(self.head, self.x.bits // 8) if self.aligned else 1

    @property
    def thread_heads(self) -> int:
        """Heads of a thread: as many as its registers hold with the rows of the tables."""
        return max(1, 64 // self.x.bits // -(-self._shares // 32)) if self.many else 1

    @property
    def cta_tokens(self) -> int:
        """Tokens of a CTA. With ``many``, each group of lanes has its own token, so that stores are contiguous."""
        return self._groups if self.many else 1

    @property
    def _groups(self) -> int:
        """Groups of lanes of a CTA, each with a head at a time. The lanes of a group are a power of two."""
        return self.block // min(32, 1 << (self._shares - 1).bit_length())

    @property
    def _shares(self) -> int:
        """Shares of a head, each of two vectors."""
        return self.head // 2 // self.vector

    def grid(self, tokens: int, heads: int, kv_heads: int) -> tuple[int, int, int]:
        """CTAs of a launch. If queries need no rotation, pass 0 heads here and to the kernel."""
        each = self._groups // self.cta_tokens * self.thread_heads
        return (-(-tokens // self.cta_tokens), -(-(heads + 2 * kv_heads) // each), 1)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``q, k, v``; ``cos, sin, positions`` (rotary only); ``slots``; ``keys, values``; ``key_scales, value_scales``
        (s8 and u4 only); ``guide`` (u4 keys only), null or that of `qcut.numerics.int4.guide_of`; ``q_stride,
        kv_stride, batch_stride`` in columns; ``heads, kv_heads, context, tokens``, ``length``, tokens of each sequence;
        ``ring`` (a ring only). Positions and slots are int32.
        """
        x = f"const {self.x.cpp}*"
        rows, scales = cache_params(self.cache, self.values, writes=True)
        tables = (Param("cos", "ptr", x), Param("sin", "ptr", x), Param("positions", "ptr", "const int*"))
        return (
            Param("q", "ptr", f"{self.x.cpp}*"),
            Param("k", "ptr", x),
            Param("v", "ptr", x),
            *(tables if self.rotary != "none" else ()),
            Param("slots", "ptr", "const int*"),
            *rows,
            *scales,
            *guide_params(self.cache),
            *(Param(name, "i64") for name in ("q_stride", "kv_stride", "batch_stride")),
            *(Param(name, "i32") for name in ("heads", "kv_heads", "context", "tokens", "length")),
            *(Param("ring", "i32"),) * self.ring,
        )

    def emit(self) -> KernelSource:
        """Text of the kernel. Everything is read after the previous kernel's end."""
        params = self.params()
        sizes = f"{self.vector}, {self.cta_tokens}, {self.thread_heads}, {self.block}{', true' * self.ring}"
        pointers = ("q", "k", "v", "cos", "sin", "positions", "slots", "keys", "values")
        compressed = ("key_scales", "value_scales", "guide")
        return self._source(
            f"qcut::rotate_and_append<{self.x.cpp}, {cache_template(self.cache, self.values)}, {self.head}, "
            f"qcut::Pairs::{_PAIRS[self.rotary]}, {sizes}>({call_arguments((*pointers, *compressed), params)}, "
            f"q_stride, kv_stride, batch_stride, heads, kv_heads, context, tokens, length{', ring' * self.ring});",
            device_code=include("decoder/append.cuh"),
        )
