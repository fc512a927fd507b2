"""Bounds the kernels that dispatch chooses from, so that a wheel can bring them all, built ahead of time.

With a compiler, a kernel is made for each shape. A `Target` with ``ahead_of_time`` has only the kernels of
`qcut.dispatch.precompile`: sizes are rounded to points before tiles are chosen for them, the activation is an argument
of the launch, and rows of D are aligned or not. Shapes of known models are points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TypeVar

from qcut.dispatch import tables
from qcut.dispatch.gpus import GPUS, Target
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.epilogue import ACTIVATIONS, Activation
from qcut.emitters.core.source import FLOATS, DType
from qcut.emitters.families import INT8_CUTLASS, INT8_MMA
from qcut.emitters.gemm.problem import GemmProblem
from qcut.emitters.stream.w8a8 import W8A8Problem

N_POINTS = (1024, 4096, 16384)
"""Rows of weights for a GPU with as many multiprocessors as the architecture's first known one."""
K_POINTS = (2048, 8192, 131_072, 1 << 20)
"""Columns, rounded up: some kernels hold the tokens of all of K."""
FEW_N_POINTS, FEW_K_POINTS = (2048, 16384), (1 << 20,)
"""The same for products of less usual types."""
FEW_TOKENS = (16, 64, 1024)
"""Numbers of tokens for these."""
KNOWN_SHAPES = frozenset(
    {
        *((n, 1280) for n in (3840, 1280, 5120, 50257)),  # GPT-2 Large
        (1280, 5120),
        *((n, 2048) for n in (2048, 512, 3072, 8192, 16384, 128256)),  # Llama 3.2 1B
        (2048, 8192),
        *((n, 3584) for n in (3584, 4608, 37888, 152064)),  # Qwen 2.5 7B
        (3584, 18944),
        *((n, 4096) for n in (4096, 1024, 6144, 14336, 28672, 128256)),  # Llama 3 8B
        (4096, 14336),
    }
)
"""N and K of layers of known models, and of layers that an engine stacks; tiles are made for them."""
ROTATION_POINTS = (1024, 2048, 4096, 8192, 16384, 131_072, 1 << 20)
"""Columns of a row that is rotated."""
FEW_ROTATION_POINTS = (4096, 16384, 1 << 20)
"""The same for less usual rotations."""
VECTOR_POINTS = (96, 128, 160, 256, 384, 512, 1024, 4096)
"""16-byte vectors of a row that is normalized."""
FEW_VECTOR_POINTS = (256, 1024, 4096)
"""The same for rows that are not aligned, or of float32."""
HEADS = (32, 64, 80, 96, 112, 128, 192, 256)
"""Columns of a head of attention."""
CLUSTER_HEADS = (64, 128)
"""Sizes of heads; attention divides the context among the CTAs of a cluster for these."""
NORM_HEADS = (128, 256)
"""Heads that attention normalizes in a decode step with rotary positions: those of Qwen 3 and Gemma 3."""
QUERIES = (1, 4, 8)
"""Queries of a CTA of attention."""
GROUPS = (32, 64, 128)
"""Columns of a group of a codebook's rotation."""

P = TypeVar("P", GemmProblem, W8A8Problem, CodebookProblem)


@lru_cache
def reference(arch: str) -> Target:
    """The GPU for which the tiles of an architecture's ahead-of-time kernels are chosen."""
    return next(Target(gpu.arch, gpu.sm_count, gpu.name) for gpu in GPUS if gpu.arch == arch)


def bounded(n: int, k: int, target: Target, *, known: bool = True) -> tuple[int, int, Target]:
    """The sizes and the GPU to choose a tile for: those given, or one of `points` for ahead-of-time kernels.

    Args:
        n: rows of the weight.
        k: columns.
        target: the GPU. N stands for as many rows to a multiprocessor of the reference.
        known: whether `KNOWN_SHAPES` are points; otherwise points are few.
    """
    if not target.ahead_of_time:
        return n, k, target
    like = reference(target.arch)
    if known and (n, k) in KNOWN_SHAPES and target.sm_count == like.sm_count:
        return n, k, like
    rows = n * like.sm_count / target.sm_count
    some_n, some_k = (N_POINTS, K_POINTS) if known else (FEW_N_POINTS, FEW_K_POINTS)
    return min(some_n, key=lambda point: abs(math.log(point / rows))), _at_least(k, some_k), like


def _at_least(size: int, some: tuple[int, ...]) -> int:
    """The first of some sizes that is as large; the last one if none is."""
    return next((point for point in some if point >= size), some[-1])


def points(known: bool = True) -> list[tuple[int, int]]:
    """All N and K that `bounded` returns."""
    if not known:
        return list(product(FEW_N_POINTS, FEW_K_POINTS))
    return [*product(N_POINTS, K_POINTS), *sorted(KNOWN_SHAPES)]


def few_tokens(m: int, target: Target, *, known: bool) -> int:
    """Tokens to choose a kernel for: those given, or one of `FEW_TOKENS` for ahead-of-time kernels of other shapes."""
    return _at_least(m, FEW_TOKENS) if target.ahead_of_time and not known else m


# ── problems ─────────────────────────────────────────────────────────────────────────────────────


def bounded_problem(problem: P, target: Target, *, element_stores: bool = False) -> tuple[P, tuple[int, ...]]:
    """The problem that has a kernel to serve a given one, and the arguments that a launch adds to those of a call.

    A target with a compiler, and a problem without ahead-of-time kernels, keep the problem.

    Args:
        problem: types, layouts and epilogue.
        target: the GPU.
        element_stores: whether the kernel stores D element by element, whatever its alignment is.
    """
    if not holds(problem, target):
        return problem, ()
    epilogue = problem.epilogue
    tail: tuple[int, ...] = ()
    if not epilogue.rescale:
        tail = (ACTIVATIONS.index(epilogue.activation.value),)
        epilogue = replace(epilogue, activation=Activation.ANY)
    if isinstance(problem, W8A8Problem):
        return replace(problem, epilogue=epilogue), tail
    whole = element_stores or problem.alignment_n * epilogue.out.bits >= 128
    if isinstance(problem, CodebookProblem):
        whole = element_stores or (whole and is_usual(problem))
    return replace(problem, epilogue=epilogue, alignment_n=16 if whole else 1), tail


def is_usual(problem: GemmProblem | W8A8Problem | CodebookProblem) -> bool:
    """Whether known shapes have tiles of their own: those of 16-bit models, aligned rows, and 16-value codebooks."""
    if isinstance(problem, CodebookProblem):
        whole = problem.alignment_n * problem.epilogue.out.bits >= 128
        kind = problem.bits, problem.slots, problem.offsets, problem.pairs, whole
        return kind == (4, 1, False, False, True) and problem.epilogue.out is not DType.F32
    aligned = isinstance(problem, W8A8Problem) or problem.alignment_k > 1
    return problem.epilogue.out is not DType.F32 and aligned and not problem.epilogue.rescale


def holds(problem: GemmProblem | W8A8Problem | CodebookProblem, target: Target) -> bool:
    """Whether a target has ahead-of-time kernels for a problem; False leaves the problem to a compiler."""
    return target.ahead_of_time and covers(problem)


def serves_cutlass(problem: GemmProblem | CodebookProblem, target: Target, is_buildable: Callable[[], bool]) -> bool:
    """Whether CUTLASS's kernels for a problem can be built, or were ahead of time, as those of int8 GEMMs are."""
    if target.ahead_of_time and (isinstance(problem, CodebookProblem) or problem.a is not DType.S8):
        return False
    return holds(problem, target) or is_buildable()


def covers(problem: GemmProblem | W8A8Problem | CodebookProblem) -> bool:
    """Whether there are ahead-of-time kernels for a problem: those of layers, not for every GEMM there is."""
    e = problem.epilogue
    if e.rescale:
        if isinstance(problem, W8A8Problem):
            return problem.tokens == "given" and problem.aligned
        return isinstance(problem, GemmProblem) and problem.layouts == "tnt" and problem.alignment_k == 16
    if e.out not in FLOATS or e.col_scale != "per_channel" or e.activation is Activation.ANY:
        return False
    if isinstance(problem, CodebookProblem):
        if e.residual or (e.out is DType.F32 and problem.x is not DType.S8):  # of two passes of different widths
            plain = problem.slots == 1 and e.activation is Activation.NONE and problem.rotates is None
            return e.out is DType.F32 and plain and (e.residual or not e.bias)
        if problem.offsets and problem.bits != 4:
            return False
        if problem.slots == 8 and (problem.bits != 4 or problem.offsets or problem.pairs or problem.x is DType.S8):
            return False
        return (e.out is problem.x or problem.x is DType.S8) and (
            (problem.bits, problem.slots, problem.pairs) == (4, 1, False) or problem.rotates is None
        )
    if e.residual:
        return False
    if isinstance(problem, W8A8Problem):
        return (e.row_scale, e.zero_point) == ("per_token", "none") and _takes_rows(problem)
    if problem.layouts != "tnt":
        return False
    if problem.a is DType.S8:
        static = ("none", "none" if e.halves else "per_tensor")
        scaled = (e.row_scale, e.zero_point) in (("per_token", "none"), static)
        return scaled and problem.alignment_k == 16
    return (e.out, e.row_scale, e.zero_point) == (problem.a, "none", "none") and problem.alignment_k in (1, 8)


def _takes_rows(problem: W8A8Problem) -> bool:
    given = problem.tokens == "given" or (problem.tokens == "rows" and not problem.absmax)
    if problem.epilogue.halves:
        given = problem.tokens == "given" and not problem.absmax
    return given and problem.aligned and problem.x is problem.epilogue.out


def takes(problem: GemmProblem, family: str, tile: object, arch: str) -> bool:
    """Whether there is an ahead-of-time kernel with a tile of an int8 GEMM of many tokens for a problem."""
    e = problem.epilogue
    whole = problem.alignment_n * e.out.bits >= 128
    if e.halves or e.rescale:
        usual = e.out is not DType.F32 and e.row_scale == "per_token" and whole
        return (family, tile) in (_halves_tiles(arch) if usual else _few_raw_tiles(arch))
    usual = e.out is not DType.F32 and e.zero_point == "none" and whole
    return (family, tile) in (gemm_tiles(arch) if usual else _few_gemm_tiles(arch))


def is_open(problem: GemmProblem, family: str, tile: object, target: Target) -> bool:
    """Whether a tile may be chosen: if there are ahead-of-time kernels for the problem, only their tiles."""
    return not holds(problem, target) or takes(problem, family, tile, target.arch)


def is_users(row: tables.Row, arch: str) -> bool:
    """Whether a tuned row is the user's own: its kernel was built here when it was measured."""
    return replace(row, tuned_on="") not in _shipped_rows(arch)


@lru_cache
def _shipped_rows(arch: str) -> frozenset[tables.Row]:
    return frozenset(row for gpu in GPUS if gpu.arch == arch for row in tables.shipped(gpu.name).rows)


@lru_cache
def _few_raw_tiles(arch: str) -> frozenset[tuple[str, object]]:
    menu = INT8_MMA.menu(GemmProblem(), arch)
    few = [tile for tile in menu if tile.splits == 1][::2] + [tile for tile in menu if tile.splits == 4]
    return frozenset((INT8_MMA.name, tile) for tile in few)


@lru_cache
def _few_gemm_tiles(arch: str) -> frozenset[tuple[str, object]]:
    cutlass = {(INT8_CUTLASS.name, tile) for tile in INT8_CUTLASS.menu(GemmProblem(), arch)}
    return _few_raw_tiles(arch) | cutlass


@lru_cache
def gemm_tiles(arch: str) -> frozenset[tuple[str, object]]:
    """Families and tiles of int8 GEMMs of many tokens: the menus, and those of the tables that qcut brings."""
    return _tiles(arch, "f16")


@lru_cache
def _halves_tiles(arch: str) -> frozenset[tuple[str, object]]:
    return _tiles(arch, "halves")


def _tiles(arch: str, out: str) -> frozenset[tuple[str, object]]:
    problem = GemmProblem()
    found = {(family.name, tile) for family in (INT8_CUTLASS, INT8_MMA) for tile in family.menu(problem, arch)}
    names = {INT8_CUTLASS.name, INT8_MMA.name}
    rows = (row for row in _shipped_rows(arch) if row.layouts == "tnt" and row.out == out and row.family in names)
    return frozenset(found | {(row.family, row.tile) for row in rows if row.tile.schedule != "stream_k"})


def all_gemm_tiles(arch: str) -> frozenset[tuple[str, object]]:
    """Those of `gemm_tiles`, and of products of int16 tokens; `takes` selects those of a problem."""
    return gemm_tiles(arch) | _halves_tiles(arch)


# ── other kernels ────────────────────────────────────────────────────────────────────────────────


def norm_columns(k: int, x: DType, target: Target, *, aligned: bool) -> int:
    """Columns to choose the kernel of a norm layer for."""
    vectors = -(-k * x.bits // 128)
    if not target.ahead_of_time or vectors > VECTOR_POINTS[-1]:
        return k
    usual = aligned and x is not DType.F32
    return _at_least(vectors, VECTOR_POINTS if usual else FEW_VECTOR_POINTS) * 128 // x.bits


def attention_queries(queries: int, target: Target) -> int:
    """Queries of a head of keys to choose the kernel of attention for."""
    return _at_least(queries, QUERIES) if target.ahead_of_time else queries


def has_clusters(head: int, target: Target) -> bool:
    """Whether attention has kernels that divide a context of such heads among the CTAs of a cluster."""
    return target.exchanges_in_clusters and (not target.ahead_of_time or head in CLUSTER_HEADS)


def has_head_norms(head: int, rotary: bool, target: Target) -> bool:
    """Whether the attention of a step has kernels that normalize heads of so many columns."""
    return not target.ahead_of_time or (rotary and head in NORM_HEADS)


def rotation_columns(
    kind: str, x: DType, k: int, group_size: int, passes: int, target: Target, *, aligned: bool
) -> tuple[int, int]:
    """Columns of a row, and of a group, to choose the kernel of a rotation for; arguments as of `select_rotation`."""
    if not target.ahead_of_time:
        return k, group_size
    whole, group_size = kind == "none" and group_size >= k, min(group_size, k)  # a row that is one group stays one
    usual = aligned and passes == 1 and group_size == 128 and x is not DType.F32
    if not usual or all(k != shape[1] for shape in KNOWN_SHAPES):
        k = _at_least(k, ROTATION_POINTS if usual else FEW_ROTATION_POINTS)
    return k, k if whole else group_size
