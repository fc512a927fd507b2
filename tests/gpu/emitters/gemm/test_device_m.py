"""Products with M read on the device: bitwise those of M known on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.source import KernelSource
from qcut.emitters.families import INT8_MMA
from qcut.emitters.gemm.problem import GemmProblem, Layout, TileConfig
from tests.gpu.support.launching import SENTINEL, Guarded, arch, launch
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, Gemm, assert_same
from tests.gpu.support.problems import DYNAMIC

BOUND, N, K = 208, 304, 272
SMALL = TileConfig((16, 64, 128), (16, 16, 128), 5)
LARGE = TileConfig((128, 128, 64), (64, 64, 64), 3)
SPLIT = TileConfig((16, 64, 128), (16, 16, 128), 5, splits=4)


class Product:
    """An int8 product of up to `BOUND` tokens; ``count`` on the device says of how many."""

    def __init__(self, tile: TileConfig, layout_d: Layout = "row") -> None:
        # Columns of D have as many elements as there are tokens.
        self.problem = GemmProblem(epilogue=DYNAMIC, layout_d=layout_d, alignment_n=16 if layout_d == "row" else 1)
        self.tile, self.count = tile, torch.zeros(1, dtype=torch.int32, device=DEVICE)
        gemm = Gemm.random(DYNAMIC, BOUND, N, K)
        self.a, self.b = gemm.a.to(DEVICE), gemm.b.to(DEVICE)
        given = (gemm.args[param.name] for param in DYNAMIC.params())
        self.vectors = [vector.to(DEVICE) for vector in given]
        self.host, self.device = (
            INT8_MMA.emit(replace(self.problem, device_m=read), tile, arch()) for read in (False, True)
        )

    def output(self) -> Guarded:
        runs, length = (BOUND, N) if self.problem.layout_d == "row" else (N, BOUND)
        return Guarded(runs, length, TORCH_DTYPE[DYNAMIC.out])

    def launch(self, source: KernelSource, d: Tensor, m: int, *more: Any, pdl: bool = False) -> None:
        sizes = (m, N, K, K, K, N if self.problem.layout_d == "row" else BOUND)
        launch(source, INT8_MMA.grid(self.tile, N)(m), self.a, self.b, d, *sizes, *self.vectors, *more, pdl=pdl)

    def expected(self, m: int) -> Tensor:
        """D of m tokens known on the host; the other tokens' is the sentinel."""
        d = self.output()
        if m > 0:
            self.launch(self.host, d.tensor, m)
        return d.take(d.tensor.shape[1])


@pytest.mark.parametrize("layout_d", ["row", "column"])
@pytest.mark.parametrize("tile", [SMALL, LARGE, SPLIT], ids=lambda tile: tile.name)
def test_count_on_the_device_is_m(tile: TileConfig, layout_d: Layout) -> None:
    if tile.splits > 1 and not architecture(arch()).clusters:
        pytest.skip(f"{tile.name} needs thread-block clusters; {arch()} has none")
    block, product = tile.threadblock_shape[0], Product(tile, layout_d)
    for m in (0, 1, block - 1, block, block + 1, BOUND - 1, BOUND):
        expected = product.expected(m)
        for pdl in {False, architecture(arch()).pdl}:
            d = product.output()
            product.count.fill_(m)
            product.launch(product.device, d.tensor, BOUND, product.count, pdl=pdl)
            assert_same(d.take(d.tensor.shape[1]), expected)


@pytest.mark.parametrize(("count", "m"), [(-1, 0), (BOUND + 1, BOUND), (2**31 - 1, BOUND)])
def test_counts_out_of_range_are_clamped(count: int, m: int) -> None:
    product = Product(SMALL)
    d = product.output()
    product.count.fill_(count)
    product.launch(product.device, d.tensor, BOUND, product.count)
    assert_same(d.take(N), product.expected(m))


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=lambda tile: tile.name)
def test_replays_follow_the_count(tile: TileConfig) -> None:
    product = Product(tile)
    d, graph = product.output(), torch.cuda.CUDAGraph()
    product.launch(product.device, d.tensor, BOUND, product.count)
    with torch.cuda.graph(graph):
        product.launch(product.device, d.tensor, BOUND, product.count)
    for m in (BOUND, 1, 0, tile.threadblock_shape[0] + 1, BOUND - 1):
        d.tensor.view(torch.uint8).fill_(SENTINEL)
        product.count.fill_(m)
        graph.replay()
        assert_same(d.take(N), product.expected(m))
