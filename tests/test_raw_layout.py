"""The index arithmetic of the raw kernels, restated in numpy: fragments, swizzles, banks, magic numbers.

A GPU says that a kernel is right; this says why, on any machine: formulas are those of
``emitters/include/qcut/{mma,gemm,mma_gemm,weight_only_gemm,quantize}.cuh`` and of the PTX ISA.
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


@pytest.mark.parametrize("warp_n", [16, 32, 64])
def test_epilogue_staging_of_int8(warp_n: int):
    pitch, lanes = warp_n + 8, warp_n // 8
    assert wavefronts(4 * (G * pitch + 2 * T), 8) == 2
    flip = (LANES % lanes) // 4
    reads = 4 * (LANES // lanes * pitch + 8 * (LANES % lanes)) + 16 * flip
    assert wavefronts(reads, 16) == (4 if warp_n == 64 else 8)


@pytest.mark.parametrize("warp_n", [16, 32, 64])
def test_epilogue_staging_of_weight_only(warp_n: int):
    pitch, lanes = warp_n + 4, warp_n // 8
    assert wavefronts(4 * (2 * T * pitch + G), 4) == 1
    flip = (LANES % lanes) // 4
    reads = 4 * (LANES // lanes * pitch + 8 * (LANES % lanes)) + 16 * flip
    assert (reads % 16 == 0).all()
    assert wavefronts(reads, 16) == (8 if warp_n == 16 else 4)


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
