"""Codebook products of many tokens, and rotations: tiles, memory, grids, what a binary overlaps."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from qcut import jit
from qcut.dispatch.codebook import select
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.dispatch.heuristics.codebook.wgmma import cycles
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.rotate import Kind, RotateTokens
from qcut.emitters.codebook.rotate_dense import RotateTokensDense
from qcut.emitters.codebook.wgmma import CodebookWgmmaTile, buffers, smem_bytes, stage_of
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.families import CODEBOOK_MMA, CODEBOOK_STREAM_WGMMA, CODEBOOK_WGMMA
from qcut.errors import ToolchainError
from qcut.jit.dump import disassemble
from qcut.numerics.codebook.layout import Geometry
from tests.emitters.conformance.codebook import (
    ARCH,
    BF16,
    BRAIN,
    CONVERSIONS,
    DEEP,
    F16,
    HALF,
    INT8,
    INT8_PAIRS,
    MIDDLE,
    ONE_NORM,
    PAIR,
    S8,
    SPLIT,
    TOKEN_PAIRS,
    TOKENS,
)
from tests.support.binaries import build, instructions

H200 = Target(ARCH, 132)


def test_few_tokens_take_flat_tiles():
    assert best_tile(CODEBOOK_MMA, HALF, 8, 4096, 128, Target("sm_80", 108)).threadblock_shape[0] == 16
    assert best_tile(CODEBOOK_MMA, HALF, 4096, 4096, 128, Target("sm_80", 108)).threadblock_shape[0] >= 128


def test_what_no_tile_can_build_is_refused():
    with pytest.raises(EmitError, match="alignment_n"):
        best_tile(CODEBOOK_MMA, replace(HALF, alignment_n=0), 1, 16, 128, Target("sm_80", 108))


def test_grid_is_one_cta_per_tile():
    assert CODEBOOK_MMA.grid(MIDDLE, 257)(129) == (6, 1, 1)


@pytest.mark.parametrize(
    "problem", [INT8, TOKENS, BRAIN, replace(TOKENS, slots=4), TOKEN_PAIRS, INT8_PAIRS], ids=lambda p: p.name
)
def test_menu_holds_a_tile_for_every_shape(problem: CodebookProblem):
    menu = CODEBOOK_WGMMA.default_tiles(problem, "sm_90a")
    assert {128, 160 if problem.x is not DType.S8 else 256} <= {t.tokens for t in menu}
    stage = stage_of(problem)
    for tile in menu:
        CODEBOOK_WGMMA.validate(problem, tile, ARCH)
        deeper = replace(tile, stages=tile.stages + 1)
        fits = smem_bytes(stage, deeper) <= architecture(ARCH).smem_bytes
        assert tile.stages == 8 or not fits or buffers(stage, deeper) < buffers(stage, tile)
    menu = (*menu, *CODEBOOK_STREAM_WGMMA.default_tiles(problem, "sm_90a"))
    for m, n, units in ((65, 1, 1), (80, 1280, 10), (256, 4096, 112), (8192, 14336, 32)):
        assert select(problem, m, n, units, H200).tile in menu


def test_large_prompts_take_large_tiles():
    assert isinstance(select(INT8, 4096, 14336, 32, H200).tile, CodebookWgmmaTile)
    assert select(INT8, 4096, 14336, 32, H200).tile.tokens == select(TOKENS, 4096, 14336, 32, H200).tile.tokens == 256
    assert select(TOKENS, 128, 4096, 112, H200).tile.splits > 1
    assert cycles(TOKENS, DEEP, 4096, 4096, 4096, H200) > cycles(INT8, DEEP, 4096, 4096, 4096, H200)


def test_clusters_beyond_one_wave_take_a_second():
    """Of 132 multiprocessors, 30 clusters of 4 run at once, not 33."""
    four = CodebookWgmmaTile(128, 4, 1, 4, lead=2)
    fits, second = (cycles(TOKENS, four, 128, 128 * rows, 4096, H200) for rows in (30, 31))
    assert second > 1.5 * fits


def test_grid_is_persistent_but_for_splits():
    assert CODEBOOK_WGMMA.grid(PAIR, 14336, 132)(4096) == (132, 1, 1)
    assert CODEBOOK_WGMMA.grid(PAIR, 14336, 132)(256) == (112, 1, 1)
    assert CODEBOOK_WGMMA.grid(PAIR, 129, 133)(1) == (2, 1, 1)
    assert CODEBOOK_WGMMA.grid(PAIR, 257, 1)(1) == (2, 1, 1)
    assert CODEBOOK_WGMMA.grid(replace(SPLIT, splits=8), 300, 4)(65) == (2 * 3 * 8, 1, 1)


@pytest.mark.parametrize("problem", [INT8, TOKENS], ids=lambda p: p.x.value)
def test_weights_are_decoded_between_products(problem: CodebookProblem):
    """While the tensor core multiplies one half of a unit, a warp decodes the other."""
    try:
        text = disassemble(jit.build(CODEBOOK_WGMMA.emit(problem, DEEP, ARCH)).cubin)
    except ToolchainError as error:
        pytest.skip(str(error))
    between = re.split(r"[HI]GMMA\.64x256x", text)[1:-1]
    assert len(between) == (3 if problem is INT8 else 7)
    first_half = between[: len(between) // 2 + 1]  # the last of them ends with the second half's first product
    assert sum(part.count("PRMT") for part in first_half) >= (20 if problem is INT8 else 60)


def test_one_norm_takes_int8_tokens_and_one_slot() -> None:
    for change in ({"slots": 2}, {"x": DType.F16, "epilogue": Epilogue(col_scale="per_channel")}):
        with pytest.raises(EmitError, match="rows of one norm"):
            replace(ONE_NORM, **change)
    assert ONE_NORM.name != replace(ONE_NORM, row_norm=False).name


def test_heuristics_cover_every_row():
    """Threads and pieces hold all columns, cut no group, and leave no CTA without work."""
    gen = random.Random(4)
    for _ in range(2000):
        group = 2 ** gen.randrange(15)
        k = group * gen.randrange(1, 60) + (2 ** gen.randrange(group.bit_length()) if gen.random() < 0.5 else 0)
        m = gen.choice((1, 2, 16, 200, 4096))
        x, out = gen.choice(CONVERSIONS)
        kind: Kind = gen.choice(("hadamard", "none"))
        desc = RotateTokens.for_shape(x, out, kind, "sm_90a", m, k, group)
        k_padded = Geometry(k, group, kind).k_padded
        along_m, pieces, _ = desc.grid(m, k_padded)
        assert m <= along_m * desc.rows < m + desc.rows
        if desc.held:
            assert (pieces - 1) * desc.row_columns < k_padded <= pieces * desc.row_columns
        else:
            assert k_padded > desc.row_columns
        if kind == "hadamard" and (pieces > 1 or not desc.held):
            assert desc.row_columns % desc.padded_group == 0


def test_one_token_is_spread_over_ctas():
    desc = RotateTokens.for_shape(F16, F16, "hadamard", "sm_90a", 1, 4096, 128)
    assert desc.grid(1, 4096) == (1, 8, 1)
    many = RotateTokens.for_shape(F16, F16, "hadamard", "sm_90a", 4096, 4096, 128)
    assert many.grid(4096, 4096) == (4096, 2, 1)


def test_without_a_rotation_unpadded_groups_share_a_kernel():
    def name(k: int, group: int) -> str:
        return RotateTokens.for_shape(F16, S8, "none", "sm_90a", 8, k, group).name

    assert name(1024, 16) == name(1024, 64) == name(1024, 128) == name(1024, 1024) == name(1000, 5000)
    assert name(1024, 8) != name(1024, 12)
    assert name(1024, 96) != name(1024, 128)


def test_grid_refuses_what_does_not_fit():
    with pytest.raises(EmitError, match="holds rows of up to 4096"):
        RotateTokens(F16, S8, "hadamard", 128, "sm_90a").grid(1, 4224)
    with pytest.raises(EmitError, match="cut groups of 1024"):
        RotateTokens(F16, F16, "hadamard", 1024, "sm_90a", threads=96).grid(1, 2048)


def test_rotations_hold_their_instructions():
    rows = instructions(build(RotateTokens(F16, S8, "hadamard", 1024, "sm_90a", threads=64).emit())[0].cubin)
    assert {"SHFL.BFLY", "LDG.E.128", "STG.E.128", "STS.128", "LDS.128"} <= rows
    dense = instructions(build(RotateTokensDense(BF16, BF16, 128, "sm_90a").emit())[0].cubin)
    assert "HMMA.16816.F32.BF16" in dense
    assert any(name.startswith("LDGSTS") for name in dense)
    assert any(name.startswith("LDSM") for name in dense)
