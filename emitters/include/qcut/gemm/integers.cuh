// The epilogue of integer-only layers, for the kernels of gemm.cuh. Rows of A are int8 tokens, or the hi/lo split of
// int16 tokens (halves.cuh).
//
// Exactness: as core/integers.cuh.
#pragma once

#include <qcut/core/integers.cuh>
#include <qcut/gemm/halves.cuh>

namespace qcut {

// Writes eight rows of D for each sixteen that are staged, as OfHalves of floats does. The sums of 64 bits are rescaled
// as they are read.
template <class Out, int kAlign, class Acc, int kWidth, class Stage, int kCtas>
struct TileWriter<OfHalves<IntegerEpilogue<Out>>, kAlign, false, Acc, kWidth, Stage, kCtas>
    : TileWriter<RescaledEpilogue<Out>, kAlign, false, int, kWidth, Stage, 2 * kCtas> {
  using E = IntegerEpilogue<Out>;
  using Base = TileWriter<RescaledEpilogue<Out>, kAlign, false, int, kWidth, Stage, 2 * kCtas>;
  using typename Base::Rows;
  using typename Base::Sums;

  __device__ __forceinline__ TileWriter(Out* d, int row0, int col0, int, int n, int ldd,
                                        const typename OfHalves<E>::Args& args, int rank)
      : Base(d, row0 / 2, col0, args.tokens, n, ldd, args, rank) {}

  __device__ __forceinline__ void load(Sums& sums, uint32_t shared) const {
    const typename E::Row of_rows = E::row(this->args, 0, 0);
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
          sums[p][j][i] = bits(E::apply(sum, of_rows, this->along[4 * j + i]));
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
