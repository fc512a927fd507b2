// W8A16 for few tokens, at the speed of memory: D = epilogue(A B^T), int8 weights as rows lie.
//
// A CTA takes 16 kRowTiles rows of weights, its warps divide K among them, and each keeps the tokens of
// its columns in registers while it walks down the rows. Weights go from global memory to registers: a
// sum over K does not care which column sits where, if both operands agree, so lane 4g + t reads 16
// bytes each of rows g and g + 8, and of its columns 16t .. 16t + 15 the four from 4s on serve product s
// of 64 columns. The lane's part of a token is then 32 contiguous bytes. What bounds the kernel are
// bytes in flight, so there are many warps and one or two units of each on their way; the first are
// asked for before the wait for the previous kernel, which writes tokens alone.
//
// The warps' sums meet in shared memory, those of a cluster's CTAs, which divide K too, in each
// other's; both are added in a fixed order.
//
// Source: PTX ISA "Matrix Fragments for mma.m16n8k16", "griddepcontrol", "barrier.cluster".
#pragma once

#include <qcut/core/epilogue.cuh>
#include <qcut/core/streaming.cuh>

namespace qcut {

// See WeightOnlyTile in emitters/weight_only_decode.py. A unit is 16 rows x 128 columns.
template <int kRowTiles_, int kWarps_, int kUnits_, int kPrefetch_, int kTokens_, int kSplits_>
struct WeightOnlyTile {
  static constexpr int kRowTiles = kRowTiles_, kWarps = kWarps_, kUnits = kUnits_, kPrefetch = kPrefetch_;
  static constexpr int kTokens = kTokens_, kSplits = kSplits_;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kSpan = 128 * kUnits;  // columns of a warp
  static constexpr int kThreads = 32 * kWarps;
  // Of a token's sums: four more words than rows make its stores miss those of the other tokens.
  static constexpr int kPitch = kRows + 4;
};

// Eight elements of a row from column `col` on, those past k zero. kAligned: k and the row are aligned to them.
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

// kAligned: tokens are read 16 bytes at a time.
template <class Tile, class T, bool kAligned, class E>
__device__ __forceinline__ void weight_only_decode(const T* a, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                                   int lda, int ldb, int ldd, const typename E::Args& args) {
  extern __shared__ __align__(16) char shared[];
  float* const sums = reinterpret_cast<float*>(shared);  // [warp][token][row]
  float* const scales = sums + Tile::kWarps * Tile::kTokens * Tile::kPitch;
  float* const biases = scales + Tile::kRows;

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

  // A unit of weights: [64 columns][row g, g + 8][16 bytes]. Rows past n repeat the last one and are not
  // stored; columns past k meet zero tokens, and repeat the last 16.
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
#pragma unroll
  for (int s = 0; s < Tile::kPrefetch; ++s) {
    if (s >= tiles || rounds == 0) break;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) load(w[s][u], s, first + 128 * u);
  }
  // The next tile goes to the L2 meanwhile, a row's 128 bytes for each lane. Of two tiles it is the last, and gains less
  // than it delays the first.
  if (Tile::kPrefetch + 1 < tiles && first < k) {
#pragma unroll
    for (int i = 0; i < 16 * Tile::kUnits; i += 32) {
      const int row = n0 + 16 * Tile::kPrefetch + threadIdx.x % 16;
      const int unit = i / 16 + threadIdx.x % 32 / 16;
      if (unit < Tile::kUnits) {
        const int column = min(first + 128 * unit, last_column);
        prefetch_l2(b + static_cast<long long>(min(row, n - 1)) * ldb + column);
      }
    }
  }
  launch_dependents();

  constexpr int kVectors = (Tile::kRows + Tile::kThreads - 1) / Tile::kThreads;
  typename E::Column columns[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int row = threadIdx.x + i * Tile::kThreads;
    columns[i] = E::column(args, row < Tile::kRows ? n0 + row : n, n);
  }
  wait_for_dependencies();

  // Tokens past m repeat the last one, and are not stored.
  uint32_t x[Tile::kTokenTiles][Tile::kUnits][2][2][4];  // [8 tokens][unit][64 columns][8 columns][words]
  const auto load_tokens = [&](int column) {
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; ++j) {
      const T* row = a + static_cast<long long>(min(8 * j + g, m - 1)) * lda;
#pragma unroll
      for (int i = 0; i < 4 * Tile::kUnits; ++i) {
        load_8<T, kAligned>(x[j][i / 4][i / 2 % 2][i % 2], row, column + i / 2 * 64 + 16 * t + i % 2 * 8, k);
      }
    }
  };
  load_tokens(first);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int row = threadIdx.x + i * Tile::kThreads;
    if (row < Tile::kRows) {
      scales[row] = columns[i].scale;
      biases[row] = columns[i].bias;
    }
  }

  float* const own = sums + (warp * Tile::kTokens + 2 * t) * Tile::kPitch + g;
  const auto place = [](int c) { return (c / 4 * 8 + c % 2) * Tile::kPitch + c / 2 % 2 * 8; };
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
        // Accumulators hold rows g and g + 8 of tokens 2t and 2t + 1, of this round and those before it.
        float* const mine = own + 16 * tile;
        float acc[Tile::kTokenTiles][4] = {};
        if (round > 0) {
#pragma unroll
          for (int c = 0; c < 4 * Tile::kTokenTiles; ++c) acc[c / 4][c % 4] = mine[place(c)];
        }
#pragma unroll
        for (int u = 0; u < Tile::kUnits; ++u) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const uint32_t(&rows)[2][4] = w[s][u][i / 4];
            uint32_t weights[4];
            Float16<T>::from_int8(rows[0][i % 4], weights[0], weights[2]);
            Float16<T>::from_int8(rows[1][i % 4], weights[1], weights[3]);
#pragma unroll
            for (int j = 0; j < Tile::kTokenTiles; ++j) {
              const uint32_t(&part)[4] = x[j][u][i / 4][i / 2 % 2];
              Float16<T>::mma(acc[j], weights, {part[i % 2 * 2], part[i % 2 * 2 + 1]});
            }
          }
          if (down || round + 1 < rounds) load(w[s][u], next_tile, next_column + 128 * u);
        }
#pragma unroll
        for (int c = 0; c < 4 * Tile::kTokenTiles; ++c) mine[place(c)] = acc[c / 4][c % 4];
      }
    }
    if (round + 1 < rounds) load_tokens(column + kStride);
  }
  __syncthreads();

  const int warps = min(Tile::kWarps, max(0, k - rank_first + Tile::kSpan - 1) / Tile::kSpan);  // those with columns
  const auto sum_warps = [&](int token, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Tile::kWarps; ++i) {
      if (i < warps) sum += sums[(i * Tile::kTokens + token) * Tile::kPitch + row];
    }
    return sum;
  };
  const auto residual_at = [&](int token, int row) {
    if constexpr (E::kHasResidual) {
      if (n0 + row < n) return to_float(args.residual[static_cast<long long>(token) * ldd + n0 + row]);
    }
    return 0.0f;
  };
  const auto write = [&](int token, int row, float sum, float residual) {
    if (n0 + row >= n) return;
    const typename E::Column column{0, scales[row], biases[row]};
    const auto v = E::finish(E::apply(sum, E::row(args, token, m), column), residual, args);
    d[static_cast<long long>(token) * ldd + n0 + row] = E::convert(v);
  };
  if constexpr (Tile::kSplits == 1) {
    for (int i = threadIdx.x; i < Tile::kRows * m; i += Tile::kThreads) {
      const int token = i / Tile::kRows;
      const int row = i % Tile::kRows;
      const float residual = residual_at(token, row);
      write(token, row, sum_warps(token, row), residual);
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
      float residual[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) residual[j] = residual_at(token, row + j);
      uint32_t total[4];
      load_sum_16<float, Tile::kSplits>(total, shared_address(sums + token * Tile::kPitch + row));
#pragma unroll
      for (int j = 0; j < 4; ++j) write(token, row + j, from_bits<float>(total[j]), residual[j]);
    }
    // No CTA leaves while others read its sums.
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace qcut
