"""Shared by all prefill attention kernels: arguments and grid.

A kernel computes, for token ``t = b * length + i`` of a chunk of sequence b,
``out[t, h] = softmax_p(scale * q[t, h] . K[b, h / group, p]) . V[b, h / group, p]``, p to ``starts[b] + i``, if
``i < lengths[b]``, and 0 otherwise; a window keeps the last of these positions. The rows of a tile are the
queries of neighbouring tokens for one head of keys.
"""

from __future__ import annotations

from qcut.emitters.attention.scores import PLAIN, Scores
from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.source import DType, Param
from qcut.emitters.core.text import call_arguments
from qcut.emitters.decoder.cache import cache_params, value_type

HEAD = Constraint(
    "head",
    "is 8 to 256 columns, in whole vectors of 16 bytes of the cache",
    lambda kernel: 8 <= kernel.head <= 256 and kernel.head % min(16, 128 // kernel.cache.bits) == 0,
)
"""Constraint of prefill attention; takes the kernel."""


def prompt_params(x: DType, keys: DType, values: DType | None = None, scores: Scores = PLAIN) -> tuple[Param, ...]:
    """Arguments of every form, in order.

    ``q, keys, values``; ``key_scales, value_scales`` (s8 and u4); ``starts, lengths`` int32 ``[sequences]``; ``out``;
    ``absmax``, null or float32 for each token, which is raised to the largest magnitude of its row of out; the stride
    of q between tokens in elements; ``sequences``; ``length``; ``kv_heads``; ``group``, queries of each; ``context``;
    ``scale * log2(e)``, above 0; and what `Scores` adds. q and the cache start at multiples of 16 bytes, and so
    does every token of q.
    """
    rows, scales = cache_params(keys, values, writes=False)
    return (
        Param("q", "ptr", f"const {x.cpp}*"),
        *rows,
        *scales,
        Param("starts", "ptr", "const int*"),
        Param("lengths", "ptr", "const int*"),
        Param("out", "ptr", f"{x.cpp}*"),
        Param("absmax", "ptr", "float*"),
        Param("q_stride", "i64"),
        *(Param(name, "i32") for name in ("sequences", "length", "kv_heads", "group", "context")),
        Param("scale", "f32"),
        *scores.params(),
    )


def prompt_arguments(params: tuple[Param, ...], scores: Scores = PLAIN) -> str:
    """Members of ``qcut::PromptArgs``, or of ``qcut::MaskedPromptArgs``, null pointers for scales if there are none."""
    pointers = ("q", "keys", "values", "key_scales", "value_scales", "starts", "lengths", "out", "absmax")
    given = call_arguments(pointers, params)
    members = f"{given}, q_stride, sequences, length, kv_heads, group, context, scale"
    return f"{{{members}}}{scores.arguments()}" if scores.arguments() else members


def tiles(rows: int, sequences: int, length: int, kv_heads: int, group: int) -> int:
    """Tiles of a launch."""
    return -(-length * group // rows) * kv_heads * sequences


def raw_bytes(keys: DType, values: DType | None, columns: int, count: int, *, in_turns: bool) -> int:
    """Shared memory for compressed keys or values of a block before they become 16-bit floats, and for their scales.

    Args:
        keys: type of keys.
        values: type of values; None: that of keys.
        columns: of a product.
        count: rows of a block.
        in_turns: keys and values use the same bytes in turns: their scales lie after the longer rows of both.
    """

    def rounds(kind: DType) -> int:
        lanes = 1 << (-(-columns * kind.bits // 128) - 1).bit_length()  # that copy a row, 16 bytes each
        return -(-count * lanes // 128)

    kinds = (keys, value_type(keys, values))
    longest = max(rounds(kind) for kind in kinds)

    def of(kind: DType) -> int:
        rows = 2048 * (longest if in_turns else rounds(kind))
        return rows + 8 * count + (512 * rounds(kind) if kind is DType.U4 else 0)

    return max(of(kind) for kind in kinds)
