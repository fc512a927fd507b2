"""Ahead-of-time kernels: all that the layers of a model and an engine can need on an architecture.

`qcut.dispatch.ahead_of_time` bounds what dispatch chooses from for such a `Target`; here the same functions are
asked for all points. Outside are, on purpose: products of `qcut.ops` that no layer makes (other layouts, epilogues or
alignments, dp4a), tiles of a user's own tuned tables, rotations in groups other than 32, 64 and 128 columns, and
attention of heads that are not in `qcut.dispatch.ahead_of_time.HEADS`, or with windows, rings or softcaps. Those need a
compiler. W8A16's kernels that nvcc builds, and codebooks', are outside too: in their place the set has kernels that
NVRTC builds. In place of embeddings in codebooks there are torch's kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from typing import Any

from qcut.dispatch import ahead_of_time, codebook, gemm
from qcut.dispatch.attention import prompt_attention_menu, select_attention
from qcut.dispatch.buckets import m_bucket
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import Choice, best_tile
from qcut.emitters.attention.append import AttentionAppend
from qcut.emitters.attention.mma import CLUSTERS, TILE, AttentionMma
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import FLOATS, DType, EmitError, KernelSource
from qcut.emitters.decoder.accept import AcceptTokens
from qcut.emitters.decoder.activate import ActivateRows
from qcut.emitters.decoder.append import ROTARY, RotateAndAppend
from qcut.emitters.decoder.argmax import PARTS, ArgmaxRows
from qcut.emitters.decoder.cache import ROTATED_HEADS
from qcut.emitters.decoder.embed import EmbedRows
from qcut.emitters.decoder.norm import NormRows
from qcut.emitters.decoder.quantize import ColSum, Dequantize, QuantizePerTensor, QuantizePerToken
from qcut.emitters.decoder.split_halves import SplitHalves
from qcut.emitters.families import (
    CODEBOOK_MMA,
    CODEBOOK_STREAM,
    CODEBOOK_STREAM_ROUNDS,
    CODEBOOK_STREAM_WGMMA,
    CODEBOOK_WGMMA,
    INT8_STREAM,
    W8A16_MMA,
    family,
)
from qcut.emitters.gemm.problem import K_MAX, GemmProblem
from qcut.emitters.routing.route import SCORES, SLOTS, RouteTokens
from qcut.emitters.routing.sort_routes import FEW_ROUTES, MANY_ROUTES, SortRoutes
from qcut.emitters.routing.sum_routes import SumRoutes
from qcut.emitters.stream import w8a8, w8a16
from qcut.emitters.stream.w8a8 import W8A8Problem

HALVES = (DType.F16, DType.BF16)
BUCKETS = tuple(dict.fromkeys(m_bucket(m) for m in range(1, 65)))
"""Numbers of tokens for which kernels of few tokens are chosen."""
_BOOLS = (True, False)


def ahead_of_time_kernels(arch: str) -> Iterator[KernelSource]:
    """Every kernel that layers and engines can need on an architecture, for any sizes, each once.

    Texts of CUTLASS kernels are written when they are read.
    """
    target = ahead_of_time_target(arch)
    seen: set[str] = set()
    products = chain(_int8(target), _w8a16(target), _codebook(target))
    rows = _each_once(chain(_rotations(target), _rows(target)))
    for source in chain(products, rows, _routing(target), _attention(target)):
        if source.name not in seen:
            seen.add(source.name)
            yield source


def _each_once(kernels: Iterable[Kernel]) -> Iterator[KernelSource]:
    """Texts of kernels, each once; most kernels serve many sizes."""
    for kernel in dict.fromkeys(kernels):
        yield kernel.emit()


def precompile_sources(arch: str) -> list[KernelSource]:
    """The ahead-of-time kernels as a list, for ``qcut precompile``."""
    return list(ahead_of_time_kernels(arch))


def ahead_of_time_target(arch: str) -> Target:
    """The GPU of an architecture that ahead-of-time kernels are chosen for."""
    like = ahead_of_time.reference(arch)
    return Target(like.arch, like.sm_count, like.name, ahead_of_time=True)


# ── products ─────────────────────────────────────────────────────────────────────────────────────


def _int8(target: Target) -> Iterator[KernelSource]:
    """W8A8 and int16 tokens, dynamic and static, and layers in integers."""
    arch = target.arch
    for epilogue, alignment in product(_int8_epilogues(), (16, 1)):
        problem = GemmProblem(epilogue=epilogue, alignment_n=alignment)
        for name, tile in sorted(ahead_of_time.all_gemm_tiles(arch), key=str):
            if family(name).is_legal(problem, tile, arch) and ahead_of_time.takes(problem, name, tile, arch):
                yield family(name).emit(problem, tile, arch)
    for epilogue, tokens, absmax in product(_int8_epilogues(), ("given", "rows"), _BOOLS):
        few = W8A8Problem(tokens, epilogue.out, epilogue, absmax=absmax)  # type: ignore[arg-type]
        if ahead_of_time.covers(replace(few, epilogue=_without_any(epilogue))):
            for m in (m for m in BUCKETS if m <= w8a8.MAX_TOKENS):
                for n, k in ahead_of_time.points(ahead_of_time.is_usual(few)):
                    if w8a8.is_legal(few, m, min(k, K_MAX), arch):
                        tile = best_tile(INT8_STREAM, few, m, n, min(k, K_MAX), ahead_of_time.reference(arch))
                        yield INT8_STREAM.emit(few, tile, arch)
    for aligned in _BOOLS:
        yield SplitHalves(arch, aligned).emit()


def _int8_epilogues() -> Iterator[Epilogue]:
    """Those of layers with int8 products."""
    for out, bias, halves in product(FLOATS, _BOOLS, _BOOLS):
        dynamic = Epilogue(out, "per_token", "per_channel", bias=bias, activation=Activation.ANY, halves=halves)
        yield dynamic
        yield replace(dynamic, row_scale="none", zero_point="none" if halves else "per_tensor")
    yield Epilogue(DType.S8, rescale=True)
    yield Epilogue(DType.S16, halves=True, rescale=True)


def _without_any(epilogue: Epilogue) -> Epilogue:
    """A layer's own epilogue without the activation, which a launch names."""
    return replace(epilogue, activation=Activation.NONE)


def _w8a16(target: Target) -> Iterator[KernelSource]:
    for dtype, bias, alignment_k, alignment_n in product(HALVES, _BOOLS, (8, 1), (16, 1)):
        epilogue = Epilogue(dtype, "none", "per_channel", bias=bias, activation=Activation.ANY)
        problem = GemmProblem(dtype, epilogue=epilogue, alignment_k=alignment_k, alignment_n=alignment_n)
        for tile in W8A16_MMA.menu(problem, target.arch):
            yield W8A16_MMA.emit(problem, tile, target.arch)
        for m, (n, k) in product(BUCKETS, ahead_of_time.points(ahead_of_time.is_usual(problem))):
            if m <= w8a16.MAX_TOKENS and alignment_n == 16:
                yield gemm.emit(gemm.select_w8a16(problem, m, n, k, target), problem, target.arch)


def _codebook(target: Target) -> Iterator[KernelSource]:
    """Products with codebook weights, of one token that is rotated within too."""
    types = [(x, x) for x in HALVES] + [(DType.S8, out) for out in FLOATS]
    for (x, out), bits, slots in product(types, (2, 3, 4), (1, 2, 4, 8)):
        for alignment in (16, 1) if (bits, slots) == (4, 1) else (1,):
            found = codebook.problem_of(x, bits, slots, out, True, "none", False, alignment)
            if ahead_of_time.covers(found):
                yield from _codebook_products(found, target)
                if x is DType.S8 and bits == 4:
                    yield from _codebook_products(replace(found, mirrored=True), target)
        if out in HALVES and (bits, slots) == (4, 1):
            for alignment in (16, 1):
                row = codebook.problem_of(x, bits, slots, out, True, "none", False, alignment, rotates=out)
                yield from _codebook_products(row, target)
    for x, slots in product(HALVES, (1, 2, 4)):
        yield from _codebook_products(codebook.problem_of(x, 4, slots, x, True, "none", False, 1, offsets=True), target)
    for (x, out), slots in product(types, (1, 2, 4)):
        yield from _codebook_products(codebook.problem_of(x, 4, slots, out, True, "none", False, 1, pairs=True), target)
    # Passes of different widths: float32 sums, to which the second product adds its own.
    for x, bits, residual in product((*HALVES, DType.S8), (2, 3, 4), _BOOLS):
        found = codebook.problem_of(x, bits, 1, DType.F32, False, "none", residual, 1)
        yield from _codebook_products(found, target)
        if x is DType.S8 and bits == 4:
            yield from _codebook_products(replace(found, mirrored=True), target)


def _codebook_products(problem: CodebookProblem, target: Target) -> Iterator[KernelSource]:
    usual = ahead_of_time.is_usual(problem)
    choices: dict[Choice, None] = {}
    for m, (n, k) in product(
        (1,) if problem.rotates else BUCKETS if usual else ahead_of_time.FEW_TOKENS, ahead_of_time.points(usual)
    ):
        with suppress(EmitError):  # kernels that rotate hold the token of all of K
            choices[codebook.select(problem, m, n, k // 128, target)] = None
    if usual and not problem.rotates:
        has_wgmma = architecture(target.arch).wgmma
        for kind in (CODEBOOK_WGMMA, CODEBOOK_STREAM_WGMMA) if has_wgmma else (CODEBOOK_MMA,):
            choices |= {Choice(kind.name, tile): None for tile in kind.default_tiles(problem, target.arch)}
    for choice in choices:
        e, by_element = problem.epilogue, choice.family in (CODEBOOK_STREAM.name, CODEBOOK_STREAM_ROUNDS.name)
        alignment = 16 if by_element else problem.alignment_n
        # Of two passes of different widths the first has no bias.
        for bias in _BOOLS if e.out is not DType.F32 or problem.x is DType.S8 or e.residual else (False,):
            epilogue = Epilogue(e.out, e.row_scale, "per_channel", "none", bias, Activation.ANY, e.residual)
            yield codebook.emit(choice, replace(problem, epilogue=epilogue, alignment_n=alignment), target.arch)


def _rotations(target: Target) -> Iterator[Kernel]:
    known = sorted({k for _, k in ahead_of_time.KNOWN_SHAPES})
    for x, out, kind, group, passes, aligned in product(
        FLOATS, (*HALVES, DType.S8), ("hadamard", "qr", "none"), ahead_of_time.GROUPS, (1, 2), _BOOLS
    ):
        for m, k in product(
            (1, 32, target.sm_count, 4 * target.sm_count),
            (*ahead_of_time.ROTATION_POINTS, *ahead_of_time.FEW_ROTATION_POINTS, *known),
        ):
            if out in (x, DType.S8):
                given = (kind, x, out, m, k, group, passes, target)
                with suppress(EmitError):  # qr takes no float32
                    yield from codebook.select_rotation(*given, aligned=aligned)
                if (kind, out, passes) == ("hadamard", DType.S8, 1):
                    yield from codebook.select_rotation(*given, aligned=aligned, natural=True, row_major=True)


# ── a decoder's rows and attention ───────────────────────────────────────────────────────────────


def _rows(target: Target) -> Iterator[Kernel]:
    """Quantization, norms, activations, embeddings, the next token."""
    arch, sms = target.arch, target.sm_count
    for x, aligned in product(FLOATS, _BOOLS):
        for k, m in product(_widths(), (1, 4 * sms, 1 << 24)):  # few rows, many, and many for every SM
            for halves in _BOOLS:
                options: dict[str, Any] = {"aligned": aligned, "halves": halves}
                yield QuantizePerToken.for_shape(x, arch, m, k, sm_count=sms, **options)
                yield QuantizePerTensor.for_shape(x, arch, m, k, **options)
            yield Dequantize.for_shape(x, arch, m, k, aligned=aligned)
        for layer, residual, quantized, many in product(_BOOLS, repeat=4):
            usual = aligned and x is not DType.F32
            for vectors in ahead_of_time.VECTOR_POINTS if usual else ahead_of_time.FEW_VECTOR_POINTS:
                flags: dict[str, Any] = {"many": many, "residual": residual, "quantized": quantized}
                with suppress(EmitError):
                    width = vectors * 128 // x.bits
                    yield NormRows.for_shape(x, layer, arch, width, aligned=aligned, **flags)
        for kind in ("silu_mul", "gelu_tanh"):
            yield ActivateRows(kind, x, arch, aligned)
        for table, places, zeroes in product((x, DType.S8), _BOOLS, _BOOLS):
            yield EmbedRows(x, table, arch, places, aligned, zeroes)
    for x, parts in product(FLOATS, (1, PARTS) if target.exchanges_in_clusters else (1,)):
        for advances, tells in ((False, False), (True, False), (True, True)):
            yield ArgmaxRows(x, arch, advances, parts, tells)
    yield AcceptTokens(arch)
    for aligned in _BOOLS:
        yield ColSum(arch, aligned)


def _routing(target: Target) -> Iterator[KernelSource]:
    """A router's choice, tiles of routes, and the sums of experts' results."""
    arch = target.arch
    for x, scores, slots, by_score in product(FLOATS, SCORES, SLOTS, _BOOLS):
        yield RouteTokens(x, scores, slots, by_score, arch).emit()
    for routes in (1, FEW_ROUTES + 1, MANY_ROUTES):
        yield SortRoutes.for_routes(routes, arch).emit()
    for x, many, aligned in product(FLOATS, _BOOLS, _BOOLS):
        yield SumRoutes(x, arch, many, aligned).emit()


@lru_cache
def _widths() -> tuple[int, ...]:
    """Columns from which the kernels of rows may change, and some beyond: whole vectors of any type."""
    return tuple(dict.fromkeys((*range(16, 4096, 16), *range(4096, 65_536, 256), *range(65_536, K_MAX + 1, 8192))))


def _attention(target: Target) -> Iterator[KernelSource]:
    arch = target.arch
    for x, head in product(FLOATS, ahead_of_time.HEADS):
        for cache, values in _caches(x, head):
            for rotary, many in product(ROTARY, _BOOLS):
                with suppress(EmitError):
                    yield RotateAndAppend(x, cache, head, rotary, arch, many, values=values).emit()
            for kernel in prompt_attention_menu(x, cache, head, arch, values):
                yield kernel.emit()
            for queries, cluster in product(ahead_of_time.QUERIES, CLUSTERS):
                yield from _attention_forms(x, cache, values, head, queries, cluster, target)


def _caches(x: DType, head: int) -> Iterator[tuple[DType, DType | None]]:
    """Types of keys, and of values with another type, that an engine with activations of type x may keep."""
    yield from ((x, None), (DType.S8, None))
    if x in HALVES and head in ROTATED_HEADS:
        yield from ((DType.U4, None), (DType.S8, DType.U4))


def _attention_forms(
    x: DType, cache: DType, values: DType | None, head: int, queries: int, cluster: int, target: Target
) -> Iterator[KernelSource]:
    if not AttentionMma.is_legal(x, cache, head, 1, target.arch, values=values):
        with suppress(EmitError):
            desc, _ = select_attention(x, cache, head, queries, target, batch=1, kv_heads=1, context=TILE)
            yield desc.emit()
        return
    if cluster > 1 and not ahead_of_time.has_clusters(head, target):
        return
    with suppress(EmitError):
        kernel = AttentionMma.for_shape(x, cache, head, queries, target.arch, cluster, values)
        yield kernel.emit()
        for rotary, norms in product(_BOOLS, _BOOLS):
            if not norms or ahead_of_time.has_head_norms(head, rotary, target):
                yield AttentionAppend(kernel, rotary, norms).emit()
