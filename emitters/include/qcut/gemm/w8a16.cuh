// W8A16: D = epilogue(A B^T) of float16 or bfloat16 tokens A and int8 or e4m3 weights B with float32 sums, on the skeleton of
// gemm.cuh; any m, n and k.
//
// Weights stay bytes in global and shared memory and are converted to T in registers. Weights are the
// product's first operand (16 rows of N) and tokens the second (8 rows of M), so that one load or one
// conversion yields a fragment's registers. An ldmatrix of int8 gives lane t of a row the columns 4t..4t+3
// of 16, whereas the instruction places columns 2t, 2t+1, 8+2t and 9+2t there. A sum over K does not depend on
// the places of its columns if both operands agree: tokens are read by 8-byte loads of columns 4t..4t+3, too,
// and no byte moves between lanes.
//
// Exactness: conversions and products are exact; the tensor core adds products in float32 in a fixed order.
//
// Source: PTX ISA "ldmatrix" and "Matrix Fragments for mma.m16n8k16"; schemes.md section 3.
#pragma once

#include <qcut/gemm/gemm.cuh>

namespace qcut {

// The layout of tokens. Sixteen lanes of an 8-byte read cover 2 chunks of four rows; the rows lie in different
// quarters of the 128 bytes that one access serves.
template <int kChunks>
struct TokenSwizzle : RowMajorThreads<kChunks> {
  static constexpr int kPeriod = 4;
  static_assert(kChunks == 8 || kChunks == 16, "rows of 128 or 256 bytes");
  static __host__ __device__ constexpr int offset(int row, int chunk) {
    return 16 * (row * kChunks + (chunk ^ ((row & 3) << 1)));
  }
};

template <class TileType, class OpA, class OpB>
struct CoreW8A16 {
  using Tile = TileType;
  using A = typename OpA::Element;
  using B = typename OpB::Element;
  using Acc = float;
  static constexpr int kStepK = 16;
  static constexpr int kAChunks = Tile::kBlockK / 8;
  static constexpr int kBChunks = Tile::kBlockK / 16;
  static constexpr int kABytes = 2 * Tile::kBlockM * Tile::kBlockK;
  static constexpr int kBBytes = Tile::kBlockN * Tile::kBlockK;
  static constexpr int kMTiles = Tile::kWarpM / 8;
  static constexpr int kNTiles = Tile::kWarpN / 16;
  static constexpr int kMatrices = kNTiles == 1 ? 2 : 4;  // matrices of 8 weight rows per ldmatrix
  using Accumulators = float[kNTiles][kMTiles][4];
  using WeightSwizzle = MatrixSwizzle<kBChunks>;
  using TokenLayout = TokenSwizzle<kAChunks>;
  using CopyA = TileCopy<OpA, Tile::kBlockM, kAChunks, TokenLayout, Tile::kThreads>;
  using CopyB = TileCopy<OpB, Tile::kBlockN, kBChunks, WeightSwizzle, Tile::kThreads>;
  template <class Out>
  using Stage = SwizzledStage<Out, Tile::kWarpN>;

  struct Fragments {
    uint32_t tokens[kMTiles][2];
    uint32_t weights[2 * kNTiles / kMatrices][kMatrices];  // still bytes
  };

  // The offsets of this lane's rows at step 0. As in FragmentS8, a step is an XOR of chunk bits.
  uint32_t a_offset, b_offset;

  static __device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < kNTiles * kMTiles * 4; ++i) acc[i / (4 * kMTiles)][i / 4 % kMTiles][i % 4] = 0.0f;
  }

  __device__ __forceinline__ CoreW8A16(int warp_m, int warp_n) {
    const int lane = threadIdx.x % 32;
    const int t = lane % 4;
    const int a_row = warp_m + lane / 4;
    const int b_row = warp_n + lane % (8 * kMatrices);
    a_offset = TokenLayout::offset(a_row, t / 2) + 8 * (t % 2);
    b_offset = WeightSwizzle::offset(b_row, 0);
  }

  __device__ __forceinline__ void load(Fragments& f, uint32_t a_stage, uint32_t b_stage, int step) const {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
      load_shared_8(f.tokens[i], a_stage + (a_offset ^ (32 * step)) + i * 16 * Tile::kBlockK);
    }
#pragma unroll
    for (int j = 0; j < 2 * kNTiles / kMatrices; ++j) {
      load_matrices(f.weights[j], b_stage + (b_offset ^ (16 * step)) + j * 8 * kMatrices * Tile::kBlockK);
    }
  }

  static __device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& f) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      uint32_t w[4];  // columns 4t, 4t+1 of rows g and g + 8, then columns 4t+2, 4t+3 of both
      from_bytes<A, B>(f.weights[2 * j / kMatrices][2 * j % kMatrices], w[0], w[2]);
      from_bytes<A, B>(f.weights[2 * j / kMatrices][2 * j % kMatrices + 1], w[1], w[3]);
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) Float16<A>::mma(acc[j][i], w, f.tokens[i]);
    }
  }

  static __device__ __forceinline__ int row_of(int staged) { return staged_token(staged); }

  template <class Stage>
  static __device__ __forceinline__ void stage(const Accumulators& acc, int group, uint32_t shared) {
    stage_transposed<Stage>(acc, group, shared);
  }
};

// The same with a scale for each unit of 16 rows and 128 columns: products of a unit are a sum of their own, which is
// multiplied by the unit's scale and added.
template <class TileType, class OpA, class OpB>
struct CoreScaledUnits : CoreW8A16<TileType, OpA, OpB> {
  using Base = CoreW8A16<TileType, OpA, OpB>;
  static constexpr int kUnitSteps = 128 / Base::kStepK;
  struct Accumulators {
    typename Base::Accumulators sum, of_unit;
    const float* scales[Base::kNTiles];  // of the next unit of each 16 rows
    int steps;
  };

  static __device__ __forceinline__ void clear(Accumulators& acc) {
    Base::clear(acc.sum);
    Base::clear(acc.of_unit);
    acc.steps = 0;
  }
  // Goes to the scales of the warp's rows, the first of which is a multiple of 16.
  template <class Args>
  static __device__ __forceinline__ void begin(Accumulators& acc, const Args& args, int row0, int n, int k) {
    const int units = (k + 127) / 128, last = (n - 1) / 16;
#pragma unroll
    for (int j = 0; j < Base::kNTiles; ++j) acc.scales[j] = args.col_scale_per_unit + min(row0 / 16 + j, last) * units;
  }
  static __device__ __forceinline__ void add_unit(Accumulators& acc) {
#pragma unroll
    for (int j = 0; j < Base::kNTiles; ++j) {
      const float scale = *acc.scales[j]++;
#pragma unroll
      for (int i = 0; i < 4 * Base::kMTiles; ++i) {
        acc.sum[j][i / 4][i % 4] = fmaf(scale, acc.of_unit[j][i / 4][i % 4], acc.sum[j][i / 4][i % 4]);
        acc.of_unit[j][i / 4][i % 4] = 0.0f;
      }
    }
    acc.steps = 0;
  }

  using Base::Base;
  static __device__ __forceinline__ void multiply(Accumulators& acc, const typename Base::Fragments& f) {
    if (acc.steps == kUnitSteps) add_unit(acc);
    Base::multiply(acc.of_unit, f);
    ++acc.steps;
  }
  template <class Stage>
  static __device__ __forceinline__ void stage(const Accumulators& acc, int group, uint32_t shared) {
    stage_transposed<Stage>(acc.sum, group, shared);
  }
};

template <class TileType, class OpA, class OpB, class E, int kAlignD, bool kSwapped>
__device__ __forceinline__ void w8a16_mma(const typename OpA::Element* a, const typename OpB::Element* b, typename E::Out* d,
                                                 int m, int n, int k, int lda, int ldb, int ldd,
                                                 const typename E::Args& args) {
  static_assert(!kSwapped, "tokens are the first operand");
  using Rows = CoreW8A16<TileType, OpA, OpB>;
  using Core = typename Either<E::kUnitScales, CoreScaledUnits<TileType, OpA, OpB>, Rows>::Type;
  gemm<Core, E, kAlignD, kSwapped>(a, b, d, m, n, k, lda, ldb, ldd, args);
}

}  // namespace qcut
