// W8A16 for few tokens, on the skeleton of stream/int8.cuh: float16 or bfloat16 tokens, int8 or e4m3 weights that are
// converted to the tokens' type in registers, float32 sums.
//
// Lane 4g + t holds columns 16t .. 16t + 15 of 64 of its rows of weights. Columns 4s .. 4s + 3 of these 16 belong to
// product s, so that the lane's part of a token is 32 contiguous bytes.
//
// Exactness: conversions and products are exact; the tensor core adds products in float32 in a fixed order.
//
// Source: PTX ISA "Matrix Fragments for mma.m16n8k16".
#pragma once

#include <qcut/stream/int8.cuh>

namespace qcut {

// W8A16Tile in emitters/stream/w8a16.py describes the sizes. The previous kernel may only write the tokens, so
// that weights are read before the wait.
template <int kRowTiles, int kWarps, int kUnits, int kPrefetch, int kTokens, int kSplits>
struct W8A16Tile : Int8StreamTile<kRowTiles, kWarps, kUnits, kPrefetch, kTokens, kSplits> {
  static constexpr bool kWaitsFirst = false;
  static constexpr bool kPrefetchesL2 = true;
  static constexpr bool kCommonSums = false;
  static constexpr int kSums = W8A16Tile::kVectorBytes;
};

// Loads eight elements of a row from column `col` on; elements past k are zero. With kAligned, k is a multiple of eight
// and the row starts at a multiple of 16 bytes.
template <class T, bool kAligned>
__device__ __forceinline__ void load_8(uint32_t (&w)[4], const T* row, int col, int k) {
  Vector<T> v{};
  if constexpr (kAligned) {
    if (col < k) {
      const uint4 raw = *reinterpret_cast<const uint4*>(row + col);
      v = Vector<T>{raw.x, raw.y, raw.z, raw.w};
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < k) v.set(i, row[col + i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = v.w[i];
}

// Adds the products of a unit of weights with tiles of eight tokens of 16 bits. part(tile, i) is lane 4g + t's part of
// token g of a tile: eight columns, the (i % 2)th of its 16 of the (i / 2)th 64.
template <class T, class B, int kTiles, class Part>
__device__ __forceinline__ void multiply_halves(float (&acc)[kTiles][4], const Int8Unit& unit, const Part& part) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t(&rows)[2][4] = unit[i / 4];
    uint32_t weights[4];
    from_bytes<T, B>(rows[0][i % 4], weights[0], weights[2]);
    from_bytes<T, B>(rows[1][i % 4], weights[1], weights[3]);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const uint32_t(&words)[4] = part(j, i / 2);
      Float16<T>::mma(acc[j], weights, {words[i % 2 * 2], words[i % 2 * 2 + 1]});
    }
  }
}

// Tokens as rows of T, lda elements apart. Tokens past m repeat the last token, and their results are not stored.
template <class Tile, class T, class B, bool kAligned, class Rows>
struct FloatTokens {
  using Acc = float;
  uint32_t x[Tile::kTokenTiles][Tile::kUnits][2][2][4];  // [8 tokens][unit][64 columns][8 columns][words]
  const T* a;
  int m, k, lda;
  Rows rows;

  __device__ __forceinline__ FloatTokens(const T* a, int m, int k, int lda, const Rows& rows)
      : a(a), m(m), k(k), lda(lda), rows(rows) {}

  __device__ __forceinline__ void begin(int column) { next(column); }
  __device__ __forceinline__ void settle() {}
  __device__ __forceinline__ void next(int column) {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; ++j) {
      const T* row = a + static_cast<long long>(rows.source(min(8 * j + g, m - 1))) * lda;
#pragma unroll
      for (int i = 0; i < 4 * Tile::kUnits; ++i) {
        load_8<T, kAligned>(x[j][i / 4][i / 2 % 2][i % 2], row, column + i / 2 * 64 + 16 * t + i % 2 * 8, k);
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&acc)[Tile::kTokenTiles][4], const Int8Unit& unit, int u) const {
    multiply_halves<T, B>(acc, unit, [&](int j, int i) -> const uint32_t(&)[4] { return x[j][u][i / 2][i % 2]; });
  }
};

// The kernel: D [m, n] = epilogue(A B^T), A [m, k] of T, B [n, k] of int8 or E4M3. With kAligned, tokens are read 16 bytes at a
// time. With ExpertRows, B is [experts, n, k], m counts the routes of all tiles, and rows of D are routes.
template <class Tile, class T, bool kAligned, class E, class B, class Rows = AllRows>
__device__ __forceinline__ void w8a16_stream(const T* a, const B* b, typename E::Out* d, int m, int n, int k, int lda,
                                             int ldb, int ldd, typename E::Args args, Rows rows = Rows()) {
  const int8_t* bytes = reinterpret_cast<const int8_t*>(b);
  if (!begin_expert<Tile>(rows, bytes, args, m, n, k, ldb)) return;
  const FloatTokens<Tile, T, B, kAligned, Rows> tokens(a, m, k, lda, rows);
  stream_int8<Tile, false, E>(tokens, bytes, d, nullptr, m, n, k, ldb, ldd, args, rows);
}

}  // namespace qcut
