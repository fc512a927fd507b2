"""Short int8 GEMMs for readers, one idea each, and kernels that measure the peak rate of a multiprocessor's products.

``D = epilogue(A B)`` of whole tiles alone. Device code: ``ladder.cuh`` and ``peak.cuh`` beside this file.
Dispatch never chooses these kernels: they are the first steps of ``layers/ladder.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qcut.emitters.core.constraints import Constraint, check, require
from qcut.emitters.core.names import procedural_name
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import kernel_source
from qcut.emitters.gemm.problem import GemmProblem

FAMILY = "ladder"
Step = Literal["naive", "shared", "registers", "wmma"]
Unit = Literal["dp4a", "mma"]


def _device_code(header: str) -> str:
    """Device code that lies beside this file."""
    return Path(__file__).with_name(header).read_text()


@dataclass(frozen=True)
class LadderTile:
    """One of the kernels, with the sizes that it has in ``ladder.cuh``.

    Attributes:
        step: name of the kernel.
        threadblock_shape: CTA tile (m, n, k) in elements.
        threads: of a CTA.
    """

    step: Step
    threadblock_shape: tuple[int, int, int]
    threads: int

    @property
    def name(self) -> str:
        """``{m}x{n}x{k}_{step}``."""
        return "x".join(map(str, self.threadblock_shape)) + f"_{self.step}"


NAIVE = LadderTile("naive", (16, 16, 1), 256)
SHARED = LadderTile("shared", (32, 32, 32), 1024)
REGISTERS = LadderTile("registers", (128, 128, 32), 256)
WMMA = LadderTile("wmma", (128, 128, 64), 128)
TILES = (NAIVE, SHARED, REGISTERS, WMMA)

CONSTRAINTS = (
    Constraint("operands", "are s8 x s8", lambda p: p.a is DType.S8 and p.b is DType.S8),
    Constraint("layouts", "are tnt: A and B contiguous along K, D along N", lambda p: p.layouts == "tnt"),
    Constraint(
        "alignments",
        "are multiples of 16: pieces of 16 bytes are read, of 8 written",
        lambda p: p.alignment_k % 16 == 0 and p.alignment_n % 16 == 0,
    ),
    Constraint("residual", "is the families' that serve", lambda p: not p.epilogue.residual),
)
"""What these kernels take, on (problem,). Sizes: see `grid`."""


def grid(tile: LadderTile, m: int, n: int, k: int) -> tuple[int, int, int]:
    """CTAs of a launch: tiles along N, tiles along M.

    Raises:
        EmitError: m, n or k is no multiple of the tile's, or below 1.
    """
    sizes = (m, n, k)
    whole = all(size > 0 and size % side == 0 for size, side in zip(sizes, tile.threadblock_shape, strict=True))
    require(whole, f"ladder kernel {tile.name}", f"takes whole tiles alone, not M, N, K = {m}, {n}, {k}")
    bm, bn, _ = tile.threadblock_shape
    return (n // bn, m // bm, 1)


def emit_ladder_gemm(problem: GemmProblem, tile: LadderTile, arch: str) -> KernelSource:
    """Text of one kernel.

    Arguments are ``problem.params()`` in order, sizes as `grid` says; rows of A and B start at multiples of 16 bytes,
    rows of D at multiples of 8.

    Exactness: that of `qcut.emitters.gemm.mma.Int8Mma`, which has the same epilogue.

    Raises:
        EmitError: naming the kernel and the first of `CONSTRAINTS` it breaks.
    """
    name = procedural_name(FAMILY, arch, problem, tile)
    check(name, CONSTRAINTS, problem)
    params = problem.params()
    return kernel_source(
        name,
        arch,
        params,
        *problem.epilogue.statements(params),
        f"qcut::ladder::{tile.step}_gemm<Epilogue>(a, b, d, m, n, k, lda, ldb, ldd, args);",
        device_code=_device_code("ladder.cuh"),
        block=tile.threads,
        waits=False,
    )


@dataclass(frozen=True)
class Peak:
    """How the kernel of `emit_peak` keeps one arithmetic unit busy.

    Attributes:
        threads: of a CTA, of which each multiprocessor gets one.
        chains: independent sums of a thread (dp4a) or warp (mma).
        sums: 32-bit sums that a thread keeps.
        factor: the addition of a product to each sum, as a multiple of the dot product of x and y.
        macs: multiply-adds of all threads in one round.
    """

    threads: int
    chains: int
    sums: int
    factor: int
    macs: int


PEAKS: dict[Unit, Peak] = {
    "dp4a": Peak(1024, 16, sums=16, factor=1, macs=1024 * 16 * 4),
    "mma": Peak(512, 8, sums=32, factor=8, macs=512 // 32 * 8 * (16 * 8 * 32)),
}


def emit_peak(unit: Unit, arch: str) -> KernelSource:
    """Text of a kernel that does nothing but one unit's products.

    Arguments: ``sums`` int32 of CTAs × threads, ``cycles`` int64 of CTAs, ``rounds``, and the words ``x`` and ``y`` of
    four int8 factors each. Chain i of thread t starts at t + i, and a round adds the dot product of x and y times
    `Peak.factor`; ``sums[t]`` is all of them together modulo 2³².
    """
    peak = PEAKS[unit]
    name = f"qcut_peak_{arch.replace('_', '')}_{unit}_t{peak.threads}_c{peak.chains}"
    return kernel_source(
        name,
        arch,
        (
            Param("sums", "ptr", "int*"),
            Param("cycles", "ptr", "long long*"),
            Param("rounds", "i32"),
            Param("x", "i32"),
            Param("y", "i32"),
        ),
        f"qcut::{unit}_peak<{peak.chains}>(sums, cycles, rounds, x, y);",
        device_code=_device_code("peak.cuh"),
        block=peak.threads,
        waits=False,
    )
