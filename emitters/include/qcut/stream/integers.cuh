// Layers in integers for few tokens, on the skeleton of stream/int8.cuh: int8 rows, or int16 rows that are split into
// halves as they are loaded, with the epilogue of core/integers.cuh.
//
// Exactness: as core/integers.cuh.
#pragma once

#include <qcut/core/integers.cuh>
#include <qcut/stream/int16x8.cuh>

namespace qcut {

// IntegerTile in shared memory: biases, multipliers and shifts of rows of weights, the zero point, sums of warps.
template <bool kWaitsFirst_, bool kCommonSums_, int kRowTiles, int kWarps, int kUnits, int kPrefetch, int kTokens,
          int kSplits>
struct IntegerTile : Int8StreamTile<kRowTiles, kWarps, kUnits, kPrefetch, kTokens, kSplits> {
  static constexpr bool kWaitsFirst = kWaitsFirst_;
  static constexpr bool kPrefetchesL2 = false;
  static constexpr bool kCommonSums = kCommonSums_;
  static constexpr int kZeroPoint = 16 * IntegerTile::kRows;
  static constexpr int kSums = kZeroPoint + 16;
};

template <class Tile, class Out>
struct ColumnStore<Tile, IntegerEpilogue<Out>> {
  using Column = typename IntegerEpilogue<Out>::Column;
  static_assert(sizeof(Column) == 16, "see IntegerTile");
  Column* const columns;

  __device__ __forceinline__ explicit ColumnStore(char* shared) : columns(reinterpret_cast<Column*>(shared)) {}
  __device__ __forceinline__ void store(int row, const Column& column) const { columns[row] = column; }
  __device__ __forceinline__ Column load(int row) const { return columns[row]; }
};

// Tokens as int16 rows, lda elements apart. k is a multiple of 16. Columns past k are zero.
template <class Tile>
struct Int16Rows {
  using Acc = long long;
  static_assert(Tile::kTokenTiles == 1, "of eight tokens, the high halves and the low ones");
  uint32_t high[Tile::kUnits][2][4], low[Tile::kUnits][2][4];
  const short* a;
  int m, k, lda;

  __device__ __forceinline__ Int16Rows(const void* a, int m, int k, int lda)
      : a(static_cast<const short*>(a)), m(m), k(k), lda(lda) {}
  __device__ __forceinline__ void next(int column) {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    const short* row = a + static_cast<long long>(g) * lda;
    const int columns = g < m ? k : 0;
#pragma unroll
    for (int i = 0; i < 2 * Tile::kUnits; ++i) {
      const int col = column + 64 * i + 16 * t;
      uint4 raw[2] = {};
      if (col < columns) {
        raw[0] = *reinterpret_cast<const uint4*>(row + col);
        raw[1] = *reinterpret_cast<const uint4*>(row + col + 8);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t(&h)[4] = high[i / 2][i % 2];
        uint32_t(&l)[4] = low[i / 2][i % 2];
        split_halves(raw[j].x, raw[j].y, h[2 * j], l[2 * j]);
        split_halves(raw[j].z, raw[j].w, h[2 * j + 1], l[2 * j + 1]);
      }
    }
  }
  __device__ __forceinline__ void multiply(long long (&acc)[1][4], const Int8Unit& unit, int u) const {
    multiply_halves(acc, unit, high[u], low[u]);
  }
};

// Rows of tokens, and the zero point of the result, which waits in shared memory for the end.
template <class Tile, class E, class Rows>
struct IntegerTokens : Rows {
  typename E::Args& args;
  int* stored;
  int zero_point = 0;

  __device__ __forceinline__ IntegerTokens(const void* a, int m, int k, int lda, typename E::Args& args, char* shared)
      : Rows(a, m, k, lda), args(args), stored(reinterpret_cast<int*>(shared + Tile::kZeroPoint)) {}
  __device__ __forceinline__ void begin(int column) {
    if constexpr (E::kHasZeroPoint) zero_point = *args.zero_point;
    this->next(column);
  }
  __device__ __forceinline__ void settle() {
    if (threadIdx.x == 0) *stored = zero_point;
    args.zero_point = stored;
  }
};

// The kernel: as int8_stream, with kHalves of int16 rows.
template <class Tile, bool kHalves, class E>
__device__ __forceinline__ void integer_stream(const void* a, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                               int lda, int ldb, int ldd, typename E::Args args) {
  static_assert(!kHalves || (Tile::kSplits == 1 && !Tile::kCommonSums), "sums of 64 bits are added within a CTA");
  extern __shared__ __align__(16) char shared[];
  using Rows = typename Either<kHalves, Int16Rows<Tile>, Int8Rows<Tile>>::Type;
  const IntegerTokens<Tile, E, Rows> tokens(a, m, k, lda, args, shared);
  stream_int8<Tile, false, E>(tokens, b, d, nullptr, m, n, k, ldb, ldd, args);
}

}  // namespace qcut
