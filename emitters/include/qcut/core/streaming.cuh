// Loads of weights, which a kernel reads once: from global memory to registers, without a place in the L1.
//
// Source: PTX ISA 8.x, "ld.global.nc", "prefetch".
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// Loads of weights skip the L1, and the L2 fetches 256 bytes at a time. Weights are constant: their loads may precede
// the wait for the previous kernel.
__device__ __forceinline__ void load_stream_16(uint32_t (&w)[4], const void* p) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(p));
}
__device__ __forceinline__ void load_stream_8(uint32_t (&w)[2], const void* p) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
}
__device__ __forceinline__ uint32_t load_stream_4(const void* p) {
  uint32_t w;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w) : "l"(p));
  return w;
}

// The same loads if `wanted`; otherwise the registers keep their values. The load is predicated instead of branched
// over, so that the compiler may place it right after the last use of its registers, among the products.
__device__ __forceinline__ void load_stream_16_if(uint32_t (&w)[4], const void* p, bool wanted) {
  const int loaded = wanted;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
      : "l"(p), "r"(loaded));
}
__device__ __forceinline__ void load_stream_8_if(uint32_t (&w)[2], const void* p, bool wanted) {
  const int loaded = wanted;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];\n\t}"
      : "+r"(w[0]), "+r"(w[1])
      : "l"(p), "r"(loaded));
}
__device__ __forceinline__ void load_stream_4_if(uint32_t& w, const void* p, bool wanted) {
  const int loaded = wanted;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p ld.global.nc.L1::no_allocate.u32 %0, [%1];\n\t}"
      : "+r"(w)
      : "l"(p), "r"(loaded));
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Keeps the compiler from moving a use of these words above the call.
template <int kWords>
__device__ __forceinline__ void pin(uint32_t (&w)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(w[i]));
}

}  // namespace qcut
