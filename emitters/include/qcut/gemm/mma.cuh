// D = epilogue(A B^T) with int8 operands and int32 sums on mma.sync.m16n8k32, on the skeleton of gemm.cuh; any m, n and
// k, every layout.
//
// Exactness: integer sums are exact.
// Source: PTX ISA "ldmatrix" and "Matrix Fragments for mma.m16n8k32"; schemes.md sections 1 and 2.
#pragma once

#include <qcut/gemm/gemm.cuh>

namespace qcut {

// The layout of a tile whose runs are columns of K, for the transposing ldmatrix of FragmentS8. The 32 places of
// a step hold, eight by eight, the runs whose pairs of bytes go to one register: columns 0, 1, 4, 5, 8, 9, 12, 13,
// then these + 2, then these sixteen + 16.
template <int kChunks>
struct TransposeSwizzle : MatrixSwizzle<kChunks> {
  static __host__ __device__ constexpr int source(int place) {
    return (place & ~15) | (place & 6) << 1 | (place & 8) >> 2 | (place & 1);
  }
};

// One operand of a warp: kWarpRows of the CTA's kRows rows. Four registers of lane 4g + t hold 16 rows x 32
// columns of K: row g or g + 8, columns 4t .. 4t + 3 or 16 + 4t .. 16 + 4t + 3. Their order is that of the
// instruction: rows first for the 16 rows of A, columns first for two operands B of 8 columns each.
//
// If the operand is contiguous along K, one ldmatrix loads these registers. If the operand is contiguous along its
// rows, a transposing ldmatrix gives pairs of rows 2g and 2g + 1, of two columns of K. Two such loads and a
// permutation of bytes give four columns of row 2g and four of row 2g + 1, which stand in the places of rows g
// and g + 8 up to the epilogue.
template <class Op, bool kRowsFirst, int kRows, int kWarpRows, int kBlockK, int kThreads>
struct FragmentS8 {
  static constexpr bool kByK = Op::kMajor == Major::kK;
  static constexpr int kRuns = kByK ? kRows : kBlockK;
  static constexpr int kChunks = (kByK ? kBlockK : kRows) / 16;
  using Layout = typename Either<kByK, MatrixSwizzle<kChunks>, TransposeSwizzle<kChunks>>::Type;
  using Copy = TileCopy<Op, kRuns, kChunks, Layout, kThreads>;
  static constexpr int kBytes = kRows * kBlockK;
  static constexpr int kCount = kWarpRows / 16;
  using Registers = uint32_t[kCount][4];

  // This lane's offset at step 0. A step along a run (along K, or 16 rows) moves by whole chunks: the step is an
  // XOR with the chunk's bits, because the swizzle is an XOR, too.
  uint32_t offset;

  __device__ __forceinline__ explicit FragmentS8(int warp_row) {
    const int lane = threadIdx.x % 32;
    const int row = kRowsFirst ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int chunk = kRowsFirst ? lane / 16 : lane / 8 % 2;
    offset = kByK ? Layout::offset(warp_row + row, chunk) : Layout::offset(lane, warp_row / 16);
  }

  __device__ __forceinline__ void load(Registers& r, uint32_t stage, int step) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kByK) {
        load_matrices(r[i], stage + (offset ^ (32 * step)) + i * 16 * kBlockK);
      } else {
        uint32_t pairs[4];
        load_matrices_transposed(pairs, stage + (offset ^ (16 * i)) + step * 32 * kRows);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int odd = kRowsFirst ? j % 2 : j / 2;
          const int upper = kRowsFirst ? j / 2 : j % 2;
          r[i][j] = __byte_perm(pairs[2 * upper], pairs[2 * upper + 1], odd ? 0x7531 : 0x6420);
        }
      }
    }
  }
};

template <class TileType, class OpA, class OpB>
struct CoreS8 {
  using Tile = TileType;
  using A = int8_t;
  using B = int8_t;
  using Acc = int;
  using FragmentA = FragmentS8<OpA, true, Tile::kBlockM, Tile::kWarpM, Tile::kBlockK, Tile::kThreads>;
  using FragmentB = FragmentS8<OpB, false, Tile::kBlockN, Tile::kWarpN, Tile::kBlockK, Tile::kThreads>;
  using CopyA = typename FragmentA::Copy;
  using CopyB = typename FragmentB::Copy;
  template <class Out>
  using Stage = SwizzledStage<Out, Tile::kWarpN>;
  static constexpr int kABytes = FragmentA::kBytes;
  static constexpr int kBBytes = FragmentB::kBytes;
  static constexpr int kStepK = 32;
  static constexpr int kMTiles = Tile::kWarpM / 16;  // products of 16 rows of A by 8 of B
  static constexpr int kNTiles = Tile::kWarpN / 8;
  using Accumulators = int[kMTiles][kNTiles][4];

  struct Fragments {
    typename FragmentA::Registers a;
    typename FragmentB::Registers b;
  };

  FragmentA a;
  FragmentB b;

  __device__ __forceinline__ CoreS8(int warp_m, int warp_n) : a(warp_m), b(warp_n) {}

  static __device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][j][c] = 0;
      }
    }
  }

  __device__ __forceinline__ void load(Fragments& f, uint32_t a_stage, uint32_t b_stage, int step) const {
    a.load(f.a, a_stage, step);
    b.load(f.b, b_stage, step);
  }

  static __device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& f) {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) mma_s8(acc[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
    }
  }

  // The row of 16 that is staged as row `staged`. `stage` writes rows 16 * group .. of the warp's tile to shared
  // memory.
  static __device__ __forceinline__ int row_of(int staged) {
    return FragmentA::kByK ? staged : 2 * (staged % 8) + staged / 8;
  }

  template <class Stage>
  static __device__ __forceinline__ void stage(const Accumulators& acc, int group, uint32_t shared) {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    const int mine = FragmentB::kByK ? Stage::offset(g, t / 2) + 8 * (t % 2) : Stage::offset(g, t);
#pragma unroll
    for (int j = 0; j < kNTiles; j += 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int(&c)[4] = acc[group][j];
        const int(&e)[4] = acc[group][j + 1];
        const uint32_t c0 = bits(c[2 * half]), c1 = bits(c[2 * half + 1]);
        const uint32_t e0 = bits(e[2 * half]), e1 = bits(e[2 * half + 1]);
        const uint32_t row = shared + Stage::offset(8 * half, 0);
        if constexpr (FragmentB::kByK) {
          store_shared_8(row + (mine ^ Stage::offset(0, 2 * j)), c0, c1);
          store_shared_8(row + (mine ^ Stage::offset(0, 2 * j + 2)), e0, e1);
        } else {  // the even columns of 16 are in the first product, the odd ones in the second
          store_shared_16(row + (mine ^ Stage::offset(0, 2 * j)), {c0, e0, c1, e1});
        }
      }
    }
  }
};

template <class TileType, class OpA, class OpB, class E, int kAlignD, bool kSwapped>
__device__ __forceinline__ void mma_gemm(const int8_t* a, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                         int lda, int ldb, int ldd, const typename E::Args& args) {
  gemm<CoreS8<TileType, OpA, OpB>, E, kAlignD, kSwapped>(a, b, d, m, n, k, lda, ldb, ldd, args);
}

}  // namespace qcut
