"""Routes of the same expert in tiles.

Device code: ``include/qcut/routing/sort_routes.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import KernelSource, Param

FEW_ROUTES = 256
"""Routes that one CTA sorts by comparing each with each."""
MANY_ROUTES = 2048
"""Routes from which CTAs have `MOST_THREADS` threads, eight routes for each at once."""
MOST_THREADS = 1024
_MAX_EXPERTS = 1024

CONSTRAINTS = (
    Constraint(
        "threads",
        f"are {FEW_ROUTES}, or {MOST_THREADS} of many routes",
        lambda k: k.threads == FEW_ROUTES or (k.threads == MOST_THREADS and k.many),
    ),
)
"""Constraints of `SortRoutes`."""


@dataclass(frozen=True)
class SortRoutes(Kernel):
    """Tiles of the routes of each expert, as ``qcut.numerics.routing.sort_routes`` makes them.

    Attributes:
        arch: real architecture.
        many: whether a CTA for each of up to 1024 experts sorts any number of routes; otherwise one CTA sorts up to
            `FEW_ROUTES`.
        threads: threads of a CTA.

    Exactness: bitwise.
    """

    arch: str
    many: bool = False
    threads: int = FEW_ROUTES

    constraints = CONSTRAINTS

    @classmethod
    def for_routes(cls, routes: int, arch: str) -> SortRoutes:
        """The kernel for a number of routes."""
        return cls(arch, routes > FEW_ROUTES, FEW_ROUTES if routes < MANY_ROUTES else MOST_THREADS)

    @property
    def name(self) -> str:
        """``qcut_sort_routes_{arch}_few``, or ``_many_t{threads}``."""
        return f"qcut_sort_routes_{self.arch.replace('_', '')}_{f'many_t{self.threads}' if self.many else 'few'}"

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return self.threads

    def grid(self, count: int) -> tuple[int, int, int]:
        """CTAs for so many experts."""
        return (count if self.many else 1, 1, 1)

    def params(self) -> tuple[Param, ...]:
        """``experts`` ``[routes]``; ``tile_experts`` ``[tiles]``; ``tile_routes`` ``[tiles, tile]``; all int32.

        Then ``routes``, ``count`` of experts, ``tile`` and ``tiles``; ``short_tile``, the most routes of tiles that lie
        evenly among the others.
        """
        return (
            Param("experts", "ptr", "const int*"),
            Param("tile_experts", "ptr", "int*"),
            Param("tile_routes", "ptr", "int*"),
            *(Param(name, "i32") for name in ("routes", "count", "tile", "tiles", "short_tile")),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        function = (
            f"sort_many_routes<{self.threads}, {_MAX_EXPERTS}>" if self.many else f"sort_few_routes<{self.threads}>"
        )
        return self._call(function, "routing/sort_routes.cuh")
