"""Which kernel runs which problem: tuned choices first, a cost model for the rest.

Pure functions of sizes, types and the GPU: no tensor, no compiler, no launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from qcut.dispatch import codebook as codebook_dispatch
from qcut.dispatch import tables as tuned
from qcut.dispatch.cost_model import Estimate, Target, estimate, target_for, target_named, tile_cycles
from qcut.emitters.core.epilogue import OUT_DTYPES, Activation, Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm import w8a16 as weight_only_gemm
from qcut.emitters.gemm.cutlass.gemm import LAUNCH_PARAMS
from qcut.emitters.gemm.cutlass.tiles import SM80_MENU, SM90_MENU
from qcut.emitters.gemm.families import FAMILIES, family
from qcut.emitters.gemm.problem import GemmProblem, Layout, procedural_name
from qcut.emitters.stream import w8a16 as weight_only_decode
from qcut.errors import ConfigError

__all__ = [
    "LAUNCH_PARAMS",
    "SM80_MENU",
    "SM90_MENU",
    "Choice",
    "Explanation",
    "Target",
    "alignment_of",
    "emit",
    "expected",
    "explain",
    "grid",
    "precompile_sources",
    "problem_of",
    "select_gemm",
    "select_weight_only",
    "target_for",
    "target_named",
    "tile_rows",
]

MODEL_ERROR = 1.5
"""A raw kernel is taken where CUTLASS could serve if the model says that it is faster by more than this."""


_FIRST_LAYERS = (
    (3840, 1280, True, "none"),
    (1280, 1280, True, "none"),
    (5120, 1280, True, "gelu_tanh"),
    (1280, 5120, True, "none"),
    (4096, 4096, False, "none"),
    (1024, 4096, False, "none"),
    (14336, 4096, False, "none"),
    (4096, 14336, False, "none"),
)
"""N, K, bias and activation of GPT-2 Large's layers and of Llama 3 8B's."""


@dataclass(frozen=True)
class Choice:
    """One kernel for one problem size.

    Attributes:
        family: ``cutlass``, ``mma``, ``wmma``, ``simt``, ``weight_only`` or ``weight_only_decode``.
        tile: how it cuts the problem.
        swizzle: stripe width of the tile walk (CUTLASS).
        raster: 0 CUTLASS's choice, 1 along M first, 2 along N (CUTLASS).
        splits: parts K is cut into (CUTLASS's stream-K kernels; raw tiles have theirs).
        reason: ``tuned`` or ``model``, and why CUTLASS's kernels were left out, where they were.
        tuned_us: time of the tuned row it was taken from.
    """

    family: str
    tile: Any
    swizzle: int = 1
    raster: int = 0
    splits: int = 1
    reason: str = "model"
    tuned_us: float | None = None


# ── selection ────────────────────────────────────────────────────────────────────────────────────


def select_gemm(
    problem: GemmProblem, m: int, n: int, k: int, target: Target, *, cutlass: bool = True, tensor_cores: bool = True
) -> Choice:
    """Choose the kernel of an int8 GEMM.

    A tuned row for these N, K and layouts at a nearby M decides (of several the fastest); families that nobody
    measured there do not compete. Without one, the model decides among the menus of all families.

    Args:
        problem: types, layouts, alignments and epilogue.
        m: rows of A and D.
        n: columns of B and D.
        k: summed over; as padded, where the operands are.
        target: the GPU.
        cutlass: whether nvcc and g++ are there; without them the raw families serve.
        tensor_cores: False takes the ``simt`` family.

    Returns:
        The choice; `emit` turns it into text.
    """
    why_not = _why_not_cutlass(problem, cutlass, tensor_cores)
    suffix = f"; not cutlass: {why_not}" if why_not else ""
    families = _families(why_not, tensor_cores)
    found = _tuned(problem, m, n, k, target, families)
    if found is not None:
        return replace(found, reason=found.reason + suffix)
    best = {name: tile for name in families if (tile := _best(name, problem, m, n, k, target)) is not None}

    def cost(name: str) -> float:
        cycles = expected(Choice(name, best[name]), problem, m, n, k, target).cycles
        return cycles / MODEL_ERROR if name == "cutlass" else cycles

    name = min(best, key=cost)
    return Choice(name, best[name], reason="model" + suffix)


def _families(why_not_cutlass: str, tensor_cores: bool) -> tuple[str, ...]:
    if not tensor_cores:
        return ("simt",)
    return tuple(name for name in FAMILIES if name != "cutlass" or not why_not_cutlass)


def _why_not_cutlass(problem: GemmProblem, available: bool, tensor_cores: bool) -> str:
    """What keeps CUTLASS's kernels from a problem, whatever its size; empty where nothing does."""
    if not tensor_cores:
        return "no tensor cores wanted"
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
    """The fastest tuned kernel for this (N, K) at the nearest M, where the two fill the GPU alike.

    A tile's count of waves changes by less than the gap between two tuned sizes when M moves by a
    quarter; beyond that the model decides. SIMT rows speak where SIMT is asked for, or beside a tensor-core row.
    """
    out = "s8" if problem.epilogue.out is DType.S8 else "f16"
    nearest: dict[str, tuned.Row] = {}
    for row in tuned.rows_for(target.name).get((out, problem.layouts, n, k), ()):
        near = row.m * 0.75 <= m <= row.m or (m < row.m and row.m <= 64)
        closer = row.family not in nearest or _distance(m, row) < _distance(m, nearest[row.family])
        legal = row.family in families and family(row.family).is_legal(problem, row.tile, target.arch)
        if near and closer and legal:
            nearest[row.family] = row
    if not nearest or (set(nearest) == {"simt"} and len(families) > 1):
        return None
    # Rows at different M compare by time per row of D; up to 64 of them cost the same.
    row = min(nearest.values(), key=lambda row: row.time_us / max(64, row.m))
    return Choice(row.family, row.tile, row.swizzle, row.raster, row.splits, "tuned", row.time_us)


def _distance(m: int, row: tuned.Row) -> float:
    return abs(math.log(max(m, 1) / row.m))


def _best(name: str, problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Any:
    """The tile of a family's menu that the model prefers; None where none can be built."""
    menu = family(name).menu(problem, target.arch)
    return min(menu, key=lambda t: expected(Choice(name, t), problem, m, n, k, target).cycles, default=None)


def expected(choice: Choice, problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Estimate:
    """What the cost model expects of a choice on an int8 GEMM."""
    kind = family(choice.family)
    return estimate(
        choice.family,
        problem,
        choice.tile,
        m,
        n,
        k,
        target,
        threads=kind.threads(choice.tile),
        smem_bytes=kind.smem_bytes(problem, choice.tile),
    )


def select_weight_only(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Choice:
    """Choose the kernel of a GEMM with 16-bit activations and int8 weights: for few tokens one that memory bounds."""
    if m <= weight_only_decode.MAX_TOKENS:
        tile = weight_only_decode.for_shape(problem, target.arch, m, n, k, target.sm_count)
        return Choice("weight_only_decode", tile)
    bits = problem.epilogue.out.bits
    tiles = weight_only_gemm.default_tiles(target.arch)
    return Choice("weight_only", min(tiles, key=lambda tile: tile_cycles(tile, bits, m, n, 2 * k, target)))


def emit(choice: Choice, problem: GemmProblem, arch: str) -> KernelSource:
    """Text of the chosen kernel."""
    if choice.family == "weight_only":
        return weight_only_gemm.emit_weight_only_gemm(problem, choice.tile, arch)
    if choice.family == "weight_only_decode":
        return weight_only_decode.emit_weight_only_decode(problem, choice.tile, arch)
    return family(choice.family).emit(problem, choice.tile, arch)


def grid(choice: Choice, m: int, n: int) -> tuple[int, int, int]:
    """CTAs of a launch in x, y and z; a host launcher computes its own and ignores them."""
    if choice.family == "weight_only":
        return weight_only_gemm.grid(choice.tile, m, n)
    if choice.family == "weight_only_decode":
        return weight_only_decode.grid(choice.tile, m, n)
    of = family(choice.family).grid
    return of(choice.tile, m, n) if of is not None else (1, 1, 1)


def tile_rows(choice: Choice) -> int:
    """Rows of D that a raw kernel's CTA computes."""
    return choice.tile.tokens if choice.family == "weight_only_decode" else choice.tile.threadblock_shape[0]


def alignment_of(size: int) -> int:
    """Largest of 16, 8, 4, 2, 1 that divides a size: what a kernel may assume of it."""
    return math.gcd(size, 16)


# ── explanation ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Explanation:
    """What would run a problem, and why. ``str`` of it is a paragraph.

    Attributes:
        kernel: procedural name, as in the cache, the profiler and the benchmarks.
        choice: family, tile, and reason.
        estimate: what the cost model expects of it.
        others: for each other family that could serve, its best tile and estimate.
        target: the GPU.
        sizes: M, N and K.
        tables: which tables were read, and what of them was ignored and why.
    """

    kernel: str
    choice: Choice
    estimate: Estimate
    others: tuple[tuple[str, str, Estimate], ...]
    target: Target
    sizes: tuple[int, int, int]
    tables: tuple[str, ...]

    def __str__(self) -> str:
        m, n, k = self.sizes
        c, e, gpu = self.choice, self.estimate, self.target
        walk = f", swizzle {c.swizzle}, raster {c.raster}" if c.family == "cutlass" else ""
        measured = "" if c.tuned_us is None else f" Its row says {c.tuned_us:.2f} us."
        lines = [
            f"{m}x{n}x{k} on {gpu.name or gpu.arch} ({gpu.sm_count} SMs): {self.kernel}{walk}.",
            f"Why: {c.reason}.{measured}",
            f"Model: {e.time_us:.2f} us; {e.ctas_per_sm} CTAs an SM, {e.waves:.2f} waves.",
        ]
        if self.others:
            rest = ", ".join(f"{name} {tile} {other.time_us:.2f} us" for name, tile, other in self.others)
            lines.append(f"Others by the model: {rest}.")
        lines.append(f"Tables: {'; '.join(self.tables) or 'none for this GPU'}.")
        return "\n".join(lines)


def explain(
    problem: GemmProblem, m: int, n: int, k: int, target: Target, *, cutlass: bool = True, tensor_cores: bool = True
) -> Explanation:
    """Say what `select_gemm` chooses, and what it was chosen from. Arguments as there."""
    choice = select_gemm(problem, m, n, k, target, cutlass=cutlass, tensor_cores=tensor_cores)
    others = []
    for name in _families(_why_not_cutlass(problem, cutlass, tensor_cores), tensor_cores):
        if name != choice.family and (tile := _best(name, problem, m, n, k, target)) is not None:
            others.append((name, tile.name, expected(Choice(name, tile), problem, m, n, k, target)))
    return Explanation(
        procedural_name(choice.family, target.arch, problem, choice.tile),
        choice,
        expected(choice, problem, m, n, k, target),
        tuple(others),
        target,
        (m, n, k),
        tuned.table_for(target.name).notes,
    )


def problem_of(
    m: int, n: int, k: int, *, layouts: str = "tnt", out: str = "f16", epilogue: Epilogue | None = None
) -> GemmProblem:
    """An int8 GEMM of dense operands, as `qcut.explain` and the tuner name it.

    Args:
        m: rows of A and D.
        n: columns of B and D.
        k: summed over.
        layouts: of A, B and D: ``t`` is row-major, ``n`` column-major.
        out: type of D: f16, bf16, f32, s8 or s32.
        epilogue: what is fused; None takes the whole dequantization (zero point, both scales, bias), or nothing
            where ``out`` is s32. Its own output type wins over ``out``.

    Raises:
        ConfigError: layouts or an output that do not exist, or a size below 1.
    """
    if layouts not in tuned.LAYOUTS:
        raise ConfigError(f"layouts {layouts!r} do not exist; three of t (row-major) and n (column-major): A, B, D")
    if min(m, n, k) < 1:
        raise ConfigError(f"sizes {m}x{n}x{k}: M, N and K are at least 1")
    if epilogue is None:
        allowed = tuple(dtype.value for dtype in OUT_DTYPES)
        if out not in allowed:
            raise ConfigError(f"output {out!r} does not exist; allowed: {', '.join(allowed)}")
        whole = Epilogue(DType.F16, "per_token", "per_channel", "per_token", bias=True)
        epilogue = Epilogue(DType.S32) if out == "s32" else replace(whole, out=DType(out))
    sides: dict[str, Layout] = {"t": "row", "n": "column"}
    a, b, d = (sides[flag] for flag in layouts)
    along_a, along_b, along_d = k if a == "row" else m, k if b == "column" else n, n if d == "row" else m
    return GemmProblem(
        epilogue=epilogue,
        alignment_k=alignment_of(math.gcd(along_a, along_b)),
        alignment_n=alignment_of(along_d),
        layout_a=a,
        layout_b=b,
        layout_d=d,
    )


# ── ahead of time ────────────────────────────────────────────────────────────────────────────────


def precompile_sources(arch: str) -> list[KernelSource]:
    """The kernels that a first model is likely to need on an architecture, for ``qcut precompile``.

    Every CUTLASS tile of the architecture's menu with the epilogues of `qcut.Linear` in float16 (dynamic W8A8 with a
    bias, without, and with GELU), the raw families' menus with the first of them, and the tile of ``wmma`` and
    ``simt`` that the model prefers at 4096 cubed. Then W8A16's menu for prompts; and for the layers of GPT-2 Large and
    Llama 3 8B, whose kernels depend on their sizes, W8A16 for few tokens and ``codebook4``.
    """
    base = Epilogue(out=DType.F16, row_scale="per_token", col_scale="per_channel", bias=True)
    epilogues = (base, replace(base, bias=False), replace(base, activation=Activation.GELU_TANH))
    problems = [GemmProblem(epilogue=epilogue) for epilogue in epilogues]
    cutlass, mma = family("cutlass"), family("mma")
    sources = [cutlass.emit(p, tile, arch) for p in problems for tile in cutlass.menu(p, arch)]
    sources += [mma.emit(problems[0], tile, arch) for tile in mma.menu(problems[0], arch)]
    gpu = target_named(arch)
    for name in ("wmma", "simt"):
        tile = _best(name, problems[0], 4096, 4096, 4096, gpu)
        sources.append(family(name).emit(problems[0], tile, arch))
    weight_only = GemmProblem(a=DType.F16, epilogue=replace(base, row_scale="none"), alignment_k=8)
    tiles = weight_only_gemm.default_tiles(arch)
    sources += [weight_only_gemm.emit_weight_only_gemm(weight_only, tile, arch) for tile in tiles]
    few: dict[str, KernelSource] = {}
    for (n, k, bias, activation), m in product(_FIRST_LAYERS, (8, 16, 32)):
        epilogue = replace(weight_only.epilogue, bias=bias, activation=Activation(activation))
        problem = replace(weight_only, epilogue=epilogue)
        source = emit(select_weight_only(problem, m, n, k, gpu), problem, arch)
        few[source.name] = source
    return [*sources, *few.values(), *codebook_dispatch.precompile_sources(arch, _FIRST_LAYERS)]
