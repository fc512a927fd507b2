// int16 tokens and int8 weights for few tokens, on the skeleton of stream/int8.cuh: a unit of weights is multiplied by
// the high bytes of up to eight tokens and by their low bytes (hi/lo split), and both sums are combined in 64 bits.
//
// Tokens are int8 rows of decoder/quantize_halves.cuh, eight of high bytes and eight of low bytes, or rows of floats
// that are quantized as they are loaded; see stream/w8a8.cuh.
//
// Exactness: integer sums are exact; the quantization equals that of decoder/quantize_halves.cuh bitwise.
#pragma once

#include <qcut/core/int16.cuh>
#include <qcut/stream/w8a8.cuh>

namespace qcut {

// Adds the products of a unit of weights with both parts of eight tokens: lane 4g + t's part of token g.
__device__ __forceinline__ void multiply_halves(long long (&acc)[1][4], const Int8Unit& unit,
                                                const uint32_t (&high)[2][4], const uint32_t (&low)[2][4]) {
  int sums[2][4] = {};
  multiply_int8(sums, unit, [&](int half) -> const uint32_t(&)[2][4] { return half == 0 ? high : low; });
#pragma unroll
  for (int c = 0; c < 4; ++c) acc[0][c] += combine_halves(sums[0][c], sums[1][c]);
}

// Tokens as int8 rows, lda elements apart.
template <class Tile, class E>
struct HalvesTokens {
  using Acc = long long;
  static_assert(Tile::kTokenTiles == 1, "rows 0 to 7 are high halves, 8 to 15 low ones");
  Int8Tokens<Tile, E> high, low;

  __device__ __forceinline__ HalvesTokens(const void* a, int m, int k, int lda, typename E::Args& args, char* shared)
      : high(a, m, k, lda, args, shared), low(static_cast<const int8_t*>(a) + 8LL * lda, m, k, lda, args, shared) {}
  __device__ __forceinline__ void begin(int column) {
    high.begin(column);
    low.next(column);
  }
  __device__ __forceinline__ void settle() { high.settle(); }
  __device__ __forceinline__ void next(int column) {
    high.next(column);
    low.next(column);
  }
  __device__ __forceinline__ void multiply(long long (&acc)[1][4], const Int8Unit& unit, int u) const {
    multiply_halves(acc, unit, high.x[0][u], low.x[0][u]);
  }
};

// Quantized rows of floats: int16 in two parts, the high bytes and the low bytes.
struct RowsInHalves {
  using Acc = long long;
  using Quantized = QuantizedRow16;
  static constexpr int kParts = 2;
  template <int kSize>
  static __device__ __forceinline__ void quantize(const Quantized& quantized, const float (&f)[kSize],
                                                  uint32_t (&packed)[2][kSize / 4]) {
    uint32_t q[kSize];
    quantized.quantize(f, q);
    pack_half<true>(q, packed[0]);
    pack_half<false>(q, packed[1]);
  }
  template <int kUnits>
  static __device__ __forceinline__ void multiply(long long (&acc)[1][4], const Int8Unit& unit,
                                                  const uint32_t (&x)[2][kUnits][2][4], int u) {
    multiply_halves(acc, unit, x[0][u], x[1][u]);
  }
};

// The kernel: as int8_stream, for `tokens` tokens; int8 rows of a are 16.
template <class Tile, bool kAligned, bool kAbsmax, class E, class Rows = AllRows>
__device__ __forceinline__ void int16x8_stream(const void* a, const float* a_absmax, const int8_t* b,
                                               typename E::Out* d, float* absmax, int tokens, int n, int k, int lda,
                                               int ldb, int ldd, typename E::Args args, Rows of = Rows()) {
  static_assert(Tile::kSplits == 1 && !Tile::kCommonSums, "sums of 64 bits are added within a CTA, without atomics");
  static_assert(!Rows::kOfExperts || Tile::kQuantizes, "hi/lo splits lie in blocks of eight tokens, routes do not");
  extern __shared__ __align__(16) char shared[];
  if (!begin_expert<Tile>(of, b, args, tokens, n, k, ldb)) return;
  if constexpr (Tile::kQuantizes) {
    float* const scales = reinterpret_cast<float*>(shared + Tile::kTokenScales);
    args.row_scale = scales;
    uint32_t* const found = reinterpret_cast<uint32_t*>(shared + Tile::kFound);
    const RowTokens<Tile, kAligned, RowsInHalves, Rows> rows(a, a_absmax, scales, found, tokens, k, lda, of);
    stream_int8<Tile, kAbsmax, E>(rows, b, d, absmax, tokens, n, k, ldb, ldd, args, of);
  } else {
    const HalvesTokens<Tile, E> rows(a, tokens, k, lda, args, shared);
    stream_int8<Tile, kAbsmax, E>(rows, b, d, absmax, tokens, n, k, ldb, ldd, args);
  }
}

}  // namespace qcut
