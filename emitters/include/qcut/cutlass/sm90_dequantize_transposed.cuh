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

#include "cute/tensor.hpp"

#include <qcut/cutlass/epilogue.cuh>
#include <qcut/cutlass/sm90_node.cuh>
#include "cutlass/arch/grid_dependency_control.h"

namespace qcut {

struct TransposedScales {
  float const* token_scale = nullptr;
  float const* channel_scale = nullptr;
  float const* bias = nullptr;
};

template <class CtaTile, class ElementOutput, class ElementAccumulator, bool kTokenScale, bool kChannelScale,
          bool kBias>
struct Sm90DequantizeTransposed : Sm90Node<TransposedScales> {
  static constexpr int kTileN = cute::size<1>(CtaTile{});

  struct SharedStorage {
    alignas(16) float token[kTokenScale ? kTileN : 4];
  };

  CUTLASS_HOST_DEVICE Sm90DequantizeTransposed() {}
  CUTLASS_HOST_DEVICE Sm90DequantizeTransposed(Params const& params_, SharedStorage const& storage)
      : params(params_), token(const_cast<float*>(storage.token)) {}

  Params params;
  float* token = nullptr;

  template <int kThreads, class SmemVector, class RegVector, class RowCoord, class RowReg, class Residue>
  struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    static constexpr int kLoads = (kTileN + kThreads - 1) / kThreads;

    Params const& params;
    float* token;
    int thread_idx;
    int n_begin;       // first token of the CTA tile
    int n_size;        // tokens
    int m_begin;       // first channel of this thread
    SmemVector s_vec;  // the tokens' scales broadcast over the tile, (CPY,CPY_M,CPY_N,EPI_M,EPI_N)
    RegVector r_token;
    RowCoord c_row;
    RowReg r_scale, r_bias;
    Residue residue;

    CUTLASS_DEVICE
    ConsumerStoreCallbacks(Params const& params_, float* token_, int thread_idx_, int n_begin_, int n_size_,
                           int m_begin_, SmemVector s_vec_, RegVector r_vec_, RowCoord c_row_, RowReg r_row_,
                           Residue residue_)
        : params(params_), token(token_), thread_idx(thread_idx_), n_begin(n_begin_), n_size(n_size_),
          m_begin(m_begin_), s_vec(s_vec_), r_token(r_vec_), c_row(c_row_), r_scale(r_row_), r_bias(r_row_),
          residue(residue_) {}

    CUTLASS_DEVICE bool begin_sync_needed() const { return kTokenScale; }

    CUTLASS_DEVICE void begin() {
      using namespace cute;
      // In CUTLASS only the producer warps wait for the previous kernel, which may have written these vectors: this
      // thread waits, too.
      cutlass::arch::wait_on_dependent_grids();
      float v[kLoads];
      if constexpr (kTokenScale) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          int n = thread_idx + i * kThreads;
          v[i] = n < kTileN && n_begin + n < n_size ? params.token_scale[n_begin + n] : 0.f;
        }
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
      if constexpr (kTokenScale) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          int n = thread_idx + i * kThreads;
          if (kTileN % kThreads == 0 || n < kTileN) token[n] = v[i];
        }
      }
    }

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      using namespace cute;
      if constexpr (kTokenScale) {
        if (epi_m != 0) return;  // the loop over subtiles runs along M first, and tokens depend only on epi_n
        copy_aligned(filter_zeros(s_vec(_, _, _, epi_m, epi_n)), filter(r_token));
      }
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
    using cutlass::epilogue::fusion::sm90_partition_for_epilogue;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    constexpr int kThreads = decltype(size(args.tiled_copy))::value;

    Tensor s_tile = make_tensor(make_smem_ptr(token), take<0, 2>(CtaTile{}), make_stride(_0{}, _1{}));
    Tensor s_vec = sm90_partition_for_epilogue<kReferenceSrc>(s_tile, args.epi_tile, args.tiled_copy, args.thread_idx);
    Tensor r_vec = make_tensor_like<float>(take<0, 3>(s_vec));

    // A tile that varies only along M, to give the channels' registers their layout.
    Tensor row_tile = make_tensor(make_smem_ptr(token), take<0, 2>(CtaTile{}), make_stride(_1{}, _0{}));
    Tensor row_part =
        sm90_partition_for_epilogue<kReferenceSrc>(row_tile, args.epi_tile, args.tiled_copy, args.thread_idx);
    Tensor r_row = make_tensor_like<float>(row_part);

    // The residue is the distance from this thread's first element to the corner of D.
    int const thread_m = int(M) - int(get<0>(args.residue_tCcD));
    return ConsumerStoreCallbacks<kThreads, decltype(s_vec), decltype(r_vec), decltype(args.tCcD), decltype(r_row),
                                  decltype(args.residue_tCcD)>(params, token, args.thread_idx, int(n) * kTileN,
                                                               int(N), thread_m, s_vec, r_vec, args.tCcD, r_row,
                                                               args.residue_tCcD);
  }
};

}  // namespace qcut
