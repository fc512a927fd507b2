"""Rotary positions for queries and keys, and keys and values of new tokens into the cache.

Device code: ``include/qcut/decoder/append.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.source import FLOATS, DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, include, kernel_source

Rotary = Literal["none", "half", "interleaved"]
ROTARY: tuple[Rotary, ...] = ("none", "half", "interleaved")
"""Which columns rotary positions turn together: i and ``i + head / 2``, or 2 i and 2 i + 1."""
_PAIRS = {"none": "kNone", "half": "kHalves", "interleaved": "kNeighbours"}
MANY_TOKENS = 256
"""From so many on a thread has several heads of its token."""
CONSTRAINTS = (
    Constraint("x", "is f16, bf16 or f32", lambda k: k.x in FLOATS),
    Constraint("cache", "is x's type, or s8", lambda k: k.cache in (k.x, DType.S8)),
    Constraint("head", "is 2 to 256 columns, an even number", lambda k: 2 <= k.head <= 256 and k.head % 2 == 0),
    Constraint("rotary", f"is {', '.join(ROTARY)}", lambda k: k.rotary in ROTARY),
)
"""What `RotateAndAppend` can be."""


@dataclass(frozen=True)
class RotateAndAppend:
    """Rotary positions for queries, in place, and keys; keys and values of new tokens into the cache.

    q ``[tokens, heads, head]``, k and v ``[tokens, kv_heads, head]``, with strides between tokens; cos and sin
    ``[context, head]`` of x's type, at a column what rotates it: both of a pair have the same. Token i is sequence
    ``i // length``'s, at ``positions[i]`` of the tables and ``slots[i]`` of the cache
    ``[sequences, kv_heads, context, head]``.

    Attributes:
        x: element type of queries, keys, values and tables.
        cache: of the cache: x, or s8 with a float32 scale ``[sequences, kv_heads, context]`` for each token and head.
        head: columns of a head.
        rotary: see `ROTARY`; with none, keys and values are only stored.
        arch: real architecture.
        many: for `MANY_TOKENS` and more; results are the same.
        aligned: rows of q, k and v, tables and caches start at multiples of `vector` elements. False reads single ones.

    Exactness: bitwise the eager arithmetic in x's type, each product and the sum rounded; s8 as
    ``qcut.numerics.int8.quantize_per_token_ref`` of a head.
    """

    x: DType
    cache: DType
    head: int
    rotary: Rotary
    arch: str
    many: bool = False
    aligned: bool = True

    def __post_init__(self) -> None:
        check(self.name, CONSTRAINTS, self)

    @property
    def name(self) -> str:
        """``qcut_append_{arch}_{x}_{cache}_h{head}``, ``_rope`` or ``_rope_pairs``, ``_m``, ``_u``."""
        flags = {"half": "_rope", "interleaved": "_rope_pairs"}.get(self.rotary, "")
        flags += "_m" * self.many + "_u" * (not self.aligned)
        return f"qcut_append_{self.arch.replace('_', '')}_{self.x.value}_{self.cache.value}_h{self.head}{flags}"

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
        """Of a thread: as many as its registers hold with the tables' rows."""
        return max(1, 64 // self.x.bits // -(-self._shares // 32)) if self.many else 1

    @property
    def cta_tokens(self) -> int:
        """Of a CTA: with many each group of lanes has its own, so that what they store lies side by side."""
        return self._groups if self.many else 1

    @property
    def _groups(self) -> int:
        """Of a CTA, each with a head at a time: the lanes of one are a power of two."""
        return self.block // min(32, 1 << (self._shares - 1).bit_length())

    @property
    def _shares(self) -> int:
        """Of a head, each of two vectors."""
        return self.head // 2 // self.vector

    def grid(self, tokens: int, heads: int, kv_heads: int) -> tuple[int, int, int]:
        """CTAs of a launch. Without rotary positions queries have nothing to do: pass 0 heads, to the kernel too."""
        each = self._groups // self.cta_tokens * self.thread_heads
        return (-(-tokens // self.cta_tokens), -(-(heads + 2 * kv_heads) // each), 1)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``q, k, v``; ``cos, sin, positions`` (rotary alone); ``slots``; ``keys, values``; ``key_scales, value_scales``
        (s8 alone); ``q_stride, kv_stride, batch_stride`` in elements; ``heads, kv_heads, context, tokens``, ``length``,
        tokens of each sequence. Positions and slots are int32.
        """
        x, cache = f"const {self.x.cpp}*", f"{self.cache.cpp}*"
        tables = (Param("cos", "ptr", x), Param("sin", "ptr", x), Param("positions", "ptr", "const int*"))
        scales = (Param("key_scales", "ptr", "float*"), Param("value_scales", "ptr", "float*"))
        return (
            Param("q", "ptr", f"{self.x.cpp}*"),
            Param("k", "ptr", x),
            Param("v", "ptr", x),
            *(tables if self.rotary != "none" else ()),
            Param("slots", "ptr", "const int*"),
            Param("keys", "ptr", cache),
            Param("values", "ptr", cache),
            *(scales if self.cache is DType.S8 else ()),
            *(Param(name, "i64") for name in ("q_stride", "kv_stride", "batch_stride")),
            *(Param(name, "i32") for name in ("heads", "kv_heads", "context", "tokens", "length")),
        )


def emit_append(desc: RotateAndAppend) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``. Everything is read after the previous kernel's end."""
    params = desc.params()
    sizes = f"{desc.vector}, {desc.cta_tokens}, {desc.thread_heads}, {desc.block}"
    pointers = ("q", "k", "v", "cos", "sin", "positions", "slots", "keys", "values", "key_scales", "value_scales")
    return kernel_source(
        desc.name,
        desc.arch,
        params,
        f"qcut::rotate_and_append<{desc.x.cpp}, {desc.cache.cpp}, {desc.head}, qcut::Pairs::{_PAIRS[desc.rotary]}, "
        f"{sizes}>({call_arguments(pointers, params)}, "
        "q_stride, kv_stride, batch_stride, heads, kv_heads, context, tokens, length);",
        device_code=include("decoder/append.cuh"),
        block=desc.block,
        waits=True,
    )
