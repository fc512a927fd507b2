"""The attention of a decoder's step in one launch: norms of heads, rotary positions, the cache's new row, attention.

Device code: ``include/qcut/attention/append.cuh``. A kernel does the work of
`qcut.emitters.decoder.norm.NormRows`, a head a row, of `qcut.emitters.decoder.append.RotateAndAppend` and of
`qcut.emitters.attention.mma.AttentionMma`, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.codebook.rotate_rows import RowsRotation
from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include
from qcut.emitters.decoder.cache import cache_params, guide_params

FAMILY = "attention_append"
_VECTOR = 4
"""Columns of a result that a thread has."""

CONSTRAINTS = (
    Constraint(
        "rotation",
        "is of the results to their type, in groups that divide the columns of a CTA's queries; values are not of u4",
        lambda k: k.rotation is None or k.can_rotate(k.rotation, k.attention.group),
    ),
)
"""Constraints of `AttentionAppend`."""


@dataclass(frozen=True)
class AttentionAppend(Kernel):
    """``RotateAndAppend`` of a token of each sequence, and ``AttentionMma`` over the cache with it.

    Operands are those of the kernels, but q is not written. A new row goes to its slot of the cache and takes part
    in the attention if the slot is one of those that the query sees.

    Attributes:
        attention: the form of attention.
        rotary: whether there are rotary positions.
        norms: whether queries and keys are RMS-normalized first, each head by itself.
        settled: whether only q, k and v may still be written when the kernel starts; all other operands are then read
            before the kernel waits (programmatic dependent launch).
        rotation: rotates results into blocks of tokens, as `qcut.emitters.codebook.rotate.RotateTokens` makes them of
            a token's heads side by side; or None.

    Exactness: results and cache are bitwise those of the kernels.
    """

    attention: AttentionMma
    rotary: bool
    norms: bool = False
    settled: bool = False
    rotation: RowsRotation | None = None

    constraints = CONSTRAINTS

    def can_rotate(self, rotation: RowsRotation, queries: int) -> bool:
        """Whether the kernel can rotate results where a head of keys has so many queries: CTAs have whole groups."""
        attention = self.attention
        if rotation.quantized or not rotation.is_legal(attention.x, 1):
            return False
        parts = attention.group, queries % attention.group
        whole = all(part * attention.head % rotation.group == 0 for part in parts)
        return whole and (attention.values or attention.cache) is not DType.U4

    @property
    def name(self) -> str:
        """``qcut_attention_append_{arch}_{shape}`` of the attention; ``_rope``, ``_norm``, ``_settled``, rotation."""
        arch = self.attention.arch.replace("_", "")
        flags = "_rope" * self.rotary + "_norm" * self.norms + "_settled" * self.settled
        flags += self.rotation.name if self.rotation else ""
        return f"qcut_{FAMILY}_{arch}_{self.attention.shape}{flags}"

    @property
    def arch(self) -> str:  # type: ignore[override]
        """Architecture of the attention."""
        return self.attention.arch

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return self.attention.block

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``q, k, v``; ``cos, sin`` (rotary only); ``positions, slots``; ``keys, values``; ``key_scales, value_scales``
        (s8 and u4); ``guide`` (u4 keys only), null or that of `qcut.numerics.int4.guide_of`; ``out, workspace,
        counters``; ``absmax``, null or float32 for each sequence, which is raised to the largest magnitude of its row
        of out; ``q_stride, kv_stride, batch_stride`` in elements; ``kv_heads``, ``queries`` of each, ``context``,
        ``scale * log2(e)``; what `qcut.emitters.attention.scores.Scores` adds; ``query_norm, key_norm``,
        weights of a head, and ``eps`` (norms only); and the rotation's. With a rotation ``out`` are blocks, and
        ``absmax`` is not raised.
        """
        x = f"const {self.attention.x.cpp}*"
        rows, scales = cache_params(self.attention.cache, self.attention.values, writes=True)
        tables = (Param("cos", "ptr", x), Param("sin", "ptr", x))
        norms = (Param("query_norm", "ptr", x), Param("key_norm", "ptr", x), Param("eps", "f32"))
        return (
            *(Param(name, "ptr", x) for name in ("q", "k", "v")),
            *(tables if self.rotary else ()),
            Param("positions", "ptr", "const int*"),
            Param("slots", "ptr", "const int*"),
            *rows,
            *scales,
            *guide_params(self.attention.cache),
            Param("out", "ptr", f"{self.attention.x.cpp}*"),
            Param("workspace", "ptr", "float*"),
            Param("counters", "ptr", "unsigned*"),
            Param("absmax", "ptr", "float*"),
            *(Param(name, "i64") for name in ("q_stride", "kv_stride", "batch_stride")),
            *(Param(name, "i32") for name in ("kv_heads", "queries", "context")),
            Param("scale", "f32"),
            *self.attention.scores.params(),
            *(norms if self.norms else ()),
            *(self.rotation.params() if self.rotation else ()),
        )

    @property
    def template(self) -> str:
        """Arguments of the device code's template."""
        if self.rotation is not None:
            options = self.attention.scores.template(self.norms, self.settled, whole=True)
            made = self.rotation.device_class(self.attention.x, 1, self.block, _VECTOR)
            return f"{self.attention.template}, {flag(self.rotary)}{options}, {made}"
        both = self.settled or self.attention.scores.sinks
        more = (self.norms, self.settled) if both else (True,) * self.norms
        options = self.attention.scores.template(*more)
        return f"{self.attention.template}, {flag(self.rotary)}{options}"

    @property
    def options(self) -> str:
        """Optional arguments of the call, which follow the fixed ones."""
        scores = self.attention.scores
        absent = ("nullptr", "nullptr", "0.0f") if scores.sinks or self.rotation else ()
        norms = ("query_norm", "key_norm", "eps") if self.norms else absent
        if self.rotation is None:
            return scores.arguments(*norms)
        made = self.rotation.argument(self.attention.x, 1, self.block, _VECTOR)
        return f"{scores.arguments(*norms, whole=True)}, {made}"

    def call(self, device_class: str) -> str:
        """The call of a class of the device code that takes the kernel's arguments."""
        pointers = ("q", "k", "v", "cos", "sin", "positions", "slots", "keys", "values")
        compressed = ("key_scales", "value_scales", "guide")
        given = call_arguments((*pointers, *compressed), self.params())
        return (
            f"qcut::{device_class}::run({given}, out,\n"
            "      workspace, counters, absmax, q_stride, kv_stride, batch_stride, kv_heads, queries, context, scale"
            f"{self.options});"
        )

    def device_code(self, header: str) -> str:
        """The lines that include a header of attention, and what it needs."""
        return (self.rotation.device_code if self.rotation else "") + include(f"attention/{header}")

    def emit(self) -> KernelSource:
        """Text of the kernel. Only settled operands are read before the previous kernel's end."""
        attention = self.attention
        return self._source(
            self.call(f"AppendAttention<{self.template}>"),
            device_code=self.device_code("append.cuh"),
            ctas_per_sm=attention.resident,
            cluster=attention.cluster,
        )
