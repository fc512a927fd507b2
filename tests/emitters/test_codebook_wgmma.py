"""The prompt kernel on codebook weights as text, as a binary, and its index arithmetic restated in numpy."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qcut import jit
from qcut.dispatch.codebook import select
from qcut.dispatch.gpus import Target
from qcut.dispatch.heuristics.codebook_wgmma import cycles
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.codebook.wgmma import CONSTRAINTS, CodebookWgmmaTile, buffers, smem_bytes, stage_bytes
from qcut.emitters.core.arch import architecture
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType, EmitError, KernelSource
from qcut.emitters.families import CODEBOOK_STREAM_WGMMA, CODEBOOK_WGMMA
from qcut.numerics.codebook import layout as codebook_layout
from tests.support.sass import find_nvdisasm, instructions

ARCH = "sm_90a"
H200 = Target(ARCH, 132)
INT8 = CodebookProblem(DType.S8, epilogue=Epilogue(row_scale="per_token", col_scale="per_channel", bias=True))
HALF = CodebookProblem(DType.F16)
BRAIN = CodebookProblem(
    DType.BF16,
    bits=3,
    slots=4,
    epilogue=Epilogue(DType.BF16, col_scale="per_channel", bias=True, activation=Activation.GELU_TANH, residual=True),
)
PAIRS, INT8_PAIRS = replace(HALF, pairs=True), replace(INT8, pairs=True)
PAIR = CodebookWgmmaTile(256, 5, 2, lead=2)
DEEP = CodebookWgmmaTile(256, 3, 2)
SPLIT = CodebookWgmmaTile(64, 4, 1, 4, lead=2)


def sources() -> list[KernelSource]:
    """Every tile with int8 and float16 tokens, every width and number of slots, other epilogues."""
    pairs = [
        (problem, tile)
        for problem in (INT8, HALF, INT8_PAIRS)
        for tile in CODEBOOK_WGMMA.default_tiles(problem, "sm_90a")
    ]
    pairs += [
        (problem, CODEBOOK_WGMMA.default_tiles(problem, "sm_90a")[0])
        for problem in (PAIRS, replace(INT8_PAIRS, slots=4))
    ]
    for bits, slots in ((2, 1), (2, 4), (3, 2), (4, 4)):
        for problem in (INT8, HALF):
            other = replace(problem, bits=bits, slots=slots)
            pairs += [(other, tile) for tile in CODEBOOK_WGMMA.default_tiles(other, "sm_90a")[:3]]
    full = replace(INT8.epilogue, activation=Activation.SILU, residual=True)
    pairs += [
        (BRAIN, replace(DEEP, tokens=128)),
        (HALF, CodebookWgmmaTile(192, 3, 2, lead=1, pairs=True)),
        (BRAIN, CodebookWgmmaTile(96, 3, 1, splits=2, lead=1, pairs=True)),
        (replace(BRAIN, alignment_n=1), SPLIT),
        (replace(INT8, epilogue=replace(full, out=DType.F32), alignment_n=1), PAIR),
        (replace(INT8, epilogue=full, alignment_n=4), PAIR),
    ]
    return [CODEBOOK_WGMMA.emit(problem, tile, ARCH) for problem, tile in pairs]


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def test_text_instantiates_the_header():
    source = CODEBOOK_WGMMA.emit(INT8, PAIR, ARCH)
    name = "qcut_codebook_wgmma_sm90a_s8xc4s1_f16_sm_sn_b_n8_128x256_c2_s5_l2"
    words = ", ".join(f"static_cast<uint32_t>(book{i})" for i in range(8))
    assert source.text == (
        "#include <qcut/codebook/wgmma.cuh>\n\n"
        'extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)\n'
        f"{name}(\n"
        "    const char* x, const char* units, const char* norms, const float* fold, __half* d, int m, int n, "
        f"int units_k, int ldd, {', '.join(f'int book{i}' for i in range(8))}, const float* row_scale, "
        "const float* col_scale, const float* bias) {\n"
        "  using Tile = qcut::WgmmaTile<int8_t, 4, 1, false, 256, 5, 2, 2, 1, 4, false, false>;\n"
        "  using Epilogue = qcut::Epilogue<__half, qcut::ZeroPoint::kNone, true, qcut::ColScale::kPerChannel, true, "
        "qcut::Activation::kNone, false>;\n"
        "  Epilogue::Args args{};\n"
        "  args.row_scale = row_scale;\n"
        "  args.col_scale_per_channel = col_scale;\n"
        "  args.bias = bias;\n"
        f"  const qcut::Book book{{{{{words}}}}};\n"
        "  qcut::codebook_wgmma<Tile, Epilogue, 16>(x, units, norms, fold, d, m, n, units_k, ldd, book, args);\n"
        "}\n"
    )
    assert (source.name, source.entry, source.block) == (name, name, 384)
    assert source.params == INT8.params()
    assert CODEBOOK_WGMMA.emit(INT8, PAIR, ARCH) == source


def test_names_differ_with_everything_that_matters():
    built = sources()
    assert len({source.name for source in built}) == len({source.text for source in built}) == len(built)


def test_float_tokens_take_no_fold():
    text = CODEBOOK_WGMMA.emit(HALF, SPLIT, ARCH).text
    assert "nullptr" in text
    assert "fold" not in text
    assert "__cluster_dims__(4, 1, 1)" in text


REFUSALS = {
    "architecture": (INT8, PAIR, "sm_80"),
    "alignment_n": (replace(INT8, alignment_n=0), PAIR, ARCH),
    "rotates": (replace(HALF, rotates=DType.F16), DEEP, ARCH),
    "tokens": (INT8, replace(PAIR, tokens=80), ARCH),
    "cluster": (INT8, replace(PAIR, cluster=4), ARCH),
    "splits": (INT8, replace(SPLIT, splits=3), ARCH),
    "one_cluster": (INT8, replace(SPLIT, cluster=2), ARCH),
    "pairs": (INT8, replace(PAIR, pairs=True), ARCH),
    "stages": (INT8, replace(PAIR, stages=1, lead=0), ARCH),
    "lead": (INT8, replace(PAIR, lead=5), ARCH),
    "registers": (replace(HALF, slots=4), DEEP, ARCH),
    "shared_memory": (HALF, replace(DEEP, stages=4), ARCH),
}


def test_every_constraint_is_refused_below():
    assert [c.name for c in CONSTRAINTS] == list(REFUSALS)


@pytest.mark.parametrize("name", REFUSALS)
def test_illegal_kernel_is_refused_by_name(name: str):
    [constraint] = [c for c in CONSTRAINTS if c.name == name]
    with pytest.raises(
        EmitError, match=f"^qcut_codebook_wgmma_[a-z0-9_]+: {re.escape(f'{name}: {constraint.reason}')}$"
    ):
        CODEBOOK_WGMMA.emit(*REFUSALS[name])


def test_a_codebook_of_pairs_needs_the_table():
    for problem in (PAIRS, INT8_PAIRS):
        assert all(tile.pairs for tile in CODEBOOK_WGMMA.default_tiles(problem, "sm_90a"))
        with pytest.raises(EmitError, match="pairs: are of 16-bit values, or of a codebook of pairs, which needs them"):
            CODEBOOK_WGMMA.emit(problem, CodebookWgmmaTile(128, 2, 1), ARCH)
    # No tables of rows, no barriers for them.
    assert stage_bytes(INT8_PAIRS, 256) == 32768
    tile = CodebookWgmmaTile(256, 2, 1, pairs=True)
    assert smem_bytes(INT8_PAIRS, tile) == 65536 + 2 * (32768 + 16) + 8 * 4608


def test_shared_memory_counts_stages_barriers_and_staging():
    assert stage_bytes(INT8, 256) == 32768 + 128 * 16
    assert stage_bytes(replace(INT8, slots=4), 256) == 32768 + 4 * 128 * 16
    assert stage_bytes(BRAIN, 64) == 16384
    four = replace(PAIR, stages=4)
    assert (buffers(INT8, four), buffers(INT8, PAIR), buffers(HALF, DEEP), buffers(INT8, SPLIT)) == (4, 4, 2, 0)
    assert smem_bytes(INT8, four) == 4 * (stage_bytes(INT8, 256) + 24) + 8 * 4608
    assert smem_bytes(HALF, DEEP) == 3 * (stage_bytes(HALF, 256) + 16) + 4 * 4608
    assert smem_bytes(HALF, replace(DEEP, stages=2, lead=1, pairs=True)) == 65536 + 2 * (65536 + 16) + 4 * 4608
    # The sums of two warpgroups outgrow two stages.
    assert smem_bytes(INT8, replace(SPLIT, stages=2, lead=1)) == 8 * 4608 + 2 * 24
    wide = CodebookWgmmaTile(256, 2, 1, 4, lead=1)
    assert smem_bytes(INT8, wide) == 32 * 4608 + 2 * 24


@pytest.mark.parametrize(
    "problem", [INT8, HALF, BRAIN, replace(HALF, slots=4), PAIRS, INT8_PAIRS], ids=lambda p: p.name
)
def test_menu_is_legal_and_holds_a_tile_for_every_shape(problem: CodebookProblem):
    menu = CODEBOOK_WGMMA.default_tiles(problem, "sm_90a")
    assert {96, 128} <= {t.tokens for t in menu} if problem.x is not DType.S8 else {128, 256}
    for tile in menu:
        CODEBOOK_WGMMA.validate(problem, tile, ARCH)
        deeper = replace(tile, stages=tile.stages + 1)
        fits = smem_bytes(problem, deeper) <= architecture(ARCH).smem_bytes
        assert tile.stages == 8 or not fits or buffers(problem, deeper) < buffers(problem, tile)
    menu = (*menu, *CODEBOOK_STREAM_WGMMA.default_tiles(problem, "sm_90a"))
    for m, n, units in ((65, 1, 1), (80, 1280, 10), (256, 4096, 112), (8192, 14336, 32)):
        assert select(problem, m, n, units, H200).tile in menu


def test_large_prompts_take_the_large_tile_and_few_tiles_split_k():
    assert isinstance(select(INT8, 4096, 14336, 32, H200).tile, CodebookWgmmaTile)
    assert select(INT8, 4096, 14336, 32, H200).tile.tokens == select(HALF, 4096, 14336, 32, H200).tile.tokens == 256
    assert select(HALF, 128, 4096, 112, H200).tile.splits > 1
    assert cycles(HALF, DEEP, 4096, 4096, 4096, H200) > cycles(INT8, DEEP, 4096, 4096, 4096, H200)


def test_clusters_that_do_not_fit_at_once_take_a_second_wave():
    """Of 132 multiprocessors, 30 clusters of 4 run at once, not 33."""
    four = CodebookWgmmaTile(128, 4, 1, 4, lead=2)
    fits, second = (cycles(HALF, four, 128, 128 * rows, 4096, H200) for rows in (30, 31))
    assert second > 1.5 * fits


def test_grid_is_persistent_but_for_splits():
    assert CODEBOOK_WGMMA.grid(PAIR, 14336, 132)(4096) == (132, 1, 1)
    assert CODEBOOK_WGMMA.grid(PAIR, 14336, 132)(256) == (112, 1, 1)
    assert CODEBOOK_WGMMA.grid(PAIR, 129, 133)(1) == (2, 1, 1)
    assert CODEBOOK_WGMMA.grid(PAIR, 257, 1)(1) == (2, 1, 1)
    assert CODEBOOK_WGMMA.grid(replace(SPLIT, splits=8), 300, 4)(65) == (2 * 3 * 8, 1, 1)


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


def test_binaries_do_not_spill_and_hold_asynchronous_products():
    texts = sources()
    if not jit.is_toolchain_available("nvrtc"):
        texts = [replace(source, toolchain="nvcc") for source in texts]
    built = jit.build_many(texts, progress=False)
    for source in texts:
        binary = built[source.name]
        assert isinstance(binary, jit.Binary), binary
        resources = binary.resources
        assert resources is not None, source.name
        # Two words, once a tile, where float32 results with a residual are written element by element.
        most = 16 if "_f32_" in source.name else 0
        assert max(resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) <= most, source.name
        assert resources.registers == 168, source.name
        assert "serialized" not in binary.log, source.name
        found = instructions(binary.cubin)
        tokens = re.search(r"_128x(\d+)_", source.name)
        assert tokens is not None
        shape = f"64x{tokens[1]}x"
        kind = "IGMMA" if "_s8xc" in source.name else "HGMMA"
        assert any(name.startswith(f"{kind}.{shape}") for name in found), (source.name, found)
        assert any(name.startswith("UBLKCP") for name in found)
        assert any("MULTICAST" in name for name in found) == ("_c2_" in source.name), source.name
        assert most or not any(name.startswith(("LDL", "STL")) for name in found), source.name


@pytest.mark.parametrize("problem", [INT8, HALF], ids=lambda p: p.x.value)
def test_weights_are_decoded_between_products(problem: CodebookProblem, tmp_path: Path):
    """While the tensor core multiplies one half of a unit, a warp decodes the other."""
    tool = find_nvdisasm()
    if tool is None or not jit.is_toolchain_available("nvrtc"):
        pytest.skip("needs nvdisasm and NVRTC")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(jit.build(CODEBOOK_WGMMA.emit(problem, DEEP, ARCH)).cubin)
    text = subprocess.run([tool, str(file)], capture_output=True, text=True, check=True).stdout
    between = re.split(r"[HI]GMMA\.64x256x", text)[1:-1]
    assert len(between) == (3 if problem is INT8 else 7)
    first_half = between[: len(between) // 2 + 1]  # the last of them ends with the second half's first product
    assert sum(part.count("PRMT") for part in first_half) >= (20 if problem is INT8 else 60)


# ── index arithmetic ─────────────────────────────────────────────────────────────────────────────

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
Bytes = NDArray[np.uint8]


def staged_token(staged: int) -> int:
    return 2 * (staged % 4) + staged // 4 % 2 + staged // 8 * 8


def fetched_tokens(blocks: Bytes, m: int, token0: int, unit: int, tile: CodebookWgmmaTile, kb: int) -> Bytes:
    """A stage's tokens, fetched in parts by the CTAs of a cluster; what nobody fetched is 0x7f."""
    count = -(-m // 8)
    stage = np.full(kb * 128 * tile.tokens, 0x7F, np.uint8)
    part = tile.tokens // 8 // tile.cluster
    for rank in range(tile.cluster):
        begin = rank * part
        size = min(part, min(tile.tokens // 8, count - token0 // 8) - begin)
        for lane in range(kb if size > 0 else 0):
            block = (unit * kb + lane) * count + token0 // 8 + begin
            to = lane * 128 * tile.tokens + 1024 * begin
            stage[to : to + 1024 * size] = blocks[1024 * block : 1024 * (block + size)]
    return stage


def operand_b(stage: Bytes, start: int, tokens: int) -> Bytes:
    """What a descriptor that starts at a byte reads: 32 bytes of each row, through the 128-byte swizzle."""
    row = np.arange(tokens)[:, None]
    at = start + np.arange(32)[None] + row // 8 * 1024 + row % 8 * 128
    return stage[at ^ (at >> 7 & 7) << 4]


def operand_a(nibbles: NDArray[np.int64], words: list[int]) -> NDArray[np.int64]:
    """Indices [16, columns] by the fragments of m16n8k16 (a word) or m16n8k32 (two words), in registers' order."""
    if len(words) == 1:
        a = np.zeros((16, 16), np.int64)
        for byte in range(4):
            for e in range(2):
                a[G + 8 * (byte >> 1), 8 * (byte & 1) + 2 * T + e] = nibbles[LANES, words[0], 2 * byte + e]
        return a
    a = np.zeros((16, 32), np.int64)
    for register in range(4):
        row8, word = register % 2, words[register // 2]
        for e in range(4):  # bytes 2 row8 and 2 row8 + 1 of the word, low halves first
            a[G + 8 * row8, 16 * (register // 2) + 4 * T + e] = nibbles[LANES, word, 2 * (2 * row8 + (e >> 1)) + e % 2]
    return a


def write_tile(sums: NDArray[np.float64], d: NDArray[np.float64], token0: int, channel0: int, columns: int) -> None:
    """A warpgroup's [64, tokens] through staging to D, ``columns`` elements of D to a lane."""
    m, n = d.shape
    lanes, chunks = 64 // columns, columns // 4
    for i in range(sums.shape[1] // 16):
        staging = np.full(16 * 72, np.nan)
        for warp in range(4):
            for value in range(8):
                j, row8, odd = value // 4, value // 2 % 2, value % 2
                at = 72 * T + 16 * warp + G + 72 * (8 * j + 4 * odd) + 8 * row8
                assert len(set(at % 32)) == 32, "banks"
                staging[at] = sums[16 * warp + G + 8 * row8, 16 * i + 8 * j + 2 * T + odd]
        for warp in range(4):
            for lane in range(32):
                for p in range(4 * lanes // 32):
                    staged = warp * 4 + lane // lanes % 4 + p * (32 // lanes)
                    token = token0 + 16 * i + staged_token(staged)
                    for c in range(4 * chunks):
                        channel = channel0 + columns * (lane % lanes) + c
                        if token < m and channel < n:
                            assert np.isnan(d[token, channel]), "written twice"
                            chunk = lane % lanes * chunks + c // 4
                            d[token, channel] = staging[72 * staged + 4 * chunk + c % 4]


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_table_warps_build_every_row_of_a_unit_once(slots: int):
    """Rows, and where their norms are; a warp reads rows g and g + 8 of its 16."""
    geometry = codebook_layout.Geometry(128, 128 // slots)
    norms = torch.arange(1, 128 * slots + 1).view(128, slots).half()
    packed = codebook_layout.pack_norms(norms, torch.ones(128), geometry)
    halves = packed.reshape(8, -1).numpy()  # those of a row tile are one copy
    turns = [0, 1, 2]
    for _unit in range(4):
        tables = np.zeros((slots, 128))
        for warp in range(3):
            rows = [*(32 * warp + LANES), *(96 + LANES if turns[warp] == 0 else [])]
            turns[warp] = 2 if turns[warp] == 0 else turns[warp] - 1
            for row in rows:
                for s in range(slots):
                    assert tables[s, row] == 0, "built twice"
                    tables[s, row] = halves[row // 16, 2 * (row % 8 + 8 * s) + (row % 16 >= 8)]
        np.testing.assert_array_equal(tables, norms.T.double().numpy())


@pytest.mark.parametrize("out_columns", [8, 4])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)
def test_index_arithmetic(dtype: torch.dtype, cluster: int, out_columns: int):
    """Copies, fragments, descriptors, staging and stores of a whole product give X W^T."""
    m, n, bits, units_k = 77, 200, 4, 2
    tile = CodebookWgmmaTile(64, 4, cluster)
    kb = dtype.itemsize
    geometry = codebook_layout.Geometry(128 * units_k, 128)
    gen = torch.Generator().manual_seed(cluster)
    indices = torch.randint(0, 16, (n, geometry.k), generator=gen, dtype=torch.uint8)
    tokens = torch.randint(-8, 9, (m, geometry.k), generator=gen).to(dtype)
    blocks = codebook_layout.to_blocks(tokens).view(torch.uint8).flatten().numpy()
    units = codebook_layout.pack_units(indices, bits, geometry).numpy()
    d = np.full((m, n), np.nan)
    row_tiles = -(-n // 64) * 4
    for token0 in range(0, m, tile.tokens):
        stages = [fetched_tokens(blocks, m, token0, u, tile, kb) for u in range(units_k)]
        for across in range(-(-n // (128 * cluster)) * cluster):
            for group in range(2):
                sums = np.zeros((64, tile.tokens))
                for warp in range(4):
                    row_tile = 8 * across + 4 * group + warp
                    for u in range(units_k if row_tile < row_tiles else 0):
                        raw = units[row_tile, u].reshape(2, 32, 4, 4).transpose(1, 0, 2, 3).reshape(32, 8, 4)
                        nibbles = np.stack((raw & 15, raw >> 4), -1).reshape(32, 8, 8).astype(np.int64)
                        for half in range(2):
                            for i in range(2 * kb):
                                step = 4 * half + i if kb == 2 else 2 * half + i
                                words = [step] if kb == 2 else [2 * step, 2 * step + 1]
                                start = half * 128 * tile.tokens if kb == 2 else half * 64
                                b = operand_b(stages[u], start + 32 * i, tile.tokens)
                                values = b.view(np.float16 if kb == 2 else np.int8).astype(np.float64)
                                product = operand_a(nibbles, words) @ values.T
                                sums[16 * warp : 16 * warp + 16] += product
                if 128 * across + 64 * group < n:
                    write_tile(sums, d, token0, 128 * across + 64 * group, out_columns)
    np.testing.assert_array_equal(d, (tokens.double() @ indices.double().T).numpy())
