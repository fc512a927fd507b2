// One visitor node of CUTLASS's SM90 epilogue: f32(acc - zero_point * colsum) * row_scale * col_scale + bias.
//
// CUTLASS's stock tree reads every vector with a node of its own, one global load after the other. This node issues the
// loads of all vectors together: the per-channel vectors of the CTA's tile go to shared memory, the per-token vectors
// to each thread's registers. benchmarks/layers/epilogue.py measures the gain.
//
// Exactness: one float32 operation after the other, in the order of emitters/core/epilogue.py; bitwise that of stock
// visitors.
//
// Source: visitor concept of cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp, 4.2.0.
#pragma once

#include <qcut/cutlass/epilogue.cuh>
#include <qcut/cutlass/sm90_node.cuh>

namespace qcut {

struct DequantizeArguments {
  int32_t const* colsum = nullptr;
  int32_t const* token_zero_point = nullptr;
  int32_t zero_point = 0;
  float const* row_scale = nullptr;
  float const* col_scale = nullptr;
  float tensor_scale = 1.f;
  float const* bias = nullptr;
};

template <class CtaTile, class ElementOutput, bool kZeroPointTensor, bool kZeroPointToken, bool kRowScale,
          bool kColScaleTensor, bool kColScaleChannel, bool kBias>
struct Sm90Dequantize
    : Sm90VectorNode<DequantizeArguments, CtaTile,
                     int(kZeroPointTensor || kZeroPointToken) + int(kColScaleChannel) + int(kBias)> {
  static constexpr bool kColsum = kZeroPointTensor || kZeroPointToken;
  using Node = Sm90VectorNode<DequantizeArguments, CtaTile, int(kColsum) + int(kColScaleChannel) + int(kBias)>;
  using Node::Node;

  template <int kThreads, class SmemVector, class RegVector, class RowCoord, class RowReg, class PointReg, class Residue>
  struct ConsumerStoreCallbacks : Node::template VectorCallbacks<kThreads, SmemVector> {
    using Base = typename Node::template VectorCallbacks<kThreads, SmemVector>;
    using Base::params;

    int m_begin;  // first row of this thread
    RegVector r_colsum, r_scale, r_bias;
    RowCoord c_row;
    RowReg r_row;
    PointReg r_zero_point;
    Residue residue;

    CUTLASS_DEVICE
    ConsumerStoreCallbacks(Base const& base, int m_begin_, RegVector r_vec_, RowCoord c_row_, RowReg r_row_,
                           PointReg r_point_, Residue residue_)
        : Base(base), m_begin(m_begin_), r_colsum(r_vec_), r_scale(r_vec_), r_bias(r_vec_), c_row(c_row_),
          r_row(r_row_), r_zero_point(r_point_), residue(residue_) {}

    CUTLASS_DEVICE void begin() {
      using namespace cute;
      // In CUTLASS only the producer warps wait for the previous kernel, which may have written these vectors: this
      // thread waits, too.
      cutlass::arch::wait_on_dependent_grids();
      typename Base::Words v;
      this->for_columns([&](int n, bool in, int i) {
        int slot = 0;
        if constexpr (kColsum) v[slot++][i] = in ? __int_as_float(params.colsum[n]) : 0.f;
        if constexpr (kColScaleChannel) v[slot++][i] = in ? params.col_scale[n] : 0.f;
        if constexpr (kBias) v[slot++][i] = in ? params.bias[n] : 0.f;
      });
      if constexpr (kRowScale || kZeroPointToken) {
        // The columns are modes of stride 0. Without these modes, one coordinate per distinct row is left.
        Tensor rows = filter_zeros(c_row, r_row.stride());
        Tensor scales = filter_zeros(r_row);
        Tensor points = filter_zeros(r_zero_point);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(scales); ++i) {
          bool in = get<0>(rows(i)) < get<0>(residue);
          int m = m_begin + get<0>(rows(i));
          if constexpr (kRowScale) scales(i) = in ? params.row_scale[m] : 0.f;
          if constexpr (kZeroPointToken) points(i) = in ? params.token_zero_point[m] : 0;
        }
      }
      this->store(v);
    }

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      if (epi_m != 0) return;  // the loop over subtiles runs along M first, and columns depend only on epi_n
      int slot = 0;
      if constexpr (kColsum) this->fetch(r_colsum, slot++, epi_m, epi_n);
      if constexpr (kColScaleChannel) this->fetch(r_scale, slot++, epi_m, epi_n);
      if constexpr (kBias) this->fetch(r_bias, slot++, epi_m, epi_n);
    }

    template <class ElementAccumulator, int kFragment>
    CUTLASS_DEVICE cutlass::Array<ElementOutput, kFragment> visit(
        cutlass::Array<ElementAccumulator, kFragment> const& unused, int epi_v, int epi_m, int epi_n,
        cutlass::Array<int32_t, kFragment> const& acc) {
      using namespace cute;
      cutlass::Array<float, kFragment> y;
      Tensor row = r_row(_, _, _, epi_m, epi_n);
      Tensor point = r_zero_point(_, _, _, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFragment; ++i) {
        int const at = epi_v * kFragment + i;
        int32_t a = acc[i];
        if constexpr (kZeroPointTensor) a -= params.zero_point * __float_as_int(r_colsum(at));
        if constexpr (kZeroPointToken) a -= point(at) * __float_as_int(r_colsum(at));
        float v = static_cast<float>(a);
        if constexpr (kRowScale) v *= row(at);
        if constexpr (kColScaleChannel) v *= r_scale(at);
        if constexpr (kColScaleTensor) v *= params.tensor_scale;
        if constexpr (kBias) v += r_bias(at);
        y[i] = v;
      }
      return cutlass::NumericArrayConverter<ElementOutput, float, kFragment>{}(y);
    }
  };

  template <bool kReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    constexpr int kThreads = decltype(size(args.tiled_copy))::value;

    Tensor s_vec = this->template partition<kReferenceSrc>(args, make_stride(_0{}, _1{}));
    Tensor r_vec = make_tensor_like<float>(take<0, 3>(s_vec));
    Tensor row_part = this->template partition<kReferenceSrc>(args, make_stride(_1{}, _0{}));
    Tensor r_row = make_tensor_like<float>(row_part);
    Tensor r_point = make_tensor_like<int32_t>(row_part);

    // The residue is the distance from this thread's first element to the corner of D.
    int const thread_m = int(M) - int(get<0>(args.residue_tCcD));
    using Callbacks = ConsumerStoreCallbacks<kThreads, decltype(s_vec), decltype(r_vec), decltype(args.tCcD),
                                             decltype(r_row), decltype(r_point), decltype(args.residue_tCcD)>;
    return Callbacks({{}, this->params, this->shared, args.thread_idx, int(n) * Node::kTileN, int(N), s_vec}, thread_m,
                     r_vec, args.tCcD, r_row, r_point, args.residue_tCcD);
  }
};

}  // namespace qcut
