// D^T = epilogue(W X^T) of many tokens X and int8 weights W in row-major order (sm_90a), for prefill: codebook/wgmma.cuh
// with weights that need no codebook. Tokens lie in its blocks.
//
// Exactness: int8 products are added in int32. 16-bit products are exact and are added in float32 in a fixed order.
//
// Source: PTX ISA "wgmma.mma_async".
#pragma once

#include <qcut/codebook/wgmma.cuh>
#include <qcut/core/int8_rows.cuh>
#include <qcut/core/streaming.cuh>

namespace qcut {

// Loads a warp's 16 rows from global memory to registers, 128 columns at a time and as many ahead. Word i of a row's 64
// columns then holds what chunk i of a block of int8 tokens has in its word t: columns 2t, 2t + 1, 8 + 2t and 9 + 2t of
// 16. Rows past n repeat the last row and are not stored. Columns past k repeat the last 16 columns and are multiplied
// by zero tokens.
template <class T>
struct Int8Stream {
  using Words = uint32_t[2][2][4];  // [64 columns][row g, g + 8][16 bytes]
  Words words, next;
  const int8_t* rows[2];
  int column = 0, last_column;

  template <class Weights>
  __device__ __forceinline__ explicit Int8Stream(const Weights& all)
      : rows{all.b, all.b}, last_column((all.k - 1) / 16 * 16) {}

  template <class Weights, class Work>
  __device__ __forceinline__ void begin(const Weights& all, const Work& work, int tile, int warp, int lane) {
    const int first = kUnitRows * (work.tile(tile).y + warp) + lane / 4;
    const long long before = static_cast<long long>(work.expert(tile)) * all.n;
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = all.b + (before + min(first + 8 * i, all.n - 1)) * all.ldb;
    column = 128 * work.first_unit + 16 * (lane % 4);
    load(lane);
  }
  __device__ __forceinline__ void load(int) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int at = min(column + 64 * p, last_column);
#pragma unroll
      for (int i = 0; i < 2; ++i) load_stream_16(next[p][i], rows[i] + at);
    }
    column += 128;
  }
  __device__ __forceinline__ void advance(bool more, int lane) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) words[p][i][j] = next[p][i][j];
        exchange_columns(words[p][i]);
      }
    }
    if (more) load(lane);
  }
};

template <class T>
struct Int8Decoder {
  using X = typename T::X;
  static constexpr int kSteps = 4 * sizeof(X);

  template <class B>
  __device__ __forceinline__ Int8Decoder(const B&, uint32_t, int, int) {}
  __device__ __forceinline__ void fetch(int, int) {}
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const Int8Stream<T>& stream, int step) const {
    const uint32_t(&w)[2][4] = stream.words[2 * step / kSteps];
    const int i = step % (kSteps / 2);
    if constexpr (sizeof(X) == 1) {
      a[0] = w[0][2 * i];
      a[1] = w[1][2 * i];
      a[2] = w[0][2 * i + 1];
      a[3] = w[1][2 * i + 1];
    } else {
      Float16<X>::from_int8(w[0][i], a[0], a[2]);
      Float16<X>::from_int8(w[1][i], a[1], a[3]);
    }
    pin(a);  // copies: products in flight read them while the next words come
  }
};

// int8 weights of experts, [experts, n, ldb]; k columns of a row count.
struct Int8Rows {
  const int8_t* b;
  int n, k, ldb;

  template <class T>
  using Stream = Int8Stream<T>;
  template <class T>
  using Decoder = Int8Decoder<T>;
};

struct NoBook {
  static constexpr bool kPairs = false;
};

template <class T, class E, int kAlign, class Rows>
__device__ __forceinline__ void int8_wgmma(const char* x, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                           int ldb, int ldd, const typename E::Args& args, const Rows& rows) {
  prompt_product<T, E, kAlign>(x, Int8Rows{b, n, k, ldb}, d, m, n, (k + 127) / 128, ldd, NoBook(), args, rows);
}

}  // namespace qcut
