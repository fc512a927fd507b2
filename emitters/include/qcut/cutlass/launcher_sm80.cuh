// The parameter block and the launch of CUTLASS's multistage kernels of sm_80.
//
// Source: CUTLASS 4.2.0, cutlass/gemm/kernel/gemm_universal_with_visitor.h (Arguments, Params).
#pragma once

#include <cstdint>

#include "launcher.cuh"

namespace qcut {

template <class Call>
struct Launcher {
  using Kernel = typename Call::Kernel;

  static int launch(void const* args, void* function, void* stream, int flags) {
    Call const& a = *static_cast<Call const*>(args);
    typename Kernel::Params params(
        typename Kernel::Arguments(cutlass::gemm::GemmUniversalMode::kGemm, {a.m, a.n, a.k}, 1, Call::epilogue(a), a.a,
                                   a.b, Call::residual_of(a), a.d, 0, 0, 0, 0, int64_t(a.lda), int64_t(a.ldb),
                                   int64_t(a.ldd), int64_t(a.ldd)),
        -1, -1);
    return qcut::launch(function, params.get_grid_dims(), dim3(1, 1, 1), Kernel::kThreadCount,
                        sizeof(typename Kernel::SharedStorage), stream, flags & 1, &params);
  }

  static long query(int what, void const*) {
    switch (what) {
      case 0: return sizeof(typename Kernel::SharedStorage);
      case 1: return sizeof(typename Kernel::Params);
      case 2: return 0;
      case 3: return Kernel::kThreadCount;
      case 4: return 1;
      default: return -1;
    }
  }
};

}  // namespace qcut
