// D = epilogue(A B^T) with e4m3 operands and float32 sums on mma.sync.m16n8k32 (sm_89, sm_90a, sm_120), on the skeleton
// of gemm.cuh; any m, n and k. Fragments are those of int8 (mma.cuh).
//
// Tensor cores add products of e4m3 with about 14 bits. The products of 128 columns are therefore a sum of their own,
// which is added to the whole sum in float32.
//
// Exactness: products are exact; sums of 128 columns have the tensor core's 14 bits, the rest are float32, in a fixed
// order.
//
// Source: PTX ISA "Matrix Fragments for mma.m16n8k32".
#pragma once

#include <qcut/gemm/mma.cuh>

namespace qcut {

__device__ __forceinline__ void mma_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class TileType, class OpA, class OpB>
struct CoreE4M3 : CoreS8<TileType, OpA, OpB> {
  using Base = CoreS8<TileType, OpA, OpB>;
  using A = E4M3;
  using B = E4M3;
  using Acc = float;
  static constexpr int kPartSteps = 128 / Base::kStepK;
  using Sums = float[Base::kMTiles][Base::kNTiles][4];
  struct Accumulators {
    Sums sum, part;
    int steps;
  };
  using Base::Base;

  template <class Each>
  static __device__ __forceinline__ void for_sums(const Each& each) {
#pragma unroll
    for (int i = 0; i < Base::kMTiles; ++i) {
#pragma unroll
      for (int j = 0; j < Base::kNTiles; ++j) each(i, j);
    }
  }
  static __device__ __forceinline__ void clear(Accumulators& acc) {
    for_sums([&](int i, int j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) acc.sum[i][j][c] = acc.part[i][j][c] = 0.0f;
    });
    acc.steps = 0;
  }
  static __device__ __forceinline__ void multiply(Accumulators& acc, const typename Base::Fragments& f) {
    if (acc.steps == kPartSteps) {
      for_sums([&](int i, int j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          acc.sum[i][j][c] += acc.part[i][j][c];
          acc.part[i][j][c] = 0.0f;
        }
      });
      acc.steps = 0;
    }
    for_sums([&](int i, int j) {
      mma_e4m3(acc.part[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
    });
    ++acc.steps;
  }
  // Stages the bits of the whole sums as those of int32.
  template <class Stage>
  static __device__ __forceinline__ void stage(const Accumulators& acc, int group, uint32_t shared) {
    typename Base::Accumulators whole;
    for_sums([&](int i, int j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) whole[i][j][c] = __float_as_int(acc.sum[i][j][c] + acc.part[i][j][c]);
    });
    Base::template stage<Stage>(whole, group, shared);
  }
};

template <class TileType, class OpA, class OpB, class E, int kAlignD, bool kSwapped>
__device__ __forceinline__ void fp8_mma(const E4M3* a, const E4M3* b, typename E::Out* d, int m, int n, int k, int lda,
                                        int ldb, int ldd, const typename E::Args& args) {
  static_assert(!kSwapped, "D is row-major");
  gemm<CoreE4M3<TileType, OpA, OpB>, E, kAlignD, kSwapped>(a, b, d, m, n, k, lda, ldb, ldd, args);
}

}  // namespace qcut
