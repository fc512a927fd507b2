"""Products of few tokens: tiles, grids, memory, what has no tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from qcut.dispatch.codebook import select
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import ARCHITECTURES, architecture
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.families import (
    CODEBOOK_EXPERTS,
    CODEBOOK_STREAM,
    CODEBOOK_STREAM_ROUNDS,
    CODEBOOK_STREAM_WGMMA,
    INT8_EXPERTS,
    INT8_STREAM,
    W8A16_STREAM,
)
from qcut.emitters.gemm.problem import K_MAX
from qcut.emitters.stream import codebook_rounds
from qcut.emitters.stream.codebook_rounds import CodebookRoundsTile
from qcut.emitters.stream.experts import ExpertsTile
from qcut.emitters.stream.int8 import register_limit
from qcut.emitters.stream.w8a8 import (
    MAX_ROWS,
    MAX_TOKENS,
    Tokens,
    W8A8Problem,
    W8A8Tile,
    is_legal,
    registers,
)
from tests.emitters.conformance.stream import (
    BRAIN,
    CLUSTER,
    F16,
    F32,
    HALF,
    INT8,
    INT8_PAIRS,
    INT8_TILE,
    LAYERS,
    NONE,
    PAIRS,
    ROUNDS,
    SM_COUNT,
    TOKEN_ROWS,
    W8A16,
    WGMMA,
    WIDE,
    problem_of,
)

H200 = Target("sm_90a", 132)


KINDS: tuple[Tokens, ...] = ("none", "given", "rows", "floats")
SHAPES = (*LAYERS, (3840, 1280), (128256, 4096), (864, 288), (512, 1376), (1, 1), (17, 40), (33, 77), (100, 1000))


def test_grid_has_a_cluster_a_row_of_tiles() -> None:
    assert INT8_STREAM.grid(INT8_TILE, 3840)(1) == INT8_STREAM.grid(INT8_TILE, 3840)(8) == (120, 1, 1)
    assert INT8_STREAM.grid(W8A8Tile(2, 8, splits=4), 33)(8) == (8, 1, 1)


def test_clusters_of_experts_all_run_at_a_time() -> None:
    tile = ExpertsTile(8, 12, 7, splits=2)
    assert CODEBOOK_EXPERTS.grid(tile, 4096, 132)(64)[0] == 132
    assert [INT8_EXPERTS.grid(replace(tile, splits=splits), 4096, 132)(64)[0] for splits in (4, 8)] == [120, 120]
    assert INT8_EXPERTS.grid(replace(tile, splits=8), 4096, 7)(64)[0] == 8


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("x", [F16, F32], ids=lambda x: x.value)
@pytest.mark.parametrize("tokens", KINDS)
def test_every_shape_has_an_int8_tile(tokens: Tokens, x: DType, arch: str) -> None:
    problem = problem_of(tokens, x)
    for n, k in SHAPES:
        for m in (1, 2, 3, 8) if problem.quantizes else (1, 2, 3, 8, 16, 20):
            assert is_legal(problem, m, k, arch)
            tile = best_tile(INT8_STREAM, problem, m, n, k, Target(arch, SM_COUNT[arch]))
            INT8_STREAM.validate(problem, tile, arch)
            assert registers(problem, tile, arch) <= register_limit(tile.warps) <= 65_536 // (32 * tile.warps)
            assert INT8_STREAM.smem_bytes(problem, tile) <= architecture(arch).smem_bytes
            assert m <= tile.tokens < 2 * m
            assert (tile.warps - 1) * tile.units * tile.splits * 128 < k, "no warp is idle"
            rows = INT8_STREAM.grid(tile, n)(m)[0] // tile.splits * 16 * tile.row_tiles
            assert n <= rows < n + 16 * tile.row_tiles


@pytest.mark.parametrize(
    ("n", "k", "tile"),
    [
        (1280, 1280, "m16_r1_w10_u1_p1_c"),
        (5120, 1280, "m16_r2_w10_u1_p2_c"),
        (4096, 4096, "m16_r2_w32_u1_p1_c"),
        (14336, 4096, "m16_r7_w32_u1_p1_c"),
    ],
)
def test_sixteen_tokens_take_the_tile_that_was_fastest(n: int, k: int, tile: str) -> None:
    assert best_tile(INT8_STREAM, problem_of("given"), 16, n, k, Target("sm_90a", 132)).name == tile


@pytest.mark.parametrize("sm_count", [1, 2, 8, 9, 16])
def test_small_gpus_have_tiles(sm_count: int) -> None:
    for tokens, m, k in (("none", 8, 28672), ("given", 8, 4096), ("rows", 2, 14336)):
        problem = problem_of(tokens)
        INT8_STREAM.validate(problem, best_tile(INT8_STREAM, problem, m, 4096, k, Target("sm_90a", sm_count)), "sm_90a")


@pytest.mark.parametrize(("problem", "most"), [(NONE, MAX_TOKENS), (TOKEN_ROWS, MAX_ROWS)])
def test_other_numbers_of_tokens_are_refused(problem: W8A8Problem, most: int) -> None:
    assert is_legal(problem, most, 4096, "sm_90a")
    for m in (0, most + 1):
        assert not is_legal(problem, m, 4096, "sm_90a")
        with pytest.raises(EmitError, match=f"int8_stream: {m} tokens; allowed are 1 to {most}"):
            best_tile(INT8_STREAM, problem, m, 4096, 4096, Target("sm_90a", 132))


@pytest.mark.parametrize("k", [0, K_MAX + 1])
def test_sums_beyond_int32_are_refused(k: int) -> None:
    assert not is_legal(NONE, 1, k, "sm_90a")
    with pytest.raises(EmitError, match=f"int8_stream: K is {k}; allowed is 1 to {K_MAX}"):
        best_tile(INT8_STREAM, NONE, 1, 4096, k, Target("sm_90a", 132))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_shape_has_a_w8a16_tile(arch: str):
    for (n, k), m in product((*LAYERS, (1, 1), (17, 40)), (1, 8, 9, 16, 17, 32)):
        tile = best_tile(W8A16_STREAM, W8A16, m, n, k, Target(arch, 132))
        W8A16_STREAM.validate(W8A16, tile, arch)
        assert m <= tile.tokens < max(9, 2 * m)
        assert (tile.warps - 1) * tile.units * tile.splits * 128 < k, "no warp is idle"


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (4096, 4096), (4096, 14336)])
def test_large_layers_are_one_wave(n: int, k: int, m: int):
    tile = best_tile(W8A16_STREAM, W8A16, m, n, k, Target("sm_90a", 132))
    assert 0.85 * 132 <= INT8_STREAM.grid(tile, n)(m)[0] <= 132
    assert 2048 * tile.warps * tile.units * tile.prefetch >= 48 * 1024


def test_grid_covers_the_rows():
    for n in (1, 15, 16, 17, 112, 113, 4096):
        for tile, rows in ((WIDE, 112), (CLUSTER, 144)):
            ctas = CODEBOOK_STREAM.grid(tile, n)(1)[0] // tile.splits
            assert (ctas - 1) * rows < n <= ctas * rows
        ctas = CODEBOOK_STREAM_WGMMA.grid(WGMMA, n)(1)[0] // WGMMA.splits
        assert (ctas - 1) * 256 < n <= ctas * 256
        ctas = CODEBOOK_STREAM_ROUNDS.grid(ROUNDS, n)(8)[0]
        assert (ctas - 1) * 32 < n <= ctas * 32
    assert [CODEBOOK_STREAM_WGMMA.grid(WGMMA, 4096)(m)[0] for m in (1, 64, 65, 200)] == [32, 32, 64, 128]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        *(
            (partial(best_tile, W8A16_STREAM, W8A16, m, 64, 64, H200), f"{m} tokens; allowed are 1 to 32")
            for m in (0, 33)
        ),
        (partial(best_tile, W8A16_STREAM, replace(W8A16, a=DType.S8), 1, 64, 64, H200), "operands"),
        (partial(best_tile, CODEBOOK_STREAM, HALF, 33, 64, 128, H200), "m is 33; allowed: 1 to 32"),
        *(
            (partial(best_tile, CODEBOOK_STREAM_ROUNDS, HALF, m, 64, 128, H200), f"m is {m}; allowed: 1 to 16")
            for m in (0, 17)
        ),
        (
            partial(best_tile, CODEBOOK_STREAM, HALF, 1, 4096, 128 * 112, Target("sm_80", 108)),
            "no tile for 112 units of K, 4096 rows and 1 tokens on sm_80",
        ),
    ],
)
def test_sizes_without_a_tile_are_refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(EmitError, match=why):
        call()


@pytest.mark.parametrize("problem", [HALF, BRAIN, INT8, PAIRS, INT8_PAIRS], ids=lambda p: p.name)
def test_tiles_for_prompts_are_legal_and_alone(problem: CodebookProblem):
    tiles = CODEBOOK_STREAM_WGMMA.default_tiles(problem, "sm_90a")
    assert len(tiles) == len(set(tiles)) > 15
    for tile in tiles:
        CODEBOOK_STREAM_WGMMA.validate(problem, tile, "sm_90a")
        source = CODEBOOK_STREAM_WGMMA.emit(problem, tile, "sm_90a")
        assert 2 * source.smem_bytes >= architecture("sm_90a").sm_smem_bytes


@pytest.mark.parametrize(
    ("n", "units", "m", "name"),
    [
        (14336, 32, 1, "t1_r7_w32_u1_k1_p1_a"),
        (14336, 32, 16, "t16_r7_w16_u2_k1_p1_a"),
        (4096, 112, 1, "t1_r9_w28_u1_k4_p1_a"),
        (4096, 112, 8, "t8_r9_w28_u1_k4_p1_a"),
        (4096, 32, 8, "t8_r2_w32_u1_k1_p1_a"),
        (1280, 10, 1, "t1_r1_w10_u1_k1_p1_a"),
        (5120, 10, 8, "t8_r3_w10_u1_k1_p3_a"),
    ],
)
def test_measured_shapes_have_their_best_tile(n: int, units: int, m: int, name: str):
    assert select(HALF, m, n, units, H200).family != CODEBOOK_STREAM_WGMMA.name
    assert best_tile(CODEBOOK_STREAM, HALF, m, n, 128 * units, H200).name == name


@pytest.mark.parametrize(
    ("n", "units", "m", "groups", "splits"),
    [(14336, 32, 32, 4, 2), (4096, 112, 16, 5, 8), (4096, 32, 64, 3, 4), (5120, 10, 32, 2, 2)],
)
def test_measured_shapes_have_their_best_wgmma_tile(n: int, units: int, m: int, groups: int, splits: int):
    assert select(HALF, m, n, units, H200).family == CODEBOOK_STREAM_WGMMA.name
    tile = best_tile(CODEBOOK_STREAM_WGMMA, HALF, m, n, 128 * units, H200)
    assert (tile.groups, tile.splits) == (groups, splits)


def test_what_pairs_do_not_go_with() -> None:
    row = CodebookProblem(DType.S8, epilogue=INT8_PAIRS.epilogue, row_norm=True)
    for problem in (HALF, row, replace(HALF, offsets=True)):
        bits = 3 if problem is HALF else 4
        with pytest.raises(EmitError, match="pairs: 4 bits, norms that are read, no offsets"):
            replace(problem, bits=bits, pairs=True)


def test_what_fits_the_registers_fits_the_shared_memory() -> None:
    least = architecture("sm_86")
    for bits, slots, x in product((2, 3, 4), (1, 2, 4), (DType.F16, DType.S8)):
        problem = replace(INT8 if x is DType.S8 else HALF, bits=bits, slots=slots)
        for sizes in product((1, 2, 4, 8, 16), range(1, 5), range(1, 33), range(1, 9)):
            tile = CodebookRoundsTile(*sizes)
            if codebook_rounds.registers(problem, tile) <= codebook_rounds.register_limit(tile):
                needed = codebook_rounds.smem_bytes(problem, tile)
                assert needed <= least.smem_bytes
                assert tile.ctas * (needed + 1024) <= least.sm_smem_bytes, (problem, tile)
