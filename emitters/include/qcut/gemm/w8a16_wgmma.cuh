// W8A16 on wgmma (sm_90a): D = epilogue(A B^T) of 16-bit tokens A and int8 weights B in row-major order. Converted
// weights are the operand of wgmma that lies in registers.
//
// A warpgroup computes 64 rows of B, a CTA kGroups of them for kTokens tokens. The CTAs of a cluster (kSplits) divide K
// into contiguous parts. Weights go from global memory straight to registers, kPrefetch units of 128 columns ahead: lane
// 4g + t reads 16 bytes each of rows g and g + 8, columns 16t .. 16t + 15 of 64. Columns 4s .. 4s + 3 of these 16 belong
// to product s. This places other columns of K in the fragment than the instruction names; tokens are placed in the same
// way, so that the products' sum is the same.
//
// One more warpgroup feeds the tokens: each of its warps fills every fourth stage, 64 columns of all tokens. Lane 4r + s
// reads columns 4s .. 4s + 3 of each 16 of a token, and its eight words are the 32 bytes of product s. A warp's load
// touches whole sectors, and its stores all banks.
//
// Exactness: conversions and products are exact; the tensor core adds the products of a CTA's part of K in float32, and
// the CTAs of a cluster add each other's sums in the order of their ranks.
//
// Shared memory: the stages, whose place the sums take later; barriers; the epilogue's vectors of rows of B.
//
// Source: PTX ISA "wgmma.mma_async", "fence.proxy", "mbarrier", "barrier.cluster".
#pragma once

#include <qcut/core/barrier.cuh>
#include <qcut/core/quad.cuh>
#include <qcut/core/streaming.cuh>
#include <qcut/core/wgmma.cuh>

namespace qcut {

// W8A16WgmmaTile in emitters/gemm/w8a16_wgmma.py describes the sizes. kFeedRegisters and kRegisters are those of a
// thread that feeds and of one that multiplies; 0 leaves the launch's to all.
template <int kTokens_, int kGroups_, int kShare_, int kSplits_, int kStages_, int kPrefetch_, int kBatch_,
          int kFeedRegisters_, int kRegisters_>
struct W8A16WgmmaTile {
  static constexpr int kTokens = kTokens_, kGroups = kGroups_, kSplits = kSplits_, kStages = kStages_;
  static constexpr int kShare = kShare_, kCtas = kShare * kSplits, kPrefetch = kPrefetch_;
  static constexpr int kBatch = kBatch_;  // blocks of eight tokens that a feeding warp has in flight
  static constexpr int kFeedRegisters = kFeedRegisters_, kRegisters = kRegisters_;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kWarps = 4 * kGroups;  // that multiply
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kFeeders = 4;  // warps
  static constexpr int kBlocks = kTokens / 8;
  static constexpr int kStageBytes = 128 * kTokens;
  static constexpr int kPitch = kRows + 4;  // words between the sums of two tokens, [token][row]
  static constexpr int kSumBytes = 4 * kTokens * kPitch;
  static constexpr int kFull = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kColScale = kEmpty + 8 * kStages;
  static constexpr int kBias = kColScale + 4 * kRows;
  static constexpr int kBytes = kBias + 4 * kRows;
  static_assert(kStages >= kFeeders && kBlocks % (kBatch * kShare) == 0, "see emitters/gemm/w8a16_wgmma.py");
};

// Orders this thread's stores to shared memory, with kCluster also to that of other CTAs, before later reads of the
// tensor cores.
template <bool kCluster>
__device__ __forceinline__ void fence_shared_stores() {
  if constexpr (kCluster) {
    asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
  } else {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
}

// Stores 16 bytes at a cluster-wide address.
__device__ __forceinline__ void store_cluster_16(uint32_t mapped, const uint32_t (&w)[4]) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(mapped), "r"(w[0]), "r"(w[1]), "r"(w[2]),
               "r"(w[3])
               : "memory");
}

// Arrives at a barrier of any CTA of the cluster; this thread's stores to the cluster's memory come before.
__device__ __forceinline__ void barrier_release_cluster(uint32_t mapped) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// Waits for a phase of the given parity that threads of other CTAs end.
__device__ __forceinline__ void barrier_acquire_cluster(uint32_t barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tAGAIN:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n\t"
      "@p bra.uni DONE;\n\tbra.uni AGAIN;\n\tDONE:\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

template <class Tile>
__device__ __forceinline__ void wait_phase(uint32_t barrier, int parity) {
  if constexpr (Tile::kShare > 1) {
    barrier_acquire_cluster(barrier, parity);
  } else {
    barrier_wait(barrier, parity);
  }
}

// The part of K of a CTA: units of 128 columns.
template <class Tile>
struct UnitRange {
  int first, count;
  __device__ __forceinline__ UnitRange(int k, int index) {
    const int units = (k + 127) / 128;
    const int part = (units + Tile::kSplits - 1) / Tile::kSplits;
    first = index * part;
    count = max(0, min(part, units - first));
  }
};

// The work of a feeding warp: tokens token0 .. token0 + kTokens - 1, columns `range`. k is a multiple of four and rows
// start at multiples of 8 bytes. Columns past k are zero. Tokens past m repeat the last one or are missing.
template <class Tile, class T>
__device__ __forceinline__ void feed_tokens(const T* a, int token0, int m, int k, int lda, const UnitRange<Tile>& range,
                                            uint32_t base, int warp, int rank) {
  constexpr int kMine = Tile::kBlocks / Tile::kShare;
  const int sub = rank % Tile::kShare;
  const int peers = rank - sub;  // the first rank of the CTAs that share these tokens
  const int lane = threadIdx.x % 32;
  const int r = lane / 4;
  const int s = lane % 4;
  const int begin = sub * kMine;
  const int end = min(begin + kMine, (m - token0 + 7) / 8);
  const int steps = 2 * range.count;
  const uint32_t even = 128 * r + 16 * ((2 * s) ^ r);
  const uint32_t odd = 128 * r + 16 * ((2 * s + 1) ^ r);
  int stage = warp, parity = 1;
  for (int step = warp; step < steps; step += Tile::kFeeders) {
    const int column = 128 * range.first + 64 * step + 4 * s;
    const uint32_t to = base + stage * Tile::kStageBytes;
    bool waited = false;
    for (int block0 = begin; block0 < end; block0 += Tile::kBatch) {
      uint2 v[Tile::kBatch][4];
#pragma unroll
      for (int j = 0; j < Tile::kBatch; ++j) {
        const T* row = a + static_cast<long long>(min(token0 + 8 * (block0 + j) + r, m - 1)) * lda + column;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[j][i] = make_uint2(0, 0);
          if (column + 16 * i < k) v[j][i] = *reinterpret_cast<const uint2*>(row + 16 * i);
        }
      }
      if (!waited) wait_phase<Tile>(base + Tile::kEmpty + 8 * stage, parity);
      waited = true;
#pragma unroll
      for (int j = 0; j < Tile::kBatch; ++j) {
        const uint32_t block = to + 1024 * (block0 + j);
        const uint32_t low[4] = {v[j][0].x, v[j][1].x, v[j][2].x, v[j][3].x};
        const uint32_t high[4] = {v[j][0].y, v[j][1].y, v[j][2].y, v[j][3].y};
        store_shared_16(block + even, low);
        store_shared_16(block + odd, high);
#pragma unroll
        for (int i = 1; i < Tile::kShare; ++i) {
          const uint32_t other = map_to_rank(block, peers + (sub + i) % Tile::kShare);
          store_cluster_16(other + even, low);
          store_cluster_16(other + odd, high);
        }
      }
    }
    if (!waited) wait_phase<Tile>(base + Tile::kEmpty + 8 * stage, parity);  // tokens past m
    fence_shared_stores<(Tile::kShare > 1)>();
    __syncwarp();
    if constexpr (Tile::kShare > 1) {
      if (lane < Tile::kShare) barrier_release_cluster(map_to_rank(base + Tile::kFull + 8 * stage, peers + lane));
    } else {
      if (lane == 0) barrier_arrive(base + Tile::kFull + 8 * stage);
    }
    stage += Tile::kFeeders;
    if (stage >= Tile::kStages) {
      stage -= Tile::kStages;
      parity ^= 1;
    }
  }
}

// The work of the multiplying warpgroups: adds the products of the CTA's part of K to `sum`.
template <class Tile, class T>
__device__ __forceinline__ void multiply_units(float (&sum)[Tile::kTokens / 2], const int8_t* b, int row0, int n, int k,
                                               int ldb, const UnitRange<Tile>& range, uint32_t base, int rank) {
  using Product = Wgmma<T, Tile::kTokens>;
  constexpr int kSteps = 4;  // products of 64 columns
  const int lane = threadIdx.x % 32;
  const int t = lane % 4;
  uint32_t w[Tile::kPrefetch][2][2][4];  // [unit][64 columns][row g, g + 8][16 bytes]
  // Rows past n repeat the last row and are not stored. Columns past k repeat the last 16 columns and are multiplied by
  // zero tokens.
  const int8_t* rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) rows[i] = b + static_cast<long long>(min(row0 + lane / 4 + 8 * i, n - 1)) * ldb;
  const int last_column = (k - 1) / 16 * 16;
  const auto load = [&](uint32_t(&unit)[2][2][4], int u) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int column = min(128 * (range.first + u) + 64 * p + 16 * t, last_column);
#pragma unroll
      for (int i = 0; i < 2; ++i) load_stream_16(unit[p][i], rows[i] + column);
    }
  };
#pragma unroll
  for (int s = 0; s < Tile::kPrefetch; ++s) {
    if (s < range.count) load(w[s], s);
  }

  uint32_t a[2][kSteps][4] = {};  // 64 columns are multiplied while the next 64 are converted
  // Products in flight read the registers of their first operand. A use of the operand after the wait for these
  // products keeps the compiler from giving the registers to other values earlier.
  const auto keep = [&](uint32_t(&part)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) pin(part[i]);
  };
  const uint32_t empty = Tile::kShare > 1
                             ? map_to_rank(base + Tile::kEmpty, rank / Tile::kShare * Tile::kShare + lane % Tile::kShare)
                             : base + Tile::kEmpty;
  const auto release = [&](int stage) {
    if constexpr (Tile::kShare > 1) {
      barrier_arrive_cluster(empty + 8 * stage);
    } else {
      barrier_arrive(empty + 8 * stage);
    }
  };
  int stage = 0, parity = 0, previous = -1;
#pragma unroll 1
  for (int u0 = 0; u0 < range.count; u0 += Tile::kPrefetch) {
#pragma unroll
    for (int s = 0; s < Tile::kPrefetch; ++s) {
      const int u = u0 + s;
      if (s > 0 && u >= range.count) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          Float16<T>::from_int8(w[s][half][0][i], a[half][i][0], a[half][i][2]);
          Float16<T>::from_int8(w[s][half][1][i], a[half][i][1], a[half][i][3]);
        }
        if (half == 1 && u + Tile::kPrefetch < range.count) load(w[s], u + Tile::kPrefetch);
        wait_phase<Tile>(base + Tile::kFull + 8 * stage, parity);
        const uint32_t staged = __shfl_sync(0xffffffffu, base + stage * Tile::kStageBytes, 0);
        const unsigned long long tokens = wgmma_descriptor(staged);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) Product::issue(sum, a[half][i], tokens + i * kWgmmaStep, 1);
        wgmma_commit();
        wgmma_wait<1>();  // the 64 columns before
        keep(a[half ^ 1]);
        if (previous >= 0 && lane < Tile::kShare) release(previous);
        previous = stage;
        if (++stage == Tile::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  }
  wgmma_wait<0>();
  keep(a[1]);
#pragma unroll
  for (int i = 0; i < Tile::kTokens / 2; ++i) pin(sum[i]);  // no sum is read before the wait
}

// Loads the sums at `shared`, added over the CTAs of these rows in the order of their parts of K.
template <class Tile>
__device__ __forceinline__ void load_parts_16(uint32_t (&w)[4], uint32_t shared, int sub) {
  if constexpr (Tile::kSplits == 1) {
    load_shared_16(w, shared);
  } else {
    uint32_t part[Tile::kSplits][4];
#pragma unroll
    for (int i = 0; i < Tile::kSplits; ++i) load_cluster_16(part[i], shared, i * Tile::kShare + sub);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float sum = __uint_as_float(part[0][j]);
#pragma unroll
      for (int i = 1; i < Tile::kSplits; ++i) sum += __uint_as_float(part[i][j]);
      w[j] = __float_as_uint(sum);
    }
  }
}

// The kernel. The grid has a cluster for every kRows rows of B and kTokens tokens, rows first.
template <class Tile, class T, class E, int kAlign>
__device__ __forceinline__ void w8a16_wgmma(const T* a, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                            int lda, int ldb, int ldd, typename E::Args args) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % Tile::kCtas;
  const int cluster = static_cast<int>(blockIdx.x) / Tile::kCtas;
  const int row_tiles = (n + Tile::kShare * Tile::kRows - 1) / (Tile::kShare * Tile::kRows);
  const int col0 = (cluster % row_tiles * Tile::kShare + rank % Tile::kShare) * Tile::kRows;
  const int token0 = cluster / row_tiles * Tile::kTokens;
  const UnitRange<Tile> range(k, rank / Tile::kShare);
  const uint32_t base = shared_address(shared);
  float* const col_scale = reinterpret_cast<float*>(shared + Tile::kColScale);
  float* const bias = reinterpret_cast<float*>(shared + Tile::kBias);
  launch_dependents();
  if (threadIdx.x == Tile::kThreads) {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(base + Tile::kFull + 8 * i, Tile::kShare);
      barrier_init(base + Tile::kEmpty + 8 * i, Tile::kWarps * Tile::kShare);
    }
    barrier_init_fence();
  }
  if constexpr (Tile::kShare > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  if (warp >= Tile::kWarps) {
    if constexpr (Tile::kFeedRegisters > 0) give_registers<Tile::kFeedRegisters>();
    wait_for_dependencies();
    feed_tokens<Tile>(a, token0, m, k, lda, range, base, warp - Tile::kWarps, rank);
    for (int i = threadIdx.x - Tile::kThreads; i < Tile::kRows; i += 32 * Tile::kFeeders) {
      const typename E::Column column = E::column(args, col0 + i, n);
      col_scale[i] = column.scale;
      bias[i] = column.bias;
    }
    if constexpr (Tile::kSplits > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  } else {
    if constexpr (Tile::kRegisters > 0) take_registers<Tile::kRegisters>();
    float sum[Tile::kTokens / 2] = {};
    multiply_units<Tile, T>(sum, b, col0 + 16 * warp, n, k, ldb, range, base, rank);
    wait_for_dependencies();
    named_barrier_sync<Tile::kThreads>(1);  // the stages have been read
    const int row0 = 16 * warp + lane / 4;
#pragma unroll
    for (int j = 0; j < Tile::kTokens / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = 8 * j + 2 * (lane % 4) + e;
        const uint32_t at = base + 4 * (token * Tile::kPitch + row0);
        store_shared_4(at, bits(sum[4 * j + e]));
        store_shared_4(at + 32, bits(sum[4 * j + 2 + e]));
      }
    }
    if constexpr (Tile::kSplits > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
    args.col_scale_per_channel = col_scale;
    args.bias = bias;
    constexpr int kQuads = Tile::kRows / 4;
    const int tokens = min(Tile::kTokens, m - token0);
    const int share = (tokens * kQuads + Tile::kSplits - 1) / Tile::kSplits;
    const int part = rank / Tile::kShare;
    const int end = min((part + 1) * share, tokens * kQuads);
#pragma unroll 2
    for (int i = part * share + threadIdx.x; i < end; i += Tile::kThreads) {
      const int token = i / kQuads;
      const int row = i % kQuads * 4;
      if (col0 + row >= n) continue;
      uint32_t sums[4];
      load_parts_16<Tile>(sums, base + 4 * (token * Tile::kPitch + row), rank % Tile::kShare);
      finish_quad<E, kAlign, float>(sums, token0 + token, row, col0, d, m, n, ldd, args);
    }
  }
  if constexpr (Tile::kCtas > 1) {
    // No CTA exits while other CTAs read its sums or arrive at its barriers.
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace qcut
