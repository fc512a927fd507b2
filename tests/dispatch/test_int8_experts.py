"""Kernels of products with int8 weights of experts: every size has one, and no CTA has rows of two experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from qcut.dispatch.experts import busy_tiles, select, tile_size
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import emit, grid
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.gemm.problem import GemmProblem
from tests.emitters.conformance.stream import SM_COUNT, W8A16_EXPERTS

H200 = Target("sm_90a", 132)
SHAPES = ((1536, 2048), (2048, 768), (4096, 14336), (33, 77), (1, 1))
SIZES = (1, 8, 16, 32)
ORDERED = GemmProblem(epilogue=Epilogue(DType.F16, row_scale="per_token", col_scale="per_channel"), experts=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("problem", [ORDERED, W8A16_EXPERTS], ids=["w8a8", "w8a16"])
def test_every_size_has_a_tile(problem: GemmProblem, arch: str) -> None:
    gpu = Target(arch, SM_COUNT[arch])
    for (n, k), size, tiles in product(SHAPES, SIZES, (1, 7, 200)):
        choice = select(problem, size, tiles, n, k, gpu)
        assert choice.tile.tokens == size, "as many as a tile has routes"
        emit(choice, problem, arch)
        one = grid(choice, n, gpu.sm_count)
        if choice.family == "int8_experts":
            tile = choice.tile
            assert one(200 * size)[0] <= tile.ctas * gpu.sm_count, "CTAs go from tile to tile"
            assert 128 * tile.units * tile.warps * tile.splits >= k
        else:
            assert one(tiles * size)[0] == tiles * one(size)[0], "a tile has CTAs of its own"


def test_long_rows_and_unaligned_tokens_take_other_kernels() -> None:
    old, unaligned = Target("sm_80", 108), replace(W8A16_EXPERTS, alignment_k=1)
    assert select(ORDERED, 8, 4, 4096, 14336, old).family == "int8_stream"
    assert select(W8A16_EXPERTS, 8, 4, 4096, 14336, old).family == "w8a16_stream"
    assert select(unaligned, 8, 4, 1536, 2048, H200).family == "w8a16_stream"
    for problem in (ORDERED, W8A16_EXPERTS):
        assert select(problem, 8, 4, 4096, 14336, H200).family == "int8_experts", "a cluster holds the columns"


@pytest.mark.parametrize("problem", [ORDERED, replace(W8A16_EXPERTS, a=DType.BF16)], ids=["w8a8", "w8a16"])
def test_prompts_take_tiles_of_the_tensor_cores(problem: GemmProblem) -> None:
    for (n, k), size in product(SHAPES, (96, 128)):
        choice = select(problem, size, 200, n, k, H200)
        assert (choice.family, choice.tile.tokens) == ("int8_wgmma", size)
        emit(choice, problem, "sm_90a")
        ctas = grid(choice, n, H200.sm_count)(200 * size)[0]
        assert ctas == min(132, 200 * choice.tile.cluster * -(-n // (128 * choice.tile.cluster)))
    assert select(ORDERED, 256, 200, 1536, 2048, H200).tile.tokens == 256
    with pytest.raises(EmitError, match="int8_wgmma: no tile of 256 routes"):
        select(W8A16_EXPERTS, 256, 200, 1536, 2048, H200)
    with pytest.raises(EmitError, match=r"int8_wgmma: no tile of 128 routes for .* on sm_80"):
        select(ORDERED, 128, 200, 1536, 2048, Target("sm_80", 108))


def test_no_expected_tile_counts_as_one() -> None:
    for size in SIZES[1:]:
        one = select(W8A16_EXPERTS, size, 0, 1536, 2048, H200)
        assert one == select(W8A16_EXPERTS, size, 1, 1536, 2048, H200)


def test_tiles_grow_with_the_routes_of_an_expert() -> None:
    assert [tile_size(8 * m, 128) for m in (1, 16, 128, 256, 4096)] == [1, 8, 16, 16, 16]
    assert busy_tiles(8, 128, 1) == 8
    assert 50 < busy_tiles(64, 128, 8) < 64
