"""Chooses the kernels that rotate tokens and multiply them with codebook weights.

All choices are pure functions of sizes, types and the GPU.
"""

from __future__ import annotations

from contextlib import suppress
from typing import cast

from qcut.dispatch import ahead_of_time
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import Choice, best, choose
from qcut.dispatch.heuristics import emit as emit
from qcut.dispatch.heuristics import grid as grid
from qcut.dispatch.heuristics.codebook.wgmma import DECODE_TOKENS
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.rotate import Kind, RotateTokens, padded_columns
from qcut.emitters.codebook.rotate_dense import RotateTokensDense
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.family import Grid
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.families import (
    CODEBOOK_CUTLASS,
    CODEBOOK_MMA,
    CODEBOOK_STREAM,
    CODEBOOK_STREAM_ROUNDS,
    CODEBOOK_STREAM_WGMMA,
    CODEBOOK_WGMMA,
)
from qcut.emitters.stream.codebook import CodebookStreamTile
from qcut.jit.debug import logs_choice

Rotation = RotateTokens | RotateTokensDense

FEW_TOKENS = 16
"""Most tokens for which weights stream past all tokens at once on GPUs without wgmma."""
MAX_STREAM_TOKENS = 32
"""Most tokens of ``codebook_stream``."""


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────

_MOST_LATE = 1 << 22
"""Most elements of a rotation that starts late."""


def starts_early(rows: int, k: int) -> bool:
    """Whether the rotation of some rows of k columns begins before its predecessor ends.

    The CTAs of medium rotations that start early crowd on the multiprocessors that are idle at that moment: on an H200,
    layers of 128 to 512 tokens and 4,096 columns take 1 to 2 µs less if the rotation starts late, as do layers of 320
    to 448 tokens and 1,280 columns. With 96 tokens and 5,120 columns, as many elements, they take up to 1 µs more.
    """
    fewest = 400_000 if rows > 256 else 1 << 19
    return not fewest <= rows * k <= _MOST_LATE


@logs_choice
def select_rotation(
    kind: str,
    x: DType,
    out: DType,
    m: int,
    k: int,
    group_size: int,
    passes: int,
    target: Target,
    *,
    aligned: bool = True,
    routed: bool = False,
    natural: bool = False,
    row_major: bool = False,
) -> tuple[Rotation, ...]:
    """Choose the kernels that rotate tokens: two, with float32 rows between, for dense rotations to int8; else one.

    Args:
        kind: hadamard, qr or none.
        x: type of the tokens: f16, bf16, or f32 if the rotation is not qr.
        out: type of the blocks: s8 or x's.
        m: number of tokens.
        k: number of columns.
        group_size: columns of a group.
        passes: number of rotations of the same tokens.
        target: the GPU.
        aligned: whether rows start at multiples of 16 bytes.
        routed: whether rows of the blocks are routes to experts; not with qr.
        natural: whether int8 columns lie in natural order; not with qr.
        row_major: whether int8 columns lie in rows and not in blocks; only with hadamard.

    Raises:
        EmitError: see ``CONSTRAINTS`` of `qcut.emitters.codebook.rotate` and of `qcut.emitters.codebook.rotate_dense`.
    """
    k, group_size = ahead_of_time.rotation_columns(kind, x, k, group_size, passes, target, aligned=aligned)
    arch, sms = target.arch, target.sm_count
    if kind != "qr":
        checked = cast("Kind", kind)  # the kernel's constraints check the value
        layout = {"aligned": aligned, "routed": routed, "natural": natural, "row_major": row_major}
        one = RotateTokens.for_shape(x, out, checked, arch, m, k, group_size, passes=passes, sm_count=sms, **layout)
        return (one,)
    to = DType.F32 if out is DType.S8 else out
    dense = RotateTokensDense.for_shape(x, to, arch, m, k, group_size, passes=passes, aligned=aligned)
    if to is out:
        return (dense,)
    columns = passes * padded_columns(k, min(group_size, k), kind)
    return dense, RotateTokens.for_shape(DType.F32, out, "none", arch, m, columns, columns, sm_count=sms)


def rotation_grid(rotation: Rotation, k_padded: int) -> Grid:
    """CTAs of one kernel of `select_rotation` for rows of k_padded columns a pass."""
    rows = rotation.tokens if isinstance(rotation, RotateTokensDense) else rotation.rows
    return Grid(rows, rotation.grid(1, k_padded))


# ── product ──────────────────────────────────────────────────────────────────────────────────────


def problem_of(
    x: DType,
    bits: int,
    slots: int,
    out: DType,
    bias: bool,
    activation: str,
    residual: bool,
    alignment_n: int,
    rotates: DType | None = None,
    row_norm: bool = False,
    offsets: bool = False,
    pairs: bool = False,
    experts: bool = False,
    early_routes: bool = False,
    summed: bool = False,
    mirrored: bool = False,
) -> CodebookProblem:
    """The description of a product with codebook weights that kernels are chosen and emitted by.

    Args:
        x: type of the tokens: f16, bf16 or s8.
        bits: bits of an index.
        slots: group scales per 128 columns.
        out: type of the result.
        bias: whether a bias is added.
        activation: activation after the bias.
        residual: whether a residual is added.
        alignment_n: number of elements that divides the length of the result's rows.
        rotates: type of the one token that the kernel rotates; None: tokens were rotated before.
        row_norm: whether a row has one scale, and all rows have the same int8 values.
        offsets: whether group scales have offsets.
        pairs: whether the codebook is of pairs.
        experts: whether weights are those of experts, and rows of the result are routes.
        early_routes: whether the last kernel has not written which routes there are.
        summed: whether rows of the result are tokens, the sums of their routes.
        mirrored: whether the codebook is mirrored, see `qcut.numerics.codebook.products.is_mirrored_book`.

    Raises:
        EmitError: see `qcut.emitters.codebook.problem.CodebookProblem`.
    """
    epilogue = Epilogue(
        out=out,
        row_scale="per_token" if x is DType.S8 else "none",
        col_scale="per_channel",
        bias=bias,
        activation=Activation(activation),
        residual=residual,
    )
    return CodebookProblem(
        x,
        bits,
        slots,
        epilogue,
        alignment_n,
        rotates,
        row_norm,
        offsets,
        pairs,
        experts,
        early_routes,
        summed,
        mirrored,
    )


@logs_choice
def select(problem: CodebookProblem, m: int, n: int, units: int, target: Target, *, cutlass: bool = False) -> Choice:
    """Choose the kernel of a product.

    Args:
        problem: types, widths and epilogue.
        m: number of tokens.
        n: number of output channels.
        units: units of 128 columns along K, all passes together.
        target: the GPU.
        cutlass: whether CUTLASS's kernels can be built.

    Raises:
        EmitError: no kernel takes the problem on this GPU.
    """
    usual, rotates = ahead_of_time.is_usual(problem), problem.rotates is not None
    if rotates and target.ahead_of_time and not ahead_of_time.covers(problem):
        raise EmitError(f"codebook: no ahead-of-time kernel rotates for {problem.name}")
    m = m if rotates else ahead_of_time.few_tokens(m, target, known=usual)
    n, k, target = ahead_of_time.bounded(n, 128 * units, target, known=usual)

    sizes = (problem, m, n, k, target)
    if rotates:
        return best(CODEBOOK_STREAM, *sizes)
    if architecture(target.arch).wgmma:
        if m > DECODE_TOKENS:
            prompt = choose((CODEBOOK_CUTLASS.name,), *sizes) if cutlass else None
            prompt = prompt or choose((CODEBOOK_WGMMA.name, CODEBOOK_STREAM_WGMMA.name), *sizes)
            assert prompt is not None, "menus of prompts have tiles for every problem"
            return prompt
        # The stream's warps hold the tokens of all K, so a long K has no such kernel.
        with suppress(EmitError):
            if m <= MAX_STREAM_TOKENS and not _takes_wgmma(problem, m, streams := best(CODEBOOK_STREAM, *sizes)):
                return streams
        return best(CODEBOOK_STREAM_WGMMA, *sizes)
    if m <= FEW_TOKENS:
        # Without clusters, a long K or little shared memory leaves no tile with warps that hold all tokens.
        with suppress(EmitError):
            return best(CODEBOOK_STREAM, *sizes)
        return best(CODEBOOK_STREAM_ROUNDS, *sizes)
    return best(CODEBOOK_MMA, *sizes)


def _takes_wgmma(problem: CodebookProblem, m: int, streams: Choice) -> bool:
    """Whether ``codebook_stream_wgmma`` is faster than the ``codebook_stream`` of a choice on sm_90a.

    It is from 9 tokens on (int8: 17) if ``codebook_stream`` would take a cluster, from 17 tokens on if a CTA of
    ``codebook_stream`` has several row tiles, and from 33 tokens on everywhere.
    """
    tile = streams.tile
    assert isinstance(tile, CodebookStreamTile)
    most = 16 if problem.x is DType.S8 else 8
    return (m > most and tile.splits > 1) or (m > 16 and tile.row_tiles > 1)
