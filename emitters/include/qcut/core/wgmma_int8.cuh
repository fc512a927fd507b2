// Products of a warpgroup of int8 with both operands in shared memory, as 64 rows and kTokens rows of 128 columns. Only
// sm_90a.
//
// Both lie as core/wgmma.cuh says of B, and have descriptors of the same kind. Accumulators are those of core/wgmma.cuh.
//
// Source: PTX ISA 8.x, "wgmma.mma_async".
#pragma once

#include <qcut/core/wgmma.cuh>

namespace qcut {

// Issues c += a b^T. The call stands between wgmma_fence and wgmma_commit.
template <int kTokens>
struct WgmmaInt8;

#define QCUT_W0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define QCUT_W1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QCUT_W2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define QCUT_W3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QCUT_W4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define QCUT_W5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define QCUT_W6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define QCUT_W7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define QCUT_LIST32 QCUT_W0 ", " QCUT_W1
#define QCUT_LIST48 QCUT_LIST32 ", " QCUT_W2
#define QCUT_LIST64 QCUT_LIST48 ", " QCUT_W3
#define QCUT_LIST80 QCUT_LIST64 ", " QCUT_W4
#define QCUT_LIST96 QCUT_LIST80 ", " QCUT_W5
#define QCUT_LIST128 QCUT_LIST96 ", " QCUT_W6 ", " QCUT_W7
#define QCUT_REGS4(i) "+r"(c[i]), "+r"(c[i + 1]), "+r"(c[i + 2]), "+r"(c[i + 3])
#define QCUT_REGS16(i) QCUT_REGS4(i), QCUT_REGS4(i + 4), QCUT_REGS4(i + 8), QCUT_REGS4(i + 12)
#define QCUT_ALL32 QCUT_REGS16(0), QCUT_REGS16(16)
#define QCUT_ALL48 QCUT_ALL32, QCUT_REGS16(32)
#define QCUT_ALL64 QCUT_ALL48, QCUT_REGS16(48)
#define QCUT_ALL80 QCUT_ALL64, QCUT_REGS16(64)
#define QCUT_ALL96 QCUT_ALL80, QCUT_REGS16(80)
#define QCUT_ALL128 QCUT_ALL96, QCUT_REGS16(96), QCUT_REGS16(112)
#define QCUT_WGMMA(tokens, words, a, b)                                                                               \
  template <>                                                                                                         \
  struct WgmmaInt8<tokens> {                                                                                          \
    static __device__ __forceinline__ void issue(int (&c)[words], unsigned long long a_descriptor,                    \
                                                 unsigned long long b_descriptor) {                                   \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.eq.b32 p, 0, 0;\n\twgmma.mma_async.sync.aligned.m64n" #tokens          \
                   "k32.s32.s8.s8 {" QCUT_LIST##words "}, " a ", " b ", p;\n\t}"                                      \
                   : QCUT_ALL##words                                                                                  \
                   : "l"(a_descriptor), "l"(b_descriptor));                                                           \
    }                                                                                                                 \
  };

QCUT_WGMMA(64, 32, "%32", "%33")
QCUT_WGMMA(96, 48, "%48", "%49")
QCUT_WGMMA(128, 64, "%64", "%65")
QCUT_WGMMA(160, 80, "%80", "%81")
QCUT_WGMMA(192, 96, "%96", "%97")
QCUT_WGMMA(256, 128, "%128", "%129")

#undef QCUT_WGMMA
#undef QCUT_REGS16
#undef QCUT_REGS4
#undef QCUT_W0
#undef QCUT_W1
#undef QCUT_W2
#undef QCUT_W3
#undef QCUT_W4
#undef QCUT_W5
#undef QCUT_W6
#undef QCUT_W7
#undef QCUT_LIST32
#undef QCUT_LIST48
#undef QCUT_LIST64
#undef QCUT_LIST80
#undef QCUT_LIST96
#undef QCUT_LIST128
#undef QCUT_ALL32
#undef QCUT_ALL48
#undef QCUT_ALL64
#undef QCUT_ALL80
#undef QCUT_ALL96
#undef QCUT_ALL128

}  // namespace qcut
