"""One step of a decoder between its projections in one launch: rotary positions, the cache's new row, attention.

Device code: ``include/qcut/decoder/attention/append.cuh``. `qcut.emitters.decoder.transformer.RotateAndAppend`, then
`qcut.emitters.decoder.attention.mma.AttentionMma`.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.decoder.attention.mma import AttentionMma, launch_bounds

FAMILY = "attention_append"


@dataclass(frozen=True)
class AttentionAppend:
    """``RotateAndAppend`` of a token of each sequence, and ``AttentionMma`` over the cache with it.

    Operands as the two have them, but q stays as it is. A new row goes to its slot of the cache, and is read where that
    is one of ``0`` to ``positions[b]``.

    Attributes:
        attention: the form of attention.
        rotary: whether there are rotary positions.

    Exactness: bitwise what the two kernels store and return.
    """

    attention: AttentionMma
    rotary: bool

    @property
    def name(self) -> str:
        """``qcut_attention_append_{arch}_...`` as the attention's, ``_rope`` where positions are rotary."""
        return self.attention.name.replace("attention_mma", FAMILY) + ("_rope" if self.rotary else "")

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``q, k, v``; ``cos, sin`` (rotary alone); ``positions, slots``; ``keys, values``; ``key_scales, value_scales``
        (s8 alone); ``out, workspace, counters``; ``absmax``, null or float32 for each sequence, which is raised to the
        largest magnitude of its row of out; ``q_stride, kv_stride, batch_stride`` in elements; ``kv_heads``,
        ``queries`` of each, ``context``, ``scale * log2(e)``.
        """
        names = ["q", "k", "v", *["cos", "sin"] * self.rotary, "positions", "slots", "keys", "values"]
        names += ["key_scales", "value_scales"] * (self.attention.cache is DType.S8)
        return (
            *(Param(name, "ptr") for name in (*names, "out", "workspace", "counters", "absmax")),
            *(Param(name, "i64") for name in ("q_stride", "kv_stride", "batch_stride")),
            *(Param(name, "i32") for name in ("kv_heads", "queries", "context")),
            Param("scale", "f32"),
        )


def emit_attention_append(desc: AttentionAppend) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``. Everything is read after the previous kernel's end."""
    attention, params = desc.attention, desc.params()
    x, cache = attention.x.cpp, attention.cache.cpp
    types = dict.fromkeys(("q", "k", "v", "cos", "sin"), f"const {x}*") | {"out": f"{x}*", "counters": "unsigned*"}
    types |= dict.fromkeys(("positions", "slots"), "const int*") | dict.fromkeys(("keys", "values"), f"{cache}*")
    types |= dict.fromkeys(("key_scales", "value_scales", "workspace", "absmax"), "float*") | {"scale": "float"}
    types |= dict.fromkeys(("q_stride", "kv_stride", "batch_stride"), "long long")
    names = {p.name for p in params}
    signature = ", ".join(f"{types.get(p.name, 'int')} {p.name}" for p in params)
    order = ("q", "k", "v", "cos", "sin", "positions", "slots", "keys", "values", "key_scales", "value_scales")
    given = ", ".join(name if name in names else "nullptr" for name in order)
    text = (
        "#include <qcut/decoder/attention/append.cuh>\n\n"
        f'extern "C" __global__ void {launch_bounds(attention)}\n'
        f"{desc.name}({signature}) {{\n"
        f"  qcut::AppendAttention<{attention.template}, {str(desc.rotary).lower()}>::run({given}, out,\n"
        "      workspace, counters, absmax, q_stride, kv_stride, batch_stride, kv_heads, queries, context, scale);\n"
        "}\n"
    )
    return KernelSource(
        name=desc.name,
        text=text,
        entry=desc.name,
        params=params,
        arch=attention.arch,
        block=attention.block,
        includes=("qcut", "cuda"),
    )
