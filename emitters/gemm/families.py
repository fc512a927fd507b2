"""The int8 GEMM families side by side: what dispatch and a tuner need to know of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qcut.emitters.core.source import EmitError, KernelSource
from qcut.emitters.gemm import dp4a as simt_gemm
from qcut.emitters.gemm import mma as mma_gemm
from qcut.emitters.gemm import wmma as wmma_gemm
from qcut.emitters.gemm.cutlass import gemm as cutlass_gemm
from qcut.emitters.gemm.cutlass import tiles as cutlass_tiles
from qcut.emitters.gemm.problem import GemmProblem, TileConfig

VERSIONS = {"cutlass": 1, "mma": 1, "wmma": 1, "simt": 1}
"""Of each family's device code, as far as speed goes: what was measured under another version is not believed.

Raise one when a change can move which tile is fastest. ``tests/test_tuned.py`` holds a digest of each family's code
(comments and layout aside) and fails when it changes, so that the decision is made and not forgotten.
"""


@dataclass(frozen=True)
class Family:
    """One family's functions.

    Attributes:
        name: as in kernel names and tables.
        tile_type: class of its tiles.
        validate: raises `EmitError` where it cannot build (problem, tile, arch).
        emit: (problem, tile, arch) → text.
        grid: (tile, m, n) → CTAs in x, y, z; None where the host launcher knows.
        threads: of a CTA; 0 where the host launcher knows.
        smem_bytes: dynamic shared memory of a CTA, of (problem, tile); 0 where the host launcher knows.
        default_tiles: the menu of an architecture.
        search_space: every legal tile of (problem, arch) that a tuner may try.
    """

    name: str
    tile_type: type
    validate: Callable[[GemmProblem, Any, str], None]
    emit: Callable[[GemmProblem, Any, str], KernelSource]
    grid: Callable[[Any, int, int], tuple[int, int, int]] | None
    threads: Callable[[Any], int]
    smem_bytes: Callable[[GemmProblem, Any], int]
    default_tiles: Callable[[str], tuple[Any, ...]]
    search_space: Callable[[GemmProblem, str], Iterator[Any]]

    def is_legal(self, problem: GemmProblem, tile: Any, arch: str) -> bool:
        """Whether the family can build the three together."""
        try:
            self.validate(problem, tile, arch)
        except EmitError:
            return False
        return True

    def menu(self, problem: GemmProblem, arch: str) -> list[Any]:
        """What of the architecture's menu can be built for a problem."""
        return [tile for tile in self.default_tiles(arch) if self.is_legal(problem, tile, arch)]


def _raw(module: Any, emit: Callable[[GemmProblem, Any, str], KernelSource], tile_type: type, threads: Any) -> Family:
    return Family(
        module.FAMILY,
        tile_type,
        module.validate,
        emit,
        module.grid,
        threads,
        module.smem_bytes,
        module.default_tiles,
        module.search_space,
    )


_FAMILIES = (
    Family(
        "cutlass",
        TileConfig,
        cutlass_gemm.validate,
        cutlass_gemm.emit_cutlass_gemm,
        None,
        lambda tile: 0,
        lambda problem, tile: 0,
        cutlass_tiles.default_tiles,
        cutlass_tiles.search_space,
    ),
    _raw(mma_gemm, mma_gemm.emit_mma_gemm, TileConfig, mma_gemm.threads),
    _raw(wmma_gemm, wmma_gemm.emit_wmma_gemm, TileConfig, mma_gemm.threads),
    _raw(simt_gemm, simt_gemm.emit_simt_gemm, simt_gemm.SimtTile, lambda tile: tile.threads),
)
_BY_NAME = {kind.name: kind for kind in _FAMILIES}
FAMILIES = tuple(_BY_NAME)
"""Names of the families, the usually faster first."""


def family(name: str) -> Family:
    """The family of that name.

    Raises:
        EmitError: there is none.
    """
    if name not in _BY_NAME:
        raise EmitError(f"family {name!r} does not exist; there are {', '.join(FAMILIES)}")
    return _BY_NAME[name]
