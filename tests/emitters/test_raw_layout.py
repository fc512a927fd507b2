"""The index arithmetic of the raw kernels, restated in numpy: fragments, swizzles, banks, magic numbers.

A GPU says that a kernel is right; this says why, on any machine: formulas are those of
``emitters/include/qcut/{mma,gemm,epilogue,mma_gemm,wmma_gemm,weight_only_gemm,quantize}.cuh`` and of the PTX ISA.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
Swizzle = Callable[[np.ndarray, np.ndarray], np.ndarray]


def matrix_swizzle(chunks: int) -> Swizzle:
    return (lambda row, chunk: chunk ^ (row & 7)) if chunks == 8 else (lambda row, chunk: chunk ^ ((row >> 1) & 3))


def token_swizzle(row: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    return chunk ^ ((row & 3) << 1)


def transpose_source(place: np.ndarray) -> np.ndarray:
    """The column of K that lies at a place, where runs are columns of K."""
    return (place & ~15) | (place & 6) << 1 | (place & 8) >> 2 | (place & 1)


def transpose_offset(chunks: int, place: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    return 16 * (place * chunks + (chunk ^ (place & 7 if chunks >= 8 else (place & 7) * chunks // 8)))


def store(tile: np.ndarray, swizzle: Swizzle) -> np.ndarray:
    """Shared memory that holds the rows of a byte matrix, 16-byte chunks swizzled."""
    rows, width = tile.shape
    chunks = width // 16
    memory = np.zeros(rows * width, np.uint8)
    for row in range(rows):
        for chunk in range(chunks):
            at = 16 * (row * chunks + int(swizzle(np.array(row), np.array(chunk))))
            memory[at : at + 16] = tile[row, 16 * chunk : 16 * chunk + 16]
    return memory


def wavefronts(addresses: np.ndarray, width: int) -> int:
    """Shared-memory cycles of a warp's access: 128 bytes a cycle, lanes of a group in distinct banks."""
    group = 128 // width
    total = 0
    for lanes in addresses.reshape(-1, group):
        words = {int(a) // 4 + i for a in lanes for i in range(width // 4)}
        total += max(sum(1 for w in words if w % 32 == bank) for bank in {w % 32 for w in words})
    return total


def ldmatrix(memory: np.ndarray, addresses: np.ndarray, count: int) -> np.ndarray:
    """Register r of lane 4g + t: bytes 4t..4t+3 of row g of matrix r, whose address lane 8r + g gave."""
    out = np.zeros((count, 32, 4), np.uint8)
    for r in range(count):
        for lane in range(32):
            at = addresses[8 * r + G[lane]] + 4 * T[lane]
            out[r, lane] = memory[at : at + 4]
    return out


# ── swizzles ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("swizzle", "chunks", "period"),
    [(matrix_swizzle(4), 4, 8), (matrix_swizzle(8), 8, 8), (token_swizzle, 8, 4), (token_swizzle, 16, 4)],
)
def test_swizzle_is_a_permutation_and_repeats(swizzle: Swizzle, chunks: int, period: int):
    columns = np.arange(chunks)
    for row in range(32):
        assert sorted(swizzle(np.array(row), columns)) == list(columns)
        assert (swizzle(np.array(row), columns) == swizzle(np.array(row % period), columns)).all()


@pytest.mark.parametrize("chunks", [4, 8])
def test_ldmatrix_of_int8_has_no_bank_conflict(chunks: int):
    swizzle = matrix_swizzle(chunks)
    for chunk in range(chunks):
        rows = np.arange(8)
        assert wavefronts(16 * (rows * chunks + swizzle(rows, np.full(8, chunk))), 16) == 1


@pytest.mark.parametrize("chunks", [8, 16])
def test_token_reads_have_no_bank_conflict(chunks: int):
    for step in range(chunks // 2):
        base = 16 * (G * chunks + token_swizzle(G, T // 2)) + 8 * (T % 2)
        assert wavefronts(base ^ (32 * step), 8) == 2


@pytest.mark.parametrize(
    ("swizzle", "chunks"), [(matrix_swizzle(4), 4), (matrix_swizzle(8), 8), (token_swizzle, 8), (token_swizzle, 16)]
)
def test_copies_write_without_bank_conflict(swizzle: Swizzle, chunks: int):
    rows, columns = LANES // chunks, LANES % chunks
    assert wavefronts(16 * (rows * chunks + swizzle(rows, columns)), 16) == 4


@pytest.mark.parametrize("runs", [64, 128])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8, 16])
def test_transposing_ldmatrix_has_no_bank_conflict(chunks: int, runs: int):
    for first in range(0, runs, 8):
        for chunk in range(chunks):
            assert wavefronts(transpose_offset(chunks, np.arange(first, first + 8), chunk), 16) == 1


@pytest.mark.parametrize("chunks", [1, 2, 4, 8, 16])
def test_transposed_places_are_a_permutation_that_repeats(chunks: int):
    places = np.arange(64)
    assert sorted(transpose_source(places)) == list(places)
    for step in (8, 16, 32):  # runs copied at a time
        below = np.arange(step)
        for i in range(64 // step):
            assert (transpose_source(below + i * step) == transpose_source(below) + transpose_source(i * step)).all()
            offsets = transpose_offset(chunks, below + i * step, 0)
            assert (offsets == transpose_offset(chunks, below, 0) + transpose_offset(chunks, i * step, 0)).all()


def blocked_offset(chunks: int, run: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    return 256 * (run // 16 * chunks + chunk) + 16 * (run % 16)


@pytest.mark.parametrize("threads", [64, 128, 256])
@pytest.mark.parametrize("chunks", [4, 8])
def test_blocked_fragments_are_copied_and_loaded_without_bank_conflict(chunks: int, threads: int):
    thread = np.arange(threads)
    run, chunk = thread % 8 + thread // (8 * chunks) * 8, thread // 8 % chunks
    assert sorted(zip(run, chunk, strict=True)) == [(r, c) for r in range(threads // chunks) for c in range(chunks)]
    for first in range(0, threads, 32):
        assert wavefronts(blocked_offset(chunks, run, chunk)[first : first + 32], 16) == 4
    step = threads // chunks
    for i in range(4):
        offsets = blocked_offset(chunks, run + i * step, chunk)
        assert (offsets == blocked_offset(chunks, run, chunk) + blocked_offset(chunks, i * step, 0)).all()
    for half in (0, 8):
        assert wavefronts(blocked_offset(chunks, np.arange(half, half + 8), np.full(8, 1)), 16) == 1


STAGES = [(width, size) for width in (16, 32, 64) for size in (1, 2, 4)]


def lane_columns(width: int, size: int) -> int:
    """Columns of D of ``size`` bytes that a lane owns."""
    return min(16 // size, width // 2)


def staged(width: int, size: int, row: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    chunks = lane_columns(width, size) // 4
    lane, j = chunk // chunks, chunk % chunks
    if width == 16:
        place = (lane | j << 1) ^ np.where(row & 2, 3, 0)
    else:
        place = lane ^ (j & 1) << 2 ^ (j & 2) ^ (row & 1) * 7 ^ (row >> 1 & 1) * 5
        if width == 64:
            place = place ^ (j if chunks == 2 else j >> 1) << 3
    return 4 * width * row + 16 * place


@pytest.mark.parametrize(("width", "size"), STAGES)
def test_staging_keeps_every_accumulator_and_is_linear(width: int, size: int):
    row, chunk = np.divmod(np.arange(4 * width), width // 4)
    offsets = staged(width, size, row, chunk)
    assert sorted(offsets) == list(range(0, 64 * width, 16))
    assert (offsets == staged(width, size, row, 0 * chunk) ^ staged(width, size, 0 * row, chunk)).all()


@pytest.mark.parametrize(("width", "size"), STAGES)
def test_staging_has_no_bank_conflict(width: int, size: int):
    for chunk in range(0, width // 4, 2):  # pairs of columns, of contiguous B
        assert wavefronts(staged(width, size, G, chunk + T // 2) + 8 * (T % 2), 8) == 2
    for chunk in range(0, width // 4, 4):  # four columns, of B that was transposed
        assert wavefronts(staged(width, size, G, chunk + T), 16) == 4
        for odd in (0, 4):  # the weight-only product: one column of four tokens
            assert wavefronts(staged(width, size, T + odd, chunk + G // 4) + 4 * (G % 4), 4) == 1
    columns = lane_columns(width, size)
    lanes = width // columns
    for j in range(columns // 4):
        reads = staged(width, size, LANES // lanes, LANES % lanes * (columns // 4) + j)
        assert wavefronts(reads, 16) == 4


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_warp_stores_whole_sectors(size: int):
    columns = lane_columns(64, size)
    addresses = size * (LANES // (64 // columns) * 4096 + LANES % (64 // columns) * columns)
    assert columns * size == 16
    written = {int(a) + i for a in addresses for i in range(columns * size)}
    assert len({b // 32 for b in written}) * 32 == len(written)


# ── fragments ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chunks", [4, 8])
def test_int8_fragments_are_the_product(chunks: int):
    rng = np.random.default_rng(0)
    a = rng.integers(-128, 128, (16, 16 * chunks)).astype(np.int8)
    b = rng.integers(-128, 128, (16, 16 * chunks)).astype(np.int8)
    swizzle = matrix_swizzle(chunks)
    a_memory, b_memory = store(a.view(np.uint8), swizzle), store(b.view(np.uint8), swizzle)
    a_row, b_row = LANES % 16, LANES % 8 + 8 * (LANES // 16)
    a_offset = 16 * (a_row * chunks + swizzle(a_row, LANES // 16))
    b_offset = 16 * (b_row * chunks + swizzle(b_row, LANES // 8 % 2))
    c = np.zeros((16, 16), np.int64)
    for step in range(chunks // 2):
        a_regs = ldmatrix(a_memory, a_offset ^ (32 * step), 4).view(np.int8)
        b_regs = ldmatrix(b_memory, b_offset ^ (32 * step), 4).view(np.int8)
        rows, columns = np.zeros((16, 32), np.int64), np.zeros((16, 32), np.int64)
        for lane in range(32):
            g, t = G[lane], 4 * T[lane]
            for r, (row, k) in enumerate(((g, t), (g + 8, t), (g, 16 + t), (g + 8, 16 + t))):
                rows[row, k : k + 4] = a_regs[r, lane]
            for r, (column, k) in enumerate(((g, t), (g, 16 + t), (8 + g, t), (8 + g, 16 + t))):
                columns[column, k : k + 4] = b_regs[r, lane]
        c += rows @ columns.T
    assert (c == a.astype(np.int64) @ b.astype(np.int64).T).all()


@pytest.mark.parametrize("extent", [16, 32, 64, 128, 256])
def test_transposed_fragments_are_rows(extent: int):
    """Sixteen rows contiguous across K: byte i of a register is column 4t + i of row 2g or 2g + 1."""
    rng = np.random.default_rng(0)
    a = rng.integers(-128, 128, (extent, 64)).astype(np.int8)
    chunks = extent // 16
    memory = np.zeros(64 * extent, np.int8)
    for place in range(64):
        for chunk in range(chunks):
            at = int(transpose_offset(chunks, np.array(place), np.array(chunk)))
            memory[at : at + 16] = a[16 * chunk : 16 * chunk + 16, int(transpose_source(np.array(place)))]
    for warp_row, i, step in ((0, 0, 0), (0, 0, 1), (extent // 2 // 16 * 16, 0, 1), (0, chunks // 2, 0)):
        offset = transpose_offset(chunks, LANES, np.array(warp_row // 16))
        addresses = (offset ^ (16 * i)) + step * 32 * extent
        row = warp_row + 16 * i
        pairs = np.zeros((4, 32, 4), np.int8)
        for r in range(4):
            for lane in range(32):  # transposed: pair g of rows 2t and 2t + 1
                for half in range(2):
                    at = addresses[8 * r + 2 * T[lane] + half] + 2 * G[lane]
                    pairs[r, lane, 2 * half : 2 * half + 2] = memory[at : at + 2]
        for upper in range(2):
            both = np.concatenate([pairs[2 * upper], pairs[2 * upper + 1]], 1)
            for odd in range(2):
                register = both[:, [odd, 2 + odd, 4 + odd, 6 + odd]]
                k = 32 * step + 16 * upper + 4 * T[:, None] + np.arange(4)
                assert (register == a[row + 2 * G[:, None] + odd, k]).all()


@pytest.mark.parametrize("warp_n", [16, 32])
@pytest.mark.parametrize("block_k", [64, 128])
def test_weight_only_fragments_are_the_product(block_k: int, warp_n: int):
    rng = np.random.default_rng(0)
    x = rng.integers(-100, 100, (8, block_k)).astype(np.float16)
    w = rng.integers(-128, 128, (warp_n, block_k)).astype(np.int8)
    b_chunks, matrices = block_k // 16, min(warp_n // 8, 4)
    swizzle = matrix_swizzle(b_chunks)
    x_memory, w_memory = store(x.view(np.uint8), token_swizzle), store(w.view(np.uint8), swizzle)
    a_offset = 16 * (G * (block_k // 8) + token_swizzle(G, T // 2)) + 8 * (T % 2)
    row = LANES % (8 * matrices)
    b_offset = 16 * (row * b_chunks + swizzle(row, np.zeros(32, int)))
    c = np.zeros((warp_n, 8))
    for step in range(block_k // 16):
        at = a_offset ^ (32 * step)
        tokens = np.stack([x_memory[i : i + 8].view(np.float16) for i in at])  # lane, columns 4t..4t+3
        raw = ldmatrix(w_memory, b_offset ^ (16 * step), matrices).view(np.int8)
        for tile in range(warp_n // 16):
            first, second = np.zeros((16, 16)), np.zeros((8, 16))
            for lane in range(32):
                g, k = G[lane], 2 * T[lane]
                low, high = raw[2 * tile, lane], raw[2 * tile + 1, lane]
                first[g, k : k + 2], first[g + 8, k : k + 2] = low[:2], high[:2]
                first[g, 8 + k : 10 + k], first[g + 8, 8 + k : 10 + k] = low[2:], high[2:]
                second[g, k : k + 2], second[g, 8 + k : 10 + k] = tokens[lane, :2], tokens[lane, 2:]
            c[16 * tile : 16 * tile + 16] += first @ second.T
    assert (c == w.astype(float) @ x.astype(float).T).all()


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────

Q = np.arange(-128, 128)


def test_int8_to_half_is_exact():
    halves = (0x6400 | ((Q & 0xFF) ^ 0x80)).astype(np.uint16).view(np.float16)
    assert ((halves - np.array(0x6480, np.uint16).view(np.float16)) == Q).all()


def test_int8_to_bfloat16_is_exact():
    def bfloat16(bits: np.ndarray) -> np.ndarray:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    byte = Q & 0xFF
    difference = bfloat16(0x4300 | (byte & 0x7F)) - bfloat16(0x4300 | (byte & 0x80))
    assert (difference == Q).all()
    assert (difference.view(np.uint32) & 0xFFFF == 0).all()  # representable: the FMA rounds nothing


@pytest.mark.parametrize("largest", [1.0, 3.3e38, 2e-34, 127.0, 0.1])
def test_reciprocal_decides_as_the_division_away_from_ties(largest: float):
    rng = np.random.default_rng(0)
    absmax = (rng.uniform(0.5, 1, 4000) * largest).astype(np.float32)[:, None]
    scale = absmax / np.float32(127)
    half = (np.arange(127) + np.float32(0.5)).astype(np.float32) * scale
    x = np.concatenate([half, np.nextafter(half, np.float32(0)), rng.uniform(-1, 1, (4000, 200)) * absmax], 1)
    x = np.clip(x, -absmax, absmax).astype(np.float32)
    assert (scale >= 2.0**-120).all()
    inv = np.float32(1) / scale
    product = x.astype(np.float64) * inv  # 48 bits: exact, as inside the FMA
    near = np.abs(product - np.rint(product)) > 0.5 - 2.0**-14
    quotient = x / scale
    assert (np.rint(product) == np.rint(quotient))[~near].all()
    assert near[:, :254].mean() > 0.9  # the ties are among them
    assert near[:, 254:].mean() < 1e-3  # and the slow path is rare
    assert np.abs(quotient).max() < 127.5  # so that no clamp is needed


@pytest.mark.parametrize("scale", [2.0**-120, 0.037, 3.0e4, 2.0**118])
def test_static_bound_saturates(scale: float):
    bound = np.float32(512) * np.float32(scale)
    assert np.rint(bound / np.float32(scale)) - 128 > 127
