"""Kernels of layers with int8 weights: tokens quantized, and products with int8, int16 or 16-bit float tokens."""

import triton
import triton.language as tl

from qcut.backends.triton.kernels.epilogue import rounded, settled, store_rows, store_sums, tile_of


@triton.jit
def quantize_rows(x, q, scale, stride, K, K_PADDED, BLOCK: tl.constexpr, ONCE: tl.constexpr):
    """Quantize a row by its largest magnitude: `qcut.numerics.int8.quantize_per_token_ref`, bitwise."""
    m = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    finite = tl.full((BLOCK,), 1, tl.int32)
    values = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, K, BLOCK):
        at = first + columns
        values = tl.load(x + m * stride + at, mask=at < K, other=0.0).to(tl.float32)
        magnitude = tl.abs(values)
        finite = tl.where(magnitude < float("inf"), finite, 0)
        largest = tl.maximum(largest, magnitude)
    whole = tl.min(finite, 0) == 1
    absmax = tl.max(largest, 0)
    step = tl.where(absmax == 0.0, 1.0, tl.div_rn(absmax, 127.0))
    tl.store(scale + m, tl.where(whole, step, float("nan")))
    for first in range(0, K_PADDED, BLOCK):
        at = first + columns
        if not ONCE:
            values = tl.load(x + m * stride + at, mask=at < K, other=0.0).to(tl.float32)
        steps = tl.div_rn(values, step)
        steps = rounded(tl.minimum(tl.maximum(steps, -127.0), 127.0))
        tl.store(q + m * K_PADDED + at, tl.where(whole, steps, 0.0).to(tl.int8), mask=at < K_PADDED)


@triton.jit
def quantize_by(x, q, stride, K, K_PADDED, step, zero_point, BLOCK: tl.constexpr):
    """Quantize all rows by one scale and zero point: `qcut.numerics.int8.quantize_per_tensor_ref`, bitwise."""
    m = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + m * stride + at, mask=at < K, other=0.0).to(tl.float32)
    steps = tl.div_rn(values, step)
    steps = tl.where(steps == steps, steps, 0.0)  # a GPU's maximum of NaN and a bound is the bound
    steps = rounded(tl.minimum(tl.maximum(steps, -512.0), 512.0)) + zero_point
    steps = tl.minimum(tl.maximum(steps, -128.0), 127.0)
    tl.store(q + m * K_PADDED + at, tl.where(at < K, steps, 0.0).to(tl.int8), mask=at < K_PADDED)


@triton.jit
def store_halves(halves, K_PADDED, m, at, steps):
    """Store whole numbers from -32,768 to 32,639 of row m as int8 halves: `qcut.numerics.int16.in_blocks`."""
    q = steps.to(tl.int32)
    low = ((q + 128) & 255) - 128
    inside = at < K_PADDED
    high = m // 8 * 16 + m % 8
    tl.store(halves + high * K_PADDED + at, ((q - low) >> 8).to(tl.int8), mask=inside)
    tl.store(halves + (high + 8) * K_PADDED + at, low.to(tl.int8), mask=inside)


@triton.jit
def quantize_rows_to_halves(x, q, scale, stride, K, K_PADDED, BLOCK: tl.constexpr, ONCE: tl.constexpr):
    """Quantize a row by its largest magnitude: `qcut.numerics.int16.quantize_tokens_ref`, bitwise."""
    m = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    finite = tl.full((BLOCK,), 1, tl.int32)
    values = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, K, BLOCK):
        at = first + columns
        values = tl.load(x + m * stride + at, mask=at < K, other=0.0).to(tl.float32)
        magnitude = tl.abs(values)
        finite = tl.where(magnitude < float("inf"), finite, 0)
        largest = tl.maximum(largest, magnitude)
    whole = tl.min(finite, 0) == 1
    absmax = tl.max(largest, 0)
    step = tl.where(absmax == 0.0, 1.0, tl.maximum(tl.div_rn(absmax, 32639.0), 1.1754943508222875e-38))
    inverse = tl.div_rn(1.0, step)
    tl.store(scale + m, tl.where(whole, step, float("nan")))
    for first in range(0, K_PADDED, BLOCK):
        at = first + columns
        if not ONCE:
            values = tl.load(x + m * stride + at, mask=at < K, other=0.0).to(tl.float32)
        store_halves(q, K_PADDED, m, at, tl.where(whole, rounded(values * inverse), 0.0))


@triton.jit
def quantize_to_halves_by(x, q, stride, K, K_PADDED, inverse, BLOCK: tl.constexpr):
    """Quantize all rows by one scale, given its reciprocal: `qcut.numerics.int16.quantize_tensor_ref`, bitwise."""
    m = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.load(x + m * stride + at, mask=at < K, other=0.0).to(tl.float32) * inverse
    steps = tl.where(steps == steps, steps, 0.0)
    store_halves(q, K_PADDED, m, at, rounded(tl.minimum(tl.maximum(steps, -32639.0), 32639.0)))


@triton.jit
def widened(q, dtype: tl.constexpr, PTX: tl.constexpr):
    """int8 values as float16 or bfloat16, exact."""
    if PTX and dtype == tl.float16:
        # Bytes become the lowest bits of 1,024: converting integers takes four times as long.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, b;
            mov.b32 b, 0x64806480;
            xor.b32 t, $2, 0x80808080;
            prmt.b32 $0, t, 0x64646464, 0x4140;
            prmt.b32 $1, t, 0x64646464, 0x4342;
            sub.rn.f16x2 $0, $0, b;
            sub.rn.f16x2 $1, $1, b;
            }""",
            "=&r,=&r,r",
            [q],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return q.to(dtype)


@triton.jit(do_not_specialize=["M", "zero_point"])
def product(
    x,
    w,
    x_box,
    w_box,
    y,
    row_scale,
    col_scale,
    colsum,
    bias,
    M,
    N,
    K,
    stride_x,
    stride_w,
    zero_point,
    ACTIVATION: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_COLSUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SPARSE: tl.constexpr,
    BOXES: tl.constexpr,
    PARTS: tl.constexpr,
    PTX: tl.constexpr,
    HALVES: tl.constexpr,
):
    """``y = act(f(x w^T) + bias)``: tokens int8 with exact sums, or of 16 bits with float32 sums, weights int8.

    HALVES: x has the halves of int16 tokens in the blocks of `qcut.numerics.int16.in_blocks`. A tile has half as many
    tokens as rows, and both sums of a token are put together in int64.
    TRANSPOSED gives weights the rows of the tensor core's tile, which few tokens do not fill. SPARSE: many rows of a
    tile hold no token. PARTS of K are summed by programs of their own; y then takes their sums, for `finish`. BOXES
    loads tiles by tensor descriptors, which a unit of the GPU carries out.
    """
    rows = tl.cdiv(M, 8) * 16 if HALVES else M
    m0, n0 = tile_of(rows, N, BM, BN, GROUP)
    m, n, k = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, BK)
    token = m // 16 * 8 + m % 8 if HALVES else m
    x_at = x + tl.minimum(m, rows - 1)[:, None].to(tl.int64) * stride_x + k[None, :]
    w_at = w + tl.minimum(n, N - 1)[:, None].to(tl.int64) * stride_w + k[None, :]
    sums: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    if TRANSPOSED:
        acc = tl.zeros((BN, BM), sums)
    else:
        acc = tl.zeros((BM, BN), sums)
    steps = (K + PARTS * BK - 1) // (PARTS * BK) * BK
    start = tl.program_id(1) * steps
    end = tl.minimum(start + steps, K)
    x_at += start
    w_at += start
    for first in range(start, end, BK):
        inside = (k < K - first)[None, :]
        if BOXES:
            b = w_box.load([n0, first])
        elif WHOLE_K:
            b = tl.load(w_at)
        else:
            b = tl.load(w_at, mask=inside, other=0)
        if BOXES:
            a = x_box.load([m0, first])
        elif SPARSE:
            # Rows that hold no token are not read: few tokens would be as many bytes as the weights.
            a = tl.load(x_at, mask=(token < M)[:, None] & inside, other=0)
        elif WHOLE_K:
            a = tl.load(x_at)
        else:
            a = tl.load(x_at, mask=inside, other=0)
        if sums == tl.float32:
            b = widened(b, a.dtype, PTX)
        if TRANSPOSED:
            acc = tl.dot(b, tl.trans(a), acc, out_dtype=sums)
            if sums == tl.float32:
                acc = settled(acc, PTX)
        else:
            acc = tl.dot(a, tl.trans(b), acc, out_dtype=sums)
        x_at += BK
        w_at += BK
    if TRANSPOSED:
        acc = tl.trans(acc)
    if HALVES:
        # Both sums are one thread's: they lie eight rows apart.
        high, low = tl.split(tl.permute(tl.reshape(acc, (BM // 16, 2, 8, BN)), (0, 2, 3, 1)))
        acc = tl.reshape(high.to(tl.int64) * 256 + low, (BM // 2, BN))
        m = m0 // 2 + tl.arange(0, BM // 2)
    if PARTS > 1:
        store_sums(y, acc, m, n, M, N)
    else:
        if HAS_COLSUM:
            acc -= zero_point * tl.load(colsum + n, mask=n < N, other=0)[None, :]
        v = acc.to(tl.float32)
        if HAS_ROW_SCALE:
            v *= tl.load(row_scale + m, mask=m < M, other=0.0)[:, None]
        v *= tl.load(col_scale + n, mask=n < N, other=0.0)[None, :]
        store_rows(y, v, y, bias, m, n, M, N, ACTIVATION, HAS_BIAS, False)
