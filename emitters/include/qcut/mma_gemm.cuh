// int8 x int8 -> int32 GEMM on mma.sync.m16n8k32, any m, n and k.
//
// Source: PTX ISA "ldmatrix" and "Matrix Fragments for mma.m16n8k32"; schemes.md sections 1 and 2.
#pragma once

#include <qcut/gemm.cuh>

namespace qcut {

template <class TileType, bool kAligned>
struct CoreS8 {
  using Tile = TileType;
  using A = int8_t;
  using B = int8_t;
  using Acc = int;
  static constexpr int kMTiles = Tile::kWarpM / 16;  // products of 16 rows of A by 8 of B
  static constexpr int kNTiles = Tile::kWarpN / 8;
  using Accumulators = int[kMTiles][kNTiles][4];
  static constexpr int kStepK = 32;
  static constexpr int kChunks = Tile::kBlockK / 16;
  static constexpr int kABytes = Tile::kBlockM * Tile::kBlockK;
  static constexpr int kBBytes = Tile::kBlockN * Tile::kBlockK;
  using Swizzle = MatrixSwizzle<kChunks>;
  using CopyA = TileCopy<A, Tile::kBlockM, kChunks, Swizzle, Tile::kThreads, kAligned>;
  using CopyB = TileCopy<B, Tile::kBlockN, kChunks, Swizzle, Tile::kThreads, kAligned>;

  struct Fragments {
    uint32_t a[kMTiles][4];
    uint32_t b[kNTiles / 2][4];  // two 8-column tiles: b0, b1 of the first, b0, b1 of the second
  };

  // Addresses of this lane's rows at step 0. A step moves two chunks, an XOR of its own bits, because
  // the swizzle is an XOR too and stages start at multiples of the row.
  uint32_t a_offset, b_offset;

  __device__ __forceinline__ CoreS8(int warp_m, int warp_n) {
    const int lane = threadIdx.x % 32;
    const int a_row = warp_m + lane % 16;
    const int b_row = warp_n + lane % 8 + 8 * (lane / 16);
    a_offset = 16 * (a_row * kChunks + Swizzle::apply(a_row, lane / 16));
    b_offset = 16 * (b_row * kChunks + Swizzle::apply(b_row, lane / 8 % 2));
  }

  __device__ __forceinline__ void load(Fragments& f, uint32_t a_stage, uint32_t b_stage, int step) const {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
      load_matrices(f.a[i], a_stage + (a_offset ^ (32 * step)) + i * 16 * Tile::kBlockK);
    }
#pragma unroll
    for (int j = 0; j < kNTiles / 2; ++j) {
      load_matrices(f.b[j], b_stage + (b_offset ^ (32 * step)) + j * 16 * Tile::kBlockK);
    }
  }

  static __device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& f) {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
        mma_s8(acc[i][j], f.a[i], f.b[j / 2][2 * (j % 2)], f.b[j / 2][2 * (j % 2) + 1]);
      }
    }
  }

  // Rows 16 * group .. + 15 of the warp's tile, kPitch words apart. Half a warp stores 8 bytes to each
  // of 4 rows: 8 words more than a multiple of 32 bring them to different banks.
  static constexpr int kPitch = Tile::kWarpN + 8;
  static __device__ __forceinline__ void stage(const Accumulators& acc, int group, uint32_t shared) {
    const int lane = threadIdx.x % 32;
    const uint32_t at = shared + 4 * ((lane / 4) * kPitch + 2 * (lane % 4));
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      store_shared_8(at + 32 * j, bits(acc[group][j][0]), bits(acc[group][j][1]));
      store_shared_8(at + 32 * j + 32 * kPitch, bits(acc[group][j][2]), bits(acc[group][j][3]));
    }
  }
};

// kAligned promises rows of A and B that start at multiples of 16 bytes.
template <class TileType, class E, bool kAligned, bool kVectorD>
__device__ __forceinline__ void mma_gemm(const int8_t* a, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                         int lda, int ldb, int ldd, const typename E::Args& args) {
  gemm<CoreS8<TileType, kAligned>, E, kVectorD>(a, b, d, m, n, k, lda, ldb, ldd, args);
}

}  // namespace qcut
