"""The multistage codebook kernel as text and as a binary: parameters, constraints, choice of tiles, instructions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics import best_tile
from qcut.emitters.codebook.mma import CONSTRAINTS, smem_bytes
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import ARCHITECTURES, architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import CODEBOOK_MMA
from qcut.emitters.gemm.problem import TileConfig
from tests.support.compiled import build, in_turns
from tests.support.sass import instructions

HALF = CodebookProblem(epilogue=Epilogue(col_scale="per_channel", bias=True))
INT8 = CodebookProblem(DType.S8, epilogue=Epilogue(row_scale="per_token", col_scale="per_channel", bias=True))
PAIRS, INT8_PAIRS = replace(HALF, pairs=True), replace(INT8, pairs=True)
SMALL = TileConfig((16, 64, 128), (16, 16, 128), 6)
MIDDLE = TileConfig((128, 128, 128), (64, 32, 128), 2)
LARGE = TileConfig((128, 128, 128), (128, 32, 128), 3)


def sources(arch: str) -> list[KernelSource]:
    full = Epilogue(DType.BF16, col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True)
    problems = [
        HALF,
        replace(HALF, bits=3, slots=2),
        replace(HALF, bits=2, slots=4, alignment_n=1),
        CodebookProblem(DType.BF16, 4, 1, full),
        INT8,
        replace(INT8, bits=3, slots=4),
        replace(INT8, bits=2, slots=2, epilogue=replace(full, row_scale="per_token")),
        replace(PAIRS, slots=2),
        INT8_PAIRS,
    ]
    found = [CODEBOOK_MMA.emit(problem, tile, arch) for problem in problems for tile in (MIDDLE, LARGE)]
    return found + [CODEBOOK_MMA.emit(problem, SMALL, arch) for problem in (HALF, INT8)]


def menu_sources(arch: str) -> list[KernelSource]:
    problems = (HALF, replace(HALF, x=DType.BF16), INT8, PAIRS, INT8_PAIRS)
    return [CODEBOOK_MMA.emit(p, tile, arch) for p in problems for tile in CODEBOOK_MMA.default_tiles(p, arch)]


def test_text_instantiates_the_header():
    problem = CodebookProblem(DType.S8, 3, 2, Epilogue(DType.BF16, "per_token", "per_channel"), 2)
    book = ", ".join(f"static_cast<uint32_t>(book{i})" for i in range(8))
    assert CODEBOOK_MMA.emit(problem, SMALL, "sm_80").text == (
        "#include <qcut/codebook/mma.cuh>\n\n"
        'extern "C" __global__ void __launch_bounds__(128)\n'
        "qcut_codebook_mma_sm80_s8xc3s2_bf16_sm_sn_n2_16x64x128_w16x16_s6_multistage(\n"
        "    const char* x, const char* units, const char* norms, const float* fold, __nv_bfloat16* d, int m, int n, "
        "int units_k, int ldd, int book0, int book1, int book2, int book3, int book4, int book5, int book6, int book7, "
        "const float* row_scale, const float* col_scale) {\n"
        "  using Tile = qcut::Tile<16, 64, 128, 16, 16, 6, 1>;\n"
        "  using Epilogue = qcut::Epilogue<__nv_bfloat16, qcut::ZeroPoint::kNone, true, qcut::ColScale::kPerChannel, "
        "false, qcut::Activation::kNone, false>;\n"
        "  Epilogue::Args args{};\n"
        "  args.row_scale = row_scale;\n"
        "  args.col_scale_per_channel = col_scale;\n"
        f"  const qcut::Book book{{{{{book}}}}};\n"
        "  qcut::codebook_mma<Tile, int8_t, 3, 2, false, Epilogue, 4>"
        "(x, units, norms, fold, d, m, n, units_k, ldd, book, args);\n"
        "}\n"
    )


def test_names_are_unique_and_text_repeats():
    first, second = ([s for arch in ("sm_80", "sm_90a") for s in sources(arch)] for _ in range(2))
    assert first == second
    assert len({s.name for s in first}) == len({s.text for s in first}) == len(first)


REFUSALS = {
    "architecture": (HALF, MIDDLE, "sm_75"),
    "alignment_n": (replace(HALF, alignment_n=0), MIDDLE, "sm_80"),
    "rotates": (replace(HALF, rotates=DType.F16), MIDDLE, "sm_80"),
    "schedule": (HALF, replace(MIDDLE, schedule="pingpong"), "sm_90a"),
    "cluster_shape": (HALF, replace(MIDDLE, cluster_shape=(2, 1)), "sm_90a"),
    "epilogue_tile": (HALF, replace(MIDDLE, epilogue_tile=(64, 32)), "sm_90a"),
    "one_cta": (HALF, replace(MIDDLE, splits=2), "sm_90a"),
    "block_k": (HALF, TileConfig((128, 128, 64), (64, 32, 64), 2), "sm_80"),
    "warp_k": (HALF, TileConfig((128, 128, 128), (64, 32, 64), 2), "sm_80"),
    "warp_shape": (HALF, TileConfig((128, 128, 128), (24, 32, 128), 2), "sm_80"),
    "contiguous_warp": (HALF, TileConfig((64, 128, 128), (16, 128, 128), 2), "sm_80"),
    "warps": (HALF, TileConfig((128, 256, 128), (16, 32, 128), 2), "sm_80"),
    "stages": (HALF, replace(MIDDLE, stages=1), "sm_80"),
    "registers": (HALF, TileConfig((128, 128, 128), (128, 64, 128), 2), "sm_80"),
    "shared_memory": (HALF, replace(MIDDLE, stages=5), "sm_80"),
}


def test_every_constraint_is_refused_below():
    assert [c.name for c in CONSTRAINTS] == list(REFUSALS)


@pytest.mark.parametrize("name", REFUSALS)
def test_illegal_tile_is_refused_by_name(name: str):
    [constraint] = [c for c in CONSTRAINTS if c.name == name]
    with pytest.raises(EmitError, match=f"^qcut_codebook_mma_[a-z0-9_]+: {re.escape(f'{name}: {constraint.reason}')}$"):
        CODEBOOK_MMA.emit(*REFUSALS[name])


# ── choice ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("problem", [HALF, INT8, PAIRS, INT8_PAIRS], ids=lambda p: p.name)
def test_every_shape_has_a_legal_tile(problem: CodebookProblem, arch: str):
    for m in (1, 17, 64, 300, 4096):
        for n in (1, 1280, 14336):
            CODEBOOK_MMA.validate(problem, best_tile(CODEBOOK_MMA, problem, m, n, 128, Target(arch, 132)), arch)


def test_few_tokens_take_flat_tiles_and_prompts_square_ones():
    assert best_tile(CODEBOOK_MMA, HALF, 8, 4096, 128, Target("sm_80", 108)).threadblock_shape[0] == 16
    assert best_tile(CODEBOOK_MMA, HALF, 4096, 4096, 128, Target("sm_80", 108)).threadblock_shape[0] >= 128


def test_what_no_tile_can_build_is_refused():
    with pytest.raises(EmitError, match="alignment_n"):
        best_tile(CODEBOOK_MMA, replace(HALF, alignment_n=0), 1, 16, 128, Target("sm_80", 108))


def test_grid_is_one_cta_per_tile():
    assert CODEBOOK_MMA.grid(MIDDLE, 257)(129) == (6, 1, 1)


def test_a_stage_holds_tokens_units_and_norms():
    assert smem_bytes(HALF, MIDDLE) == 2 * (128 * 256 + 8 * (1024 + 32))
    assert smem_bytes(PAIRS, MIDDLE) == 32768 + smem_bytes(HALF, MIDDLE)
    assert smem_bytes(replace(INT8, bits=3, slots=4), LARGE) == 3 * (128 * 128 + 8 * (768 + 128))


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_spills(arch: str):
    texts = in_turns(lambda arch: list(dict.fromkeys(sources(arch) + menu_sources(arch))), arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        resources = binary.resources
        assert resources is not None, source.name
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, source.name
        assert source.smem_bytes + resources.smem_bytes <= architecture(arch).smem_bytes


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_binaries_hold_the_instructions_they_were_written_for(arch: str):
    product = {"_f16xc": "HMMA.16816.F32", "_bf16xc": "HMMA.16816.F32.BF16", "_s8xc": "IMMA.16832.S8.S8"}
    texts = in_turns(sources, arch)
    for source, binary in zip(texts, build(*texts), strict=True):
        [wanted] = [name for x, name in product.items() if x in source.name]
        found = instructions(binary.cubin)
        decodes = set() if "f16xc4p" in source.name else {"PRMT"}  # pairs of 16 bits come from the table as they are
        assert {"LDSM.16.M88.4", "LDS.128", wanted, *decodes} <= found, source.name
        assert any(re.fullmatch(r"LDGSTS\.E\.BYPASS.*\.128(\.ZFILL)?", name) for name in found), source.name
        assert not any(name.startswith(("LDL", "STL")) for name in found), source.name
