"""CUTLASS int8 GEMMs through nvidia-cutlass: SM80 multistage and SM90 warp-specialized.

The Python interface writes the device text from a tile description and a visitor graph built from
`qcut.emitters.core.epilogue.Epilogue`; `qcut.emitters.gemm.cutlass.launcher` writes the host side.

Source: CUTLASS 4.2.0, ``cutlass/gemm/kernel`` and ``cutlass/epilogue/fusion``.
"""

from __future__ import annotations

from collections.abc import Iterator

from qcut.emitters.core.arch import ARCHITECTURES, architecture
from qcut.emitters.core.constraints import can_make, require
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import FLOATS, DType, KernelSource
from qcut.emitters.gemm.cutlass.text import WGMMA_N, Operands, emit, sm90_defines
from qcut.emitters.gemm.cutlass.tiles import SM80_MENU, SM90_MENU, multistage_space, sm90_space
from qcut.emitters.gemm.problem import HOST_M, GemmProblem, TileConfig


def takes_halves(problem: GemmProblem, tile: TileConfig) -> bool:
    """Whether the kernel can combine halves of tokens, where the problem has them."""
    e = problem.epilogue
    plain = e.out in FLOATS and e.col_scale != "per_tensor" and not e.residual
    return not e.halves or (plain and tile.schedule not in ("multistage", "stream_k"))


class Int8Cutlass(Family[GemmProblem, TileConfig]):
    """Int8 products in CUTLASS's kernels.

    Problems are s8 x s8 with any epilogue. ``multistage`` tiles are for sm_80 code, on any architecture; the other
    schedules for sm_90a.

    Exactness: accumulation is exact for K <= `qcut.emitters.gemm.problem.K_MAX`; the epilogue rounds as
    `qcut.emitters.core.epilogue` says.
    """

    name = "int8_cutlass"
    tile_type = TileConfig

    def validate(self, problem: GemmProblem, tile: TileConfig, arch: str) -> None:
        """Check a description against what the kernels can do; the message has no names of constraints."""
        name = self.kernel_name(problem, tile, arch)
        m, n, k = tile.threadblock_shape
        smem_bytes = architecture(arch).smem_bytes if arch in ARCHITECTURES else 0
        require(arch in ARCHITECTURES, name, f"architecture: allowed are {', '.join(ARCHITECTURES)}")
        require(problem.a is DType.S8 and problem.b is DType.S8, name, "operands are s8 x s8")
        require(not problem.experts, name, "B is one weight")
        require(problem.layouts == "tnt", name, "A and B are contiguous along K, D is row-major (tnt)")
        require(not problem.epilogue.is_raw, name, "raw accumulators are the raw families'")
        require(not problem.epilogue.rescale, name, "rescale: results only in integers are the raw families'")
        require(takes_halves(problem, tile), name, "halves: a warp-specialized tile, floats, per channel, no residual")
        require(not problem.device_m, name, f"{HOST_M.name}: {HOST_M.reason}")
        require(tile.splits == 1, name, "K is split by the stream_k schedule, not by the tile")
        require(problem.alignment_k % 16 == 0, name, "rows of A and B are multiples of 16 bytes")
        require(problem.alignment_n * problem.epilogue.out.bits >= 128, name, "rows of D are multiples of 16 bytes")
        if tile.schedule == "multistage":
            wm, wn, wk = tile.warp_shape
            require(wm > 0 and wn > 0 and wk > 0, name, "warp_shape is given for a multistage kernel")
            require(m % wm == 0 and n % wn == 0 and k == wk, name, "warp_shape divides threadblock_shape, whole in K")
            require(wm % 16 == 0 and wn % 8 == 0 and wk % 32 == 0, name, "warp_shape is a multiple of 16x8x32")
            require(m // wm * (n // wn) in (1, 2, 4, 8), name, "1, 2, 4 or 8 warps")
            require(tile.stages >= 3, name, "a multistage pipeline has at least 3 stages")
            require((m + n) * k * tile.stages <= smem_bytes, name, "operand stages fit shared memory")
            require(tile.cluster_shape == (1, 1), name, "clusters exist from sm_90 on")
            return
        require(architecture(arch).wgmma, name, f"schedule {tile.schedule} exists only on sm_90a")
        require(not any(tile.warp_shape), name, "the schedule fixes the warp shape on sm_90a")
        require(
            m in (64, 128, 256) and n in WGMMA_N and k in (64, 128, 256), name, "M is 64, 128 or 256, N a wgmma width"
        )
        cooperative = tile.schedule in ("cooperative", "stream_k")
        require(not cooperative or m >= 128, name, "a cooperative tile has 128 rows or more")
        consumers = 2 if cooperative else 1
        require(m * n // (128 * consumers) <= 192, name, "accumulators leave registers for the epilogue")
        cm, cn = tile.cluster_shape
        require(cm in (1, 2, 4) and cn in (1, 2, 4) and cm * cn <= 8, name, "cluster sides are 1, 2 or 4")
        require((m + n) * k * 2 <= smem_bytes, name, "two operand stages fit shared memory")
        if any(tile.epilogue_tile):
            em, en = tile.epilogue_tile
            require(n % en == 0 and em == 64 * consumers, name, "epilogue_tile is 64 rows per consumer and divides N")

    def is_legal(self, problem: GemmProblem, tile: TileConfig, arch: str) -> bool:
        """Whether `validate` accepts them."""
        return can_make(self.validate, problem, tile, arch)

    def default_tiles(self, problem: GemmProblem, arch: str) -> tuple[TileConfig, ...]:
        """Return the menu of an architecture; `validate` tells which tiles suit a problem."""
        return SM90_MENU if architecture(arch).wgmma else SM80_MENU

    def search_space(self, problem: GemmProblem, arch: str) -> Iterator[TileConfig]:
        """On sm_90a `SM90_SPACE`, elsewhere the multistage tiles."""
        tiles = sm90_space() if architecture(arch).wgmma else multistage_space()
        return (tile for tile in tiles if self.is_legal(problem, tile, arch))

    def _source(self, name: str, problem: GemmProblem, tile: TileConfig, arch: str) -> KernelSource:
        defines = sm90_defines(tile) if tile.schedule != "multistage" else ()
        return emit(name, Operands(), problem.epilogue, tile, arch, problem.params(), defines=defines)


INT8_CUTLASS = Int8Cutlass()
