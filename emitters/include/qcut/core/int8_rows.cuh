// Rows of int8 weights in row-major order, as operands of tensor cores.
//
// A warp's lane 4g + t reads 16 neighbouring columns of a row at a time, and a fragment wants pairs of columns: the four
// lanes of a row exchange them.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// Exchanges the int8 of a row's 64 columns among the four lanes that hold 16 neighbours each: word i then has columns
// 16i + 2t, 16i + 2t + 1, 16i + 2t + 8 and 16i + 2t + 9.
__device__ __forceinline__ void exchange_columns(uint32_t (&w)[4]) {
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  const uint32_t mine = odd ? 0x7632 : 0x5410, other = odd ? 0x5410 : 0x7632;
  const uint32_t r0 = __shfl_xor_sync(0xffffffffu, upper ? w[0] : w[1], 2);
  const uint32_t r1 = __shfl_xor_sync(0xffffffffu, upper ? w[2] : w[3], 2);
  const uint32_t x[2][2] = {{upper ? r0 : w[0], upper ? r1 : w[2]}, {upper ? w[1] : r0, upper ? w[3] : r1}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t kept, sent;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(kept) : "r"(x[i][0]), "r"(x[i][1]), "r"(mine));
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(sent) : "r"(x[i][0]), "r"(x[i][1]), "r"(other));
    const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, 1);
    w[2 * i] = odd ? got : kept;
    w[2 * i + 1] = odd ? kept : got;
  }
}

}  // namespace qcut
