"""Families of kernels, as dispatch, the tuner and the launch plans see them: products with tiles, and other kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from qcut.emitters.core.constraints import Constraint, check, holds
from qcut.emitters.core.names import Named, procedural_name
from qcut.emitters.core.source import KernelSource, Param
from qcut.emitters.core.text import include, kernel_source

Problem = TypeVar("Problem", bound=Named)
Tile = TypeVar("Tile", bound=Named)


@dataclass(frozen=True)
class Grid:
    """Grid of a launch as data, so that C++ can compute it.

    Attributes:
        rows: rows of D that one row of CTAs computes.
        one: CTAs along x, y, z for up to ``rows`` rows of D. Every ``rows`` more rows add ``one[0]`` CTAs along x.
        most: largest number of CTAs along x, which then go from tile to tile; None: one CTA for each tile.
    """

    rows: int
    one: tuple[int, int, int]
    most: int | None = None

    def __call__(self, m: int) -> tuple[int, int, int]:
        """CTAs for m rows, or for the bound of a count that the kernel reads on the device."""
        x, y, z = self.one
        ctas = -(-m // self.rows) * x
        return (ctas if self.most is None else min(ctas, self.most), y, z)


class Family(Generic[Problem, Tile]):
    """One family of kernels: constraints, text and launch. The docstring of a subclass states arguments and exactness.

    Attributes:
        name: as in the names of its kernels, in tables and in documents.
        tile_type: class of its tiles.
        constraints: checked in order; each takes (problem, tile, arch).
        version: version of the device code's speed. A change that can make another tile the fastest raises the
            version. Rows that were measured under another version are not used.
    """

    name: str
    tile_type: type[Tile]
    constraints: tuple[Constraint, ...]
    version = 1

    def kernel_name(self, problem: Problem, tile: Tile, arch: str) -> str:
        """Procedural name of a kernel."""
        return procedural_name(self.name, arch, problem, tile)

    def validate(self, problem: Problem, tile: Tile, arch: str) -> None:
        """Check that this family can build a kernel for the problem with this tile on this architecture.

        Raises:
            EmitError: a constraint is broken; the message has the kernel's name and the first broken constraint.
        """
        check(self.kernel_name(problem, tile, arch), self.constraints, problem, tile, arch)

    def emit(self, problem: Problem, tile: Tile, arch: str) -> KernelSource:
        """Text of one kernel.

        Raises:
            EmitError: see `validate`. Reading the texts of CUTLASS's kernels: nvidia-cutlass cannot be imported.
        """
        self.validate(problem, tile, arch)
        return self._source(self.kernel_name(problem, tile, arch), problem, tile, arch)

    def _source(self, name: str, problem: Problem, tile: Tile, arch: str) -> KernelSource:
        raise NotImplementedError

    def grid(self, tile: Tile, n: int, sm_count: int = 1) -> Grid:
        """CTAs of a launch for n columns of D. A host launcher computes its own grid and ignores this one."""
        return Grid(1, (1, 1, 1))

    def threads(self, tile: Tile) -> int:
        """Threads of a CTA; 0 where the host launcher knows."""
        return 0

    def smem_bytes(self, problem: Problem, tile: Tile) -> int:
        """Dynamic shared memory of a CTA; 0 where the host launcher knows."""
        return 0

    def default_tiles(self, problem: Problem, arch: str) -> Iterable[Tile]:
        """Tiles to choose from; none where dispatch makes a tile for each shape."""
        return ()

    def search_space(self, problem: Problem, arch: str) -> Iterable[Tile]:
        """Every tile that a tuner may try; none where nothing is tuned."""
        return ()

    def is_legal(self, problem: Problem, tile: Tile, arch: str) -> bool:
        """Whether the family can build a kernel for the problem with this tile on this architecture."""
        return holds(self.constraints, problem, tile, arch)

    def menu(self, problem: Problem, arch: str) -> list[Tile]:
        """Return the tiles of `default_tiles` that the family can build for a problem."""
        return [tile for tile in self.default_tiles(problem, arch) if self.is_legal(problem, tile, arch)]


class Kernel(ABC):
    """A kernel of a family without tiles, as data. A subclass is a frozen dataclass and checks itself when made.

    Attributes:
        arch: real architecture.
        constraints: checked in order; each takes the kernel.

    Raises:
        EmitError: a constraint is broken; the message has the kernel's name and the first broken constraint.
    """

    arch: str
    constraints: ClassVar[tuple[Constraint, ...]] = ()

    def __post_init__(self) -> None:
        check(self.name, self.constraints, self)

    @property
    @abstractmethod
    def name(self) -> str:
        """Procedural name."""

    @property
    @abstractmethod
    def block(self) -> int:
        """Threads of a CTA."""

    @abstractmethod
    def params(self) -> tuple[Param, ...]:
        """Arguments, in order."""

    @abstractmethod
    def emit(self) -> KernelSource:
        """Text of the kernel; arguments are `params`. Everything is read after the previous kernel's end."""

    def _source(self, *statements: str, device_code: str, **options: Any) -> KernelSource:
        """The text of these statements; ``options`` are those of `kernel_source`."""
        return kernel_source(
            self.name, self.arch, self.params(), *statements, device_code=device_code, block=self.block, waits=True,
            **options,
        )  # fmt: skip

    def _call(self, function: str, header: str) -> KernelSource:
        """The text of a call that passes all parameters on."""
        arguments = ", ".join(param.name for param in self.params())
        return self._source(f"qcut::{function}({arguments});", device_code=include(header))
