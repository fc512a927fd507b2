"""Which kernels rotate tokens and multiply them with codebook weights: pure functions of sizes, types and the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from qcut.dispatch.cost_model import Target, target_named
from qcut.emitters.codebook import mma as codebook_mma
from qcut.emitters.codebook import wgmma as codebook_prompt
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.rotate import RotateTokens, RotateTokensDense, emit_rotate, padded_columns
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.stream import codebook as codebook_decode
from qcut.emitters.stream import codebook_wgmma as codebook_decode_wgmma

Rotation = RotateTokens | RotateTokensDense
Family = Literal["decode", "decode_wgmma", "prompt", "mma"]

FEW_TOKENS = 16
"""Up to so many, ``decode`` serves GPUs without wgmma."""
DECODE_TOKENS = 64
"""Up to so many, weights stream past all tokens at once on sm_90a (``decode`` or ``decode_wgmma``)."""


_FIRST_TOKENS = (1, 8, 16, 64, 4096)
_FIRST_GROUP = 128


@dataclass(frozen=True)
class CodebookChoice:
    """One kernel for one problem size.

    Attributes:
        family: ``decode`` (mma.sync, few tokens), ``decode_wgmma`` and ``prompt`` (sm_90a), or ``mma`` (every GPU).
        tile: how it cuts the problem.
    """

    family: Family
    tile: Any


def bucket(m: int) -> int:
    """Tokens up to which one kernel serves: 1, 8, 16, 32, 64, then four steps an octave."""
    if m <= 64:
        return next(size for size in (1, 8, 16, 32, 64) if m <= size)
    step = 1 << ((m - 1).bit_length() - 3)
    return -(-m // step) * step


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────


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
) -> tuple[Rotation, ...]:
    """Choose what rotates tokens: one kernel, or for dense rotations to int8 two, through float32 rows.

    Args:
        kind: hadamard, qr or none.
        x: type of the tokens: f16, bf16, or f32 where the rotation is not qr.
        out: type of the blocks: s8 or x's.
        m: tokens.
        k: columns.
        group_size: columns of a group.
        passes: rotations of the same tokens.
        target: the GPU.
        aligned: whether rows start at multiples of 16 bytes.

    Raises:
        EmitError: see `qcut.emitters.codebook.rotate.CONSTRAINTS` and ``DENSE_CONSTRAINTS``.
    """
    arch, sms = target.arch, target.sm_count
    if kind != "qr":
        of: Any = kind
        return (
            RotateTokens.for_shape(x, out, of, arch, m, k, group_size, passes=passes, aligned=aligned, sm_count=sms),
        )
    to = DType.F32 if out is DType.S8 else out
    dense = RotateTokensDense.for_shape(x, to, arch, m, k, group_size, passes=passes, aligned=aligned)
    if to is out:
        return (dense,)
    columns = passes * padded_columns(k, min(group_size, k))
    return dense, RotateTokens.for_shape(DType.F32, out, "none", arch, m, columns, columns, sm_count=sms)


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
    rotates: bool = False,
) -> CodebookProblem:
    """What a product asks of its kernel.

    Args:
        x: type of the tokens: f16, bf16 or s8.
        bits: of an index.
        slots: norms of 128 columns.
        out: type of the result.
        bias: whether one is added.
        activation: after the bias.
        residual: whether one is added.
        alignment_n: elements that divide the result's rows.
        rotates: whether the kernel rotates the token.

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
    return CodebookProblem(x, bits, slots, epilogue, alignment_n, rotates)


def select(problem: CodebookProblem, m: int, n: int, units: int, target: Target) -> CodebookChoice:
    """Choose the kernel of a product.

    Args:
        problem: types, widths and epilogue.
        m: tokens.
        n: output channels.
        units: of 128 columns along K, those of all passes.
        target: the GPU.

    Raises:
        EmitError: no kernel takes the problem on this GPU.
    """
    sm_count, arch = target.sm_count, target.arch
    if problem.rotates:
        return CodebookChoice("decode", codebook_decode.for_shape(problem, n, units, m, sm_count, arch))
    if arch == "sm_90a":
        if m > DECODE_TOKENS:
            return CodebookChoice("prompt", codebook_prompt.for_shape(problem, m, n, units, sm_count))
        if not codebook_decode_wgmma.is_better(problem, n, units, m, sm_count):
            # Its warps hold the tokens of all K, so that there is a longest.
            with suppress(EmitError):
                return CodebookChoice("decode", codebook_decode.for_shape(problem, n, units, m, sm_count, arch))
        return CodebookChoice("decode_wgmma", codebook_decode_wgmma.for_shape(problem, n, units, m, sm_count))
    if m <= FEW_TOKENS:
        # Without clusters, a long K or little shared memory leaves no tile.
        with suppress(EmitError):
            return CodebookChoice("decode", codebook_decode.for_shape(problem, n, units, m, sm_count, arch))
    return CodebookChoice("mma", codebook_mma.for_shape(problem, arch, m, n, sm_count))


def emit(choice: CodebookChoice, problem: CodebookProblem, arch: str) -> KernelSource:
    """Text of the chosen kernel."""
    if choice.family == "decode":
        return codebook_decode.emit_codebook_decode(problem, choice.tile, arch)
    if choice.family == "decode_wgmma":
        return codebook_decode_wgmma.emit_codebook_decode_wgmma(problem, choice.tile, arch)
    if choice.family == "prompt":
        return codebook_prompt.emit_codebook_prompt(problem, choice.tile, arch)
    return codebook_mma.emit_codebook_mma(problem, choice.tile, arch)


def grid(choice: CodebookChoice, m: int, n: int, sm_count: int) -> tuple[int, int, int]:
    """CTAs of a launch."""
    if choice.family == "decode":
        return codebook_decode.grid(choice.tile, m, n)
    if choice.family == "decode_wgmma":
        return codebook_decode_wgmma.grid(choice.tile, m, n)
    if choice.family == "prompt":
        return codebook_prompt.grid(choice.tile, m, n, sm_count)
    return codebook_mma.grid(choice.tile, m, n)


# ── ahead of time ────────────────────────────────────────────────────────────────────────────────


def precompile_sources(arch: str, layers: Iterable[tuple[int, int, bool, str]]) -> list[KernelSource]:
    """The kernels of ``codebook4`` for layers on an architecture, in float16, with float16 and with int8 products.

    For one token, a few, some, and a prompt, rotations included.

    Args:
        arch: real architecture.
        layers: N and K, multiples of 128, whether there is a bias, and the activation.
    """
    gpu = target_named(arch)
    sources: dict[str, KernelSource] = {}
    for (n, k, bias, activation), tokens, m in product(layers, (DType.F16, DType.S8), _FIRST_TOKENS):
        problem = problem_of(tokens, 4, 1, DType.F16, bias, activation, False, 16)
        rotations = select_rotation("hadamard", DType.F16, tokens, m, k, _FIRST_GROUP, 1, gpu)
        found = [emit_rotate(rotation) for rotation in rotations]
        found.append(emit(select(problem, m, n, k // 128, gpu), problem, arch))
        sources |= {source.name: source for source in found}
    return list(sources.values())
