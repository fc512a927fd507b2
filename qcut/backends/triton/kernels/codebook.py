"""Kernels of codebook layers: products with weights that are decoded on the way."""

import triton
import triton.language as tl

from qcut.backends.triton.kernels.epilogue import settled, store_rows, store_sums, tile_of

# Eight indices of a word are looked up in 16 values of two bytes. PRMT picks four bytes of eight: one lookup for the
# values' lower bytes and one for the upper, in both halves of the table; the highest bit of an index, spread over a
# byte, chooses the half.
_SELECT = """
    and.b32 s, {word}, 0x77777777;
    shl.b32 n, {word}, 4;
    prmt.b32 m0, {word}, n, 0x9d8c;
    prmt.b32 m1, {word}, n, 0xbfae;
    shr.b32 t, s, 16;
"""
_PICK = """
    prmt.b32 {to}, {a}, {b}, {index};
    prmt.b32 n, {c}, {d}, {index};
    lop3.b32 {to}, n, {to}, {half}, 0xe4;
"""


def _values(word: str, table: list[str], out: list[str]) -> str:
    """Text that leaves the eight 16-bit values of a word in four registers."""
    text = _SELECT.format(word=word)
    for i, index in enumerate("st"):
        for to, (a, b, c, d) in zip("xy", (table[:4], table[4:]), strict=True):
            text += _PICK.format(to=to, a=a, b=b, c=c, d=d, index=index, half=f"m{i}")
        text += f"prmt.b32 {out[2 * i]}, x, y, 0x5140;\nprmt.b32 {out[2 * i + 1]}, x, y, 0x7362;\n"
    return text


def _asm(*lines: str) -> str:
    return "{\n.reg .b32 s, t, n, x, y, m<2>, v<4>, f<8>;\n" + "\n".join(lines) + "\n}"


_V = ["v0", "v1", "v2", "v3"]


def _floats(offsets: bool, brain: bool) -> str:
    """Four registers of two 16-bit weights: values times the norms of two rows, and what offsets add."""
    table = [f"${i}" for i in range(5, 13)]  # $0 to $3 are results, $4 the word
    norm, shift = "$13", "$14"
    lines = [_values("$4", table, _V)]
    if not brain:
        for r, pick in enumerate(("0x1010", "0x3232")):
            lines.append(f"prmt.b32 x, {norm}, {norm}, {pick};")
            if offsets:
                lines.append(f"prmt.b32 y, {shift}, {shift}, {pick};\nmul.rn.f16x2 y, x, y;")
            for i in (2 * r, 2 * r + 1):
                lines.append(f"fma.rn.f16x2 ${i}, v{i}, x, y;" if offsets else f"mul.rn.f16x2 ${i}, v{i}, x;")
        return _asm(*lines)
    lines.append(".reg .b16 h0, h1;\n.reg .f32 p, q, a, b;")
    for r in range(2):
        lines.append(f"mov.b32 {{h0, h1}}, {norm};\ncvt.f32.f16 p, h{r};")
        if offsets:
            lines.append(f"mov.b32 {{h0, h1}}, {shift};\ncvt.f32.f16 q, h{r};\nmul.rn.f32 q, p, q;")
        for i in (2 * r, 2 * r + 1):
            lines.append(f"shl.b32 x, v{i}, 16;\nand.b32 y, v{i}, 0xffff0000;\nmov.b32 a, x;\nmov.b32 b, y;")
            for name in "ab":
                multiply = f"fma.rn.f32 {name}, {name}, p, q;" if offsets else f"mul.rn.f32 {name}, {name}, p;"
                lines.append(multiply)
            lines.append(f"cvt.rn.bf16x2.f32 ${i}, b, a;")
    return _asm(*lines)


def _integers() -> str:
    """Two registers of four int8 weights: values times a factor for each of two rows, rounded once."""
    table = [f"${i}" for i in range(3, 11)]  # $0 and $1 are results, $2 the word
    lines = [_values("$2", table, _V), ".reg .b16 h0, h1;\n.reg .f32 a;"]
    for r, factor in enumerate(("$11", "$12")):
        for i in range(4):
            # A float32 next to 1.5 * 2**23 has the integer in its lowest bits.
            lines.append(f"mov.b32 {{h0, h1}}, v{2 * r + i // 2};\ncvt.f32.f16 a, h{i % 2};")
            lines.append(f"fma.rn.f32 a, a, {factor}, 0f4B400000;\nmov.b32 f{i}, a;")
        lines.append("prmt.b32 x, f0, f1, 0x0040;\nprmt.b32 y, f2, f3, 0x0040;")
        lines.append(f"prmt.b32 ${r}, x, y, 0x5410;")
    return _asm(*lines)


def _bytes() -> str:
    """Two registers of four int8 weights, those of a table of 16 bytes."""
    text = _SELECT.format(word="$2")
    for i, index in enumerate("st"):
        text += _PICK.format(to="x", a="$3", b="$4", c="$5", d="$6", index=index, half=f"m{i}") + f"mov.b32 ${i}, x;\n"
    return _asm(text)


_F16 = tl.constexpr(_floats(False, False))
_F16_OFFSETS = tl.constexpr(_floats(True, False))
_BF16 = tl.constexpr(_floats(False, True))
_BF16_OFFSETS = tl.constexpr(_floats(True, True))
_S8 = tl.constexpr(_integers())
_S8_TABLE = tl.constexpr(_bytes())
_OUT4 = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r")
_OUT4_OFFSETS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r")
_OUT2 = tl.constexpr("=&r,=&r,r,r,r,r,r,r,r,r,r,f,f")
_OUT2_TABLE = tl.constexpr("=&r,=&r,r,r,r,r,r")


@triton.jit
def index_words(unit, BT: tl.constexpr, BITS: tl.constexpr):
    """Words ``[BT, 2 (v), 8 (g), 4 (t), 4 (w)]`` of eight 4-bit indices each, of a unit of each tile of 16 rows.

    A row of 128 words is a warp's load of four words a lane, which makes lanes hold what tensor cores want of them.
    """
    place = tl.arange(0, 128)[None, :]
    if BITS == 4:
        words = tl.join(tl.load(unit + place), tl.load(unit + 128 + place))
        return tl.permute(tl.reshape(words, (BT, 8, 4, 4, 2)), (0, 4, 1, 2, 3))
    else:
        words = tl.reshape(tl.load(unit + place), (BT, 8, 4, 2, 2))  # g, t, v, pair of words
        words = tl.join(words & 0x33333333, (words >> 2) & 0x33333333)
        if BITS == 3:
            third = tl.load(unit + 128 + tl.arange(0, 64)[None, :])
            third = tl.reshape(third, (BT, 8, 4, 2, 1, 1))
            w = tl.reshape(tl.arange(0, 4), (1, 1, 1, 1, 2, 2))
            words |= ((third >> w) & 0x11111111) << 2
        return tl.reshape(tl.permute(words, (0, 3, 1, 2, 4, 5)), (BT, 2, 8, 4, 4))


@triton.jit
def half(words, R: tl.constexpr):
    """The float16 in the lower (R = 0) or upper half of each word."""
    return (words >> (16 * R)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def looked_up(words, table, PAIRS: tl.constexpr):
    """Values ``[..., 2 (r), 2 (h), 2 (e)]`` of each word's eight indices of 4 bits, or four of PAIRS, from memory."""
    i = tl.reshape(tl.arange(0, 8), (1, 1, 1, 1, 1, 8))
    words = tl.expand_dims(words, 5)
    if PAIRS:
        places = ((words >> (i // 2 * 8)) & 255) * 2 + i % 2
    else:
        places = (words >> (4 * i)) & 15
    return tl.reshape(tl.load(table + places), places.shape[:5] + (2, 2, 2))


@triton.jit
def float_weights(words, norm, shift, table, book, OFFSETS: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """Weights ``[..., 2 (r), 2 (h), 2 (e)]`` in the table's type: values, and offsets, times norms, rounded once.

    Norms are words of two float16, those of rows g and g + 8; so is ``shift``, norms times offsets.
    """
    dtype: tl.constexpr = table.dtype.element_ty
    if PTX and not PAIRS:
        four: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        b0, b1, b2, b3, b4, b5, b6, b7 = book
        if OFFSETS:
            text: tl.constexpr = _F16_OFFSETS if dtype == tl.float16 else _BF16_OFFSETS
            a, b, c, d = tl.inline_asm_elementwise(
                text, _OUT4_OFFSETS, [words, b0, b1, b2, b3, b4, b5, b6, b7, norm, shift], four, True, 1
            )
        else:
            asm: tl.constexpr = _F16 if dtype == tl.float16 else _BF16
            a, b, c, d = tl.inline_asm_elementwise(
                asm, _OUT4, [words, b0, b1, b2, b3, b4, b5, b6, b7, norm], four, True, 1
            )
        pairs = tl.join(tl.join(a, c), tl.join(b, d))  # [..., r, h]
        first = pairs.to(tl.int16).to(dtype, bitcast=True)
        second = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
        weights = tl.join(first, second)
    else:
        weights = looked_up(words, table, PAIRS).to(tl.float32)
        norms = tl.join(half(norm, 0), half(norm, 1)).to(tl.float32)
        norms = tl.expand_dims(tl.expand_dims(norms, 6), 6)
        if OFFSETS:
            offsets = tl.join(half(shift, 0), half(shift, 1)).to(tl.float32)
            weights += tl.expand_dims(tl.expand_dims(offsets, 6), 6)
        weights = (weights * norms).to(dtype)
    return weights


@triton.jit
def int8_weights(
    words,
    norm,
    fold0,
    fold1,
    table,
    book,
    ONE_TABLE: tl.constexpr,
    PAIRS: tl.constexpr,
    PTX: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Weights ``[..., 2 (r), 2 (h), 2 (e)]``: `qcut.numerics.codebook.layout.int8_weight`, bitwise.

    ONE_TABLE: the book is a table of 16 bytes for all rows. EXACT: multiply in float64, where no fused product is.
    """
    if PTX and not PAIRS:
        b0, b1, b2, b3, b4, b5, b6, b7 = book
        two: tl.constexpr = (tl.int32, tl.int32)
        if ONE_TABLE:
            low, high = tl.inline_asm_elementwise(_S8_TABLE, _OUT2_TABLE, [words, b0, b1, b2, b3], two, True, 1)
        else:
            factor0, factor1 = half(norm, 0).to(tl.float32) * fold0, half(norm, 1).to(tl.float32) * fold1
            low, high = tl.inline_asm_elementwise(
                _S8, _OUT2, [words, b0, b1, b2, b3, b4, b5, b6, b7, factor0, factor1], two, True, 1
            )
        rows = tl.join(low, high)
        first = tl.join(rows.to(tl.int8), (rows >> 16).to(tl.int8))
        second = tl.join((rows >> 8).to(tl.int8), (rows >> 24).to(tl.int8))
        weights = tl.join(first, second)
    else:
        factors = tl.join(half(norm, 0).to(tl.float32) * fold0, half(norm, 1).to(tl.float32) * fold1)
        if PAIRS:
            factors = factors.to(tl.float16).to(tl.float32)
        factors = tl.expand_dims(tl.expand_dims(factors, 6), 6)
        values = looked_up(words, table, PAIRS)
        # 1.5 * 2**23, or 2**52, is next to whole numbers only: the sum is rounded once, to an integer.
        if EXACT:
            product = values.to(tl.float64) * factors.to(tl.float64)
            weights = ((product + 6755399441055744.0) - 6755399441055744.0).to(tl.int8)
        else:
            weights = (tl.math.fma(values.to(tl.float32), factors, 12582912.0) - 12582912.0).to(tl.int8)
    return weights


@triton.jit(do_not_specialize=["M", "U", "blocks"])
def product(
    x,
    row_scale,
    units,
    norms,
    fold,
    col_scale,
    bias,
    residual,
    y,
    table,
    book,
    M,
    N,
    U,
    blocks,
    BITS: tl.constexpr,
    SLOTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    ONE_TABLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PTX: tl.constexpr,
    EXACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SPARSE: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """`qcut.numerics.codebook.products.codebook_gemm_ref`: x of ``blocks`` times 8 rows, K in the order of its memory.

    TRANSPOSED gives weights the rows of the tensor core's tile, which few tokens do not fill. SPARSE: many rows of a
    tile hold no token. PARTS of K are summed by programs of their own; y then takes their sums, for `finish`.
    """
    INT8: tl.constexpr = x.dtype.element_ty == tl.int8
    m0, n0 = tile_of(M, N, BM, BN, GROUP)
    m = m0 + tl.arange(0, BM)
    BT: tl.constexpr = BN // 16
    # A block holds 128 bytes of each token, in 8 chunks: chunk c of token r lies at c ^ (r % 8).
    PER: tl.constexpr = 16 if INT8 else 8
    k = tl.arange(0, 128)[None, :]
    row = tl.minimum(m, blocks * 8 - 1)[:, None]
    line = k // (8 * PER) * (blocks * 8) + row
    x_place = (line * 8 + ((k // PER % 8) ^ (row % 8))) * PER + k % PER
    tile = tl.minimum(n0 // 16 + tl.arange(0, BT), (N + 63) // 64 * 4 - 1)
    unit = units + (tile * U)[:, None] * (64 * BITS)
    tiles = tile[:, None, None, None, None]
    g = tl.arange(0, 8)[None, None, :, None, None]
    if SLOTS == 4:
        slot = 2 * tl.arange(0, 2)[None, :, None, None, None] + tl.arange(0, 4)[None, None, None, None, :] // 2
    elif SLOTS == 8:
        slot = 4 * tl.arange(0, 2)[None, :, None, None, None] + tl.arange(0, 4)[None, None, None, None, :]
    else:
        slot = tl.arange(0, SLOTS)[None, :, None, None, None]
    WORDS: tl.constexpr = 2 if OFFSETS else 1
    norm_at = norms + ((tiles * U * SLOTS + slot) * 8 + g) * WORDS
    if INT8:
        fold0, fold1 = tl.load(fold + tiles * 16 + g), tl.load(fold + tiles * 16 + 8 + g)
    SUMS: tl.constexpr = tl.int32 if INT8 else tl.float32
    if TRANSPOSED:
        acc = tl.zeros((BN, BM), SUMS)
    else:
        acc = tl.zeros((BM, BN), SUMS)
    first = tl.program_id(1) * ((U + PARTS - 1) // PARTS)
    last = tl.minimum(first + (U + PARTS - 1) // PARTS, U)
    x += blocks.to(tl.int64) * 1024 * first
    unit += first * (64 * BITS)
    norm_at += first * (SLOTS * 8 * WORDS)
    for _ in range(first, last):
        if SPARSE:
            # Rows that hold no token are not read: few tokens would be as many bytes as the weights.
            a = tl.load(x + x_place, mask=row < M, other=0)
        else:
            a = tl.load(x + x_place)
        words = index_words(unit, BT, BITS)
        norm = tl.load(norm_at)
        if INT8:
            w = int8_weights(words, norm, fold0, fold1, table, book, ONE_TABLE, PAIRS, PTX, EXACT)
        elif OFFSETS:
            w = float_weights(words, norm, tl.load(norm_at + 1), table, book, True, PAIRS, PTX)
        else:
            w = float_weights(words, norm, norm, table, book, False, PAIRS, PTX)
        # Tile, v, g, t, w, r, h, e: to rows (tile, r, g), and columns in the order of tokens.
        if INT8:
            w = tl.permute(w, (0, 5, 2, 1, 4, 3, 6, 7))
        else:
            w = tl.permute(w, (0, 5, 2, 1, 4, 6, 3, 7))
        w = tl.reshape(w, (BN, 128))
        if TRANSPOSED:
            acc = settled(tl.dot(w, tl.trans(a), acc, out_dtype=SUMS), PTX)
        else:
            acc = tl.dot(a, tl.trans(w), acc, out_dtype=SUMS)
        x += blocks.to(tl.int64) * 1024
        unit += 64 * BITS
        norm_at += SLOTS * 8 * WORDS
    if TRANSPOSED:
        acc = tl.trans(acc)
    n = n0 + tl.arange(0, BN)
    if PARTS > 1:
        store_sums(y, acc, m, n, M, N)
    else:
        v = acc.to(tl.float32)
        if INT8:
            v *= tl.load(row_scale + m, mask=m < M, other=0.0)[:, None]
        v *= tl.load(col_scale + n, mask=n < N, other=0.0)[None, :]
        store_rows(y, v, residual, bias, m, n, M, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)
