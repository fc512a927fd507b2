// D = epilogue(A B^T) of few tokens A and int8 weights B in row-major order, at the speed of memory.
//
// A CTA computes 16 kRowTiles rows of weights. Its warps divide K, and each warp keeps the tokens of its columns in
// registers while it walks down the rows. Weights go from global memory straight to registers: lane 4g + t reads 16
// bytes each of rows g and g + 8, columns 16t .. 16t + 15 of 64. This places other columns of K in the fragment than
// the instruction names; the products' sum is the same, because tokens are placed in the same way. The bytes in flight
// bound the kernel's speed: there are many warps, each with one or two units in flight, and the first units are loaded
// before the wait for the previous kernel.
//
// Exactness: the sums of the warps are added in shared memory, and the sums of a cluster's CTAs, which may divide K
// further, in each other's shared memory. The order of both is fixed, except where warps add integers to common sums:
// these are the same in any order.
//
// A kernel chooses its tokens (w8a8.cuh, w8a16.cuh) by a class with the accumulators' type `Acc` and four functions:
//   begin(column)            starts the loads of the tokens of the warp's first columns
//   settle()                 makes these tokens the second operand of the products, once they have arrived
//   next(column)             loads and settles the tokens of the columns of a later round
//   multiply(acc, unit, u)   adds the products of unit u of a row tile
// With scales of units, those of a unit are added in a sum of their own, which is multiplied by its scale.
// Shared memory of a Tile: what the epilogue needs of rows of weights (ColumnStore); from Tile::kSums on, the sums of
// warps. A Tile with kCommonSums has one set of integer sums for all warps.
//
// Codebook weights have a kernel of their own in codebook.cuh.
//
// Source: PTX ISA "Matrix Fragments for mma.m16n8k16 / mma.m16n8k32", "griddepcontrol", "barrier.cluster".
#pragma once

#include <qcut/core/epilogue.cuh>
#include <qcut/core/experts.cuh>
#include <qcut/core/streaming.cuh>

namespace qcut {

// A lane's part of 16 rows x 128 columns of weights: [64 columns][row g, g + 8][16 bytes].
using Int8Unit = uint32_t[2][2][4];

template <class E>
constexpr bool kHasZeroPoint = false;
template <class Out, ZeroPoint kZeroPoint, bool kRowScale, ColScale kColScale, bool kBias, Activation kActivation,
          bool kResidual, bool kWrap>
constexpr bool kHasZeroPoint<Epilogue<Out, kZeroPoint, kRowScale, kColScale, kBias, kActivation, kResidual, kWrap>> =
    kZeroPoint != ZeroPoint::kNone;

// What an epilogue E needs of the rows of weights, columns of D, in shared memory: scales and biases, and with a zero
// point, from Tile::kColSums on, the rows' sums.
template <class Tile, class E>
struct ColumnStore {
  float* const scales;
  float* const biases;
  int* colsums = nullptr;

  __device__ __forceinline__ explicit ColumnStore(char* shared)
      : scales(reinterpret_cast<float*>(shared)), biases(scales + Tile::kRows) {
    if constexpr (kHasZeroPoint<E>) colsums = reinterpret_cast<int*>(shared + Tile::kColSums);
  }
  __device__ __forceinline__ void store(int row, const typename E::Column& column) const {
    scales[row] = column.scale;
    biases[row] = column.bias;
    if constexpr (kHasZeroPoint<E>) colsums[row] = column.colsum;
  }
  __device__ __forceinline__ typename E::Column load(int row) const {
    typename E::Column column{0, scales[row], biases[row]};
    if constexpr (kHasZeroPoint<E>) column.colsum = colsums[row];
    return column;
  }
};

// How a CTA divides the product. Int8StreamTile in emitters/stream/int8.py describes the sizes.
template <int kRowTiles_, int kWarps_, int kUnits_, int kPrefetch_, int kTokens_, int kSplits_>
struct Int8StreamTile {
  static constexpr int kRowTiles = kRowTiles_, kWarps = kWarps_, kUnits = kUnits_, kPrefetch = kPrefetch_;
  static constexpr int kTokens = kTokens_, kSplits = kSplits_;
  static constexpr int kTokenTiles = (kTokens + 7) / 8;
  static constexpr int kUnitColumns = 128;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kSpan = kUnitColumns * kUnits;  // columns of a warp in one round
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kVectorBytes = 8 * kRows;  // scales and biases
  // The words between the sums of two tokens. Four more words than rows bring the stores of different tokens to
  // different banks.
  static constexpr int kPitch = kRows + 4;
};

// With ExpertRows, waits for the previous kernel, which may have written which expert this is, and goes to the expert
// of this CTA: b and the vectors of columns become those of the expert, m the number of routes. False: there is none.
template <class Tile, class Args, class Rows>
__device__ __forceinline__ bool begin_expert(Rows& rows, const int8_t*& b, Args& args, int& m, int n, int k, int ldb) {
  if constexpr (Rows::kOfExperts) {
    wait_for_dependencies();
    const int ctas = (n + Tile::kRows - 1) / Tile::kRows;
    const long long expert = rows.begin(static_cast<int>(blockIdx.x) / Tile::kSplits / ctas, m);
    if (expert < 0) return false;
    b += expert * n * ldb;
    args.col_scale_per_channel += expert * n;
    args.col_scale_per_unit += expert * ((n + 15) / 16) * ((k + 127) / 128);
    if (args.bias != nullptr) args.bias += expert * n;
  }
  return true;
}

// The kernel: 1 <= m <= kTokens. The grid has kSplits CTAs for every kRows rows, and with ExpertRows, after
// begin_expert, as many again for every tile of routes. With kAbsmax, absmax [m] is raised to the largest magnitude of
// each row of D.
template <class Tile, bool kAbsmax, class E, class Tokens, class Rows = AllRows>
__device__ __forceinline__ void stream_int8(Tokens tokens, const int8_t* b, typename E::Out* d, float* absmax, int m,
                                            int n, int k, int ldb, int ldd, const typename E::Args& args,
                                            const Rows& rows = Rows()) {
  static_assert(!Rows::kOfExperts || !(kAbsmax || E::kHasResidual), "rows of these vectors are tokens");
  using Acc = typename Tokens::Acc;
  extern __shared__ __align__(16) char shared[];
  const ColumnStore<Tile, E> stored(shared);
  Acc* const sums = reinterpret_cast<Acc*>(shared + Tile::kSums);  // [warp][token][row]
  unsigned* peaks = nullptr;  // bits of the largest magnitudes of D's rows
  if constexpr (kAbsmax) peaks = reinterpret_cast<unsigned*>(shared + Tile::kPeaks);

  const int warp = threadIdx.x / 32;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  const int rank = blockIdx.x % Tile::kSplits;
  unsigned cta = blockIdx.x / Tile::kSplits;
  if constexpr (Rows::kOfExperts) cta %= (n + Tile::kRows - 1) / Tile::kRows;
  const int n0 = cta * Tile::kRows;
  const int tiles = min(Tile::kRowTiles, (n - n0 + 15) / 16);

  // If K is longer than the columns of all warps together, each warp goes on in a further round, kStride columns later.
  constexpr int kStride = Tile::kSplits * Tile::kWarps * Tile::kSpan;
  const int rank_first = rank * Tile::kWarps * Tile::kSpan;
  const int first = rank_first + warp * Tile::kSpan;
  const int rounds = first < k ? (k - first + kStride - 1) / kStride : 0;

  // Rows past n repeat the last row and are not stored. Columns past k repeat the last 16 columns and are multiplied
  // by zero tokens.
  Int8Unit w[Tile::kPrefetch][Tile::kUnits];
  float scales[Tile::kPrefetch][Tile::kUnits];
  const int last_column = (k - 1) / 16 * 16;
  const auto load = [&](int s, int u, int tile, int column) {
    Int8Unit& unit = w[s][u];
    if constexpr (E::kUnitScales) {
      const int units = (k + Tile::kUnitColumns - 1) / Tile::kUnitColumns;
      scales[s][u] = args.col_scale_per_unit[(n0 / 16 + tile) * units + min(column / Tile::kUnitColumns, units - 1)];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int8_t* row = b + static_cast<long long>(min(n0 + 16 * tile + g + 8 * i, n - 1)) * ldb;
#pragma unroll
      for (int p = 0; p < 2; ++p) load_stream_16(unit[p][i], row + min(column + 64 * p + 16 * t, last_column));
    }
  };
  if constexpr (Tile::kWaitsFirst && !Rows::kOfExperts) wait_for_dependencies();
#pragma unroll
  for (int s = 0; s < Tile::kPrefetch; ++s) {
    if (s >= tiles || rounds == 0) break;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) load(s, u, s, first + Tile::kUnitColumns * u);
  }
  // Meanwhile the next tile is prefetched to the L2; each lane prefetches 128 bytes of a row. The last of two tiles is
  // not prefetched, because it would delay the first tile by more than it gains.
  if (Tile::kPrefetchesL2 && Tile::kPrefetch + 1 < tiles && first < k) {
#pragma unroll
    for (int i = 0; i < 16 * Tile::kUnits; i += 32) {
      const int row = n0 + 16 * Tile::kPrefetch + threadIdx.x % 16;
      const int unit = i / 16 + threadIdx.x % 32 / 16;
      if (unit < Tile::kUnits) {
        const int column = min(first + Tile::kUnitColumns * unit, last_column);
        prefetch_l2(b + static_cast<long long>(min(row, n - 1)) * ldb + column);
      }
    }
  }
  launch_dependents();
  if constexpr (Tile::kCommonSums) {
    for (int i = threadIdx.x; i < Tile::kTokens * Tile::kPitch; i += Tile::kThreads) sums[i] = 0;
    __syncthreads();
  }

  constexpr int kVectors = (Tile::kRows + Tile::kThreads - 1) / Tile::kThreads;
  typename E::Column columns[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int row = threadIdx.x + i * Tile::kThreads;
    columns[i] = E::column(args, row < Tile::kRows ? n0 + row : n, n);
  }
  if constexpr (!Tile::kWaitsFirst && !Rows::kOfExperts) wait_for_dependencies();

  tokens.begin(first);
  const auto residual_at = [&](int token, int row) {
    if constexpr (E::kHasResidual) {
      if (token < m && n0 + row < n) return to_float(args.residual[static_cast<long long>(token) * ldd + n0 + row]);
    }
    return 0.0f;
  };
  // The residual of the element that a thread writes first arrives while the products are computed.
  const float first_residual = residual_at(threadIdx.x / Tile::kRows, threadIdx.x % Tile::kRows);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int row = threadIdx.x + i * Tile::kThreads;
    if (row < Tile::kRows) stored.store(row, columns[i]);
  }
  if (kAbsmax && threadIdx.x < Tile::kTokens) peaks[threadIdx.x] = 0;
  tokens.settle();

  // Accumulators hold rows g and g + 8 of tokens 2t and 2t + 1 of each tile of eight tokens, summed over the rounds so
  // far.
  Acc* const own = sums + ((Tile::kCommonSums ? 0 : warp) * Tile::kTokens + 2 * t) * Tile::kPitch + g;
  const auto place = [](int c) { return (c / 4 * 8 + c % 2) * Tile::kPitch + c / 2 % 2 * 8; };
  const auto counts = [&](int c) { return Tile::kTokens % 8 == 0 || 2 * t + c % 2 < Tile::kTokens; };
  for (int round = 0; round < rounds; ++round) {
    const int column = first + round * kStride;
#pragma unroll 1
    for (int tile0 = 0; tile0 < tiles; tile0 += Tile::kPrefetch) {
#pragma unroll
      for (int s = 0; s < Tile::kPrefetch; ++s) {
        const int tile = tile0 + s;
        if (tile >= tiles) break;
        // Registers s take the tile that is kPrefetch tiles further down or, after the last tile, tile s of the next
        // round.
        const bool down = tile + Tile::kPrefetch < tiles;
        const int next_tile = down ? tile + Tile::kPrefetch : s;
        const int next_column = down ? column : column + kStride;
        Acc* const mine = own + 16 * tile;
        Acc acc[Tile::kTokenTiles][4] = {};
        if (!Tile::kCommonSums && round > 0) {
#pragma unroll
          for (int c = 0; c < 4 * Tile::kTokenTiles; ++c) acc[c / 4][c % 4] = counts(c) ? mine[place(c)] : Acc(0);
        }
#pragma unroll
        for (int u = 0; u < Tile::kUnits; ++u) {
          if constexpr (E::kUnitScales) {
            Acc sum[Tile::kTokenTiles][4] = {};
            tokens.multiply(sum, w[s][u], u);
#pragma unroll
            for (int c = 0; c < 4 * Tile::kTokenTiles; ++c) {
              acc[c / 4][c % 4] = fmaf(scales[s][u], sum[c / 4][c % 4], acc[c / 4][c % 4]);
            }
          } else {
            tokens.multiply(acc, w[s][u], u);
          }
          if (down || round + 1 < rounds) load(s, u, next_tile, next_column + Tile::kUnitColumns * u);
        }
#pragma unroll
        for (int c = 0; c < 4 * Tile::kTokenTiles; ++c) {
          if constexpr (Tile::kCommonSums) {
            if (counts(c)) atomicAdd(mine + place(c), acc[c / 4][c % 4]);
          } else {
            if (counts(c)) mine[place(c)] = acc[c / 4][c % 4];
          }
        }
      }
    }
    if (round + 1 < rounds) tokens.next(column + kStride);
  }
  __syncthreads();

  const int warps = min(Tile::kWarps, max(0, k - rank_first + Tile::kSpan - 1) / Tile::kSpan);  // warps with columns
  const auto sum_warps = [&](int token, int row) {
    if constexpr (Tile::kCommonSums) return sums[token * Tile::kPitch + row];
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < Tile::kWarps; ++i) {
      if (i < warps) sum += sums[(i * Tile::kTokens + token) * Tile::kPitch + row];
    }
    return sum;
  };
  // Stores an element of D and returns the bits of its magnitude.
  const auto write = [&](int token, int row, Acc sum, float residual) -> uint32_t {
    if (n0 + row >= n) return 0;
    const typename E::Column column = stored.load(row);
    const typename E::Out y = E::convert(E::finish(E::apply(sum, E::row(args, token, m), column), residual, args));
    d[static_cast<long long>(rows.of(token)) * ldd + n0 + row] = y;
    return kAbsmax ? __float_as_uint(to_float(y)) & 0x7fffffffu : 0u;
  };
  if constexpr (Tile::kSplits == 1) {
    for (int i = threadIdx.x; i < Tile::kRows * m; i += Tile::kThreads) {
      const int token = i / Tile::kRows;
      const int row = i % Tile::kRows;
      const float residual = i == static_cast<int>(threadIdx.x) ? first_residual : residual_at(token, row);
      uint32_t peak = write(token, row, sum_warps(token, row), residual);
      if constexpr (kAbsmax) {
        peak = __reduce_max_sync(0xffffu << (threadIdx.x & 16), peak);  // sixteen rows of one token
        if (threadIdx.x % 16 == 0) atomicMax(peaks + token, peak);
      }
    }
  } else {
    // The CTA's sums over its warps replace the sums of its first warp. Four rows at a time are then summed over the
    // cluster.
    if constexpr (!Tile::kCommonSums) {
      for (int i = threadIdx.x; i < Tile::kRows * m; i += Tile::kThreads) {
        const int token = i / Tile::kRows;
        const int row = i % Tile::kRows;
        sums[token * Tile::kPitch + row] = sum_warps(token, row);
      }
    }
    cluster_arrive();
    cluster_wait();
    constexpr int kQuads = Tile::kRows / 4;
    for (int i = rank * Tile::kThreads + threadIdx.x; i < kQuads * m; i += Tile::kSplits * Tile::kThreads) {
      const int token = i / kQuads;
      const int row = i % kQuads * 4;
      float residual[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) residual[j] = residual_at(token, row + j);
      uint32_t total[4];
      load_sum_16<Acc, Tile::kSplits>(total, shared_address(sums + token * Tile::kPitch + row));
      uint32_t peak = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) peak = max(peak, write(token, row + j, from_bits<Acc>(total[j]), residual[j]));
      if constexpr (kAbsmax) atomicMax(peaks + token, peak);
    }
    // No CTA exits while other CTAs read its sums.
    cluster_arrive();
    cluster_wait();
  }
  if constexpr (kAbsmax) {
    __syncthreads();
    if (threadIdx.x < m) atomicMax(reinterpret_cast<unsigned*>(absmax) + threadIdx.x, peaks[threadIdx.x]);
  }
}

}  // namespace qcut
