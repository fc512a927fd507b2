"""The decode families on codebook weights as text and as binaries: choices, refusals, instructions, no spills."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from qcut.dispatch.codebook import select
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.family import Family
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import CODEBOOK_STREAM, CODEBOOK_STREAM_WGMMA
from qcut.emitters.stream import codebook as codebook_stream
from qcut.emitters.stream.codebook import CodebookStreamTile
from qcut.emitters.stream.codebook_wgmma import CodebookStreamWgmmaTile
from qcut.jit import Binary
from tests.support.compiled import build
from tests.support.sass import instructions

H200 = Target("sm_90a", 132)
HALF = CodebookProblem()
BRAIN = CodebookProblem(DType.BF16, 3, 4, Epilogue(DType.BF16, col_scale="per_channel", bias=True))
INT8 = CodebookProblem(DType.S8, 2, 2, Epilogue(row_scale="per_token", col_scale="per_channel", residual=True))
GELU = Epilogue(col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True)
ROTATES = replace(HALF, rotates=DType.F16)
PAIRS = replace(HALF, pairs=True)
INT8_PAIRS = CodebookProblem(DType.S8, 4, 2, Epilogue(row_scale="per_token", col_scale="per_channel"), pairs=True)
QUANTIZES = CodebookProblem(DType.S8, 4, 2, Epilogue(row_scale="per_token", col_scale="per_channel"), 8, DType.BF16)
WIDE = CodebookStreamTile(1, 7, 32)
SMALL = CodebookStreamTile(16, 2, 8, 2)
CLUSTER = CodebookStreamTile(8, 9, 28, 1, 4)
WGMMA = CodebookStreamWgmmaTile(64, 4, 2, 8, 4)
SHAPES = (
    (14336, 32),
    (4096, 112),
    (4096, 32),
    (1280, 10),
    (5120, 10),
    (1280, 40),
    (50257, 10),
    (28672, 64),
    (8192, 224),
    (1, 1),
)
"""(N, units) of layers."""


def mma_sources(arch: str) -> list[KernelSource]:
    """Kernels near their register limit, and one of each type of token."""
    tiles = [(HALF, WIDE), (replace(HALF, epilogue=GELU), CodebookStreamTile(8, 2, 32)), (HALF, SMALL)]
    tiles += [(ROTATES, WIDE), (replace(BRAIN, rotates=DType.BF16), CodebookStreamTile(1, 3, 10, 2))]
    tiles += [(QUANTIZES, WIDE), (replace(INT8, rotates=DType.F16), CodebookStreamTile(1, 3, 10, 2, 1))]
    tiles += [(BRAIN, WIDE), (BRAIN, CodebookStreamTile(32, 1, 10)), (INT8, CodebookStreamTile(16, 2, 32))]
    tiles += [(PAIRS, SMALL), (INT8_PAIRS, WIDE), (replace(INT8_PAIRS, rotates=DType.BF16), WIDE)]
    if arch == "sm_90a":
        tiles += [
            (HALF, CLUSTER),
            (INT8_PAIRS, CodebookStreamTile(8, 4, 28, 1, 2)),
            (INT8, CodebookStreamTile(8, 4, 28, 2, 2)),
            (QUANTIZES, CodebookStreamTile(1, 9, 28, 1, 8)),
        ]
    return [CODEBOOK_STREAM.emit(problem, tile, arch) for problem, tile in tiles]


def wgmma_sources() -> list[KernelSource]:
    tiles = [(HALF, WGMMA), (HALF, CodebookStreamWgmmaTile(64, 5, 8, 10, 1)), (INT8, WGMMA)]
    tiles += [(BRAIN, CodebookStreamWgmmaTile(32, 2, 2, 5, 4)), (INT8, CodebookStreamWgmmaTile(8, 1, 1, 3, 2))]
    tiles += [(PAIRS, WGMMA), (INT8_PAIRS, WGMMA)]
    problems = (HALF, BRAIN, INT8, INT8_PAIRS)
    tiles += [(problem, CODEBOOK_STREAM_WGMMA.default_tiles(problem, "sm_90a")[-1]) for problem in problems]
    return [CODEBOOK_STREAM_WGMMA.emit(problem, tile, "sm_90a") for problem, tile in tiles]


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_is_deterministic_and_names_are_unique():
    sources = [*mma_sources("sm_80"), *mma_sources("sm_90a"), *wgmma_sources()]
    assert sources == [*mma_sources("sm_80"), *mma_sources("sm_90a"), *wgmma_sources()]
    assert len({s.name for s in sources}) == len(sources)


def test_names_spell_the_kernel():
    name = CODEBOOK_STREAM.emit(HALF, CLUSTER, "sm_90a").name
    assert name == "qcut_codebook_stream_sm90a_f16xc4s1_f16_sn_n8_t8_r9_w28_u1_k4_p1"
    name = CODEBOOK_STREAM.emit(ROTATES, WIDE, "sm_90a").name
    assert name == "qcut_codebook_stream_sm90a_f16hxc4s1_f16_sn_n8_t1_r7_w32_u1_k1_p1"
    name = CODEBOOK_STREAM.emit(INT8_PAIRS, WIDE, "sm_90a").name
    assert name == "qcut_codebook_stream_sm90a_s8xc4ps2_f16_sm_sn_n8_t1_r7_w32_u1_k1_p1"
    name = CODEBOOK_STREAM_WGMMA.emit(INT8, WGMMA, "sm_90a").name
    assert name == "qcut_codebook_stream_wgmma_sm90a_s8xc2s2_f16_sm_sn_r_n8_t64_g4_k2_s8_p4"


def test_splits_are_a_cluster():
    assert "__cluster_dims__(4, 1, 1)" in CODEBOOK_STREAM.emit(HALF, CLUSTER, "sm_90a").text
    assert "__cluster_dims__(2, 1, 1)" in CODEBOOK_STREAM_WGMMA.emit(HALF, WGMMA, "sm_90a").text
    assert "__cluster_dims__" not in CODEBOOK_STREAM.emit(HALF, WIDE, "sm_90a").text


def test_grid_covers_the_rows():
    for n in (1, 15, 16, 17, 112, 113, 4096):
        for tile, rows in ((WIDE, 112), (CLUSTER, 144)):
            ctas = CODEBOOK_STREAM.grid(tile, n)(1)[0] // tile.splits
            assert (ctas - 1) * rows < n <= ctas * rows
        ctas = CODEBOOK_STREAM_WGMMA.grid(WGMMA, n)(1)[0] // WGMMA.splits
        assert (ctas - 1) * 256 < n <= ctas * 256


def test_grid_covers_the_tokens():
    assert [CODEBOOK_STREAM_WGMMA.grid(WGMMA, 4096)(m)[0] for m in (1, 64, 65, 200)] == [32, 32, 64, 128]


# ── choices ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("problem", [HALF, BRAIN, INT8, PAIRS, INT8_PAIRS], ids=lambda p: p.name)
def test_chosen_tiles_are_legal_and_cover_k(problem: CodebookProblem):
    for (n, units), m in product(SHAPES, (1, 2, 8, 9, 16, 17, 32, 33, 64)):
        wide = best_tile(CODEBOOK_STREAM_WGMMA, problem, m, n, 128 * units, H200)
        CODEBOOK_STREAM_WGMMA.validate(problem, wide, "sm_90a")
        assert m <= wide.tokens
        if select(problem, m, n, units, H200).family != CODEBOOK_STREAM_WGMMA.name:
            tile = best_tile(CODEBOOK_STREAM, problem, m, n, 128 * units, H200)
            CODEBOOK_STREAM.validate(problem, tile, "sm_90a")
            assert m <= tile.tokens
            assert units <= tile.capacity


@pytest.mark.parametrize("problem", [HALF, BRAIN, INT8, PAIRS, INT8_PAIRS], ids=lambda p: p.name)
def test_tiles_for_prompts_are_legal_and_alone(problem: CodebookProblem):
    tiles = CODEBOOK_STREAM_WGMMA.default_tiles(problem, "sm_90a")
    assert len(tiles) == len(set(tiles)) == 9
    for tile in tiles:
        CODEBOOK_STREAM_WGMMA.validate(problem, tile, "sm_90a")
        source = CODEBOOK_STREAM_WGMMA.emit(problem, tile, "sm_90a")
        assert 2 * source.smem_bytes >= architecture("sm_90a").sm_smem_bytes


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_120"])
def test_other_architectures_have_tiles(arch: str):
    for m in (1, 8):
        tile = best_tile(CODEBOOK_STREAM, HALF, m, 1280, 1280, Target(arch, 108))
        CODEBOOK_STREAM.validate(HALF, tile, arch)
        assert tile.splits == 1


def test_long_sums_need_clusters():
    with pytest.raises(EmitError, match="no tile for 112 units of K, 4096 rows and 1 tokens on sm_80"):
        best_tile(CODEBOOK_STREAM, HALF, 1, 4096, 14336, Target("sm_80", 108))


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


def test_too_many_tokens_have_no_tile():
    with pytest.raises(EmitError, match=r"m is 33; allowed: 1 to 32"):
        best_tile(CODEBOOK_STREAM, HALF, 33, 64, 128, H200)
    with pytest.raises(EmitError, match=r"m is 0; allowed: 1 to 64"):
        best_tile(CODEBOOK_STREAM_WGMMA, HALF, 0, 64, 128, H200)


def test_pairs_have_64_words_and_a_table_for_every_type() -> None:
    for problem in (PAIRS, INT8_PAIRS):
        source = CODEBOOK_STREAM.emit(problem, WIDE, "sm_90a")
        assert [p.name for p in source.params if p.name.startswith("book")] == [f"book{i}" for i in range(64)]
        assert "const qcut::PairBook book{{static_cast<uint32_t>(book0), " in source.text
        assert source.smem_bytes > codebook_stream.PAIR_TABLE_BYTES
    assert codebook_stream.smem_bytes(replace(INT8_PAIRS, pairs=False), WIDE) < codebook_stream.PAIR_TABLE_BYTES


def test_what_pairs_do_not_go_with() -> None:
    row = CodebookProblem(DType.S8, epilogue=INT8_PAIRS.epilogue, row_norm=True)
    for problem in (HALF, row, replace(HALF, offsets=True)):
        bits = 3 if problem is HALF else 4
        with pytest.raises(EmitError, match="pairs: 4 bits, norms that are read, no offsets"):
            replace(problem, bits=bits, pairs=True)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────

REFUSALS = {
    "architecture": (HALF, SMALL, "sm_75"),
    "alignment": (replace(HALF, alignment_n=0), SMALL, "sm_80"),
    "tokens": (HALF, replace(SMALL, tokens=12), "sm_80"),
    "row_tiles": (HALF, replace(SMALL, row_tiles=65), "sm_80"),
    "warps": (HALF, replace(SMALL, warps=33), "sm_80"),
    "units": (HALF, replace(SMALL, units=9), "sm_80"),
    "prefetch": (HALF, replace(SMALL, prefetch=3), "sm_80"),
    "splits": (HALF, replace(SMALL, splits=3), "sm_90a"),
    "rotates": (ROTATES, SMALL, "sm_80"),
    "clusters": (HALF, CLUSTER, "sm_80"),
    "registers": (HALF, CodebookStreamTile(16, 1, 32), "sm_90a"),
    "shared_memory": (HALF, CodebookStreamTile(8, 12, 32), "sm_90a"),
}
WGMMA_REFUSALS = {
    "architecture": (HALF, WGMMA, "sm_100"),
    "alignment": (replace(HALF, alignment_n=0), WGMMA, "sm_90a"),
    "rotates": (ROTATES, WGMMA, "sm_90a"),
    "tokens": (HALF, replace(WGMMA, tokens=24), "sm_90a"),
    "groups": (HALF, replace(WGMMA, groups=9), "sm_90a"),
    "splits": (HALF, replace(WGMMA, splits=16), "sm_90a"),
    "stages": (HALF, replace(WGMMA, stages=2), "sm_90a"),
    "prefetch": (HALF, replace(WGMMA, prefetch=9), "sm_90a"),
    "registers": (HALF, replace(WGMMA, groups=8), "sm_90a"),
    "shared_memory": (HALF, replace(WGMMA, stages=11), "sm_90a"),
}


@pytest.mark.parametrize(
    ("family", "refusals"),
    [
        (CODEBOOK_STREAM, REFUSALS),
        (CODEBOOK_STREAM_WGMMA, WGMMA_REFUSALS),
    ],
    ids=["mma", "wgmma"],
)
def test_illegal_tiles_are_refused_by_name(family: Family[Any, Any], refusals: dict[str, Any]):
    assert [constraint.name for constraint in family.constraints] == list(refusals)
    for constraint in family.constraints:
        message = f"{constraint.name}: {constraint.reason}"
        with pytest.raises(EmitError, match=f"^qcut_{family.name}_sm[a-z0-9_]+: {re.escape(message)}$"):
            family.emit(*refusals[constraint.name])


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


def assert_fits(source: KernelSource, binary: Binary) -> None:
    resources = binary.resources
    assert resources is not None, source.name
    assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
    assert resources.registers * source.block <= 65_536, source.name
    assert source.smem_bytes + resources.smem_bytes <= architecture(source.arch).smem_bytes, source.name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_mma_binaries_hold_their_instructions(arch: str):
    texts = mma_sources(arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        assert_fits(source, binary)
        names = instructions(binary.cubin)
        multiply = {"s8": "IMMA.16832.S8.S8", "f16": "HMMA.16816.F32", "bf1": "HMMA.16816.F32.BF16"}
        kind = source.name.split(f"{arch.replace('_', '')}_")[1][:3].rstrip("xh")
        assert {multiply[kind], "LDSM.16.M88.4", "PRMT"} <= names, source.name
        rotates = any(p.name == "signs" for p in source.params)
        assert ("SHFL.BFLY" in names) == rotates, source.name
        stream = r"LDG\.E\.NA\.LTC(128|256)B\.128\.CONSTANT"
        assert any(re.match(stream, name) for name in names), source.name
        assert any(name.startswith("LDGSTS.E.BYPASS") for name in names) != rotates, source.name
        assert ("ACQBULK" in names) == (arch == "sm_90a"), source.name
        assert any(name.startswith("UCGABAR") for name in names) == ("__cluster_dims__" in source.text), source.name


def test_wgmma_binaries_hold_their_instructions():
    texts = wgmma_sources()
    for source, binary in zip(texts, build(*texts), strict=True):
        assert_fits(source, binary)
        names = instructions(binary.cubin)
        tokens = re.search(r"_t(\d+)_g", source.name)
        assert tokens is not None
        kind = {"s8x": ("IGMMA", "x32.S8.S8"), "f16": ("HGMMA", "x16.F32"), "bf1": ("HGMMA", "x16.F32.BF16")}
        name, shape = kind[source.name.split("sm90a_")[1][:3]]
        assert f"{name}.64x{tokens.group(1)}{shape}" in names, source.name
        assert any(i.startswith("UBLKCP") for i in names), source.name
        assert {"ACQBULK", "WARPGROUP.DEPBAR.LE"} <= names, source.name
