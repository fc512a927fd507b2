// W8A16 on wgmma (sm_90a): D = epilogue(A B^T) of 16-bit tokens A and int8 weights B in row-major order. Converted
// weights are the operand of wgmma that lies in registers.
//
// A warpgroup computes 64 rows of B, a CTA kGroups of them for kTokens tokens. The CTAs of a cluster (kSplits) divide K
// into contiguous parts. Weights go from global memory to registers, kPrefetch units of 128 columns ahead: lane
// 4g + t reads 16 bytes each of rows g and g + 8, columns 16t .. 16t + 15 of 64. The four lanes of a row then exchange
// pairs of columns, so that each has the elements of its fragment. One more warp copies tokens by a tensor
// map, which swizzles them as wgmma reads them and fills with zeros past m and k. A row of zeros takes longer than a
// copied one: the last tokens, if they do not fill a tile, come in small boxes by a map of their own, and boxes without
// a token are not copied: their old contents only reach the sums of tokens past m.
//
// Exactness: conversions and products are exact; the tensor core adds the products of a CTA's part of K in float32, and
// the CTAs of a cluster add each other's sums in the order of their ranks.
//
// Shared memory: the stages, later the sums in their place; barriers; the epilogue's vectors of rows of B.
//
// Source: PTX ISA "wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier", "barrier.cluster".
#pragma once

#include <qcut/core/barrier.cuh>
#include <qcut/core/int8_rows.cuh>
#include <qcut/core/quad.cuh>
#include <qcut/core/streaming.cuh>
#include <qcut/core/wgmma.cuh>

namespace qcut {

// A tensor map as the driver encodes it.
struct alignas(128) TensorMap {
  unsigned long long words[16];
};

// W8A16WgmmaTile in emitters/gemm/w8a16_wgmma.py describes the sizes.
template <int kTokens_, int kGroups_, int kSplits_, int kStages_, int kPrefetch_, int kCopyRegisters_, int kRegisters_>
struct W8A16WgmmaTile {
  static constexpr int kTokens = kTokens_, kGroups = kGroups_, kSplits = kSplits_;
  static constexpr int kCopyRegisters = kCopyRegisters_, kRegisters = kRegisters_;
  static constexpr int kStages = kStages_, kPrefetch = kPrefetch_;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kWarps = 4 * kGroups;  // that multiply
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStageBytes = 128 * kTokens;
  static constexpr int kBoxTokens = 32;  // of one copy, in a tile that is not whole
  static constexpr int kBoxBytes = 128 * kBoxTokens;
  static constexpr int kPitch = kRows + 4;  // words between the sums of two tokens, [token][row]
  static constexpr int kSumBytes = 4 * kTokens * kPitch;
  static constexpr int kFull = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kColScale = kEmpty + 8 * kStages;
  static constexpr int kBias = kColScale + 4 * kRows;
  static constexpr int kBytes = kBias + 4 * kRows;
};

// Copies a box of the tensor map, from column and row on, to shared memory. The barrier counts the bytes.
__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap& map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The part of K of a CTA: units of 128 columns.
template <class Tile>
struct UnitRange {
  int first, count;
  __device__ __forceinline__ UnitRange(int k, int rank) {
    const int units = (k + 127) / 128;
    const int part = (units + Tile::kSplits - 1) / Tile::kSplits;
    first = rank * part;
    count = max(0, min(part, units - first));
  }
};

// The work of the copying warp: tokens from token0 on, of m, columns `range`.
template <class Tile>
__device__ __forceinline__ void copy_tokens(const TensorMap& tiles, const TensorMap& parts, int token0, int m,
                                            const UnitRange<Tile>& range, uint32_t base) {
  const int lane = threadIdx.x % 32;
  const bool whole = m - token0 >= Tile::kTokens;
  const int boxes = whole ? 1 : (m - token0 + Tile::kBoxTokens - 1) / Tile::kBoxTokens;
  const int bytes = whole ? Tile::kStageBytes : boxes * Tile::kBoxBytes;
  const TensorMap& map = whole ? tiles : parts;
  const int token = token0 + lane * Tile::kBoxTokens;
  int stage = 0, parity = 1;
  for (int step = 0; step < 2 * range.count; ++step) {
    const uint32_t full = base + Tile::kFull + 8 * stage;
    barrier_wait(base + Tile::kEmpty + 8 * stage, parity);
    if (lane == 0) barrier_expect(full, bytes);
    __syncwarp();
    const uint32_t box = base + stage * Tile::kStageBytes + lane * Tile::kBoxBytes;
    if (lane < boxes) copy_box(box, map, 128 * range.first + 64 * step, token, full);
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// The work of the multiplying warpgroups: adds the products of the CTA's part of K to `sum`. With kUnitScales, `scales`
// are those of all units of the warp's rows: the products of a unit are then a sum of their own, which is multiplied by
// the unit's scale and added while the next unit's weights are converted.
template <class Tile, class T, bool kUnitScales, class B>
__device__ __forceinline__ void multiply_units(float (&sum)[Tile::kTokens / 2], const B* b, const float* scales, int row0,
                                               int n, int k, int ldb, const UnitRange<Tile>& range, uint32_t base) {
  using Product = Wgmma<T, Tile::kTokens>;
  constexpr int kSteps = 4;  // products of 64 columns
  const int lane = threadIdx.x % 32;
  const int t = lane % 4;
  uint32_t w[Tile::kPrefetch][2][2][4];  // [unit][64 columns][row g, g + 8][16 bytes]
  // Rows past n repeat the last row and are not stored. Columns past k repeat the last 16 columns and are multiplied by
  // zero tokens.
  const B* rows[2];
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
  float of_unit[Tile::kTokens / 2] = {};
  float scale = 0, next_scale = 0;
  if constexpr (kUnitScales) next_scale = range.count > 0 ? scales[range.first] : 0;
  const auto add_unit = [&] {
    wgmma_wait<0>();
    keep(a[1]);
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 2; ++i) {
      pin(of_unit[i]);  // not read before the wait
      sum[i] = fmaf(scale, of_unit[i], sum[i]);
      of_unit[i] = 0;  // with products that do not add, the compiler would wait for each
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
        exchange_columns(w[s][half][0]);
        exchange_columns(w[s][half][1]);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          from_bytes<T, B>(w[s][half][0][i], a[half][i][0], a[half][i][2]);
          from_bytes<T, B>(w[s][half][1][i], a[half][i][1], a[half][i][3]);
        }
        if (half == 1 && u + Tile::kPrefetch < range.count) load(w[s], u + Tile::kPrefetch);
        barrier_wait(base + Tile::kFull + 8 * stage, parity);
        const uint32_t staged = __shfl_sync(0xffffffffu, base + stage * Tile::kStageBytes, 0);
        const unsigned long long tokens = wgmma_descriptor(staged);
        if constexpr (kUnitScales) {
          if (half == 0) {
            add_unit();
            scale = next_scale;
            if (u + 1 < range.count) next_scale = scales[range.first + u + 1];
          }
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kSteps; ++i) Product::issue(of_unit, a[half][i], tokens + i * kWgmmaStep, 1);
        } else {
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kSteps; ++i) Product::issue(sum, a[half][i], tokens + i * kWgmmaStep, 1);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the 64 columns before
        keep(a[half ^ 1]);
        if (previous >= 0 && lane == 0) barrier_arrive(base + Tile::kEmpty + 8 * previous);
        previous = stage;
        if (++stage == Tile::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  }
  if constexpr (kUnitScales) {
    add_unit();
  } else {
    wgmma_wait<0>();
    keep(a[1]);
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 2; ++i) pin(sum[i]);  // no sum is read before the wait
  }
}

// The kernel. The grid has a cluster for every kRows rows of B and kTokens tokens, rows first.
template <class Tile, class T, class E, int kAlign, class B>
__device__ __forceinline__ void w8a16_wgmma(const TensorMap& tiles, const TensorMap& parts, const B* b,
                                            typename E::Out* d, int m, int n, int k, int ldb, int ldd,
                                            typename E::Args args) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % Tile::kSplits;
  const int cluster = static_cast<int>(blockIdx.x) / Tile::kSplits;
  const int row_tiles = (n + Tile::kRows - 1) / Tile::kRows;
  const int col0 = cluster % row_tiles * Tile::kRows;
  const int token0 = cluster / row_tiles * Tile::kTokens;
  const UnitRange<Tile> range(k, rank);
  const uint32_t base = shared_address(shared);
  float* const col_scale = reinterpret_cast<float*>(shared + Tile::kColScale);
  float* const bias = reinterpret_cast<float*>(shared + Tile::kBias);
  launch_dependents();
  if (threadIdx.x == Tile::kThreads) {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(base + Tile::kFull + 8 * i, 1);
      barrier_init(base + Tile::kEmpty + 8 * i, Tile::kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= Tile::kWarps) {
    if constexpr (Tile::kCopyRegisters > 0) give_registers<Tile::kCopyRegisters>();
    wait_for_dependencies();
    if (warp == Tile::kWarps) copy_tokens<Tile>(tiles, parts, token0, m, range, base);
    for (int i = threadIdx.x - Tile::kThreads; i < Tile::kRows; i += 128) {
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
    const int units = (k + 127) / 128, last_rows = (n - 1) / 16;
    const float* const scales = args.col_scale_per_unit + min(col0 / 16 + warp, last_rows) * units;
    multiply_units<Tile, T, E::kUnitScales>(sum, b, scales, col0 + 16 * warp, n, k, ldb, range, base);
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
    const int end = min((rank + 1) * share, tokens * kQuads);
#pragma unroll 2
    for (int i = rank * share + threadIdx.x; i < end; i += Tile::kThreads) {
      const int token = i / kQuads;
      const int row = i % kQuads * 4;
      if (col0 + row >= n) continue;
      uint32_t sums[4];
      load_sum_16<float, Tile::kSplits>(sums, base + 4 * (token * Tile::kPitch + row));
      finish_quad<E, kAlign, float>(sums, token0 + token, row, col0, d, m, n, ldd, args);
    }
  }
  if constexpr (Tile::kSplits > 1) {
    // No CTA exits while other CTAs read its sums.
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace qcut
