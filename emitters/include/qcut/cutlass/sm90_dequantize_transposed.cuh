// One visitor node of CUTLASS's SM90 epilogue, for kernels that compute the transpose of D: f32(acc) * token_scale *
// channel_scale + bias. Rows of the kernel's tile are output channels, its columns are tokens.
//
// The loads of all vectors are issued together: the tokens' scales of the CTA's tile go to shared memory, the channels'
// scales and biases to each thread's registers.
//
// Exactness: one float32 operation after the other, in the order of emitters/core/epilogue.py.
//
// Source: visitor concept of cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp, 4.2.0.
#pragma once

#include <qcut/cutlass/epilogue.cuh>
#include <qcut/cutlass/sm90_node.cuh>

namespace qcut {

struct TransposedScales {
  float const* token_scale = nullptr;
  float const* channel_scale = nullptr;
  float const* bias = nullptr;
};

template <class CtaTile, class ElementOutput, class ElementAccumulator, bool kTokenScale, bool kChannelScale,
          bool kBias>
struct Sm90DequantizeTransposed : Sm90VectorNode<TransposedScales, CtaTile, int(kTokenScale)> {
  using Node = Sm90VectorNode<TransposedScales, CtaTile, int(kTokenScale)>;
  using Node::Node;

  template <int kThreads, class SmemVector, class RegVector, class RowCoord, class RowReg, class Residue>
  struct ConsumerStoreCallbacks : Node::template VectorCallbacks<kThreads, SmemVector> {
    using Base = typename Node::template VectorCallbacks<kThreads, SmemVector>;
    using Base::params;

    int m_begin;  // first channel of this thread
    RegVector r_token;
    RowCoord c_row;
    RowReg r_scale, r_bias;
    Residue residue;

    CUTLASS_DEVICE
    ConsumerStoreCallbacks(Base const& base, int m_begin_, RegVector r_vec_, RowCoord c_row_, RowReg r_row_,
                           Residue residue_)
        : Base(base), m_begin(m_begin_), r_token(r_vec_), c_row(c_row_), r_scale(r_row_), r_bias(r_row_),
          residue(residue_) {}

    CUTLASS_DEVICE void begin() {
      using namespace cute;
      // In CUTLASS only the producer warps wait for the previous kernel, which may have written these vectors: this
      // thread waits, too.
      cutlass::arch::wait_on_dependent_grids();
      typename Base::Words v;
      if constexpr (kTokenScale) {
        this->for_columns([&](int n, bool in, int i) { v[0][i] = in ? params.token_scale[n] : 0.f; });
      }
      // The columns are modes of stride 0. Without these modes, one coordinate per distinct row is left.
      Tensor rows = filter_zeros(c_row, r_scale.stride());
      Tensor scales = filter_zeros(r_scale);
      Tensor biases = filter_zeros(r_bias);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(scales); ++i) {
        bool in = get<0>(rows(i)) < get<0>(residue);
        int m = m_begin + get<0>(rows(i));
        if constexpr (kChannelScale) scales(i) = in ? params.channel_scale[m] : 0.f;
        if constexpr (kBias) biases(i) = in ? params.bias[m] : 0.f;
      }
      this->store(v);
    }

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      if (epi_m != 0) return;  // the loop over subtiles runs along M first, and tokens depend only on epi_n
      if constexpr (kTokenScale) this->fetch(r_token, 0, epi_m, epi_n);
    }

    template <int kFragment>
    CUTLASS_DEVICE cutlass::Array<ElementOutput, kFragment> visit(
        cutlass::Array<ElementAccumulator, kFragment> const& unused, int epi_v, int epi_m, int epi_n,
        cutlass::Array<ElementAccumulator, kFragment> const& acc) {
      using namespace cute;
      cutlass::Array<float, kFragment> y;
      Tensor scale = r_scale(_, _, _, epi_m, epi_n);
      Tensor bias = r_bias(_, _, _, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFragment; ++i) {
        int const at = epi_v * kFragment + i;
        float v = static_cast<float>(acc[i]);
        if constexpr (kTokenScale) v *= r_token(at);
        if constexpr (kChannelScale) v *= scale(at);
        if constexpr (kBias) v += bias(at);
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

    // The residue is the distance from this thread's first element to the corner of D.
    int const thread_m = int(M) - int(get<0>(args.residue_tCcD));
    using Callbacks = ConsumerStoreCallbacks<kThreads, decltype(s_vec), decltype(r_vec), decltype(args.tCcD),
                                             decltype(r_row), decltype(args.residue_tCcD)>;
    return Callbacks({{}, this->params, this->shared, args.thread_idx, int(n) * Node::kTileN, int(N), s_vec}, thread_m,
                     r_vec, args.tCcD, r_row, args.residue_tCcD);
  }
};

}  // namespace qcut
