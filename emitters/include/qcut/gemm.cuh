// The skeleton of the raw GEMMs: tiles in swizzled shared memory, a cp.async pipeline, one main loop.
//
// A kernel supplies a Core: how operands lie in shared memory, how a warp reads its fragments of
// kStepK columns of K and multiplies them. D = epilogue(A B^T), A [m, k], B [n, k], D [m, n], row-major.
// Each output element is summed by one thread in a fixed order: the result depends on nothing else.
//
// Source: PTX ISA "cp.async"; the order of barrier, copy and product follows the multistage main loop
// described in the CUTLASS documentation (efficient_gemm.md, "software pipelining").
#pragma once

#include <qcut/epilogue.cuh>

namespace qcut {

constexpr int kGroupM = 8;

// CTA tile, warp tile, depth of the pipeline. kBlockK counts elements of K.
template <int kBlockM_, int kBlockN_, int kBlockK_, int kWarpM_, int kWarpN_, int kStages_>
struct Tile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_;
  static constexpr int kWarpM = kWarpM_, kWarpN = kWarpN_, kStages = kStages_;
  static constexpr int kWarpsN = kBlockN / kWarpN;
  static constexpr int kWarps = (kBlockM / kWarpM) * kWarpsN;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kBlockM % kWarpM == 0 && kBlockN % kWarpN == 0, "whole warps");
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kBlockK % 64 == 0 && kStages >= 2, "see emitters/mma_gemm.py");
};

// kGroupM tiles of M and all of N make a group, walked with M fastest: the CTAs that run together
// share few rows of A and few of B in the L2.
__device__ __forceinline__ int2 tile_of_block(int block, int tiles_m, int tiles_n) {
  const int group = block / (kGroupM * tiles_n);
  const int first = group * kGroupM;
  const int height = min(kGroupM, tiles_m - first);
  const int inside = block - group * kGroupM * tiles_n;
  return make_int2(first + inside % height, inside / height);
}

// The 8 rows of an ldmatrix read the same chunk: spread them over all 8 bank groups. Two rows of 4
// chunks share 128 bytes, so there the row's upper bits decide.
template <int kChunks>
struct MatrixSwizzle {
  static constexpr int kPeriod = 8;  // rows after which the pattern repeats
  static_assert(kChunks == 4 || kChunks == 8, "rows of 64 or 128 bytes");
  static __device__ __forceinline__ int apply(int row, int chunk) {
    return kChunks == 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
  }
};

// Copies one operand's tile, kRows rows of kChunks 16-byte chunks, chunk c of row r to chunk
// `Swizzle::apply(r, c)` of that row. Rows past `rows` and bytes past `row_bytes` become zero.
// kAsync needs rows at multiples of 16 bytes; else T elements are loaded one by one.
template <class T, int kRows, int kChunks, class Swizzle, int kThreads, bool kAsync>
struct TileCopy {
  static constexpr int kTotal = kRows * kChunks;
  static constexpr int kSteps = (kTotal + kThreads - 1) / kThreads;
  static constexpr int kRowStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRowStep % Swizzle::kPeriod == 0, "a thread keeps its chunk and its swizzle");

  const char* source;
  int ld, rows_left, bytes_left;
  uint32_t offset;

  __device__ __forceinline__ TileCopy(const T* base, int first_row, int rows, int ld, int k) : ld(ld) {
    const int row = threadIdx.x / kChunks;
    const int chunk = threadIdx.x % kChunks;
    rows_left = rows - first_row - row;
    bytes_left = k * static_cast<int>(sizeof(T)) - 16 * chunk;
    source = reinterpret_cast<const char*>(base + static_cast<long long>(first_row + row) * ld) + 16 * chunk;
    offset = 16 * (row * kChunks + Swizzle::apply(row, chunk));
  }

  __device__ __forceinline__ void load(uint32_t stage, int k_tile) const {
    const int k_byte = k_tile * 16 * kChunks;
    const int bytes = max(0, min(16, bytes_left - k_byte));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (kTotal % kThreads != 0 && static_cast<int>(threadIdx.x) + i * kThreads >= kTotal) break;
      const int valid = i * kRowStep < rows_left ? bytes : 0;
      const char* from = source + static_cast<long long>(ld) * (i * kRowStep * static_cast<int>(sizeof(T))) + k_byte;
      const uint32_t to = stage + offset + 16 * i * kThreads;
      if constexpr (kAsync) {
        copy_async_16(to, from, valid);
      } else {
        Vector<T> v{};
#pragma unroll
        for (int j = 0; j < Vector<T>::kSize; ++j) {
          if (j * static_cast<int>(sizeof(T)) < valid) v.set(j, reinterpret_cast<const T*>(from)[j]);
        }
        store_shared_16(to, v.w);
      }
    }
  }
};

template <class Core, class E, bool kVectorD>
__device__ __forceinline__ void gemm(const typename Core::A* a, const typename Core::B* b, typename E::Out* d, int m,
                                     int n, int k, int lda, int ldb, int ldd, const typename E::Args& args) {
  using T = typename Core::Tile;
  extern __shared__ __align__(128) char shared[];
  constexpr int kSteps = T::kBlockK / Core::kStepK;
  static_assert(kSteps % 2 == 0, "fragments alternate between two buffers");
  constexpr int kStageBytes = Core::kABytes + Core::kBBytes;
  launch_dependents();
  wait_for_dependencies();

  const int tiles_m = (m + T::kBlockM - 1) / T::kBlockM;
  const int tiles_n = (n + T::kBlockN - 1) / T::kBlockN;
  const int2 tile = tile_of_block(blockIdx.x, tiles_m, tiles_n);
  const int m0 = tile.x * T::kBlockM;
  const int n0 = tile.y * T::kBlockN;
  const int k_tiles = (k + T::kBlockK - 1) / T::kBlockK;
  const uint32_t base = shared_address(shared);

  const typename Core::CopyA copy_a(a, m0, m, lda, k);
  const typename Core::CopyB copy_b(b, n0, n, ldb, k);
  // A group is committed for every tile, also for the empty ones past the end: so the count of
  // groups in flight says which tile has arrived, for any number of tiles.
  const auto fetch = [&](int k_tile) {
    if (k_tile < k_tiles) {
      const uint32_t stage = base + (k_tile % T::kStages) * kStageBytes;
      copy_a.load(stage, k_tile);
      copy_b.load(stage + Core::kABytes, k_tile);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) fetch(s);

  const int warp = threadIdx.x / 32;
  const int warp_m = (warp / T::kWarpsN) * T::kWarpM;
  const int warp_n = (warp % T::kWarpsN) * T::kWarpN;
  const Core core(warp_m, warp_n);
  typename Core::Accumulators acc = {};
  typename Core::Fragments fragments[2];

  copy_async_wait<T::kStages - 2>();
  __syncthreads();
  core.load(fragments[0], base, base + Core::kABytes, 0);
  uint32_t stage = base;
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps - 1) {
        // The next tile is the newest but kStages - 2. The barrier makes every thread's part of it
        // visible, and ends all reads of this tile's stage, which the next fetch overwrites.
        copy_async_wait<T::kStages - 2>();
        __syncthreads();
        stage = base + ((k_tile + 1) % T::kStages) * kStageBytes;
      }
      core.load(fragments[(step + 1) % 2], stage, stage + Core::kABytes, (step + 1) % kSteps);
      if (step == 0) fetch(k_tile + T::kStages - 1);
      core.multiply(acc, fragments[step % 2]);
    }
  }

  // The epilogue reuses the operands' memory: nothing may be in flight or unread.
  copy_async_wait<0>();
  __syncthreads();
  const auto stage_rows = [&](int group, uint32_t at) { Core::stage(acc, group, at); };
  write_tile<E, kVectorD, typename Core::Acc, T::kWarpM / 16, T::kWarpN, Core::kPitch>(
      stage_rows, base + warp * (16 * Core::kPitch * 4), m0 + warp_m, n0 + warp_n, m, n, ldd, d, args);
}

}  // namespace qcut
