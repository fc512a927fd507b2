"""The attention of a decoder's step in one launch: rotary positions, the cache's new row, attention.

Device code: ``include/qcut/decoder/attention/append.cuh``. A kernel does the work of
`qcut.emitters.decoder.append.RotateAndAppend` and then of `qcut.emitters.decoder.attention.mma.AttentionMma`.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.source import KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include, kernel_source
from qcut.emitters.decoder.attention.mma import AttentionMma
from qcut.emitters.decoder.cache import cache_params, guide_params

FAMILY = "attention_append"


@dataclass(frozen=True)
class AttentionAppend:
    """``RotateAndAppend`` of a token of each sequence, and ``AttentionMma`` over the cache with it.

    Operands are those of the two kernels, but q is not written. A new row goes to its slot of the cache and takes part
    in the attention if the slot is one of those that the query sees.

    Attributes:
        attention: the form of attention.
        rotary: whether there are rotary positions.

    Exactness: results and cache are bitwise those of the two kernels.
    """

    attention: AttentionMma
    rotary: bool

    @property
    def name(self) -> str:
        """``qcut_attention_append_{arch}_{shape}`` with the attention's, and ``_rope`` where positions are rotary."""
        arch = self.attention.arch.replace("_", "")
        return f"qcut_{FAMILY}_{arch}_{self.attention.shape}{'_rope' if self.rotary else ''}"

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``q, k, v``; ``cos, sin`` (rotary alone); ``positions, slots``; ``keys, values``; ``key_scales, value_scales``
        (s8 and u4); ``guide`` (u4 keys alone), null or that of `qcut.numerics.int4.guide_of`; ``out, workspace,
        counters``; ``absmax``, null or float32 for each sequence, which is raised to the largest magnitude of its row
        of out; ``q_stride, kv_stride, batch_stride`` in elements; ``kv_heads``, ``queries`` of each, ``context``,
        ``scale * log2(e)``; and what `qcut.emitters.decoder.attention.scores.Scores` adds.
        """
        x = f"const {self.attention.x.cpp}*"
        rows, scales = cache_params(self.attention.cache, self.attention.values, writes=True)
        tables = (Param("cos", "ptr", x), Param("sin", "ptr", x))
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
        )


def emit_attention_append(desc: AttentionAppend) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``. Everything is read after the previous kernel's end."""
    attention, params = desc.attention, desc.params()
    pointers = ("q", "k", "v", "cos", "sin", "positions", "slots", "keys", "values")
    compressed = ("key_scales", "value_scales", "guide")
    given, scores = call_arguments((*pointers, *compressed), params), attention.scores
    return kernel_source(
        desc.name,
        attention.arch,
        params,
        f"qcut::AppendAttention<{attention.template}, {flag(desc.rotary)}{scores.template}>::run({given}, out,\n"
        "      workspace, counters, absmax, q_stride, kv_stride, batch_stride, kv_heads, queries, context, scale"
        f"{scores.arguments});",
        device_code=include("decoder/attention/append.cuh"),
        block=attention.block,
        ctas_per_sm=attention.resident,
        waits=True,
        cluster=attention.cluster,
    )
