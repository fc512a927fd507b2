"""The menus of CUTLASS tiles: a short one for sizes that are not tuned, and the tiles that a tuner tries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from qcut.emitters.gemm.problem import Schedule, TileConfig


def tile(schedule: Schedule, spec: str) -> TileConfig:
    """``128x256x128`` with the options ``c2x1`` (cluster) and ``e128x64`` (epilogue tile), separated by spaces."""
    shape, *options = spec.split()
    m, n, k = map(int, shape.split("x"))
    pairs = {"c": (1, 1), "e": (0, 0)}
    for option in options:
        rows, columns = option[1:].split("x")
        pairs[option[0]] = (int(rows), int(columns))
    return TileConfig((m, n, k), cluster_shape=pairs["c"], schedule=schedule, epilogue_tile=pairs["e"])


SM90_MENU: tuple[TileConfig, ...] = (
    tile("warp_specialized", "64x32x256"),
    tile("warp_specialized", "64x64x256"),
    tile("warp_specialized", "64x80x128"),
    tile("pingpong", "128x64x128 c2x1"),
    tile("pingpong", "128x128x128 c2x1"),
    tile("pingpong", "128x160x128 c2x1"),
    tile("cooperative", "256x160x128"),
    tile("cooperative", "128x256x128 c2x1"),
)
"""Tiles for sizes that are not tuned. Few, because each tile is built on first use."""

SM80_MENU: tuple[TileConfig, ...] = (
    TileConfig((64, 64, 64), (32, 32, 64), stages=4),
    TileConfig((64, 128, 64), (32, 64, 64), stages=4),
    TileConfig((128, 128, 64), (64, 64, 64), stages=3),
    TileConfig((128, 256, 64), (64, 64, 64), stages=3),
)
"""CUTLASS multistage tiles for sm_80, 86, 89, 100 and 120."""

SM90_SPACE: dict[Schedule, tuple[str, ...]] = {
    "pingpong": (
        "128x128x128 c2x1 e64x64", "128x128x128 c2x1 e64x128", "128x128x128", "128x128x128 c1x2",
        "128x192x128 c2x1 e64x64", "128x64x128 c2x1", "128x96x128 c2x1", "64x128x128", "64x256x128 c2x1",
        "128x160x128", "128x160x128 c2x1", "128x160x128 e64x160", "128x80x128 c2x1", "64x160x128",
    ),
    "cooperative": (
        "128x256x128", "128x256x128 c2x1", "256x160x128", "256x160x128 c2x1", "256x160x128 e128x160",
        "128x224x128 c2x1",
    ),
    "warp_specialized": (
        "64x32x256", "64x64x256", "64x80x128", "64x80x256", "64x128x256", "64x160x128", "64x112x256", "128x80x128",
    ),
}  # fmt: skip
"""The tiles worth a build of half a minute: for each kind of shape, the widths that fill 132 SMs in whole waves."""


def sm90_space() -> Iterator[TileConfig]:
    """The tiles of `SM90_SPACE`."""
    for schedule, specs in SM90_SPACE.items():
        yield from (tile(schedule, spec) for spec in specs)


def multistage_space() -> Iterator[TileConfig]:
    """Tiles with warps of 32 or 64 a side, 64 or 128 columns of K and 3 to 5 stages, legal or not."""
    sides = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
    for (bm, bn), (wm, wn), bk, stages in product(
        sides, ((32, 32), (32, 64), (64, 32), (64, 64)), (64, 128), (3, 4, 5)
    ):
        yield TileConfig((bm, bn, bk), (wm, wn, bk), stages)
