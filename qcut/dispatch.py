"""Which kernel runs which problem: tuned choices first, a cost model for the rest.

Pure functions of sizes, types and the GPU: no tensor, no compiler, no launch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from emitters.cutlass_gemm import LAUNCH_PARAMS, emit_cutlass_gemm
from emitters.cutlass_gemm import validate as validate_cutlass
from emitters.epilogue import Activation, Epilogue
from emitters.gemm import GemmProblem, Schedule, TileConfig
from emitters.mma_gemm import default_tiles as mma_tiles
from emitters.mma_gemm import emit_mma_gemm
from emitters.source import DType, EmitError, KernelSource
from emitters.weight_only_gemm import default_tiles as weight_only_tiles
from emitters.weight_only_gemm import emit_weight_only_gemm
from qcut.errors import UnsupportedError

__all__ = [
    "LAUNCH_PARAMS",
    "Choice",
    "Target",
    "emit",
    "explain",
    "precompile_sources",
    "select_gemm",
    "select_weight_only",
    "target_for",
]

_ARCH = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100", (12, 0): "sm_120"}


@dataclass(frozen=True)
class Target:
    """A GPU as dispatch sees it.

    Attributes:
        arch: architecture kernels are compiled for.
        sm_count: multiprocessors.
        name: the driver's name of it, which selects the tuned table.
    """

    arch: str
    sm_count: int
    name: str = ""


def target_for(capability: tuple[int, int], sm_count: int, name: str = "") -> Target:
    """Map a compute capability to the architecture kernels are compiled for.

    Raises:
        UnsupportedError: the GPU is older than compute capability 8.0, or unknown.
    """
    arch = _ARCH.get(capability) or _ARCH.get((capability[0], 0))
    if arch is None or capability < (8, 0):
        known = ", ".join(f"{major}.{minor}" for major, minor in _ARCH)
        raise UnsupportedError(
            f"GPU {name or '?'} has compute capability {capability[0]}.{capability[1]}; qcut's kernels run on {known}"
        )
    return Target(arch, sm_count, name)


@dataclass(frozen=True)
class Choice:
    """One kernel for one problem size.

    Attributes:
        family: ``cutlass``, ``mma`` (raw int8) or ``weight_only``.
        tile: how it cuts the problem.
        swizzle: stripe width of the tile walk (CUTLASS).
        raster: 0 CUTLASS's choice, 1 along M first, 2 along N (CUTLASS).
        splits: parts K is cut into (stream-K kernels).
        reason: ``tuned``, ``model``, or why nothing else could be taken.
    """

    family: str
    tile: TileConfig
    swizzle: int = 1
    raster: int = 0
    splits: int = 1
    reason: str = "model"


# ── tuned table ──────────────────────────────────────────────────────────────────────────────────

TileKey = tuple[int, int, int, str]


def table_name(gpu: str) -> str:
    """File name of a GPU's tuned table: ``NVIDIA H200`` → ``nvidia_h200.json``."""
    return gpu.strip().lower().replace(" ", "_") + ".json"


def tuned_rows(gpu: str) -> list[dict[str, Any]]:
    """Rows of the table shipped for a GPU; none where there is no table."""
    resource = files("qcut") / "data" / "tuned" / table_name(gpu)
    return list(json.loads(resource.read_text())["choices"]) if gpu and resource.is_file() else []


@cache
def _tuned(gpu: str) -> dict[tuple[str, int, int], list[tuple[int, Choice]]]:
    """(output class, N, K) → [(M, choice)] in ascending M."""
    table: dict[tuple[str, int, int], list[tuple[int, Choice]]] = {}
    for row in tuned_rows(gpu):
        choice = Choice("cutlass", tile_from_json(row["tile"]), row["swizzle"], row["raster"], row["splits"], "tuned")
        table.setdefault((row["out"], row["n"], row["k"]), []).append((row["m"], choice))
    for rows in table.values():
        rows.sort(key=lambda r: r[0])
    return table


def tile_from_json(data: dict[str, object]) -> TileConfig:
    """Read a tile of the tuned table (`tile_to_json`)."""
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return TileConfig(**lists)  # type: ignore[arg-type]


def tile_to_json(tile: TileConfig) -> dict[str, object]:
    """The fields of a tile that differ from the defaults."""
    default = TileConfig(tile.threadblock_shape)
    out: dict[str, object] = {"threadblock_shape": list(tile.threadblock_shape)}
    for key in ("warp_shape", "stages", "cluster_shape", "schedule", "epilogue_tile"):
        value = getattr(tile, key)
        if value != getattr(default, key):
            out[key] = list(value) if isinstance(value, tuple) else value
    return out


def _lookup(out: str, m: int, n: int, k: int, target: Target) -> Choice | None:
    """The tuned choice for this (N, K) at the nearest M, where the two fill the GPU alike.

    A tile's count of waves changes by less than the gap between two tuned sizes when M moves by a
    quarter; beyond that the model decides.
    """
    rows = _tuned(target.name).get((out, n, k))
    if not rows:
        return None
    nearest, choice = min(rows, key=lambda r: abs(math.log(max(m, 1) / r[0])))
    if nearest * 0.75 <= m <= nearest or (m < nearest and nearest <= 64):
        return choice
    return None


# ── cost model ───────────────────────────────────────────────────────────────────────────────────


def _sm90(
    shape: tuple[int, int, int],
    schedule: Schedule,
    cluster: tuple[int, int] = (1, 1),
    epilogue: tuple[int, int] = (0, 0),
) -> TileConfig:
    return TileConfig(shape, cluster_shape=cluster, schedule=schedule, epilogue_tile=epilogue)


SM90_MENU: tuple[TileConfig, ...] = (
    _sm90((64, 32, 256), "warp_specialized"),
    _sm90((64, 64, 256), "warp_specialized"),
    _sm90((128, 64, 128), "pingpong", (2, 1)),
    _sm90((128, 128, 128), "pingpong", (2, 1)),
    _sm90((256, 160, 128), "cooperative"),
    _sm90((128, 256, 128), "cooperative", (2, 1)),
)
"""What untuned sizes choose from. Short, because each member is built on first use."""

SM80_MENU: tuple[TileConfig, ...] = (
    TileConfig((64, 64, 64), (32, 32, 64), stages=4),
    TileConfig((64, 128, 64), (32, 64, 64), stages=4),
    TileConfig((128, 128, 64), (64, 64, 64), stages=3),
    TileConfig((128, 256, 64), (64, 64, 64), stages=3),
)
"""CUTLASS multistage tiles for sm_80, 86, 89, 100 and 120."""

_MAC_PER_SM_CYCLE = {"sm_90a": 4096, "sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_100": 2048, "sm_120": 1024}
"""Dense int8 multiply-accumulates of the instructions these kernels use (datasheet rate over SMs and clock)."""
_L2_BYTES_PER_SM_CYCLE = 32.0
_TILE_START_CYCLES = 1200
_EPILOGUE_BYTES_PER_CYCLE = 16.0


def model_cycles(tile: TileConfig, out_bits: int, m: int, n: int, k: int, target: Target) -> float:
    """Estimated cycles of a GEMM: waves of tiles, each bound by its products or its loads.

    A tile of bm x bn costs the larger of ``bm·bn·K / MACs per cycle`` and its operand bytes over the
    SM's share of L2 bandwidth (a cluster loads what its CTAs share once), plus an epilogue that
    ping-pong hides behind the next tile.
    """
    bm, bn, _ = tile.threadblock_shape
    cm, cn = tile.cluster_shape
    tiles = math.ceil(m / (bm * cm)) * cm * math.ceil(n / (bn * cn)) * cn
    waves = math.ceil(tiles / target.sm_count)
    # Narrow tiles read shared memory faster than it delivers.
    width_penalty = 1.0 if bn >= 128 else 1.0 + 0.25 * (128 - bn) / 128
    products = bm * bn * k / _MAC_PER_SM_CYCLE[target.arch] * width_penalty
    loads = (bm / cn + bn / cm) * k / _L2_BYTES_PER_SM_CYCLE
    epilogue = bm * bn * out_bits / 8 / _EPILOGUE_BYTES_PER_CYCLE
    body = max(products, loads)
    hidden = tile.schedule == "pingpong"
    return _TILE_START_CYCLES + waves * body + (epilogue if hidden else waves * epilogue)


def _by_model(menu: Iterable[TileConfig], out_bits: int, m: int, n: int, k: int, target: Target) -> TileConfig:
    return min(menu, key=lambda tile: model_cycles(tile, out_bits, m, n, k, target))


# ── selection ────────────────────────────────────────────────────────────────────────────────────


def select_gemm(problem: GemmProblem, m: int, n: int, k: int, target: Target, *, cutlass: bool = True) -> Choice:
    """Choose the kernel of an int8 GEMM.

    Args:
        problem: types and epilogue.
        m: rows of A and D.
        n: rows of B, columns of D.
        k: columns of A and B, as padded.
        target: the GPU.
        cutlass: whether nvcc and g++ are there; without them the raw family serves.

    Returns:
        The choice; `emit` turns it into text.
    """
    out_bits = problem.epilogue.out.bits
    if problem.alignment_n * out_bits < 128:
        return Choice("mma", _by_model(mma_tiles(target.arch), out_bits, m, n, k, target), reason="rows of D unaligned")
    if not cutlass:
        return Choice("mma", _by_model(mma_tiles(target.arch), out_bits, m, n, k, target), reason="no nvcc or g++")
    if target.arch == "sm_90a":
        out = "s8" if problem.epilogue.out is DType.S8 else "f16"
        tuned = _lookup(out, m, n, k, target)
        if tuned is not None and _is_legal(problem, tuned.tile, target.arch):
            return tuned
        legal = [tile for tile in SM90_MENU if _is_legal(problem, tile, target.arch)]
    else:
        legal = [tile for tile in SM80_MENU if _is_legal(problem, tile, target.arch)]
    return Choice("cutlass", _by_model(legal, out_bits, m, n, k, target))


def _is_legal(problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
    try:
        validate_cutlass(problem, tile, arch)
    except EmitError:
        return False
    return True


def select_weight_only(problem: GemmProblem, m: int, n: int, k: int, target: Target) -> Choice:
    """Choose the kernel of a GEMM with 16-bit activations and int8 weights."""
    tiles = weight_only_tiles(target.arch)
    return Choice("weight_only", _by_model(tiles, problem.epilogue.out.bits, m, n, 2 * k, target))


def emit(choice: Choice, problem: GemmProblem, arch: str) -> KernelSource:
    """Text of the chosen kernel."""
    emitter = {"cutlass": emit_cutlass_gemm, "mma": emit_mma_gemm, "weight_only": emit_weight_only_gemm}[choice.family]
    return emitter(problem, choice.tile, arch)


def alignment_of(size: int) -> int:
    """Largest of 16, 8, 4, 2, 1 that divides a size: what a kernel may assume of it."""
    return math.gcd(size, 16)


def explain(problem: GemmProblem, m: int, n: int, k: int, target: Target, *, cutlass: bool = True) -> str:
    """One line: what would run this problem, and why."""
    choice = select_gemm(problem, m, n, k, target, cutlass=cutlass)
    cycles = model_cycles(choice.tile, problem.epilogue.out.bits, m, n, k, target)
    return (
        f"{choice.family} {choice.tile.name} swizzle {choice.swizzle} raster {choice.raster} splits {choice.splits} "
        f"({choice.reason}; model: {cycles:.0f} cycles)"
    )


def precompile_sources(arch: str) -> list[KernelSource]:
    """The kernels that a first model is likely to need on an architecture, for ``qcut precompile``.

    Every tile of the architecture's menu with the epilogues of `qcut.Linear` in float16: dynamic W8A8
    with a bias, without and with GELU (tanh).
    """
    base = Epilogue(out=DType.F16, row_scale="per_token", col_scale="per_channel", bias=True)
    epilogues = (base, replace(base, bias=False), replace(base, activation=Activation.GELU_TANH))
    menu = SM90_MENU if arch == "sm_90a" else SM80_MENU
    problems = [GemmProblem(epilogue=epilogue) for epilogue in epilogues]
    sources = [emit_cutlass_gemm(p, tile, arch) for p in problems for tile in menu if _is_legal(p, tile, arch)]
    sources += [emit_mma_gemm(problems[0], tile, arch) for tile in mma_tiles(arch)]
    weight_only = GemmProblem(a=DType.F16, epilogue=replace(base, row_scale="none"))
    sources += [emit_weight_only_gemm(weight_only, tile, arch) for tile in weight_only_tiles(arch)]
    return sources
