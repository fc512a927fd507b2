"""Sizes of tiles of routes, and kernels of products with codebook weights of experts."""

from __future__ import annotations

import pytest

from qcut.dispatch import codebook, experts
from qcut.dispatch.gpus import target_for
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.families import CODEBOOK_EXPERTS, CODEBOOK_STREAM, CODEBOOK_WGMMA
from qcut.ops.experts import TILE_SIZES
from tests.support.fakes.launches import H200

A100 = target_for((8, 0), 108, "NVIDIA A100")


def problem(x: DType, **options: bool) -> CodebookProblem:
    return codebook.problem_of(x, 4, 1, DType.F16, False, "none", False, 8, experts=True, **options)


def test_sizes_follow_the_routes_of_an_expert() -> None:
    found = [experts.tile_size(8 * tokens, 128, TILE_SIZES) for tokens in (1, 8, 64, 128, 256, 1024, 4096)]
    assert found == [1, 8, 8, 16, 16, 128, 256]
    assert experts.tile_size(2 * 16, 8, TILE_SIZES) == 8
    assert experts.tile_size(1, 1, TILE_SIZES) == 1


def test_sizes_are_those_that_are_left() -> None:
    assert experts.tile_size(8 * 4096, 128, (1, 8, 16, 32)) == 16
    assert experts.tile_size(8 * 4096, 128, (1, 8, 16, 32, 128)) == 128
    assert experts.tile_size(8 * 256, 128, (1, 8, 16)) == 16
    assert experts.tile_size(8 * 256, 128, (1,)) == 1
    assert experts.tile_size(8, 128, (8,)) == 8
    assert experts.tile_size(8, 128, ()) is None


def test_busy_tiles_are_between_experts_and_bound() -> None:
    for tokens in (1, 4, 8, 64, 1024):
        for size in (1, 8, 32):
            tiles = experts.busy_tiles(8 * tokens, 128, size)
            assert experts.busy_experts(8 * tokens, 128) - 1 <= tiles or size == 1
            assert tiles <= 8 * tokens


@pytest.mark.parametrize("k", [512, 768, 2048, 2880, 4096, 14336])
@pytest.mark.parametrize("x", [DType.F16, DType.S8])
def test_hopper_has_kernels_of_experts(x: DType, k: int) -> None:
    for early in (False, True):
        for size in (1, 8, 16):
            choice = experts.select(problem(x, early_routes=early), size, 40, 1024, k, H200)
            assert choice.family == CODEBOOK_EXPERTS.name
            assert choice.tile.tokens == size
            assert choice.tile.units * choice.tile.warps * choice.tile.splits >= k // 128
    for size in (128, 256):
        choice = experts.select(problem(x), size, 40, 1024, k, H200)
        assert (choice.family, choice.tile.tokens) == (CODEBOOK_WGMMA.name, size)


def test_other_gpus_refuse_what_they_cannot_hold() -> None:
    assert experts.select(problem(DType.F16), 8, 40, 1024, 2048, A100).tile.splits == 1
    with pytest.raises(EmitError, match="no tile for tiles of 8 routes and 14336 columns on sm_80"):
        experts.select(problem(DType.F16), 8, 40, 1024, 14336, A100)
    with pytest.raises(EmitError, match="no tile of 128 routes"):
        experts.select(problem(DType.F16), 128, 40, 1024, 2048, A100)


@pytest.mark.parametrize(
    ("routes", "k", "n"), [(8, 768, 2048), (8, 1024, 2048), (4, 2880, 2880), (6, 1408, 2048), (2, 1024, 4096)]
)
@pytest.mark.parametrize("x", [DType.F16, DType.S8])
def test_sums_keep_routes_whole(x: DType, routes: int, k: int, n: int) -> None:
    asked, units = problem(x, summed=True), -(-k // 128)
    for tokens in (1, 2, 3):
        choice = experts.select_summed(asked, tokens, routes, n, k, H200)
        assert choice is not None
        tile = choice.tile
        CODEBOOK_STREAM.emit(asked, tile, H200.arch)
        assert units % tile.units == 0
        assert tile.capacity >= routes * units
        assert tile.splits == 1 or tile.warps * tile.units % units == 0
        ctas = CODEBOOK_STREAM.grid(tile, n, H200.sm_count)(tokens)[0]
        assert ctas == tokens * -(-n // (16 * tile.row_tiles)) * tile.splits


def test_sums_of_long_rows_have_no_kernel() -> None:
    assert experts.select_summed(problem(DType.F16, summed=True), 1, 2, 4096, 14336, A100) is None
    assert experts.select_summed(problem(DType.F16, summed=True), 1, 32, 4096, 14336, H200) is None
