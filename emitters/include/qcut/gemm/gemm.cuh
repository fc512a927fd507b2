// The skeleton of the raw GEMMs: tiles in shared memory, a cp.async pipeline, one main loop.
//
// D = epilogue(A B^T) with A [m, k], B [n, k] and row-major D [m, n]. For a column-major D the emitter swaps A and B,
// m and n, and sets kSwapped. Each operand is contiguous along K or along its rows' index. A CTA computes a tile of D;
// with kSplits > 1, the CTAs of a cluster divide the tile's K. A kernel supplies a Core: the layout of operands in
// shared memory, and how a warp reads and multiplies its fragments of kStepK columns of K.
//
// Exactness: integer sums are exact; float sums are added in an order that the tile and K fix.
//
// Source: PTX ISA "cp.async"; the order of barrier, copy and product follows the multistage main loop
// described in the CUTLASS documentation (efficient_gemm.md, "software pipelining").
#pragma once

#include <qcut/core/epilogue.cuh>

namespace qcut {

// The token at a place of a staging buffer, in which the even tokens of each eight come before the odd ones.
__device__ __forceinline__ int staged_token(int staged) {
  return 2 * (staged % 4) + staged / 4 % 2 + staged / 8 * 8;
}

// Stages the accumulators of sixteen tokens, which are transposed, [row tile][8 tokens][4]: lane (g, t) holds channels
// g and g + 8 of tokens 2t and 2t + 1. Tokens 0, 2, 4 and 6 become neighbours, so that a warp's 4-byte stores to 8
// channels of these tokens go to different banks.
template <class Stage, class Acc, int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void stage_transposed(const Acc (&acc)[kRowTiles][kTokenTiles][4], int group,
                                                 uint32_t shared) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int mine = Stage::offset(t + 4 * odd, g / 4) + 4 * (g % 4);
      const uint32_t row = shared + Stage::offset(8 * i, 0);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        const Acc(&c)[4] = acc[j][2 * group + i];
        store_shared_4(row + (mine ^ Stage::offset(0, 4 * j)), bits(c[odd]));
        store_shared_4(row + (mine ^ Stage::offset(0, 4 * j + 2)), bits(c[odd + 2]));
      }
    }
  }
}

constexpr int kGroupM = 8;

// The CTA tile, the warp tile, the depth of the pipeline, and the CTAs of a cluster that share K. Sizes in elements.
template <int kBlockM_, int kBlockN_, int kBlockK_, int kWarpM_, int kWarpN_, int kStages_, int kSplits_>
struct Tile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_;
  static constexpr int kWarpM = kWarpM_, kWarpN = kWarpN_, kStages = kStages_, kSplits = kSplits_;
  static constexpr int kWarpsN = kBlockN / kWarpN;
  static constexpr int kWarps = (kBlockM / kWarpM) * kWarpsN;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kBlockM % kWarpM == 0 && kBlockN % kWarpN == 0, "whole warps");
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kBlockK % 64 == 0 && kStages >= 2, "see emitters/gemm/mma.py");
};

enum class Major { kK, kRows };

// An operand in global memory: its element type, the dimension along which its runs are contiguous, and the
// alignment of their addresses and lengths in bytes. With an alignment of 16, 8 or 4, runs are copied in pieces of
// as many bytes; otherwise element by element. If only one operand is zero past K, the runs of the other operand
// must be readable up to a multiple of a piece.
template <class Element_, Major kMajor_, int kAlign_>
struct Operand {
  using Element = Element_;
  static constexpr Major kMajor = kMajor_;
  static constexpr int kAlign = kAlign_;
};

// The tile of D of a block. kGroupM tiles of M by all tiles of N make a group, in which M runs fastest: CTAs that
// run at the same time then share few rows of A and few of B in the L2.
__device__ __forceinline__ int2 tile_of_block(int block, int tiles_m, int tiles_n) {
  const int group = block / (kGroupM * tiles_n);
  const int first = group * kGroupM;
  const int height = min(kGroupM, tiles_m - first);
  const int inside = block - group * kGroupM * tiles_n;
  return make_int2(first + inside % height, inside / height);
}

// Whether this block has a tile of D: a grid that was made for a bound of m has blocks without one. All CTAs of a
// cluster agree.
template <class Tile>
__device__ __forceinline__ bool has_tile(int m, int n) {
  const int tiles_m = (m + Tile::kBlockM - 1) / Tile::kBlockM;
  const int tiles_n = (n + Tile::kBlockN - 1) / Tile::kBlockN;
  return static_cast<int>(blockIdx.x) < tiles_m * tiles_n * Tile::kSplits;
}

// A layout gives the place of chunk c (16 bytes) of run r of a tile in shared memory, the chunk that a thread
// copies first, and the run of global memory that becomes run r. Threads copy kRowStep runs at a time, and
// offsets repeat with them: offset(r + i * kRowStep, c) is offset(r, c) + offset(i * kRowStep, 0).

// Neighbouring threads copy neighbouring chunks of a run.
template <int kChunks>
struct RowMajorThreads {
  static constexpr int kPeriod = 1;
  static __device__ __forceinline__ int run(int thread) { return thread / kChunks; }
  static __device__ __forceinline__ int chunk(int thread) { return thread % kChunks; }
  static __host__ __device__ constexpr int source(int run) { return run; }
  static __host__ __device__ constexpr int bytes(int runs) { return 16 * kChunks * runs; }
};

// A layout for ldmatrix, which reads the same chunk of 8 runs: these chunks lie in 8 different bank groups. Where
// several short runs share 128 bytes, the upper bits of the run's number choose the bank group.
template <int kChunks>
struct MatrixSwizzle : RowMajorThreads<kChunks> {
  static constexpr int kPeriod = 8;
  static __host__ __device__ constexpr int offset(int run, int chunk) {
    return 16 * (run * kChunks + (chunk ^ (kChunks >= 8 ? run & 7 : (run & 7) * kChunks / 8)));
  }
};

// The copies of one operand's tiles of kRuns runs of kChunks chunks. Elements past the operand become zero.
template <class Op, int kRuns, int kChunks, class Layout, int kThreads>
struct TileCopy {
  using T = typename Op::Element;
  static constexpr int kSize = sizeof(T);
  static constexpr int kTotal = kRuns * kChunks;
  static constexpr int kSteps = (kTotal + kThreads - 1) / kThreads;
  static constexpr int kRowStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRowStep % Layout::kPeriod == 0, "a thread keeps its chunk and its place");

  const char* source;
  int ld, runs_left, bytes_left;
  uint32_t offset;

  // Starts at row first_row of `rows` rows and at column first_k of k columns.
  __device__ __forceinline__ TileCopy(const T* base, int first_row, int rows, int ld, int first_k, int k) : ld(ld) {
    const int place = Layout::run(threadIdx.x);
    const int chunk = Layout::chunk(threadIdx.x);
    const bool by_k = Op::kMajor == Major::kK;
    const int first_run = (by_k ? first_row : first_k) + Layout::source(place);
    const int first = (by_k ? first_k : first_row) * kSize + 16 * chunk;
    runs_left = (by_k ? rows : k) - first_run;
    bytes_left = (by_k ? k : rows) * kSize - first;
    source = reinterpret_cast<const char*>(base + static_cast<long long>(first_run) * ld) + first;
    offset = Layout::offset(place, chunk);
  }

  // Copies the tile and moves on to the next tile along K.
  __device__ __forceinline__ void load(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (kTotal % kThreads != 0 && static_cast<int>(threadIdx.x) + i * kThreads >= kTotal) break;
      const int run = Layout::source(i * kRowStep);
      copy_chunk(stage + offset + Layout::offset(i * kRowStep, 0), source + static_cast<long long>(ld) * (run * kSize),
                 run < runs_left);
    }
    if constexpr (Op::kMajor == Major::kK) {
      source += 16 * kChunks;
      bytes_left -= 16 * kChunks;
    } else {
      source += static_cast<long long>(ld) * (kRuns * kSize);
      runs_left -= kRuns;
    }
  }

  __device__ __forceinline__ void copy_chunk(uint32_t to, const char* from, bool inside) const {
    if constexpr (Op::kAlign >= 4) {
#pragma unroll
      for (int i = 0; i < 16; i += Op::kAlign) copy_async<Op::kAlign>(to + i, from + i, !inside || i >= bytes_left);
    } else {
      using E = typename Either<sizeof(T) == 1, int8_t, T>::Type;  // any bytes are copied as int8
      Vector<E> v{};
#pragma unroll
      for (int j = 0; j < Vector<E>::kSize; ++j) {
        if (inside && j * kSize < bytes_left) v.set(j, reinterpret_cast<const E*>(from)[j]);
      }
      store_shared_16(to, v.w);
    }
  }
};

// Multiplies a part of K, from the positions of the copies on. No copy is in flight afterwards.
template <class Core>
__device__ __forceinline__ void multiply_tiles(typename Core::Accumulators& acc, typename Core::CopyA copy_a,
                                               typename Core::CopyB copy_b, uint32_t base, int k_tiles) {
  using T = typename Core::Tile;
  constexpr int kSteps = T::kBlockK / Core::kStepK;
  static_assert(kSteps % 2 == 0, "fragments alternate between two buffers");
  constexpr uint32_t kStageBytes = Core::kABytes + Core::kBBytes;
  const uint32_t end = base + T::kStages * kStageBytes;
  const auto next = [&](uint32_t stage) { return stage + kStageBytes == end ? base : stage + kStageBytes; };

  // A group is committed for every tile, also for the empty ones past the end, so that the number of
  // groups in flight tells which tile has arrived, for any number of tiles.
  uint32_t empty = base;
  int to_fetch = k_tiles;
  const auto fetch = [&] {
    if (to_fetch > 0) {
      copy_a.load(empty);
      copy_b.load(empty + Core::kABytes);
      empty = next(empty);
      --to_fetch;
    }
    copy_async_commit();
  };
#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) fetch();

  const int warp = threadIdx.x / 32;
  const Core core((warp / T::kWarpsN) * T::kWarpM, (warp % T::kWarpsN) * T::kWarpN);
  typename Core::Fragments fragments[2];
  copy_async_wait<T::kStages - 2>();
  __syncthreads();
  core.load(fragments[0], base, base + Core::kABytes, 0);
  uint32_t full = base;
  for (; k_tiles > 0; --k_tiles) {
    core.load(fragments[1], full, full + Core::kABytes, 1);
    fetch();
    core.multiply(acc, fragments[0]);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
      if (step == kSteps - 1) {
        // All but the newest kStages - 2 groups are complete: the next tile has arrived. The barrier makes every
        // thread's part of this tile visible, and ends all reads of the current stage, which the next fetch
        // overwrites.
        copy_async_wait<T::kStages - 2>();
        __syncthreads();
        full = next(full);
      }
      core.load(fragments[(step + 1) % 2], full, full + Core::kABytes, (step + 1) % kSteps);
      core.multiply(acc, fragments[step % 2]);
    }
  }
  copy_async_wait<0>();
  __syncthreads();
}

// The kernel. kAlignD is the alignment of D's runs in bytes, kAlign of TileWriter.
template <class Core, class E, int kAlignD, bool kSwapped>
__device__ __forceinline__ void gemm(const typename Core::A* a, const typename Core::B* b, typename E::Out* d, int m,
                                     int n, int k, int lda, int ldb, int ldd, const typename E::Args& args) {
  using T = typename Core::Tile;
  using Stage = typename Core::template Stage<typename E::Out>;
  constexpr int kGroups = T::kWarpM / 16;
  extern __shared__ __align__(128) char shared[];
  launch_dependents();
  wait_for_dependencies();

  const int tiles_m = (m + T::kBlockM - 1) / T::kBlockM;
  const int tiles_n = (n + T::kBlockN - 1) / T::kBlockN;
  const int2 tile = tile_of_block(blockIdx.x / T::kSplits, tiles_m, tiles_n);
  const int m0 = tile.x * T::kBlockM;
  const int n0 = tile.y * T::kBlockN;
  // Each CTA of a cluster has whole tiles of K, in the order of ranks; the last CTAs may have fewer tiles, or none.
  const int rank = blockIdx.x % T::kSplits;
  const int k_tiles = (k + T::kBlockK - 1) / T::kBlockK;
  const int part = (k_tiles + T::kSplits - 1) / T::kSplits;
  const int first = min(rank * part, k_tiles);
  const uint32_t base = shared_address(shared);
  typename Core::Accumulators acc;
  Core::clear(acc);
  if constexpr (E::kUnitScales) Core::begin(acc, args, n0 + threadIdx.x / 32 % T::kWarpsN * T::kWarpN, n, k);
  multiply_tiles<Core>(acc, typename Core::CopyA(a, m0, m, lda, first * T::kBlockK, k),
                       typename Core::CopyB(b, n0, n, ldb, first * T::kBlockK, k), base, min(part, k_tiles - first));
  if constexpr (E::kUnitScales) Core::add_unit(acc);

  // The epilogue reuses the operands' memory.
  const int warp = threadIdx.x / 32;
  const int row0 = m0 + (warp / T::kWarpsN) * T::kWarpM;
  const int col0 = n0 + (warp % T::kWarpsN) * T::kWarpN;
  using Writer = TileWriter<E, kAlignD, kSwapped, typename Core::Acc, T::kWarpN, Stage, T::kSplits>;
  const Writer writer(d, row0, col0, m, n, ldd, args, rank);
  const auto row_of = [](int staged) { return Core::row_of(staged); };
  typename Writer::Rows rows;
  if constexpr (T::kSplits == 1) {
    const uint32_t at = base + warp * Stage::kBytes;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      typename Writer::Sums sums;
      writer.fetch(rows, i, row_of);
      __syncwarp();  // the reads of the previous 16 rows are done
      Core::template stage<Stage>(acc, i, at);
      __syncwarp();
      writer.load(sums, at);
      writer.write(rows, sums);
    }
  } else {
    const uint32_t at = base + warp * kGroups * Stage::kBytes;
    typename Writer::Sums sums[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) Core::template stage<Stage>(acc, i, at + i * Stage::kBytes);
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) writer.load(sums[i], at + i * Stage::kBytes);
    // No CTA exits while other CTAs read its sums. The arrival comes before the stores to D, because an arrival waits
    // for earlier stores.
    cluster_arrive();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      writer.fetch(rows, i, row_of);
      writer.write(rows, sums[i]);
    }
    cluster_wait();
  }
}

}  // namespace qcut
