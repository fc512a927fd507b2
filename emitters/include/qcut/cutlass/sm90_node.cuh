// Base classes of qcut's visitor nodes in CUTLASS's SM90 epilogues: parameters are the arguments, any problem is
// allowed, no workspace, nothing for the warps that load C.
//
// Source: visitor concept of cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp, 4.2.0.
#pragma once

#include "cute/tensor.hpp"

#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"

namespace qcut {

template <class Arguments_>
struct Sm90Node {
  using Arguments = Arguments_;
  using Params = Arguments;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(cutlass::epilogue::fusion::ProducerLoadArgs<Args...> const&) {
    return cutlass::epilogue::fusion::EmptyProducerLoadCallbacks{};
  }
};

// A node that reads kVectors vectors along N. Those of the current CTA tile lie in shared memory, kTileN words each; an
// int32 is kept as its bits.
template <class Arguments, class CtaTile, int kVectors>
struct Sm90VectorNode : Sm90Node<Arguments> {
  static constexpr int kTileN = cute::size<1>(CtaTile{});

  struct SharedStorage {
    alignas(16) float words[kVectors > 0 ? kVectors * kTileN : 4];
  };

  CUTLASS_HOST_DEVICE Sm90VectorNode() {}
  CUTLASS_HOST_DEVICE Sm90VectorNode(Arguments const& params_, SharedStorage const& storage)
      : params(params_), shared(const_cast<float*>(storage.words)) {}

  Arguments params;
  float* shared = nullptr;

  // A thread's part of a vector along N, broadcast over the tile (strides 0, 1), (CPY,CPY_M,CPY_N,EPI_M,EPI_N). With
  // strides 1, 0 it only gives registers of values along M their layout.
  template <bool kReferenceSrc, class Args, class Stride>
  CUTLASS_DEVICE auto partition(Args const& args, Stride const& stride) const {
    using namespace cute;
    Tensor tile = make_tensor(make_smem_ptr(shared), take<0, 2>(CtaTile{}), stride);
    return cutlass::epilogue::fusion::sm90_partition_for_epilogue<kReferenceSrc>(tile, args.epi_tile, args.tiled_copy,
                                                                                 args.thread_idx);
  }

  template <int kThreads, class SmemVector>
  struct VectorCallbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    static constexpr int kLoads = (kTileN + kThreads - 1) / kThreads;
    using Words = float[kVectors > 0 ? kVectors : 1][kLoads];

    Arguments const& params;
    float* shared;
    int thread_idx;
    int n_begin;       // first column of the CTA tile
    int n_size;        // N
    SmemVector s_vec;  // the first vector, see partition

    CUTLASS_DEVICE bool begin_sync_needed() const { return kVectors > 0; }

    // Calls read(column, whether it is inside, i) for this thread's columns.
    template <class Read>
    CUTLASS_DEVICE void for_columns(Read const& read) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        int n = thread_idx + i * kThreads;
        read(n_begin + n, n < kTileN && n_begin + n < n_size, i);
      }
    }

    CUTLASS_DEVICE void store(Words const& v) const {
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < kVectors; ++slot) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          int n = thread_idx + i * kThreads;
          if (kTileN % kThreads == 0 || n < kTileN) shared[slot * kTileN + n] = v[slot][i];
        }
      }
    }

    // The part of a subtile of vector `slot`.
    template <class Registers>
    CUTLASS_DEVICE void fetch(Registers& r, int slot, int epi_m, int epi_n) const {
      using namespace cute;
      Tensor s = filter_zeros(s_vec(_, _, _, epi_m, epi_n));
      Tensor from = make_tensor(s.data() + slot * kTileN, s.layout());
      copy_aligned(from, filter(r));
    }
  };
};

}  // namespace qcut
