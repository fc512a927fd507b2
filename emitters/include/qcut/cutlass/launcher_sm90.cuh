// The parameter block and the launch of CUTLASS's warp-specialized kernels of sm_90a.
//
// Source: CUTLASS 4.2.0, cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized*.hpp (Arguments, Params).
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>

#include "launcher.cuh"

namespace qcut {

template <class Params>
struct WithBook;  // of codebook_operands.cuh

template <class Call>
struct Launcher {
  using Kernel = typename Call::Kernel;
  using Scheduler = typename Kernel::TileScheduler;

  // A kernel that computes the transpose of D takes the weights as its rows, and D's leading dimension along N.
  static typename Kernel::Arguments problem(Call const& a) {
    constexpr auto mode = cutlass::gemm::GemmUniversalMode::kGemm;
    auto* c = (typename Kernel::ElementC const*)Call::residual_of(a);
    auto* d = (typename Kernel::ElementD*)a.d;
    int64_t const ldd = a.ldd;
    if constexpr (Call::kUnits) {
      auto* weights = (typename Kernel::ElementA const*)a.units;
      auto* tokens = (typename Kernel::ElementB const*)a.x;
      int const k = 128 * a.units_k;
      return {mode,
              {a.n, a.m, k, 1},
              {weights, units_layout((a.n + 63) / 64 * 4, a.units_k), tokens, {int64_t(k), {}, {}}},
              {Call::epilogue(a), c, {{}, ldd, {}}, d, {{}, ldd, {}}}};
    } else if constexpr (Call::kTransposed) {
      int64_t const lda = a.lda, ldb = a.ldb;
      auto* weights = (typename Kernel::ElementA const*)a.b;
      auto* tokens = (typename Kernel::ElementB const*)a.a;
      return {mode,
              {a.n, a.m, a.k, 1},
              {weights, {ldb, {}, {}}, tokens, {lda, {}, {}}},
              {Call::epilogue(a), c, {{}, ldd, {}}, d, {{}, ldd, {}}}};
    } else {
      int64_t const lda = a.lda, ldb = a.ldb;
      auto* left = (typename Kernel::ElementA const*)a.a;
      auto* right = (typename Kernel::ElementB const*)a.b;
      return {mode,
              {a.m, a.n, a.k, 1},
              {left, {lda, {}, {}}, right, {ldb, {}, {}}},
              {Call::epilogue(a), c, {ldd, {}, {}}, d, {ldd, {}, {}}}};
    }
  }

  static typename Kernel::Arguments arguments(Call const& a) {
    using Raster = typename Scheduler::RasterOrderOptions;
    Raster raster = a.raster == 1 ? Raster::AlongM : a.raster == 2 ? Raster::AlongN : Raster::Heuristic;
    typename Kernel::Arguments arguments = problem(a);
    arguments.hw_info.sm_count = a.sm_count;
    if constexpr (Call::kPromotion > 0) arguments.mainloop.mma_promotion_interval = Call::kPromotion;
    if constexpr (Call::kStreamK) {
      arguments.scheduler = {a.splits, a.swizzle, raster, Scheduler::DecompositionMode::Heuristic};
    } else {
      arguments.scheduler = {a.swizzle, raster};
    }
    return arguments;
  }

  static int launch(void const* args, void* function, void* stream, int flags) {
    // The last call's parameters are kept: encoding three tensor maps takes longer than the launch, and loops repeat
    // their addresses.
    static thread_local Call last;
    static thread_local std::optional<typename Kernel::Params> params;
    static thread_local size_t workspace_bytes;
    Call const& a = *static_cast<Call const*>(args);
    if (!params || std::memcmp(&last, &a, sizeof a) != 0) {
      auto filled = arguments(a);
      if (!Kernel::can_implement(filled)) return CUDA_ERROR_INVALID_VALUE;
      workspace_bytes = Kernel::get_workspace_size(filled);
      params.emplace(Kernel::to_underlying_arguments(filled, a.workspace));
      std::memcpy(&last, &a, sizeof a);
    }
    if (workspace_bytes > 0) {
      // Stream-K counts up its barriers from zero in each launch.
      if (a.workspace == nullptr) return CUDA_ERROR_INVALID_VALUE;
      int status = cuMemsetD8Async(CUdeviceptr(a.workspace), 0, workspace_bytes, static_cast<CUstream>(stream));
      if (status != CUDA_SUCCESS) return status;
    }
    typename Kernel::DispatchPolicy::ClusterShape cluster;
    return qcut::launch(function, Kernel::get_grid_shape(*params),
                        dim3(cute::size<0>(cluster), cute::size<1>(cluster), 1), Kernel::MaxThreadsPerBlock,
                        Kernel::SharedStorageSize, stream, flags & 1, argument(a, *params));
  }

  // The kernel's parameters: the codebook, if there is one, then CUTLASS's.
  static void* argument(Call const& a, typename Kernel::Params& params) {
    if constexpr (Call::kUnits) {
      static thread_local std::optional<WithBook<typename Kernel::Params>> last;
      last.emplace(WithBook<typename Kernel::Params>{int8_book(&a.book0), params});
      return &*last;
    } else {
      return &params;
    }
  }

  static constexpr long argument_bytes() {
    if constexpr (Call::kUnits) {
      return sizeof(WithBook<typename Kernel::Params>);
    } else {
      return sizeof(typename Kernel::Params);
    }
  }

  static long query(int what, void const* args) {
    switch (what) {
      case 0: return Kernel::SharedStorageSize;
      case 1: return argument_bytes();
      case 2: return long(Kernel::get_workspace_size(arguments(*static_cast<Call const*>(args))));
      case 3: return Kernel::MaxThreadsPerBlock;
      case 4: return Kernel::can_implement(arguments(*static_cast<Call const*>(args)));
      default: return -1;
    }
  }
};

}  // namespace qcut
