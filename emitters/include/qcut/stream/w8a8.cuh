// W8A8 for few tokens: D = epilogue(A B^T), memory-bound.
//
// The product is that of weight_only_decode.cuh with integers: a CTA takes 16 kRowTiles rows of weights, its warps
// divide K among them, and lane 4g + t reads 16 bytes each of rows g and g + 8. The first of a layer's weights are
// asked for before the wait for the previous kernel.
//
// A dynamic quantization wants a row's largest magnitude before its first product. The kernel that makes the row knows
// it: it raises one word of a token by an atomic maximum, which is exact in any order, and the next kernel quantizes
// what it loads. No kernel stands between the two, and no CTA reads a row twice.
//
// Source: PTX ISA "Matrix Fragments for mma.m16n8k32", "griddepcontrol", "barrier.cluster".
#pragma once

#include <qcut/core/epilogue.cuh>
#include <qcut/core/streaming.cuh>
#include <qcut/core/quantize.cuh>

namespace qcut {

// kNone, kGiven: int8 with their scales; with kNone the previous kernel may have written the weights too. kRows: of a
// floating type, with their largest magnitudes.
enum class Tokens { kNone, kGiven, kRows };

// See W8A8Tile in emitters/w8a8_decode.py. A unit is 16 rows x 128 columns. T: of the tokens where they are kRows.
template <class T_, Tokens kFrom_, int kRowTiles_, int kWarps_, int kUnits_, int kPrefetch_, int kTokens_, int kSplits_>
struct W8A8Tile {
  using T = T_;
  static constexpr Tokens kFrom = kFrom_;
  static constexpr int kRowTiles = kRowTiles_, kWarps = kWarps_, kUnits = kUnits_, kPrefetch = kPrefetch_;
  static constexpr int kTokens = kTokens_, kSplits = kSplits_;
  static constexpr bool kQuantizes = kFrom == Tokens::kRows;
  static constexpr int kUnitColumns = 128;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kSpan = kUnitColumns * kUnits;  // columns of a warp
  static constexpr int kThreads = 32 * kWarps;
  // Of a token's sums: four more words than rows make its stores miss those of the other tokens.
  static constexpr int kPitch = kRows + 4;
  // Shared memory, in bytes: scales and biases of rows; scales of tokens, largest magnitudes of results; sums of warps.
  static constexpr int kTokenScales = 8 * kRows, kPeaks = kTokenScales + 32, kSums = kPeaks + 32;
  static_assert(kTokens <= 8, "see emitters/w8a8_decode.py");
};

// What lane 4g + t multiplies of token g: [unit][64 columns][16 bytes], and how it comes there. load() asks for the
// columns from the warp's first one on, take() waits. Columns past k are zero. a: int8, k a multiple of 16.
template <class Tile>
struct TokenFragment {
  uint32_t x[Tile::kUnits][2][4];
  const int8_t* row;
  int token, columns, t;

  __device__ __forceinline__ TokenFragment(const void* a, int lda, int m, int k)
      : token(threadIdx.x % 32 / 4), columns(token < m ? k : 0), t(threadIdx.x % 4) {
    row = static_cast<const int8_t*>(a) + static_cast<long long>(token) * lda;
  }
  __device__ __forceinline__ void load(int column) {
#pragma unroll
    for (int i = 0; i < 2 * Tile::kUnits; ++i) {
      const int col = column + 64 * i + 16 * t;
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (col < columns) raw = *reinterpret_cast<const uint4*>(row + col);
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i / 2][i % 2][j] = words[j];
    }
  }
  __device__ __forceinline__ void take(const QuantizedRow&) {}
};

// The same of rows of T, quantized on the way. Fragments of fewer than eight tokens have lanes to spare: a token's words
// are quantized by all lanes that have its number modulo kTokens, and dealt out.
template <class Tile, bool kAligned>
struct RowFragment {
  using T = typename Tile::T;
  static constexpr int kTokens = Tile::kTokens, kUnits = Tile::kUnits;
  static constexpr int kSize = Vector<T>::kSize < 4 * kTokens ? Vector<T>::kSize : 4 * kTokens;  // columns of a load
  static constexpr int kLoads = 4 * kTokens / kSize;                                             // of a unit
  uint32_t x[kUnits][2][4];
  Vector<T> raw[kUnits][kLoads];
  const T* row;
  int g, t, token, columns;

  __device__ __forceinline__ RowFragment(const void* a, int lda, int m, int k)
      : g(threadIdx.x % 32 / 4), t(threadIdx.x % 4), token(g % kTokens), columns(token < m ? k : 0) {
    row = static_cast<const T*>(a) + static_cast<long long>(token) * lda;
  }
  __device__ __forceinline__ void load(int column) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const int word = g / kTokens * kTokens + l * kSize / 4;
        const int col = column + Tile::kUnitColumns * u + 64 * (word / 4) + 16 * t + 4 * (word % 4);
        raw[u][l] = Vector<T>{};
        if (kAligned && col + kSize <= columns) {
          if constexpr (kSize * sizeof(T) == 16) {
            const uint4 v = *reinterpret_cast<const uint4*>(row + col);
            raw[u][l] = Vector<T>{v.x, v.y, v.z, v.w};
          } else {
            const uint2 v = *reinterpret_cast<const uint2*>(row + col);
            raw[u][l] = Vector<T>{v.x, v.y, 0, 0};
          }
        } else if (col < columns) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) {
            if (col + j < columns) raw[u][l].set(j, row[col + j]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void take(const QuantizedRow& quantized) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      uint32_t words[kTokens];
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        float f[Vector<T>::kSize], used[kSize];
        uint32_t packed[kSize / 4];
        raw[u][l].to_float(f);
#pragma unroll
        for (int j = 0; j < kSize; ++j) used[j] = f[j];
        quantized.quantize(used, packed);
#pragma unroll
        for (int j = 0; j < kSize / 4; ++j) words[l * kSize / 4 + j] = packed[j];
      }
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        uint32_t& to = x[u][w / 4][w % 4];
        to = words[w % kTokens];
        if constexpr (kTokens < 8) to = __shfl_sync(0xffffffffu, to, 4 * (w / kTokens * kTokens + token) + t);
      }
    }
  }
};

// a: tokens, lda elements apart, int8 or T; a_absmax: their largest magnitudes where they are T. kAligned: rows of T are
// multiples of 16 bytes. absmax, where there is one, [m], is raised to the largest magnitude of each row of D.
template <class Tile, bool kAligned, bool kAbsmax, class E>
__device__ __forceinline__ void w8a8_decode(const void* a, const float* a_absmax, const int8_t* b, typename E::Out* d,
                                            float* absmax, int m, int n, int k, int lda, int ldb, int ldd,
                                            typename E::Args args) {
  extern __shared__ __align__(16) char shared[];
  float* const row_scales = reinterpret_cast<float*>(shared);
  float* const biases = row_scales + Tile::kRows;
  float* const token_scales = reinterpret_cast<float*>(shared + Tile::kTokenScales);
  unsigned* const peaks = reinterpret_cast<unsigned*>(shared + Tile::kPeaks);
  int* const sums = reinterpret_cast<int*>(shared + Tile::kSums);  // [warp][token][row]

  const int warp = threadIdx.x / 32;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  const int rank = blockIdx.x % Tile::kSplits;
  const int n0 = blockIdx.x / Tile::kSplits * Tile::kRows;
  const int tiles = min(Tile::kRowTiles, (n - n0 + 15) / 16);

  // Where K is longer than all warps together, they come round for more: kStride columns further on.
  constexpr int kStride = Tile::kSplits * Tile::kWarps * Tile::kSpan;
  const int rank_first = rank * Tile::kWarps * Tile::kSpan;
  const int first = rank_first + warp * Tile::kSpan;
  const int rounds = first < k ? (k - first + kStride - 1) / kStride : 0;

  // A unit of weights: [64 columns][row g, g + 8][16 bytes]. Rows past n repeat the last one and are not stored;
  // columns past k meet zero tokens, and repeat the last 16.
  uint32_t w[Tile::kPrefetch][Tile::kUnits][2][2][4];
  const int last_column = (k - 1) / 16 * 16;
  const auto load = [&](uint32_t (&unit)[2][2][4], int tile, int column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int8_t* row = b + static_cast<long long>(min(n0 + 16 * tile + g + 8 * i, n - 1)) * ldb;
#pragma unroll
      for (int p = 0; p < 2; ++p) load_stream_16(unit[p][i], row + min(column + 64 * p + 16 * t, last_column));
    }
  };
  // A GEMM's b, too, may be what the kernel before wrote.
  if constexpr (Tile::kFrom == Tokens::kNone) wait_for_dependencies();
#pragma unroll
  for (int s = 0; s < Tile::kPrefetch; ++s) {
    if (s >= tiles || rounds == 0) break;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) load(w[s][u], s, first + Tile::kUnitColumns * u);
  }
  launch_dependents();
  for (int row = threadIdx.x; row < Tile::kRows; row += Tile::kThreads) {
    const typename E::Column column = E::column(args, n0 + row, n);
    row_scales[row] = column.scale;
    biases[row] = column.bias;
  }
  if (kAbsmax && threadIdx.x < Tile::kTokens) peaks[threadIdx.x] = 0;
  if constexpr (Tile::kFrom != Tokens::kNone) wait_for_dependencies();

  typename Either<Tile::kQuantizes, RowFragment<Tile, kAligned>, TokenFragment<Tile>>::Type tokens(a, lda, m, k);
  tokens.load(first);
  const QuantizedRow quantized(Tile::kQuantizes && tokens.columns > 0 ? __float_as_uint(a_absmax[tokens.token]) : 0);
  if constexpr (Tile::kQuantizes) {
    if (threadIdx.x % 4 == 0 && threadIdx.x < 4 * m) token_scales[tokens.token] = quantized.scale();
    args.row_scale = token_scales;
  }
  tokens.take(quantized);

  // Accumulators hold rows g and g + 8 of tokens 2t and 2t + 1.
  int* const own = sums + warp * Tile::kTokens * Tile::kPitch + g;
  const auto place = [&](int c) { return (2 * t + c % 2) * Tile::kPitch + c / 2 * 8; };
  const auto counts = [&](int c) { return 2 * t + c % 2 < Tile::kTokens; };
  for (int round = 0; round < rounds; ++round) {
    const int column = first + round * kStride;
#pragma unroll 1
    for (int tile0 = 0; tile0 < tiles; tile0 += Tile::kPrefetch) {
#pragma unroll
      for (int s = 0; s < Tile::kPrefetch; ++s) {
        const int tile = tile0 + s;
        if (tile >= tiles) break;
        // Registers s take the tile kPrefetch further down or, below the last one, tile s of the next round.
        const bool down = tile + Tile::kPrefetch < tiles;
        const int next_tile = down ? tile + Tile::kPrefetch : s;
        const int next_column = down ? column : column + kStride;
        int* const mine = own + 16 * tile;
        int acc[4] = {};
        if (round > 0) {
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[c] = counts(c) ? mine[place(c)] : 0;
        }
#pragma unroll
        for (int u = 0; u < Tile::kUnits; ++u) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t(&rows)[2][4] = w[s][u][i / 2];
            const int j = i % 2 * 2;
            mma_s8(acc, {rows[0][j], rows[1][j], rows[0][j + 1], rows[1][j + 1]}, tokens.x[u][i / 2][j],
                   tokens.x[u][i / 2][j + 1]);
          }
          if (down || round + 1 < rounds) load(w[s][u], next_tile, next_column + Tile::kUnitColumns * u);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (counts(c)) mine[place(c)] = acc[c];
        }
      }
    }
    if (round + 1 < rounds) {
      tokens.load(column + kStride);
      tokens.take(quantized);
    }
  }
  __syncthreads();

  const int warps = min(Tile::kWarps, max(0, k - rank_first + Tile::kSpan - 1) / Tile::kSpan);  // those with columns
  const auto sum_warps = [&](int token, int row) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < Tile::kWarps; ++i) {
      if (i < warps) sum += sums[(i * Tile::kTokens + token) * Tile::kPitch + row];
    }
    return sum;
  };
  // A result, and the bits of its magnitude.
  const auto write = [&](int token, int row, int sum) -> uint32_t {
    if (n0 + row >= n) return 0;
    const typename E::Column column{0, row_scales[row], biases[row]};
    const typename E::Out y = E::convert(E::finish(E::apply(sum, E::row(args, token, m), column), 0.0f, args));
    d[static_cast<long long>(token) * ldd + n0 + row] = y;
    return __float_as_uint(to_float(y)) & 0x7fffffffu;
  };
  if constexpr (Tile::kSplits == 1) {
    for (int i = threadIdx.x; i < Tile::kRows * m; i += Tile::kThreads) {
      const int token = i / Tile::kRows;
      uint32_t peak = write(token, i % Tile::kRows, sum_warps(token, i % Tile::kRows));
      if constexpr (kAbsmax) {
        peak = __reduce_max_sync(0xffffu << (threadIdx.x & 16), peak);  // sixteen rows of one token
        if (threadIdx.x % 16 == 0) atomicMax(peaks + token, peak);
      }
    }
  } else {
    // A CTA's own sums take the place of its first warp's; four rows at a time are then summed over the cluster.
    for (int i = threadIdx.x; i < Tile::kRows * m; i += Tile::kThreads) {
      const int token = i / Tile::kRows;
      const int row = i % Tile::kRows;
      sums[token * Tile::kPitch + row] = sum_warps(token, row);
    }
    cluster_arrive();
    cluster_wait();
    constexpr int kQuads = Tile::kRows / 4;
    for (int i = rank * Tile::kThreads + threadIdx.x; i < kQuads * m; i += Tile::kSplits * Tile::kThreads) {
      const int token = i / kQuads;
      const int row = i % kQuads * 4;
      uint32_t total[4];
      load_sum_16<int, Tile::kSplits>(total, shared_address(sums + token * Tile::kPitch + row));
      uint32_t peak = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) peak = max(peak, write(token, row + j, from_bits<int>(total[j])));
      if constexpr (kAbsmax) atomicMax(peaks + token, peak);
    }
    // No CTA leaves while others read its sums.
    cluster_arrive();
    cluster_wait();
  }
  if constexpr (kAbsmax) {
    __syncthreads();
    if (threadIdx.x < m) atomicMax(reinterpret_cast<unsigned*>(absmax) + threadIdx.x, peaks[threadIdx.x]);
  }
}

}  // namespace qcut
