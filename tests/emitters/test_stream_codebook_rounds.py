"""The family of few tokens that goes along K in rounds: text, choices, refusals, instructions, no spills."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from qcut.dispatch.gpus import GPUS, Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.families import CODEBOOK_STREAM_ROUNDS
from qcut.emitters.stream.codebook_rounds import CONSTRAINTS, CodebookRoundsTile, register_limit, registers, smem_bytes
from tests.support.compiled import build
from tests.support.sass import instructions

HALF = CodebookProblem()
BRAIN = CodebookProblem(DType.BF16, 3, 4, Epilogue(DType.BF16, col_scale="per_channel", bias=True))
INT8 = CodebookProblem(DType.S8, 2, 2, Epilogue(row_scale="per_token", col_scale="per_channel", residual=True))
PAIRS = replace(HALF, pairs=True)
INT8_PAIRS = replace(INT8, bits=4, pairs=True)
TILE = CodebookRoundsTile(8, 2, 8, 2)


def test_text_instantiates_the_header() -> None:
    source = CODEBOOK_STREAM_ROUNDS.emit(INT8, TILE, "sm_86")
    assert source.name == source.entry == "qcut_codebook_stream_rounds_sm86_s8xc2s2_f16_sm_sn_r_n8_t8_r2_w8_c2"
    assert source.text.startswith("#include <qcut/stream/codebook_rounds.cuh>\n\n")
    assert "__launch_bounds__(256, 2)" in source.text
    assert "using Tile = qcut::StreamTile<8, 2, 8, 1, 1, 2>;" in source.text
    assert f"qcut::StreamShared<int8_t, Tile, false>::kBytes == {source.smem_bytes}," in source.text
    assert "qcut::codebook_stream_rounds<int8_t, 2, 2, false, Tile, Epilogue>(" in source.text
    assert (source.block, source.waits) == (256, True)
    assert source.params == INT8.params()


def test_grid_covers_the_rows() -> None:
    assert [CODEBOOK_STREAM_ROUNDS.grid(TILE, n)(8)[0] for n in (1, 32, 33, 4096)] == [1, 1, 2, 128]


REFUSALS = {
    "architecture": (HALF, TILE, "sm_75"),
    "alignment": (replace(HALF, alignment_n=0), TILE, "sm_80"),
    "rotates": (replace(HALF, rotates=DType.F16), TILE, "sm_80"),
    "tokens": (HALF, replace(TILE, tokens=24), "sm_80"),
    "row_tiles": (HALF, replace(TILE, row_tiles=5), "sm_80"),
    "warps": (HALF, replace(TILE, warps=33), "sm_80"),
    "ctas": (HALF, replace(TILE, ctas=0), "sm_80"),
    "registers": (HALF, replace(TILE, row_tiles=4), "sm_80"),
    "shared_memory": (INT8_PAIRS, CodebookRoundsTile(1, 1, 4, 8), "sm_80"),
}


def test_illegal_tiles_are_refused_by_name() -> None:
    assert [constraint.name for constraint in CONSTRAINTS] == list(REFUSALS)
    for constraint in CONSTRAINTS:
        message = re.escape(f"{constraint.name}: {constraint.reason}")
        with pytest.raises(EmitError, match=f"^qcut_{CODEBOOK_STREAM_ROUNDS.name}_sm[a-z0-9_]+: {message}$"):
            CODEBOOK_STREAM_ROUNDS.emit(*REFUSALS[constraint.name])


def test_pairs_have_a_dense_table() -> None:
    source = CODEBOOK_STREAM_ROUNDS.emit(INT8_PAIRS, TILE, "sm_86")
    assert f"StreamShared<int8_t, Tile, true, qcut::DensePairTable>::kBytes == {source.smem_bytes}," in source.text
    assert source.smem_bytes == 32768 + smem_bytes(replace(INT8_PAIRS, pairs=False), TILE)


@pytest.mark.parametrize("problem", [HALF, BRAIN, INT8, PAIRS, INT8_PAIRS], ids=lambda p: p.name)
def test_every_shape_has_a_legal_tile(problem: CodebookProblem) -> None:
    for gpu, n, units, m in product(GPUS, (1, 100, 1280, 4096, 50257), (1, 7, 32, 112, 1023), (1, 3, 8, 9, 16)):
        tile = best_tile(CODEBOOK_STREAM_ROUNDS, problem, m, n, 128 * units, gpu)
        CODEBOOK_STREAM_ROUNDS.validate(problem, tile, gpu.arch)
        assert m <= tile.tokens
        assert tile.ctas * tile.warps * 32 * registers(problem, tile) <= architecture(gpu.arch).registers


def test_what_fits_the_registers_fits_the_shared_memory() -> None:
    least = architecture("sm_86")
    for bits, slots, x in product((2, 3, 4), (1, 2, 4), (DType.F16, DType.S8)):
        problem = replace(INT8 if x is DType.S8 else HALF, bits=bits, slots=slots)
        for sizes in product((1, 2, 4, 8, 16), range(1, 5), range(1, 33), range(1, 9)):
            tile = CodebookRoundsTile(*sizes)
            if registers(problem, tile) <= register_limit(tile):
                assert smem_bytes(problem, tile) <= least.smem_bytes
                assert tile.ctas * (smem_bytes(problem, tile) + 1024) <= least.sm_smem_bytes, (problem, tile)


@pytest.mark.parametrize("m", [0, 17])
def test_other_numbers_of_tokens_have_no_tile(m: int) -> None:
    with pytest.raises(EmitError, match=rf"m is {m}; allowed: 1 to 16"):
        best_tile(CODEBOOK_STREAM_ROUNDS, HALF, m, 64, 128, Target("sm_86", 82))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_decode_in_registers(arch: str) -> None:
    """Without a table: no 32-bit load from shared memory stands between indices and products."""
    problems = (HALF, BRAIN, INT8) if arch == "sm_80" else (replace(HALF, x=DType.BF16), replace(INT8, bits=3, slots=4))
    texts = [
        CODEBOOK_STREAM_ROUNDS.emit(p, best_tile(CODEBOOK_STREAM_ROUNDS, p, 8, 4096, 14336, Target(arch, 108)), arch)
        for p in problems
    ]
    for source, binary in zip(texts, build(*texts), strict=True):
        resources, names = binary.resources, instructions(binary.cubin)
        assert resources is not None
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
        assert source.smem_bytes < 65_536, source.name
        assert any(name.startswith(("HMMA.16816.F32", "IMMA.16832.S8.S8")) for name in names), source.name
        assert {"PRMT", "LDSM.16.M88.4"} <= names, source.name
        assert any(re.match(r"LDG\.E\.NA\.LTC(128|256)B\.128\.CONSTANT", name) for name in names), source.name
        assert ("ACQBULK" in names) == (arch == "sm_90a"), source.name
