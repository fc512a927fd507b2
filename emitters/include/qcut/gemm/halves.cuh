// The epilogue of products of int16 tokens, for the kernels of gemm.cuh: 16 rows of A hold eight tokens as a hi/lo
// split, first their high bytes, then their low bytes. D has a row for each token.
//
// Exactness: as core/int16.cuh and core/epilogue.cuh.
#pragma once

#include <qcut/core/epilogue.cuh>
#include <qcut/core/int16.cuh>

namespace qcut {

// An epilogue E of tokens' sums, for the sums of their hi/lo split.
template <class E>
struct OfHalves {
  using Out = typename E::Out;
  static constexpr bool kUnitScales = false;
  struct Args : E::Args {
    int tokens;  // rows of D
  };
};

// Writes eight rows of D for each sixteen that are staged: a writer of half as many rows for each CTA, which reads two
// staged rows for one of D.
template <class E, int kAlign, class Acc, int kWidth, class Stage, int kCtas>
struct TileWriter<OfHalves<E>, kAlign, false, Acc, kWidth, Stage, kCtas>
    : TileWriter<E, kAlign, false, float, kWidth, Stage, 2 * kCtas> {
  using Base = TileWriter<E, kAlign, false, float, kWidth, Stage, 2 * kCtas>;
  using typename Base::Rows;
  using typename Base::Sums;

  __device__ __forceinline__ TileWriter(typename E::Out* d, int row0, int col0, int, int n, int ldd,
                                        const typename OfHalves<E>::Args& args, int rank)
      : Base(d, row0 / 2, col0, args.tokens, n, ldd, args, rank) {}

  __device__ __forceinline__ void load(Sums& sums, uint32_t shared) const {
#pragma unroll
    for (int p = 0; p < Base::kPasses; ++p) {
#pragma unroll
      for (int j = 0; j < Base::kChunks; ++j) {
        const int chunk = threadIdx.x % Base::kLanes * Base::kChunks + j;
        const int row = this->staged + p * Base::kRowsPerPass;
        uint32_t high[4], low[4];
        load_sum_16<Acc, kCtas>(high, shared + Stage::offset(row, chunk));
        load_sum_16<Acc, kCtas>(low, shared + Stage::offset(row + 8, chunk));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const long long sum = combine_halves(from_bits<int>(high[i]), from_bits<int>(low[i]));
          sums[p][j][i] = bits(__ll2float_rn(sum));
        }
      }
    }
  }

  template <class RowOf>
  __device__ __forceinline__ void fetch(Rows& rows, int group, const RowOf& row_of) const {
    Base::fetch(rows, group, [&](int staged) { return row_of(staged) - 8 * group; });
  }
};

}  // namespace qcut
