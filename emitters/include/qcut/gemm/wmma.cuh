// D = epilogue(A B^T) with int8 operands and int32 sums on wmma::mma_sync m16n16k16, on the skeleton of gemm.cuh; any
// m, n and k, every layout.
//
// CUDA C++'s own interface to the tensor core: the library loads and stores opaque fragments of 16 x 16 elements.
// The layout of operands in shared memory remains the kernel's choice.
//
// Exactness: integer sums are exact.
//
// Source: CUDA C++ Programming Guide, "Warp Matrix Functions"; schemes.md sections 1 and 2.
#pragma once

#include <mma.h>

#include <qcut/gemm/gemm.cuh>

namespace qcut {

namespace wmma = nvcuda::wmma;

// Runs one after the other. Loads conflict: the 8 runs of a fragment that are read together start in one or two bank
// groups.
template <int kChunks_>
struct LinearLayout : RowMajorThreads<kChunks_> {
  static constexpr int kChunks = kChunks_;
  static constexpr int kPitch = 16 * kChunks;  // bytes between the runs of a fragment
  static __host__ __device__ constexpr int offset(int run, int chunk) { return kPitch * run + 16 * chunk; }
};

// Runs one after the other, padded to an odd number of chunks, which brings 8 runs to 8 bank groups.
template <int kChunks_>
struct PaddedLayout : RowMajorThreads<kChunks_> {
  static constexpr int kChunks = kChunks_;
  static constexpr int kPitch = 16 * kChunks + 16;
  static __host__ __device__ constexpr int offset(int run, int chunk) { return kPitch * run + 16 * chunk; }
  static __host__ __device__ constexpr int bytes(int runs) { return kPitch * runs; }
};

// The 256 bytes of a fragment, 16 runs of one chunk, side by side. The layout has no padding, fragments start at
// multiples of 256 bytes, and their loads are free of bank conflicts. The copy has conflicts: the chunks of a run,
// which a line of global memory brings together, go to the same banks (docs/kernel-notes/tutorial.md).
template <int kChunks_>
struct BlockedLayout {
  static constexpr int kChunks = kChunks_;
  static constexpr int kPeriod = 8;
  static constexpr int kPitch = 16;
  static __device__ __forceinline__ int run(int thread) { return thread % 8 + thread / (8 * kChunks) * 8; }
  static __device__ __forceinline__ int chunk(int thread) { return thread / 8 % kChunks; }
  static __host__ __device__ constexpr int source(int run) { return run; }
  static __host__ __device__ constexpr int offset(int run, int chunk) {
    return 256 * (run / 16 * kChunks + chunk) + 16 * (run % 16);
  }
  static __host__ __device__ constexpr int bytes(int runs) { return 16 * kChunks * runs; }
};

// One operand of a warp. The library calls an operand row-major if A's runs lie along K, or if B's runs do not.
template <class Use, bool kRowMajor, class Op, int kRows, int kWarpRows, int kBlockK, int kThreads,
          template <int> class LayoutOf>
struct FragmentWmma {
  static constexpr bool kByK = Op::kMajor == Major::kK;
  static constexpr int kRuns = kByK ? kRows : kBlockK;
  using Layout = LayoutOf<(kByK ? kBlockK : kRows) / 16>;
  using Copy = TileCopy<Op, kRuns, Layout::kChunks, Layout, kThreads>;
  static constexpr int kBytes = Layout::bytes(kRuns);
  static constexpr int kCount = kWarpRows / 16;
  using Order = typename Either<kRowMajor, wmma::row_major, wmma::col_major>::Type;
  using Registers = wmma::fragment<Use, 16, 16, 16, signed char, Order>[kCount];

  // The offset in a stage of the warp's first fragment. The other fragments of a step lie relative to this one.
  static __device__ __forceinline__ uint32_t first(int warp_row) {
    return kByK ? Layout::offset(warp_row, 0) : Layout::offset(0, warp_row / 16);
  }

  static __device__ __forceinline__ void load(Registers& r, const signed char* at, int step) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int offset = kByK ? Layout::offset(16 * i, step) : Layout::offset(16 * step, i);
      wmma::load_matrix_sync(r[i], at + offset, Layout::kPitch);
    }
  }
};

template <class TileType, class OpA, class OpB, template <int> class LayoutOf>
struct CoreWmma {
  using Tile = TileType;
  using A = int8_t;
  using B = int8_t;
  using Acc = int;
  static constexpr bool kAByK = OpA::kMajor == Major::kK, kBByK = OpB::kMajor == Major::kK;
  using FragmentA = FragmentWmma<wmma::matrix_a, kAByK, OpA, Tile::kBlockM, Tile::kWarpM, Tile::kBlockK,
                                 Tile::kThreads, LayoutOf>;
  using FragmentB = FragmentWmma<wmma::matrix_b, !kBByK, OpB, Tile::kBlockN, Tile::kWarpN, Tile::kBlockK,
                                 Tile::kThreads, LayoutOf>;
  using CopyA = typename FragmentA::Copy;
  using CopyB = typename FragmentB::Copy;
  template <class Out>
  using Stage = PaddedStage<Tile::kWarpN>;
  static constexpr int kABytes = FragmentA::kBytes;
  static constexpr int kBBytes = FragmentB::kBytes;
  static constexpr int kStepK = 16;
  static constexpr int kMTiles = Tile::kWarpM / 16;
  static constexpr int kNTiles = Tile::kWarpN / 16;
  using Accumulators = wmma::fragment<wmma::accumulator, 16, 16, 16, int>[kMTiles][kNTiles];

  struct Fragments {
    typename FragmentA::Registers a;
    typename FragmentB::Registers b;
  };

  uint32_t a_offset, b_offset;

  __device__ __forceinline__ CoreWmma(int warp_m, int warp_n)
      : a_offset(FragmentA::first(warp_m)), b_offset(FragmentB::first(warp_n)) {}

  static __device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < kMTiles * kNTiles; ++i) wmma::fill_fragment(acc[i / kNTiles][i % kNTiles], 0);
  }

  __device__ __forceinline__ void load(Fragments& f, uint32_t a_stage, uint32_t b_stage, int step) const {
    FragmentA::load(f.a, shared_pointer<signed char>(a_stage + a_offset), step);
    FragmentB::load(f.b, shared_pointer<signed char>(b_stage + b_offset), step);
  }

  static __device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& f) {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) wmma::mma_sync(acc[i][j], f.a[i], f.b[j], acc[i][j]);
    }
  }

  static __device__ __forceinline__ int row_of(int staged) { return staged; }

  template <class Stage>
  static __device__ __forceinline__ void stage(const Accumulators& acc, int group, uint32_t shared) {
    int* rows = shared_pointer<int>(shared);
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      wmma::store_matrix_sync(rows + 16 * j, acc[group][j], Stage::kPitch, wmma::mem_row_major);
    }
  }

  // The library takes pointers. The compiler knows a pointer derived from the array to be one to shared memory.
  template <class T>
  static __device__ __forceinline__ T* shared_pointer(uint32_t address) {
    extern __shared__ __align__(128) char shared[];
    return reinterpret_cast<T*>(shared + (address - shared_address(shared)));
  }
};

template <template <int> class LayoutOf, class TileType, class OpA, class OpB, class E, int kAlignD, bool kSwapped>
__device__ __forceinline__ void wmma_gemm(const int8_t* a, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                          int lda, int ldb, int ldd, const typename E::Args& args) {
  gemm<CoreWmma<TileType, OpA, OpB, LayoutOf>, E, kAlignD, kSwapped>(a, b, d, m, n, k, lda, ldb, ldd, args);
}

}  // namespace qcut
