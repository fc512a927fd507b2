// The host side of w8a16_wgmma.cuh's launch: a tensor map of the tokens, and one driver call.
//
// The emitted text of a launcher defines `Call`, the arguments of a launch as flat fields, and a class `Tile` of sizes.
//
// Source: CUDA driver API, "cuTensorMapEncodeTiled", "cuLaunchKernelEx".
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstring>
#include <initializer_list>

#include "../cutlass/launcher.cuh"

namespace qcut {

template <class Call>
struct Params {
  CUtensorMap tiles, parts;  // boxes of a tile's tokens, and of those of a tile that is not whole
  Call call;
};

template <class Call, class Tile>
struct W8A16Launcher {
  static int launch(void const* args, void* function, void* stream, int flags) {
    // The last call's tensor map is kept: loops repeat addresses.
    static thread_local Params<Call> params;
    static thread_local bool filled = false;
    Call const& a = *static_cast<Call const*>(args);
    Call const& last = params.call;
    bool const same = filled && last.a == a.a && last.m == a.m && last.k == a.k && last.lda == a.lda;
    std::memcpy(&params.call, &a, sizeof a);
    if (!same) {
      cuuint64_t const sizes[] = {cuuint64_t(a.k), cuuint64_t(a.m)};
      cuuint64_t const pitch[] = {2 * cuuint64_t(a.lda)};
      cuuint32_t const one[] = {1, 1};
      filled = false;
      for (bool const whole : {true, false}) {
        cuuint32_t const box[] = {64, whole ? Tile::kTokens : Tile::kBoxTokens};
        CUresult const status = cuTensorMapEncodeTiled(
            whole ? &params.tiles : &params.parts, Tile::kElement, 2, a.a, sizes, pitch, box, one,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (status != CUDA_SUCCESS) return status;
      }
      filled = true;
    }
    unsigned const rows = unsigned((a.n + Tile::kRows - 1) / Tile::kRows);
    unsigned const tokens = unsigned((a.m + Tile::kTokens - 1) / Tile::kTokens);
    dim3 const grid{rows * tokens * Tile::kSplits, 1, 1}, no_cluster{1, 1, 1};  // the kernel itself states its cluster
    return qcut::launch(function, grid, no_cluster, Tile::kThreads, Tile::kBytes, stream, flags & 1, &params);
  }

  static long query(int what) {
    switch (what) {
      case 0: return Tile::kBytes;
      case 1: return sizeof(Params<Call>);
      case 2: return 0;
      case 3: return Tile::kThreads;
      default: return -1;
    }
  }
};

}  // namespace qcut
