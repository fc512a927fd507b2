// The gate of an MLP in the epilogue of a product of few tokens: D [m, n / 2] = silu(gate) * up. Of the n rows of
// weights, the first half makes the gate and the second half makes up. A CTA takes tiles of 16 rows of the gate, and
// then the same tiles of up.
//
// Exactness: both results are rounded to D's type, as the product's epilogue alone rounds them, before decoder/
// activate.cuh's function multiplies them: D is bitwise that of the two kernels.
#pragma once

#include <qcut/core/epilogue.cuh>
#include <qcut/core/silu_mul.cuh>

namespace qcut {

// The epilogue of gate and up alike, which rounds to floats.
template <class E>
struct Gated : E {
  template <class Acc>
  static __device__ __forceinline__ typename E::Out multiply(Acc gate, Acc up, const typename E::Row& row,
                                                             const typename E::Column& gate_column,
                                                             const typename E::Column& up_column,
                                                             const typename E::Args& args) {
    const auto rounded = [&](Acc sum, const typename E::Column& column) {
      return to_float(E::convert(E::finish(E::apply(sum, row, column), 0.0f, args)));
    };
    return E::convert(silu_mul<typename E::Out>(rounded(gate, gate_column), rounded(up, up_column)));
  }
};

template <class E>
constexpr bool kIsGated = false;
template <class E>
constexpr bool kIsGated<Gated<E>> = true;

// The row tiles of a CTA of kRowTiles whose first one is tile `first` of the weights. With kGated, n is a multiple of
// 32, and kRowTiles of 2: the CTA has `half` tiles of the gate, and then as many of up.
template <bool kGated, int kRowTiles>
struct RowTiles {
  static constexpr int kStep = kGated ? kRowTiles / 2 : kRowTiles;  // tiles from a CTA's first to the next CTA's
  int half = 0, gap = 0;

  __device__ __forceinline__ RowTiles(int first, int n) {
    if constexpr (kGated) {
      half = min(kStep, n / 32 - first);
      gap = n / 32 - half;
    }
  }
  // Tiles of weights between the CTA's tile `tile` and its place if all tiles followed one another.
  __device__ __forceinline__ int skipped(int tile) const { return kGated && tile >= half ? gap : 0; }
};

}  // namespace qcut
