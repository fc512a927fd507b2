"""What follows a product's sums, and the float32 arithmetic that all kernels share."""

import triton
import triton.language as tl

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: float32 next to it holds only whole numbers


@triton.jit
def rounded(v):
    """The nearest whole number to a float32 below 2**22 in magnitude, halves to even; NaN stays NaN."""
    return (v + _MAGIC) - _MAGIC


@triton.jit
def activated(v, ACTIVATION: tl.constexpr):
    """The activation of float32 values; see `qcut.numerics.int8.apply_activation`."""
    if ACTIVATION == "relu":
        v = tl.where(v < 0.0, 0.0, v)
    elif ACTIVATION == "gelu_erf":
        v = (tl.erf(v * 0.7071067811865476) + 1.0) * (v * 0.5)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)).
        u = (v * v * v * 0.044715 + v) * 0.7978845608028654
        v = v / (tl.exp(-2.0 * u) + 1.0)
    elif ACTIVATION == "silu":
        v = v / (tl.exp(-v) + 1.0)
    return v


@triton.jit
def store_rows(
    y, v, residual, bias, m, n, M, N, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    """Add the bias, apply the activation, add the residual, round and store a tile ``[BM, BN]``: rows m, columns n."""
    inside = (m < M)[:, None] & (n < N)[None, :]
    if HAS_BIAS:
        v += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    v = activated(v, ACTIVATION)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    if HAS_RESIDUAL:
        v += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def tile_of(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a program's tile: GROUP tiles of rows take turns on the columns, to meet in the cache."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid, per_group = tl.program_id(0), GROUP * tiles_n
    first = pid // per_group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    inside = pid % per_group
    return (first + inside % size) * BM, inside // size * BN


@triton.jit
def store_sums(sums, acc, m, n, M, N):
    """Store a part of the sums, ``[M, N]`` of this program's part of K."""
    at = (tl.program_id(1) * M + m[:, None]).to(tl.int64) * N + n[None, :]
    tl.store(sums + at, acc, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M", "zero_point"])
def finish(
    sums,
    y,
    row_scale,
    col_scale,
    colsum,
    bias,
    residual,
    M,
    N,
    zero_point,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_COLSUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BN: tl.constexpr,
):
    """Add the parts of a row's sums, one after another, and do what follows them."""
    m = tl.program_id(1) + tl.arange(0, 1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    acc = tl.load(sums + at, mask=(n < N)[None, :], other=0)
    for part in tl.static_range(1, PARTS):
        acc += tl.load(sums + tl.cast(part * M, tl.int64) * N + at, mask=(n < N)[None, :], other=0)
    if HAS_COLSUM:
        acc -= zero_point * tl.load(colsum + n, mask=n < N, other=0)[None, :]
    v = acc.to(tl.float32)
    if HAS_ROW_SCALE:
        v *= tl.load(row_scale + m)[:, None]
    v *= tl.load(col_scale + n, mask=n < N, other=0.0)[None, :]
    store_rows(y, v, residual, bias, m, n, M, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def settled(sums, PTX: tl.constexpr):
    """The same sums, once the tensor cores have finished them.

    A product that has its decoded weights in registers runs on while the next step decodes into the same registers:
    Triton (3.6, 3.7) awaits all but seven of a step's eight parts. An instruction that reads the sums lets it wait for
    all.
    """
    if PTX:
        if sums.dtype == tl.float32:
            sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], tl.float32, True, 1)
        else:
            sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], tl.int32, True, 1)
    return sums
