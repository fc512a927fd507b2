"""Attention of one new token of each sequence to the keys and values in a cache, split over the context.

Device code: ``include/qcut/attention/simt.cuh``. A key serves all queries that share it, so that the cache is
read once. With few sequences, the context is split into parts that fill the GPU, and the CTA that finishes last adds
up the parts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from qcut.emitters.attention.scores import PLAIN, Scores
from qcut.emitters.core.constraints import FLOAT_X, Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, EmitError, KernelSource, Param
from qcut.emitters.core.text import call_arguments, include
from qcut.emitters.decoder.cache import cache_params

FAMILY = "attention_decode"
_SMEM_STATIC = 48 * 1024


def _vector(cache: DType) -> int:
    return 128 // cache.bits


def _lanes(kernel: AttentionDecode) -> int:
    vectors = kernel.head // _vector(kernel.cache)
    return min(32, 1 << max(0, vectors - 1).bit_length())


def _elements(kernel: AttentionDecode) -> int:
    """Columns of a key in a lane."""
    vectors = kernel.head // _vector(kernel.cache)
    return -(-vectors // _lanes(kernel)) * _vector(kernel.cache)


def _registers(kernel: AttentionDecode) -> int:
    """Estimate a thread's registers: a query, its values, keys and values in flight, one widened, and the rest."""
    elements = _elements(kernel)
    in_flight = 2 * kernel.unroll * elements * kernel.cache.bits // 32
    return 2 * kernel.group * elements + in_flight + elements + kernel.unroll * kernel.group + 40


CONSTRAINTS = (
    FLOAT_X,
    Constraint("cache", "is x's type, or s8", lambda k: k.cache in (k.x, DType.S8)),
    Constraint(
        "head",
        "is 8 to 256 columns, in whole vectors of 16 bytes of the cache",
        lambda k: 8 <= k.head <= 256 and k.head % _vector(k.cache) == 0,
    ),
    Constraint("group", "is 1, 2, 4 or 8 queries", lambda k: k.group in (1, 2, 4, 8)),
    Constraint("warps", "are 1 to 16", lambda k: 1 <= k.warps <= 16),
    Constraint("unroll", "is 1 to 8 sets of keys", lambda k: 1 <= k.unroll <= 8),
    Constraint(
        "registers",
        "hold queries, values and keys: a thread's 255, and the SM's 65536",
        lambda k: _registers(k) <= min(255, 65_536 // (32 * k.warps)),
    ),
    Constraint(
        "shared_memory",
        "holds a record of each warp and query: 48 KB",
        lambda k: 4 * k.warps * k.group * (k.head + 2) < _SMEM_STATIC,
    ),
)
"""Constraints of `AttentionDecode`."""


@dataclass(frozen=True)
class AttentionDecode(Kernel):
    """``out[b, h] = softmax_t(scale * q[b, h] . K[b, h / queries, t]) . V[b, h / queries, t]``, t to ``positions[b]``.

    q ``[B, kv_heads * queries, head]``, a row stride in elements between sequences; out ``[B, kv_heads * queries,
    head]`` contiguous. K and V ``[B, kv_heads, context, head]`` with a stride between sequences, starting at multiples
    of 16 bytes; with s8 each token and head has a float32 scale, ``[B, kv_heads, context]`` contiguous.

    Attributes:
        x: element type of queries and results.
        cache: of keys and values: x, or s8.
        head: columns of a head.
        group: queries of a CTA, of those that share a head of keys.
        arch: real architecture.
        warps: of a CTA.
        unroll: sets of keys that a warp has in flight.
        scores: a window, a softcap, sinks.

    Exactness: float32, with exponentials of 2 ulp; sums in an order that the length and the number of parts fix. A
    sequence's result does not depend on the others. NaN in a key or value that is read, or in q, reaches its results.
    """

    x: DType
    cache: DType
    head: int
    group: int
    arch: str
    warps: int = 4
    unroll: int = 4
    scores: Scores = PLAIN

    constraints = CONSTRAINTS

    @classmethod
    def for_shape(
        cls, x: DType, cache: DType, head: int, queries: int, arch: str, scores: Scores = PLAIN
    ) -> AttentionDecode:
        """Return the kernel for a number of queries per head of keys, with as many loads in flight as registers allow.

        Raises:
            EmitError: see `CONSTRAINTS`.
        """
        group = next((g for g in (1, 2, 4) if g >= queries), 8)
        for unroll in (4, 2):
            for size in (group, min(group, 4), min(group, 2)):
                with suppress(EmitError):
                    return cls(x, cache, head, size, arch, 4, unroll, scores)
        return cls(x, cache, head, 1, arch, 4, 1, scores)

    @property
    def name(self) -> str:
        """``qcut_attention_decode_{arch}_{x}_{cache}_h{head}g{group}_w{warps}u{unroll}``, and `Scores.suffix`."""
        return (
            f"qcut_{FAMILY}_{self.arch.replace('_', '')}_{self.x.value}_{self.cache.value}_h{self.head}g{self.group}"
            f"_w{self.warps}u{self.unroll}{self.scores.suffix}"
        )

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def step(self) -> int:
        """Tokens that a CTA reads at once."""
        return self.warps * self.unroll * (32 // _lanes(self))

    def parts(self, batch: int, kv_heads: int, queries: int, context: int, sm_count: int) -> int:
        """Parts of the context: enough CTAs for every SM to have two, each with two steps at least."""
        ctas = batch * kv_heads * -(-queries // self.group)
        return max(1, min(-(-2 * sm_count // ctas), context // (2 * self.step), 64))

    def grid(self, batch: int, kv_heads: int, queries: int, parts: int) -> tuple[int, int, int]:
        """CTAs of a launch."""
        return (parts, kv_heads * -(-queries // self.group), batch)

    def workspace_floats(self, batch: int, kv_heads: int, queries: int, parts: int) -> int:
        """float32 of workspace: a record of each part and query; none for one part."""
        places = batch * kv_heads * -(-queries // self.group)
        return places * parts * self.group * (self.head + 2) if parts > 1 else 0

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order: see `attention_params`."""
        return attention_params(self.x, self.cache, scores=self.scores)

    def emit(self) -> KernelSource:
        """Text of the kernel. Everything is read after the previous kernel's end."""
        tile = f"{self.x.cpp}, {self.cache.cpp}, {self.head}, {self.group}, {self.warps}, {self.unroll}"
        params = self.params()
        return self._source(
            attention_call(f"DecodeAttention<{tile}{self.scores.template()}>", params, self.scores),
            device_code=include("attention/simt.cuh"),
        )


def attention_params(x: DType, keys: DType, values: DType | None = None, scores: Scores = PLAIN) -> tuple[Param, ...]:
    """Arguments of every form of attention, in order.

    ``q, keys, values``; ``key_scales, value_scales`` (s8 and u4); ``positions`` int32 ``[B]``; ``out, workspace,
    counters`` (uint32, one for each CTA of a part, 0 before the first launch, and again after each); strides of q
    and of the cache between sequences; ``kv_heads``, ``queries`` of each, ``context``, ``scale * log2(e)``; and what
    `Scores` adds.
    """
    rows, scales = cache_params(keys, values, writes=False)
    return (
        Param("q", "ptr", f"const {x.cpp}*"),
        *rows,
        *scales,
        Param("positions", "ptr", "const int*"),
        Param("out", "ptr", f"{x.cpp}*"),
        Param("workspace", "ptr", "float*"),
        Param("counters", "ptr", "unsigned*"),
        Param("q_stride", "i64"),
        Param("batch_stride", "i64"),
        Param("kv_heads", "i32"),
        Param("queries", "i32"),
        Param("context", "i32"),
        Param("scale", "f32"),
        *scores.params(),
    )


def attention_call(function: str, params: tuple[Param, ...], scores: Scores = PLAIN) -> str:
    """The statement that passes `attention_params` to ``function::run``, null pointers for scales if there are none."""
    scales = call_arguments(("key_scales", "value_scales"), params)
    return (
        f"qcut::{function}::run(q, keys, values, {scales}, positions, out, workspace, counters,\n"
        f"      q_stride, batch_stride, kv_heads, queries, context, scale{scores.arguments()});"
    )
