// The end of kernels with sums in shared memory by token: a thread finishes four neighbouring elements of D.
#pragma once

#include <qcut/core/epilogue.cuh>

namespace qcut {

// Writes four neighbouring elements of a row of D. kAlign divides the address and the leading dimension of D, in bytes.
// The epilogue's vectors of columns are in shared memory and start at column col0.
template <class E, int kAlign, class Acc>
__device__ __forceinline__ void finish_quad(const uint32_t (&sums)[4], int token, int row, int col0,
                                            typename E::Out* d, int m, int n, int ldd, const typename E::Args& args) {
  using Out = typename E::Out;
  constexpr int kSize = sizeof(Out);
  constexpr int kPiece = kAlign < 4 * kSize ? kAlign : 4 * kSize;
  constexpr int kPieces = 4 * kSize / kPiece;
  const int col = col0 + row;
  const long long at = static_cast<long long>(token) * ldd + col;
  float added[16 / kSize] = {};
  if constexpr (E::kHasResidual) {
    uint32_t raw[4] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (col + i * (kPiece / kSize) < n) {
        load_piece<kPiece>(raw, reinterpret_cast<const char*>(args.residual + at) + i * kPiece, i * kPiece);
      }
    }
    Vector<Out>{raw[0], raw[1], raw[2], raw[3]}.to_float(added);
  }
  const auto across = E::row(args, token, m);
  typename E::Value v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto along = E::column(args, row + i, n - col0);
    v[i] = E::finish(E::apply(from_bits<Acc>(sums[i]), across, along), added[i], args);
  }
  uint32_t packed[kSize];
  E::template pack<4>(packed, v);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (col + i * (kPiece / kSize) < n) {
      store_piece<kPiece>(reinterpret_cast<char*>(d + at) + i * kPiece, packed, i * kPiece);
    }
  }
}

}  // namespace qcut
