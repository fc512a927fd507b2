"""All families of products, each under the name that its kernels carry."""

from __future__ import annotations

from typing import Any

from qcut.emitters.codebook import cutlass as codebook_cutlass
from qcut.emitters.codebook import mma as codebook_mma
from qcut.emitters.codebook import wgmma as codebook_wgmma
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.family import Family, Grid
from qcut.emitters.core.source import EmitError
from qcut.emitters.gemm import dp4a, mma, w8a16, w8a16_wgmma, wmma
from qcut.emitters.gemm.cutlass import gemm as cutlass_gemm
from qcut.emitters.gemm.cutlass import tiles as cutlass_tiles
from qcut.emitters.gemm.cutlass import w8a16 as w8a16_cutlass
from qcut.emitters.gemm.dp4a import Dp4aTile
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.emitters.gemm.w8a16_wgmma import W8A16WgmmaTile
from qcut.emitters.stream import codebook as codebook_stream
from qcut.emitters.stream import codebook_rounds as codebook_stream_rounds
from qcut.emitters.stream import codebook_wgmma as codebook_stream_wgmma
from qcut.emitters.stream import int8 as int8_cut
from qcut.emitters.stream import w8a8 as int8_stream
from qcut.emitters.stream import w8a16 as w8a16_stream
from qcut.emitters.stream.codebook import CodebookStreamTile
from qcut.emitters.stream.codebook_rounds import CodebookRoundsTile
from qcut.emitters.stream.codebook_wgmma import CodebookStreamWgmmaTile
from qcut.emitters.stream.w8a8 import W8A8Problem, W8A8Tile
from qcut.emitters.stream.w8a16 import W8A16Tile

INT8_CUTLASS: Family[GemmProblem, TileConfig] = Family(
    cutlass_gemm.FAMILY,
    TileConfig,
    cutlass_gemm.validate,
    cutlass_gemm.emit_cutlass_gemm,
    grid=None,
    threads=lambda tile: 0,
    smem_bytes=lambda problem, tile: 0,
    default_tiles=lambda problem, arch: cutlass_tiles.default_tiles(arch),
    search_space=cutlass_tiles.search_space,
)
INT8_MMA: Family[GemmProblem, TileConfig] = Family(
    mma.FAMILY,
    TileConfig,
    mma.validate,
    mma.emit_mma_gemm,
    grid=lambda tile, n, sm_count: Grid(tile.threadblock_shape[0], mma.grid(tile, 1, n)),
    threads=lambda tile: tile.threads,
    smem_bytes=mma.smem_bytes,
    default_tiles=lambda problem, arch: mma.default_tiles(arch),
    search_space=mma.search_space,
)
INT8_WMMA: Family[GemmProblem, TileConfig] = Family(
    wmma.FAMILY,
    TileConfig,
    wmma.validate,
    wmma.emit_wmma_gemm,
    grid=lambda tile, n, sm_count: Grid(tile.threadblock_shape[0], wmma.grid(tile, 1, n)),
    threads=lambda tile: tile.threads,
    smem_bytes=wmma.smem_bytes,
    default_tiles=lambda problem, arch: wmma.default_tiles(arch),
    search_space=wmma.search_space,
)
INT8_DP4A: Family[GemmProblem, Dp4aTile] = Family(
    dp4a.FAMILY,
    Dp4aTile,
    dp4a.validate,
    dp4a.emit_dp4a_gemm,
    grid=lambda tile, n, sm_count: Grid(tile.bm, dp4a.grid(tile, 1, n)),
    threads=lambda tile: tile.threads,
    smem_bytes=dp4a.smem_bytes,
    default_tiles=lambda problem, arch: dp4a.default_tiles(arch),
    search_space=dp4a.search_space,
)
INT8_STREAM: Family[W8A8Problem, W8A8Tile] = Family(
    int8_stream.FAMILY,
    W8A8Tile,
    int8_stream.validate,
    int8_stream.emit_int8_stream,
    grid=lambda tile, n, sm_count: Grid(tile.tokens, int8_cut.grid(tile, 1, n)),
    threads=lambda tile: 32 * tile.warps,
    smem_bytes=lambda problem, tile: int8_stream.smem_bytes(tile, problem.epilogue.halves, problem.epilogue.rescale),
)
W8A16_MMA: Family[GemmProblem, TileConfig] = Family(
    w8a16.FAMILY,
    TileConfig,
    w8a16.validate,
    w8a16.emit_w8a16_mma,
    grid=lambda tile, n, sm_count: Grid(tile.threadblock_shape[0], w8a16.grid(tile, 1, n)),
    threads=lambda tile: tile.threads,
    smem_bytes=mma.smem_bytes,
    default_tiles=lambda problem, arch: w8a16.default_tiles(arch),
)
W8A16_CUTLASS: Family[GemmProblem, TileConfig] = Family(
    w8a16_cutlass.FAMILY,
    TileConfig,
    w8a16_cutlass.validate,
    w8a16_cutlass.emit_w8a16_cutlass,
    grid=None,
    threads=lambda tile: 0,
    smem_bytes=lambda problem, tile: 0,
    default_tiles=lambda problem, arch: w8a16_cutlass.default_tiles(arch),
    search_space=w8a16_cutlass.search_space,
)
W8A16_STREAM: Family[GemmProblem, W8A16Tile] = Family(
    w8a16_stream.FAMILY,
    W8A16Tile,
    w8a16_stream.validate,
    w8a16_stream.emit_w8a16_stream,
    grid=lambda tile, n, sm_count: Grid(tile.tokens, int8_cut.grid(tile, 1, n)),
    threads=lambda tile: 32 * tile.warps,
    smem_bytes=w8a16_stream.smem_bytes,
)
W8A16_WGMMA: Family[GemmProblem, W8A16WgmmaTile] = Family(
    w8a16_wgmma.FAMILY,
    W8A16WgmmaTile,
    w8a16_wgmma.validate,
    w8a16_wgmma.emit_w8a16_wgmma,
    grid=None,
    threads=lambda tile: tile.threads,
    smem_bytes=lambda problem, tile: w8a16_wgmma.smem_bytes(tile),
    default_tiles=lambda problem, arch: w8a16_wgmma.default_tiles(),
)
CODEBOOK_STREAM: Family[CodebookProblem, CodebookStreamTile] = Family(
    codebook_stream.FAMILY,
    CodebookStreamTile,
    codebook_stream.validate,
    codebook_stream.emit_codebook_stream,
    grid=lambda tile, n, sm_count: Grid(tile.tokens, codebook_stream.grid(tile, 1, n)),
    threads=lambda tile: 32 * tile.warps,
    smem_bytes=codebook_stream.smem_bytes,
)
CODEBOOK_STREAM_ROUNDS: Family[CodebookProblem, CodebookRoundsTile] = Family(
    codebook_stream_rounds.FAMILY,
    CodebookRoundsTile,
    codebook_stream_rounds.validate,
    codebook_stream_rounds.emit_codebook_stream_rounds,
    grid=lambda tile, n, sm_count: Grid(tile.tokens, codebook_stream_rounds.grid(tile, 1, n)),
    threads=lambda tile: 32 * tile.warps,
    smem_bytes=codebook_stream_rounds.smem_bytes,
)
CODEBOOK_STREAM_WGMMA: Family[CodebookProblem, CodebookStreamWgmmaTile] = Family(
    codebook_stream_wgmma.FAMILY,
    CodebookStreamWgmmaTile,
    codebook_stream_wgmma.validate,
    codebook_stream_wgmma.emit_codebook_stream_wgmma,
    grid=lambda tile, n, sm_count: codebook_stream_wgmma.grid(tile, n),
    threads=lambda tile: 128 * tile.groups,
    smem_bytes=codebook_stream_wgmma.smem_bytes,
)
CODEBOOK_WGMMA: Family[CodebookProblem, codebook_wgmma.CodebookWgmmaTile] = Family(
    codebook_wgmma.FAMILY,
    codebook_wgmma.CodebookWgmmaTile,
    codebook_wgmma.validate,
    codebook_wgmma.emit_codebook_wgmma,
    grid=codebook_wgmma.grid,
    threads=lambda tile: codebook_wgmma.THREADS,
    smem_bytes=codebook_wgmma.smem_bytes,
    default_tiles=lambda problem, arch: codebook_wgmma.default_tiles(problem),
)
CODEBOOK_MMA: Family[CodebookProblem, TileConfig] = Family(
    codebook_mma.FAMILY,
    TileConfig,
    codebook_mma.validate,
    codebook_mma.emit_codebook_mma,
    grid=lambda tile, n, sm_count: Grid(tile.threadblock_shape[0], codebook_mma.grid(tile, 1, n)),
    threads=lambda tile: tile.threads,
    smem_bytes=codebook_mma.smem_bytes,
    default_tiles=codebook_mma.default_tiles,
)
CODEBOOK_CUTLASS: Family[CodebookProblem, TileConfig] = Family(
    codebook_cutlass.FAMILY,
    TileConfig,
    codebook_cutlass.validate,
    codebook_cutlass.emit_codebook_cutlass,
    grid=None,
    threads=lambda tile: 0,
    smem_bytes=lambda problem, tile: 0,
    default_tiles=lambda problem, arch: codebook_cutlass.default_tiles(arch),
)

_TUNED: tuple[Family[Any, Any], ...] = (INT8_CUTLASS, INT8_MMA, INT8_WMMA, INT8_DP4A)
_OTHERS: tuple[Family[Any, Any], ...] = (
    INT8_STREAM,
    W8A16_MMA,
    W8A16_STREAM,
    W8A16_WGMMA,
    W8A16_CUTLASS,
    CODEBOOK_MMA,
    CODEBOOK_STREAM,
    CODEBOOK_STREAM_ROUNDS,
    CODEBOOK_STREAM_WGMMA,
    CODEBOOK_WGMMA,
    CODEBOOK_CUTLASS,
)
_BY_NAME = {kind.name: kind for kind in (*_TUNED, *_OTHERS)}
FAMILIES = tuple(kind.name for kind in _TUNED)
"""Names of the int8 families that compete for a GEMM of many tokens, the usually faster first."""
ALL_FAMILIES = tuple(_BY_NAME)
"""Names of all families of products."""
CUTLASS_FAMILIES = (INT8_CUTLASS.name, W8A16_CUTLASS.name, CODEBOOK_CUTLASS.name)
"""Names of the families that need nvcc and g++; a launch of theirs takes the arguments of CUTLASS's launchers too."""
TUNED_FAMILIES = (*FAMILIES, W8A16_CUTLASS.name)
"""Names of the families whose tiles are measured and put in tables."""
SPELLINGS = {"cutlass": "int8_cutlass", "mma": "int8_mma", "wmma": "int8_wmma", "simt": "int8_dp4a"}
"""What command lines, and tables of tuned kernels written before families had one name each, call `FAMILIES`."""


def family(name: str) -> Family[Any, Any]:
    """Return the family of a name, or of the name's spelling on command lines.

    Raises:
        EmitError: there is none.
    """
    kind = _BY_NAME.get(SPELLINGS.get(name, name))
    if kind is None:
        raise EmitError(f"family {name!r} does not exist; there are {', '.join(ALL_FAMILIES)}")
    return kind
