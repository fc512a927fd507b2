// Codebook weights: units of 16 rows x 128 columns of indices, their decoding, and tokens in blocks.
//
// qcut/numerics/codebook/layout.py describes the layout in global memory. Whatever the width of an index, a lane's
// part of a unit becomes eight words of eight 4-bit indices: byte b of word i of lane 4g + t holds columns
// 16i + 8(b & 1) + 2t and 16i + 8(b & 1) + 2t + 1 of row g + 8(b >> 1). One word thus gives the four
// registers of the first operand of a 16-bit m16n8k16, and two words give those of an int8 m16n8k32.
//
// Indices become values in four ways:
//   PairTable     a table in shared memory with an entry for each byte (two indices) and lane. One PRMT and
//                 one LDS without bank conflicts give two 16-bit values. For few tokens, where decoding takes
//                 most of the time.
//   RegisterBook  PRMT only, without memory. For many tokens, where the tensor cores take most of the time.
//   RowBook       int8 values of one row, with the row's norm fused in: q = rne(value * (norm * fold)).
//   PairFactors   int8 values of a codebook of pairs, whose bytes are indices of two values: a table gives float16
//                 values, and one HFMA2 for each two makes integers of them: q = rne(value * f16(norm * fold)).
//
// Source: PTX ISA, "prmt", "Matrix Fragments for mma.m16n8k16 / mma.m16n8k32".
#pragma once

#include <qcut/core/mma.cuh>
#include <qcut/core/quantize.cuh>
#include <qcut/core/streaming.cuh>

namespace qcut {

constexpr int kUnitRows = 16;
constexpr int kUnitColumns = 128;

template <int kBits>
constexpr int kUnitBytes = kUnitRows * kUnitColumns * kBits / 8;

// A lane's part of one unit. `mine` is the address of the part's first 16 bytes, 16 * lane bytes past the
// unit's start.
template <int kBits>
struct UnitWords;

template <>
struct UnitWords<4> {
  uint32_t low[4], high[4];

  __device__ __forceinline__ void load(const char* unit, int lane) {
    load_stream_16(low, unit + 16 * lane);
    load_stream_16(high, unit + 512 + 16 * lane);
  }
  __device__ __forceinline__ void load_if(const char* mine, int, bool wanted) {
    load_stream_16_if(low, mine, wanted);
    load_stream_16_if(high, mine + 512, wanted);
  }
  __device__ __forceinline__ void load_shared(uint32_t unit, int lane) {
    load_shared_16(low, unit + 16 * lane);
    load_shared_16(high, unit + 512 + 16 * lane);
  }
  // Word i, with eight 4-bit indices. i is a constant after unrolling.
  __device__ __forceinline__ uint32_t word(int i) const { return i < 4 ? low[i] : high[i - 4]; }
};

template <>
struct UnitWords<2> {
  uint32_t packed[4];

  __device__ __forceinline__ void load(const char* unit, int lane) { load_stream_16(packed, unit + 16 * lane); }
  __device__ __forceinline__ void load_if(const char* mine, int, bool wanted) {
    load_stream_16_if(packed, mine, wanted);
  }
  __device__ __forceinline__ void load_shared(uint32_t unit, int lane) { load_shared_16(packed, unit + 16 * lane); }
  __device__ __forceinline__ uint32_t word(int i) const { return packed[i / 2] >> (2 * (i % 2)) & 0x33333333u; }
};

template <>
struct UnitWords<3> {
  uint32_t packed[4], planes[2];

  __device__ __forceinline__ void load(const char* unit, int lane) {
    load_stream_16(packed, unit + 16 * lane);
    load_stream_8(planes, unit + 512 + 8 * lane);
  }
  __device__ __forceinline__ void load_if(const char* mine, int lane, bool wanted) {
    load_stream_16_if(packed, mine, wanted);
    load_stream_8_if(planes, mine + 512 - 8 * lane, wanted);
  }
  __device__ __forceinline__ void load_shared(uint32_t unit, int lane) {
    load_shared_16(packed, unit + 16 * lane);
    load_shared_8(planes, unit + 512 + 8 * lane);
  }
  __device__ __forceinline__ uint32_t word(int i) const {
    const uint32_t upper = planes[i / 4] >> (i % 4) & 0x11111111u;
    return (packed[i / 2] >> (2 * (i % 2)) & 0x33333333u) | upper << 2;
  }
};

// The instruction PRMT itself: __byte_perm would first clear the upper bits of each selector, which are clear here.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
  return d;
}

// Sixteen values of 16 bits as a kernel's argument, two to a word.
struct Book {
  static constexpr bool kPairs = false;
  uint32_t w[8];
};

// The pairs of values with positive signs, one to a word, as a kernel's argument. A byte of indices is one index of a
// pair: bits 0 to 5 number the word, bits 6 and 7 are the signs of the lower and of the upper value.
struct PairBook {
  static constexpr bool kPairs = true;
  static constexpr int kWords = 64;
  uint32_t w[kWords];
};

// The upper half of a word of selectors, twice: as a product with 1 of float16 values, none of which is NaN or infinite
// because each nibble's highest bit is 0. Decoding int8 keeps the pipe of shifts and PRMT busy, and this pipe idle.
__device__ __forceinline__ uint32_t upper_half(uint32_t selectors) {
  uint32_t d;
  asm("{\n\t.reg .b16 low, high;\n\t.reg .b32 twice;\n\t"
      "mov.b32 {low, high}, %1;\n\tmov.b32 twice, {high, high};\n\t"
      "mul.rn.f16x2 %0, twice, %2;\n\t}" : "=r"(d) : "r"(selectors), "r"(0x3c003c00u));
  return d;
}

// Words of a table with one byte for each value of a codebook.
template <int kBits>
constexpr int kTableWords = 1 << kBits >> 2;

// The selectors of PRMT for a word of eight indices. `select` chooses bytes of a table for the lower four indices, as
// do the selectors that `upper` returns for the upper four. `kShifts` takes upper halves by shifts, which need fewer
// registers. Indices of 2 and 3 bits are selectors themselves.
template <int kBits>
struct Selectors {
  uint32_t index;

  __device__ __forceinline__ explicit Selectors(uint32_t word) : index(word) {}
  template <bool kShifts>
  __device__ __forceinline__ Selectors upper() const {
    return Selectors(kShifts ? index >> 16 : upper_half(index));
  }
  __device__ __forceinline__ uint32_t select(const uint32_t (&table)[kTableWords<kBits>]) const {
    return permute_bytes(table[0], table[kTableWords<kBits> - 1], index);
  }
};

// Each nibble of `low` is the lower three bits of an index. Nibble i of `half`, i counted from the lowest, is i, plus 4
// if the value lies in the table's upper half.
template <>
struct Selectors<4> {
  uint32_t low, half;

  // One LOP3 makes `half`; the compiler would use two.
  __device__ __forceinline__ explicit Selectors(uint32_t word) : low(word & 0x77777777u) {
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(half) : "r"(word >> 1), "r"(0x44444444u), "r"(0x32103210u));
  }
  __device__ __forceinline__ Selectors(uint32_t low, uint32_t half) : low(low), half(half) {}
  template <bool kShifts>
  __device__ __forceinline__ Selectors upper() const {
    return kShifts ? Selectors(low >> 16, half >> 16) : Selectors(upper_half(low), upper_half(half));
  }
  __device__ __forceinline__ uint32_t select(const uint32_t (&table)[4]) const {
    return permute_bytes(permute_bytes(table[0], table[1], low), permute_bytes(table[2], table[3], low), half);
  }
};

template <int kBits>
struct RegisterBook {
  static constexpr int kWords = kTableWords<kBits>;
  uint32_t low[kWords], high[kWords];  // lower and upper bytes of values 4i..4i+3

  __device__ __forceinline__ explicit RegisterBook(const Book& book) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      low[i] = __byte_perm(book.w[2 * i], book.w[2 * i + 1], 0x6420);
      high[i] = __byte_perm(book.w[2 * i], book.w[2 * i + 1], 0x7531);
    }
  }

  // Decodes a word of indices to the registers of m16n8k16's first operand.
  __device__ __forceinline__ void decode(uint32_t (&a)[4], uint32_t word) const {
    const Selectors<kBits> first(word), second = first.template upper<true>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& selectors = i ? second : first;
      const uint32_t l = selectors.select(low);
      const uint32_t h = selectors.select(high);
      a[i] = __byte_perm(l, h, 0x5140);
      a[i + 2] = __byte_perm(l, h, 0x7362);
    }
  }
};

// A table of 64 KB in shared memory. The entry of byte v for lane l lies at 256 v + 4 l, so that one PRMT
// builds the address. The other half of each 256 bytes is free for other data.
struct PairTable {
  static constexpr int kBytes = 65536;

  static __device__ __forceinline__ void decode(uint32_t (&a)[4], uint32_t word, const char* table, uint32_t lane4) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      a[b / 2 + b % 2 * 2] = *reinterpret_cast<const uint32_t*>(table + __byte_perm(lane4, word, 0x1140 | b << 4));
    }
  }
};

// A table in half the memory, with two instructions for an address: the entry of byte v for lane l lies at 128 v + 4 l.
struct DensePairTable {
  static constexpr int kBytes = 32768;

  static __device__ __forceinline__ void decode(uint32_t (&a)[4], uint32_t word, const char* table, uint32_t lane4) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t at = b == 0 ? word << 7 : word >> (8 * b - 7);
      a[b / 2 + b % 2 * 2] = *reinterpret_cast<const uint32_t*>(table + (at & 0x7f80u | lane4));
    }
  }
};

// Fills a PairTable; a barrier must follow. All warps of the CTA take the same branches. PRMT chooses each lane's
// value, because an index that depends on the lane would put the book into local memory.
template <int kWarps>
__device__ __forceinline__ void fill_pair_table(char* table, const Book& book) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const uint32_t inside = 0x10 + 0x22 * (lane % 4);
  const uint32_t upper4 = lane & 4 ? 0x54 : 0x10;
  const uint32_t upper8 = lane & 8 ? 0x54 : 0x10;
  uint32_t quarter[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) quarter[i] = __byte_perm(book.w[2 * i], book.w[2 * i + 1], inside);
  const uint32_t lower = __byte_perm(quarter[0], quarter[1], upper4);
  const uint32_t upper = __byte_perm(quarter[2], quarter[3], upper4);
  const uint32_t mine = __byte_perm(lower, upper, upper8) & 0xffffu;  // value lane % 16
#pragma unroll 8
  for (int i = 0; i < 256; i += kWarps) {
    const int v = min(i + warp, 255);
    const uint32_t first = __shfl_sync(0xffffffffu, mine, v & 15);
    const uint32_t second = __shfl_sync(0xffffffffu, mine, v >> 4);
    *reinterpret_cast<uint32_t*>(table + 256 * v + 4 * lane) = first | second << 16;
  }
}

// Word kFirst + i of a book, i < kCount, chosen by selections: an index that depends on the warp would put the book
// into local memory.
template <int kFirst, int kCount>
__device__ __forceinline__ uint32_t select_word(const uint32_t (&w)[PairBook::kWords], int i) {
  if constexpr (kCount == 1) {
    return w[kFirst];
  } else {
    constexpr int kHalf = kCount > 32 ? 32 : kCount > 16 ? 16 : kCount > 8 ? 8 : kCount > 4 ? 4 : kCount > 2 ? 2 : 1;
    const uint32_t low = select_word<kFirst, kHalf>(w, i);
    const uint32_t high = select_word<kFirst + kHalf, kCount - kHalf>(w, i);
    return i & kHalf ? high : low;
  }
}

// Stores the entries of some pairs, and of the same pairs with other signs; each warp has one of kCount words from
// kFirst on.
template <class Table, int kWarps, int kFirst = 0>
__device__ __forceinline__ void store_pairs(char* table, const PairBook& book, int warp, int lane) {
  if constexpr (kFirst < PairBook::kWords) {
    constexpr int kCount = PairBook::kWords - kFirst < kWarps ? PairBook::kWords - kFirst : kWarps;
    const int mine = min(warp, kCount - 1);
    const uint32_t pair = select_word<kFirst, kCount>(book.w, mine);
    char* at = table + Table::kBytes / 256 * (kFirst + mine) + 4 * lane;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint32_t signs = (s & 1 ? 0x8000u : 0u) | (s & 2 ? 0x80000000u : 0u);
      *reinterpret_cast<uint32_t*>(at + Table::kBytes / 4 * s) = pair ^ signs;
    }
    store_pairs<Table, kWarps, kFirst + kWarps>(table, book, warp, lane);
  }
}

// Fills a table of pairs; a barrier must follow. All warps of the CTA take the same branches.
template <int kWarps, class Table = PairTable>
__device__ __forceinline__ void fill_pair_table(char* table, const PairBook& book) {
  store_pairs<Table, kWarps>(table, book, threadIdx.x / 32, threadIdx.x % 32);
}

// Decodes a word of indices by a table of pairs in shared memory.
template <class Table>
struct PairValues {
  const char* table;
  uint32_t lane4;

  __device__ __forceinline__ PairValues(const PairBook&, const char* table)
      : table(table), lane4(4 * (threadIdx.x % 32)) {}
  __device__ __forceinline__ void decode(uint32_t (&a)[4], uint32_t word) const {
    Table::decode(a, word, table, lane4);
  }
};

// The part of the codebook that a lane converts to int8: values 4t..4t+3 for word t of a table, t = lane % kTableWords.
template <int kBits>
struct QuarterBook {
  float value[4];

  __device__ __forceinline__ explicit QuarterBook(const Book& book) {
    const int t = threadIdx.x % kTableWords<kBits>;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t w = book.w[i];
#pragma unroll
      for (int j = 1; j < kTableWords<kBits>; ++j) w = t == j ? book.w[2 * j + i] : w;
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&w));
      value[2 * i] = pair.x;
      value[2 * i + 1] = pair.y;
    }
  }
};

// The int8 values of one row and slot.
template <int kBits>
struct RowBook {
  static constexpr int kWords = kTableWords<kBits>;
  uint32_t table[kWords];

  // `factor` is norm * fold of the row that the four lanes of a quad share. The fused addition of 1.5 * 2^23
  // rounds the exact product once, to an integer in the sum's low byte.
  __device__ __forceinline__ void build(const QuarterBook<kBits>& book, float factor) {
    uint32_t q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = __float_as_uint(fmaf(book.value[i], factor, kRoundingBias));
    const uint32_t mine = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
#pragma unroll
    for (int i = 0; i < kWords; ++i) table[i] = kWords > 1 ? __shfl_sync(0xffffffffu, mine, i, kWords) : mine;
  }
  // Loads the table from the first of 16 bytes of shared memory.
  __device__ __forceinline__ void load_shared(uint32_t at) {
    uint32_t w[4];
    load_shared_16(w, at);
#pragma unroll
    for (int i = 0; i < kWords; ++i) table[i] = w[i];
  }
};

// Slots of an int8 product, which has 32 columns of K: two of 16 columns, or one.
template <int kSlots>
constexpr int kStepSlots = kSlots > 4 ? kSlots / 4 : 1;

// Decodes two words of indices (32 columns) to the registers of an int8 m16n8k32 first operand: columns from 16i
// on of rows g and g + 8, then columns from 16i + 16 on of both rows. Tokens are permuted to match. The words have a
// book together, or one each.
template <bool kShifts = false, int kBits, int kBooks>
__device__ __forceinline__ void decode_s8(uint32_t (&a)[4], uint32_t word0, uint32_t word1,
                                          const RowBook<kBits> (&row)[kBooks], const RowBook<kBits> (&row8)[kBooks]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Selectors<kBits> selectors(i ? word1 : word0);
    a[2 * i] = selectors.select(row[i % kBooks].table);
    a[2 * i + 1] = selectors.template upper<kShifts>().select(row8[i % kBooks].table);
  }
}

// The upper half of a word, by the pipe of integer products, which decoding leaves idle.
__device__ __forceinline__ uint32_t upper_half_by_product(uint32_t word) {
  uint32_t d;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(word), "r"(0x0100u), "r"(0u));
  return d;
}

// decode_s8 of a mirrored codebook, in which value i of 16 is value 15 - i with the other sign, by tables of the magnitudes
// of values 0 to 7, which are negative. `minus` gets the magnitudes of negative values, `plus` those of positive ones;
// each is 0 where the other is not. The weights are plus - minus. Where a selector's highest bit is 1, PRMT replicates
// the sign of the byte that the lower bits choose, and the sign of a magnitude is 0; the inverse of index i chooses as
// index 15 - i does. Norms and folds are at least 0.
template <int kBooks>
__device__ __forceinline__ void decode_mirrored_s8(uint32_t (&minus)[4], uint32_t (&plus)[4], uint32_t word0,
                                                   uint32_t word1, const RowBook<3> (&row)[kBooks],
                                                   const RowBook<3> (&row8)[kBooks]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t word = i ? word1 : word0;
    const auto& of_row = row[i % kBooks].table;
    const auto& of_row8 = row8[i % kBooks].table;
    minus[2 * i] = permute_bytes(of_row[0], of_row[1], word);
    minus[2 * i + 1] = permute_bytes(of_row8[0], of_row8[1], upper_half_by_product(word));
    plus[2 * i] = permute_bytes(of_row[0], of_row[1], ~word);
    plus[2 * i + 1] = permute_bytes(of_row8[0], of_row8[1], upper_half_by_product(~word));
  }
}

// The factors, in float16, by which the pairs of rows g and g + 8 of a slot become int8.
struct PairFactors {
  __half2 row, row8;

  __device__ __forceinline__ void build(float factor, float factor8) {
    row = __float2half2_rn(factor);
    row8 = __float2half2_rn(factor8);
  }

  // The fused addition of 1.5 * 2^10 rounds the exact products once, to integers in the sums' low bytes.
  __device__ __forceinline__ void apply(uint32_t (&a)[4]) const {
    const __half2 bias = __float2half2_rn(1536.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 v = __hfma2(reinterpret_cast<const __half2&>(a[i]), i % 2 ? row8 : row, bias);
      a[i] = reinterpret_cast<const uint32_t&>(v);
    }
  }
};

// decode_s8 of a codebook of pairs.
template <class Values, int kSlots>
__device__ __forceinline__ void decode_pairs_s8(uint32_t (&a)[4], uint32_t word0, uint32_t word1, const Values& values,
                                                const PairFactors (&factors)[kSlots]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t v[4];
    values.decode(v, i ? word1 : word0);
    factors[i % kSlots].apply(v);
    a[2 * i] = permute_bytes(v[0], v[2], 0x6420);
    a[2 * i + 1] = permute_bytes(v[1], v[3], 0x6420);
  }
}

// The norms of rows g (x) and g + 8 (y) of a slot, from a word of two float16.
__device__ __forceinline__ float2 norm_pair(uint32_t w) {
  return __half22float2(*reinterpret_cast<const __half2*>(&w));
}

// The scales of a slot, of rows g and g + 8, as the lanes of row g hold it: the norms, a word of two
// float16. With offsets, a second word of two numbers that are added to values before the norms multiply them.
template <bool kOffsets>
struct SlotNorms {
  static constexpr int kLaneBytes = 4;
  static constexpr int kBytes = 8 * kLaneBytes;
  uint32_t norms;

  __device__ __forceinline__ void load(const char* p) { norms = load_stream_4(p); }
  __device__ __forceinline__ void load_if(const char* p, bool wanted) { load_stream_4_if(norms, p, wanted); }
  __device__ __forceinline__ void load_shared(const char* p) { norms = *reinterpret_cast<const uint32_t*>(p); }
};

template <>
struct SlotNorms<true> {
  static constexpr int kLaneBytes = 8;
  static constexpr int kBytes = 8 * kLaneBytes;
  uint32_t norms, offsets;

  __device__ __forceinline__ void load(const char* p) {
    uint32_t w[2];
    load_stream_8(w, p);
    norms = w[0], offsets = w[1];
  }
  __device__ __forceinline__ void load_if(const char* p, bool wanted) {
    uint32_t w[2] = {norms, offsets};
    load_stream_8_if(w, p, wanted);
    norms = w[0], offsets = w[1];
  }
  __device__ __forceinline__ void load_shared(const char* p) {
    const uint2 w = *reinterpret_cast<const uint2*>(p);
    norms = w.x, offsets = w.y;
  }
};

// Two float16 in a word, each as a pair of T.
template <class T>
struct RowPairs;

template <>
struct RowPairs<__half> {
  __half2 row, row8;
  __device__ __forceinline__ explicit RowPairs(uint32_t w)
      : row(__low2half2(*reinterpret_cast<const __half2*>(&w))),
        row8(__high2half2(*reinterpret_cast<const __half2*>(&w))) {}
};

template <>
struct RowPairs<__nv_bfloat16> {
  __nv_bfloat162 row, row8;
  __device__ __forceinline__ explicit RowPairs(uint32_t w) {
    const float2 n = norm_pair(w);
    row = __float2bfloat162_rn(n.x);
    row8 = __float2bfloat162_rn(n.y);
  }
};

// Multiplies decoded 16-bit weights by their rows' norms and rounds the products once (bfloat16: the norms, too).
template <class T, bool kOffsets>
struct NormScale {
  RowPairs<T> norms;
  __device__ __forceinline__ explicit NormScale(const SlotNorms<false>& slot) : norms(slot.norms) {}
  __device__ __forceinline__ void apply(uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto v = __hmul2(reinterpret_cast<const decltype(norms.row)&>(a[i]), i % 2 ? norms.row8 : norms.row);
      a[i] = reinterpret_cast<const uint32_t&>(v);
    }
  }
};

// Multiplies by the norms and adds norm * offset, which is rounded, before the sum is rounded.
template <class T>
struct NormScale<T, true> {
  RowPairs<T> norms, shifts;
  __device__ __forceinline__ explicit NormScale(const SlotNorms<true>& slot)
      : norms(slot.norms), shifts(product(slot.norms, slot.offsets)) {}
  __device__ __forceinline__ void apply(uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto v = __hfma2(reinterpret_cast<const decltype(norms.row)&>(a[i]), i % 2 ? norms.row8 : norms.row,
                             i % 2 ? shifts.row8 : shifts.row);
      a[i] = reinterpret_cast<const uint32_t&>(v);
    }
  }
  static __device__ __forceinline__ uint32_t product(uint32_t x, uint32_t y) {
    const __half2 v = __hmul2(reinterpret_cast<const __half2&>(x), reinterpret_cast<const __half2&>(y));
    return reinterpret_cast<const uint32_t&>(v);
  }
};

// The offset of a chunk in a block of tokens. Tokens lie in blocks of 8 tokens x 128 bytes,
// [blocks of K][ceil(m / 8)][8][128 bytes]; the 16-byte chunk c of token r lies at c ^ (r % 8).
__device__ __forceinline__ uint32_t token_chunk_offset(int row, int chunk) {
  return 128 * (row % 8) + 16 * (chunk ^ (row % 8));
}

}  // namespace qcut
