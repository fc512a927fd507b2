"""Kernels that rotate tokens group by group, and put them in the blocks or rows that products read."""

import triton
import triton.language as tl

from qcut.backends.triton.kernels.epilogue import rounded


@triton.jit
def hadamard(v, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """The Walsh-Hadamard transform of groups of ``2**STAGES`` values in ``v [COLUMNS]``, in torch's order."""
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(v, (COLUMNS // (2 << stage), 2, 1 << stage))
        low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
        v = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (COLUMNS,))
    return v


@triton.jit
def rotated(x, signs, at, inside, K, K_PADDED, factor, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """Places ``at`` of a token's rotated columns, all passes behind one another, in float32."""
    column = at % K_PADDED
    v = tl.load(x + column, mask=inside & (column < K), other=0.0).to(tl.float32)
    if STAGES > 0:
        word = tl.load(signs + at // 32, mask=inside, other=0)
        v = tl.where((word >> (at % 32)) & 1 != 0, -v, v)
        v = hadamard(v, COLUMNS, STAGES) * factor
    return v


@triton.jit
def place(at, m, blocks, BYTES: tl.constexpr):
    """Where column ``at`` of token m lies in blocks; see `qcut.numerics.codebook.layout.to_blocks`."""
    if BYTES == 1:
        inside = 4 * (at % 8 // 2) + 2 * (at % 16 // 8) + at % 2
        block, chunk, inside, size = at // 128, at % 128 // 16, inside, 16
    else:
        block, chunk, inside, size = at // 64, at % 64 // 8, at % 8, 8
    line = block.to(tl.int64) * (blocks * 8) + m
    return (line * 8 + (chunk ^ (m % 8))) * size + inside


@triton.jit
def to_halves(
    x, signs, out, stride, M, K, K_PADDED, WIDTH, blocks, factor, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):
    """Rotate COLUMNS columns of a token and round them to the blocks' type; tokens from M on are zeros."""
    m = tl.program_id(0)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (at < WIDTH) & (m < M)
    row = x + m.to(tl.int64) * stride
    v = rotated(row, signs, at, inside, K, K_PADDED, factor, COLUMNS, STAGES)
    tl.store(out + place(at, m, blocks, 2), v.to(out.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def to_int8(
    x,
    signs,
    out,
    scale,
    stride,
    M,
    K,
    K_PADDED,
    WIDTH,
    blocks,
    factor,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr = False,
):
    """Rotate a token and quantize it by its largest magnitude, all passes together; tokens from M on are zeros.

    With ROWS, output is rows of WIDTH columns in place of blocks.
    """
    m = tl.program_id(0)
    row = x + m.to(tl.int64) * stride
    largest = tl.zeros((COLUMNS,), tl.float32)
    finite = tl.full((COLUMNS,), 1, tl.int32)
    v = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        v = rotated(row, signs, at, (at < WIDTH) & (m < M), K, K_PADDED, factor, COLUMNS, STAGES)
        magnitude = tl.abs(v)
        finite = tl.where(magnitude < float("inf"), finite, 0)
        largest = tl.maximum(largest, magnitude)
    whole = tl.min(finite, 0) == 1
    absmax = tl.max(largest, 0)
    step = tl.where(absmax == 0.0, 1.0, tl.div_rn(absmax, 127.0))
    tl.store(scale + m, tl.where(whole, step, float("nan")), mask=m < M)
    for first in range(0, WIDTH, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        if not ONCE:
            v = rotated(row, signs, at, (at < WIDTH) & (m < M), K, K_PADDED, factor, COLUMNS, STAGES)
        steps = rounded(tl.minimum(tl.maximum(tl.div_rn(v, step), -127.0), 127.0))
        if ROWS:
            to = m.to(tl.int64) * WIDTH + at
        else:
            to = place(at, m, blocks, 1)
        tl.store(out + to, tl.where(whole, steps, 0.0).to(tl.int8), mask=at < WIDTH)


@triton.jit
def dense(
    x,
    matrices,
    rows,
    stride,
    M,
    K,
    FULL,
    SIDE,
    PADDED_GROUP,
    K_PADDED,
    WIDTH,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """``rows[m, j] = sum_i x[m, i] * matrix[j, i]`` of a group: the rotation ``qr``, in float32."""
    group, last = tl.program_id(1), tl.num_programs(1)
    turn = tl.program_id(2)
    tiles_n = tl.cdiv(SIDE, BN)
    m = tl.program_id(0) // tiles_n * BM + tl.arange(0, BM)
    j = tl.program_id(0) % tiles_n * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    size = tl.minimum(FULL, K - group * FULL)
    x_at = x + m[:, None].to(tl.int64) * stride + group * FULL
    matrix = matrices + (turn * last + group).to(tl.int64) * SIDE * SIDE + j[:, None] * SIDE
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, size, BK):
        at = first + i
        a = tl.load(x_at + at[None, :], mask=(m < M)[:, None] & (at < size)[None, :], other=0.0)
        b = tl.load(matrix + at[None, :], mask=(j < size)[:, None] & (at < size)[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b.to(a.dtype)), acc, input_precision="ieee")
    to = rows + m[:, None].to(tl.int64) * WIDTH + (turn * K_PADDED + group * PADDED_GROUP + j)[None, :]
    tl.store(to, acc, mask=(m < M)[:, None] & (j < size)[None, :])
