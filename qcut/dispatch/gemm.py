"""Chooses the kernel of an int8 GEMM: a tuned choice if there is one, else by a cost model.

All functions are pure, of sizes, types and the GPU: they take no tensor, compile nothing and launch nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from qcut.dispatch import ahead_of_time, tables
from qcut.dispatch.cost_model import Estimate, estimate
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import Choice as Choice
from qcut.dispatch.heuristics import best, choose
from qcut.dispatch.heuristics import emit as emit
from qcut.dispatch.heuristics import grid as grid
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import OUT_DTYPES, Epilogue
from qcut.emitters.core.names import procedural_name
from qcut.emitters.core.source import DType
from qcut.emitters.families import (
    CUTLASS_FAMILIES,
    FAMILIES,
    FP8_CUTLASS,
    FP8_MMA,
    INT8_CUTLASS,
    INT8_DP4A,
    INT8_MMA,
    INT8_STREAM,
    W8A16_CUTLASS,
    W8A16_MMA,
    W8A16_STREAM,
    W8A16_WGMMA,
    family,
)
from qcut.emitters.gemm.dp4a import Dp4aTile
from qcut.emitters.gemm.problem import K_MAX, GemmProblem, Layout, TileConfig
from qcut.emitters.stream import w8a8
from qcut.emitters.stream import w8a16 as w8a16_stream
from qcut.emitters.stream.w8a8 import Tokens, W8A8Problem
from qcut.errors import ConfigError
from qcut.jit.debug import logs_choice

W8A16_CUTLASS_WALK = (4, 1)
"""Swizzle and raster if none is tuned: 706 us against 724 to 735 at 4096x14336x4096 on an H200, settled."""
FP8_CUTLASS_WALK = (1, 2)
"""Of ``fp8_cutlass``, the fastest of four on an H200 at most sizes."""
_MOST_E4M3_TOKENS = 16
"""e4m3 tokens up to which streaming is as fast as ``fp8_cutlass`` on an H200."""
_MOST_TOKENS = 16
"""Int8 tokens up to which streaming is faster than the tiled kernels with weights of any size."""
_SMALL_WEIGHTS = 2 << 20
"""Bytes of weights up to which it is for as many tokens as the kernel takes."""

# ── selection ────────────────────────────────────────────────────────────────────────────────────


@logs_choice
def select_gemm(
    problem: GemmProblem, m: int, n: int, k: int, target: Target, *, cutlass: bool = True, tensor_cores: bool = True
) -> Choice:
    """Choose the kernel of an int8 GEMM.

    A tuned row for the same N, K and layouts at a nearby M decides, the fastest of several; families
    that were not measured there do not compete. Without a tuned row the model decides among the menus of all families.

    Args:
        problem: types, layouts, alignments and epilogue.
        m: rows of A: those of D, or ``problem.epilogue.rows`` of them.
        n: columns of B and D.
        k: summed over, with the operands' padding.
        target: the GPU.
        cutlass: whether nvcc and g++ are there; without them the raw families serve.
        tensor_cores: False takes the ``int8_dp4a`` family.

    Returns:
        The choice; `emit` turns it into text.
    """
    why_not = _why_not_cutlass(problem, cutlass, tensor_cores)
    suffix = f"; not cutlass: {why_not}" if why_not else ""
    families = _families(why_not, tensor_cores)
    if tensor_cores and ahead_of_time.holds(problem, target):
        families = tuple(name for name in families if name in (INT8_CUTLASS.name, INT8_MMA.name))
    tuned = _tuned(problem, m, n, k, target, families)
    if tuned is not None:
        return replace(tuned, reason=tuned.reason + suffix)
    found = choose(families, problem, m, n, k, target)
    assert found is not None, "int8_mma and int8_dp4a take every problem"
    return replace(found, reason="model" + suffix)


def _families(why_not_cutlass: str, tensor_cores: bool) -> tuple[str, ...]:
    if not tensor_cores:
        return (INT8_DP4A.name,)
    return tuple(name for name in FAMILIES if name != INT8_CUTLASS.name or not why_not_cutlass)


def _why_not_cutlass(problem: GemmProblem, available: bool, tensor_cores: bool) -> str:
    """The reason why CUTLASS's kernels cannot serve a problem of any size; empty if they can."""
    if not tensor_cores:
        return "no tensor cores wanted"
    if problem.epilogue.rescale:
        return "results only in integers"
    if problem.layouts != "tnt":
        return f"its kernels take layouts tnt, these are {problem.layouts}"
    if problem.epilogue.is_raw:
        return "raw accumulators"
    if problem.alignment_k % 16:
        return "rows of A and B unaligned"
    if problem.alignment_n * problem.epilogue.out.bits < 128:
        return "rows of D unaligned"
    return "" if available else "no nvcc or g++"


def _tuned(problem: GemmProblem, m: int, n: int, k: int, target: Target, families: tuple[str, ...]) -> Choice | None:
    """The fastest tuned kernel for this (N, K) at the nearest tuned M that fills the GPU alike, or None.

    When M moves by a quarter, a tile's count of waves changes by less than between two tuned sizes; beyond a
    quarter the model decides. Rows of dp4a count if dp4a is asked for, or with a tensor-core row.
    """
    if problem.epilogue.halves:
        # Where none was measured for halves, what is best for int8 at as many rows is a start.
        found = _tuned_for("halves", problem, m // 2, n, k, target, families)
        return found or _tuned_for("f16", problem, m, n, k, target, families)
    out = "s8" if problem.epilogue.out is DType.S8 else "f16"
    return _tuned_for(out, problem, m, n, k, target, families)


def _tuned_for(
    out: str, problem: GemmProblem, m: int, n: int, k: int, target: Target, families: tuple[str, ...]
) -> Choice | None:
    """`_tuned` among the rows of a class of D, m counted as they do."""
    nearest: dict[str, tables.Row] = {}
    for row in tables.rows_for(target).get((out, problem.layouts, n, k), ()):
        near = row.m * 0.75 <= m <= row.m or (m < row.m and row.m <= 64)
        closer = row.family not in nearest or _distance(m, row) < _distance(m, nearest[row.family])
        legal = row.family in families and family(row.family).is_legal(problem, row.tile, target.arch)
        is_open = ahead_of_time.is_open(problem, row.family, row.tile, target)
        legal = legal and (is_open or ahead_of_time.is_users(row, target.arch))
        if near and closer and legal:
            nearest[row.family] = row
    if not nearest or (set(nearest) == {INT8_DP4A.name} and len(families) > 1):
        return None
    # Rows at different M compare by time per row of D; up to 64 rows of D take the same time.
    row = min(nearest.values(), key=lambda row: row.time_us / max(64, row.m))
    start = f" for {row.tuned_on}, used as a start for {target.name}" if row.tuned_on else ""
    time_us = None if row.tuned_on else row.time_us
    return Choice(row.family, row.tile, row.swizzle, row.raster, row.splits, "tuned" + start, time_us)


def _distance(m: int, row: tables.Row) -> float:
    return abs(math.log(max(m, 1) / row.m))


@logs_choice
def select_w8a16(problem: GemmProblem, m: int, n: int, k: int, target: Target, *, nvcc: bool = True) -> Choice:
    """Choose the kernel of a GEMM with 16-bit activations and weights of a byte; few tokens have kernels of their own.

    Args:
        problem: types, alignments and epilogue.
        m: rows of A and D.
        n: columns of B and D.
        k: summed over.
        target: the GPU.
        nvcc: whether nvcc and g++ are there, which ``w8a16_wgmma`` and ``w8a16_cutlass`` need.
    """
    nvcc = nvcc and not target.ahead_of_time
    if nvcc and m > w8a16_stream.MAX_TOKENS:
        if k % 16 == 0 and (tuned := _tuned(problem, m, n, k, target, (W8A16_CUTLASS.name,))) is not None:
            return tuned
        found = choose((W8A16_WGMMA.name, W8A16_CUTLASS.name), problem, m, n, k, target)
        if found is not None:
            swizzle, raster = W8A16_CUTLASS_WALK if found.family == W8A16_CUTLASS.name else (1, 0)
            return replace(found, swizzle=swizzle, raster=raster)
    if m <= w8a16_stream.MAX_TOKENS:
        sizes = ahead_of_time.bounded(n, k, target, known=ahead_of_time.is_usual(problem))
        return best(W8A16_STREAM, problem, m, *sizes)
    return best(W8A16_MMA, problem, m, n, k, target)


@logs_choice
def select_fp8(
    problem: GemmProblem, m: int, n: int, k: int, target: Target, *, nvcc: bool = True
) -> tuple[GemmProblem, Choice]:
    """Choose the kernel of a GEMM with activations and weights of e4m3.

    Every e4m3 is a float16. Kernels of 16-bit activations and weights of a byte serve few tokens, and GPUs for which
    qcut has no products of e4m3. Without ``fp8_cutlass`` they serve more of them.

    Args:
        problem: types, alignments and epilogue.
        m: rows of A and D.
        n: columns of B and D.
        k: summed over, a multiple of 16.
        target: the GPU.
        nvcc: whether nvcc and g++ are there, which ``fp8_cutlass`` and ``w8a16_wgmma`` need.

    Returns:
        The problem, with activations in e4m3 or f16, and the choice.
    """
    floats = replace(problem, a=DType.F16, alignment_k=8)
    if m > _MOST_E4M3_TOKENS and nvcc and not target.ahead_of_time:
        found = choose((FP8_CUTLASS.name,), problem, m, n, k, target)
        if found is not None:
            swizzle, raster = FP8_CUTLASS_WALK
            return problem, replace(found, swizzle=swizzle, raster=raster)
        of_floats = choose((W8A16_WGMMA.name,), floats, m, n, k, target)
        if of_floats is not None:
            return floats, of_floats
    if m <= w8a16_stream.MAX_TOKENS or not architecture(target.arch).e4m3:
        return floats, select_w8a16(floats, m, n, k, target, nvcc=nvcc)
    return problem, best(FP8_MMA, problem, m, n, k, target)


def few_tokens(
    problem: GemmProblem,
    m: int,
    n: int,
    k: int,
    target: Target,
    tokens: Tokens = "none",
    *,
    aligned: bool = True,
    absmax: bool = False,
    rotates: int = 0,
) -> tuple[W8A8Problem, Choice] | None:
    """The problem and the kernel that stream int8 weights past m tokens; None if tiled kernels are faster or needed.

    Args:
        problem: of the product, with int8 tokens.
        m: rows of D.
        n: columns of D.
        k: summed over, with the operands' padding if tokens are int8.
        target: the GPU.
        tokens: how tokens are given and quantized, see `qcut.emitters.stream.w8a8`.
        aligned: whether rows of tokens start at multiples of 16 bytes.
        absmax: whether the kernel also computes the largest magnitude of each row of its result.
        rotates: columns of a group of the rotation that the kernel applies to its one token; 0: none.
    """
    if rotates and target.ahead_of_time:
        return None
    if problem.layouts != "tnt" or problem.alignment_k % 16 or m > most_tokens(n, k):
        return None
    few = W8A8Problem(tokens, problem.epilogue.out, problem.epilogue, aligned, absmax, rotates=rotates)
    if ahead_of_time.holds(problem, target) and not ahead_of_time.covers(few):
        return None
    if not w8a8.is_legal(few, m, k, target.arch):
        return None
    n, k, like = ahead_of_time.bounded(n, k, target, known=ahead_of_time.is_usual(few))
    found = choose((INT8_STREAM.name,), few, m, n, min(k, K_MAX), like)
    return None if found is None else (few, found)


def most_tokens(n: int, k: int) -> int:
    """Tokens up to which streaming weights ``[n, k]`` is faster than the tiled kernels."""
    return w8a8.MAX_TOKENS if n * k <= _SMALL_WEIGHTS else _MOST_TOKENS


def alignment_of(size: int) -> int:
    """The alignment that a kernel may assume of a size: the largest of 16, 8, 4, 2, 1 that divides the size."""
    return math.gcd(size, 16)


# ── explanation ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Explanation:
    """The kernel that would run a problem, and why. ``str`` of an explanation is a paragraph.

    Attributes:
        kernel: procedural name, as in the cache, the profiler and the benchmarks.
        choice: family, tile, and reason.
        estimate: the cost model's estimate for the kernel, or None if the family has no such model.
        others: best tile and estimate of each other family that could serve.
        target: the GPU.
        sizes: M, N and K.
        tables: which tables were read, and which parts of them were ignored and why.
    """

    kernel: str
    choice: Choice
    estimate: Estimate | None
    others: tuple[tuple[str, str, Estimate], ...]
    target: Target
    sizes: tuple[int, int, int]
    tables: tuple[str, ...]

    def __str__(self) -> str:
        m, n, k = self.sizes
        c, e, gpu = self.choice, self.estimate, self.target
        walk = f", swizzle {c.swizzle}, raster {c.raster}" if c.family in CUTLASS_FAMILIES else ""
        measured = "" if c.tuned_us is None else f" Its row says {c.tuned_us:.2f} us."
        lines = [
            f"{m}x{n}x{k} on {gpu.name or gpu.arch} ({gpu.sm_count} SMs): {self.kernel}{walk}.",
            f"Why: {c.reason}.{measured}",
            "Model: none."
            if e is None
            else f"Model: {e.time_us:.2f} us; {e.ctas_per_sm} CTAs an SM, {e.waves:.2f} waves.",
        ]
        if self.others:
            rest = ", ".join(f"{name} {tile} {other.time_us:.2f} us" for name, tile, other in self.others)
            lines.append(f"Others by the model: {rest}.")
        lines.append(f"Tables: {'; '.join(self.tables) or 'none for this GPU, nor for a similar one'}.")
        lines.append(f"Machine: {gpu.machine}.")
        return "\n".join(lines)


def explain(
    problem: GemmProblem, m: int, n: int, k: int, target: Target, *, cutlass: bool = True, tensor_cores: bool = True
) -> Explanation:
    """Explain the choice of `few_tokens`, or else of `select_gemm`, with the alternatives; arguments as there.

    For 16-bit tokens the choice is that of `select_w8a16`.
    """
    served: Any = problem
    others = []
    if problem.a is not DType.S8:
        choice = select_w8a16(problem, m, n, k, target, nvcc=cutlass)
        expected = _estimate(choice, problem, m, n, k, target) if choice.family in CUTLASS_FAMILIES else None
    elif tensor_cores and (found := few_tokens(problem, m, n, k, target)) is not None:
        served, choice = found[0], replace(found[1], reason="few tokens")
        ctas, _, _ = grid(choice, n, target.sm_count)(m)
        expected = Estimate(choice.cost * target.machine.ghz, choice.cost / 1e3, 1, ctas / target.sm_count)
    else:
        choice = select_gemm(problem, m, n, k, target, cutlass=cutlass, tensor_cores=tensor_cores)
        expected = _estimate(choice, problem, m, n, k, target)
        for name in _families(_why_not_cutlass(problem, cutlass, tensor_cores), tensor_cores):
            if name != choice.family and (other := choose((name,), problem, m, n, k, target)) is not None:
                others.append((name, other.tile.name, _estimate(other, problem, m, n, k, target)))
    by_element = choice.family == W8A16_STREAM.name
    served, _ = ahead_of_time.bounded_problem(served, target, element_stores=by_element)
    kernel = procedural_name(choice.family, target.arch, served, choice.tile)
    notes = tables.table_on(target).notes
    return Explanation(kernel, choice, expected, tuple(others), target, (m, n, k), notes)


def _estimate(choice: Choice, problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Estimate:
    assert isinstance(choice.tile, TileConfig | Dp4aTile), "a tiled GEMM"
    return estimate(choice.family, problem, choice.tile, m, n, k, target)


def problem_of(
    m: int,
    n: int,
    k: int,
    *,
    layouts: str = "tnt",
    out: str = "f16",
    epilogue: Epilogue | None = None,
    tokens: str = "s8",
) -> GemmProblem:
    """The description of a GEMM of dense operands, from the names that `qcut.explain` and the tuner use.

    Args:
        m: rows of A and D.
        n: columns of B and D.
        k: summed over.
        layouts: of A, B and D: ``t`` is row-major, ``n`` column-major.
        out: type of D: f16, bf16, f32, s8 or s32.
        epilogue: the fused epilogue; its output type wins over ``out``; None takes the whole dequantization (zero
            point, both scales, bias), or no epilogue if ``out`` is s32.
        tokens: type of A: s8, or f16 or bf16, with a scale for each column and a bias by default.

    Raises:
        ConfigError: layouts, an output or a type of tokens that do not exist, or a size below 1.
    """
    if tokens not in ("s8", "f16", "bf16"):
        raise ConfigError(f"tokens {tokens!r} do not exist; allowed: s8, f16, bf16")
    if layouts not in tables.LAYOUTS:
        raise ConfigError(f"layouts {layouts!r} do not exist; three of t (row-major) and n (column-major): A, B, D")
    if min(m, n, k) < 1:
        raise ConfigError(f"sizes {m}x{n}x{k}: M, N and K are at least 1")
    if epilogue is None:
        allowed = tuple(dtype.value for dtype in OUT_DTYPES)
        if out not in allowed:
            raise ConfigError(f"output {out!r} does not exist; allowed: {', '.join(allowed)}")
        whole = Epilogue(DType.F16, "per_token", "per_channel", "per_token", bias=True)
        if tokens != "s8":
            whole = Epilogue(col_scale="per_channel", bias=True)
        epilogue = Epilogue(DType.S32) if out == "s32" else replace(whole, out=DType(out))
    sides: dict[str, Layout] = {"t": "row", "n": "column"}
    a, b, d = (sides[flag] for flag in layouts)
    if tokens != "s8":
        if layouts != "tnt":
            raise ConfigError(f"layouts {layouts!r} with tokens of {tokens}; allowed: tnt")
        return GemmProblem(DType(tokens), epilogue=epilogue, alignment_k=math.gcd(k, 8), alignment_n=alignment_of(n))
    along_a, along_b, along_d = k if a == "row" else m, k if b == "column" else n, n if d == "row" else m
    return GemmProblem(
        epilogue=epilogue,
        alignment_k=alignment_of(math.gcd(along_a, along_b)),
        alignment_n=alignment_of(along_d),
        layout_a=a,
        layout_b=b,
        layout_d=d,
    )
