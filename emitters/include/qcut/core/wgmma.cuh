// Hopper's products of a warpgroup (wgmma), transposing stores, and registers passed between warpgroups (setmaxnreg). Only
// sm_90a.
//
// The functions have no guard for other architectures: a kernel that calls one of them there does not compile.
//
// A product of a warpgroup takes 64 rows of A from registers and kTokens rows of B from shared memory; both are
// contiguous along K. Warp w of the group has rows 16w..16w+15. Its registers of A are those of mma.sync m16n8k16
// (16-bit types) or m16n8k32 (int8). Accumulator 4j + e of lane 4g + t is row g + 8(e >> 1), token 8j + 2t + (e & 1).
// B consists of blocks of 8 rows x 128 bytes, 1,024 bytes apart; the 16-byte chunk c of row r lies at c ^ (r % 8).
//
// Source: PTX ISA 8.x, "wgmma.mma_async", "Matrix Descriptor Format", "stmatrix", "setmaxnreg".
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// Comes before the first product of a group, so that the product sees the registers written so far.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the last kPending groups have read their operands and written their accumulators.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from using an accumulator before the wait that precedes the call.
__device__ __forceinline__ void pin(float& v) { asm volatile("" : "+f"(v)::"memory"); }
__device__ __forceinline__ void pin(int& v) { asm volatile("" : "+r"(v)::"memory"); }

// The descriptor of B at a shared address that is a multiple of 1,024. A product takes 32 bytes of each row;
// the descriptor plus kWgmmaStep is that of the next 32 bytes.
constexpr unsigned long long kWgmmaStep = 2;
__device__ __forceinline__ unsigned long long wgmma_descriptor(uint32_t shared) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  constexpr unsigned long long kBlock = 64ull << 32;  // 1,024 bytes from 8 rows to the next 8, in units of 16
  return (shared & 0x3ffffu) >> 4 | 1ull << 16 | kBlock | kSwizzle128;
}

#define QCUT_LIST4 "%0, %1, %2, %3"
#define QCUT_LIST8 QCUT_LIST4 ", %4, %5, %6, %7"
#define QCUT_LIST16 QCUT_LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define QCUT_LIST32 QCUT_LIST16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QCUT_LIST64                                                                                               \
  QCUT_LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
              "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QCUT_LIST48                                                                                               \
  QCUT_LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define QCUT_LIST80                                                                                               \
  QCUT_LIST64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define QCUT_LIST96                                                                                               \
  QCUT_LIST80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define QCUT_LIST128                                                                                              \
  QCUT_LIST64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
              "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, " \
              "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "  \
              "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define QCUT_REGS4(k, i) k(c[i]), k(c[i + 1]), k(c[i + 2]), k(c[i + 3])
#define QCUT_REGS8(k, i) QCUT_REGS4(k, i), QCUT_REGS4(k, i + 4)
#define QCUT_REGS16(k, i) QCUT_REGS8(k, i), QCUT_REGS8(k, i + 8)
#define QCUT_REGS32(k, i) QCUT_REGS16(k, i), QCUT_REGS16(k, i + 16)
#define QCUT_REGS64(k, i) QCUT_REGS32(k, i), QCUT_REGS32(k, i + 32)
#define QCUT_REGS48(k, i) QCUT_REGS32(k, i), QCUT_REGS16(k, i + 32)
#define QCUT_REGS80(k, i) QCUT_REGS64(k, i), QCUT_REGS16(k, i + 64)
#define QCUT_REGS96(k, i) QCUT_REGS64(k, i), QCUT_REGS32(k, i + 64)
#define QCUT_REGS128(k, i) QCUT_REGS64(k, i), QCUT_REGS64(k, i + 64)

template <class T, int kTokens>
struct Wgmma;

// Issues c += a b, or c = a b if `accumulate` is 0. The call stands between wgmma_fence and wgmma_commit.
#define QCUT_WGMMA_ISSUE(tokens, words, shape, k, tail, a0, a1, a2, a3, b, p)                                         \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " p ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #tokens shape    \
               " {" QCUT_LIST##words "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p" tail ";\n\t}"                   \
               : QCUT_REGS##words(k, 0)                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(accumulate))

#define QCUT_WGMMA(T, AccType, tokens, words, shape, k, tail, ...)                                                \
  template <>                                                                                                     \
  struct Wgmma<T, tokens> {                                                                                       \
    using Acc = AccType;                                                                                          \
    static __device__ __forceinline__ void issue(Acc (&c)[words], const uint32_t (&a)[4],                         \
                                                 unsigned long long b_descriptor, int accumulate) {               \
      QCUT_WGMMA_ISSUE(tokens, words, shape, k, tail, __VA_ARGS__);                                               \
    }                                                                                                             \
  };

#define QCUT_WGMMA_TYPES(tokens, words, ...)                                                                      \
  QCUT_WGMMA(__half, float, tokens, words, "k16.f32.f16.f16", "+f", ", 1, 1, 0", __VA_ARGS__)                     \
  QCUT_WGMMA(__nv_bfloat16, float, tokens, words, "k16.f32.bf16.bf16", "+f", ", 1, 1, 0", __VA_ARGS__)            \
  QCUT_WGMMA(int8_t, int, tokens, words, "k32.s32.s8.s8", "+r", "", __VA_ARGS__)

QCUT_WGMMA_TYPES(8, 4, "%4", "%5", "%6", "%7", "%8", "%9")
QCUT_WGMMA_TYPES(16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
QCUT_WGMMA_TYPES(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
QCUT_WGMMA_TYPES(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
QCUT_WGMMA_TYPES(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
QCUT_WGMMA_TYPES(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
QCUT_WGMMA_TYPES(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
QCUT_WGMMA_TYPES(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
QCUT_WGMMA_TYPES(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef QCUT_WGMMA_TYPES
#undef QCUT_WGMMA
#undef QCUT_WGMMA_ISSUE
#undef QCUT_LIST4
#undef QCUT_LIST8
#undef QCUT_LIST16
#undef QCUT_LIST32
#undef QCUT_LIST64
#undef QCUT_LIST48
#undef QCUT_LIST80
#undef QCUT_LIST96
#undef QCUT_LIST128
#undef QCUT_REGS4
#undef QCUT_REGS8
#undef QCUT_REGS16
#undef QCUT_REGS32
#undef QCUT_REGS64
#undef QCUT_REGS48
#undef QCUT_REGS80
#undef QCUT_REGS96
#undef QCUT_REGS128

// Stores four 8 x 8 matrices of 16-bit elements, transposed. Lane 4g + t has elements 2t and 2t + 1 of column g of each;
// lanes 8i .. 8i + 7 have the shared addresses of the rows of matrix i.
__device__ __forceinline__ void store_matrices_transposed(uint32_t shared, const uint32_t (&w)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(w[0]),
               "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

// Raises the warpgroup's registers to kRegisters a thread (take), or lowers them to kRegisters (give).
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace qcut
