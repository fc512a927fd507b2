// Products of a warpgroup of 16-bit floats that core/wgmma.cuh does not have: A from shared memory, or B with its rows
// along K. Only sm_90a.
//
// Operands lie in blocks of 64 columns, rows of 128 bytes one after the other; the 16-byte chunk c of row r lies at
// c ^ (r % 8). Where K runs along the columns, a product takes 32 bytes of each row: the descriptor is
// wgmma_descriptor's, and kWgmmaStep leads to the next 16 columns. Where K runs along the rows, a product takes 16 rows
// of each block: the descriptor is wgmma_tall_descriptor's, and kWgmmaTallStep leads to the next 16 rows.
// Accumulator 4j + e of lane 4g + t of warp w is row 16w + g + 8(e >> 1), column 8j + 2t + (e & 1).
//
// Source: PTX ISA 8.x, "wgmma.mma_async", "Strides", "Matrix Descriptor Format".
#pragma once

#include <qcut/core/wgmma.cuh>

namespace qcut {

constexpr unsigned long long kWgmmaTallStep = 128;

// The descriptor of B whose rows run along K, at a shared address that is a multiple of 1,024. `block_bytes` leads from
// 64 columns to the next 64.
__device__ __forceinline__ unsigned long long wgmma_tall_descriptor(uint32_t shared, int block_bytes) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  constexpr unsigned long long kRows8 = 64ull << 32;  // 1,024 bytes from 8 rows to the next 8, in units of 16
  return (shared & 0x3ffffu) >> 4 | static_cast<unsigned long long>(block_bytes >> 4) << 16 | kRows8 | kSwizzle128;
}

// C [64, kColumns] of float32. `shared` issues c += a b^T, or c = a b^T if `accumulate` is 0, of two operands in shared
// memory with K along the columns of both. `tall` issues c += a b of A in registers, as Wgmma takes it, and B with K
// along the rows. The calls stand between wgmma_fence and wgmma_commit.
template <class T, int kColumns>
struct WgmmaFloat;

#define QCUT_W0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QCUT_W1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define QCUT_W2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define QCUT_W3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define QCUT_W4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define QCUT_W5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define QCUT_W6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define QCUT_W7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define QCUT_W8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define QCUT_W9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define QCUT_W10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define QCUT_W11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define QCUT_W12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define QCUT_W13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define QCUT_W14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define QCUT_W15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define QCUT_LIST32 QCUT_W0 ", " QCUT_W1 ", " QCUT_W2 ", " QCUT_W3
#define QCUT_LIST40 QCUT_LIST32 ", " QCUT_W4
#define QCUT_LIST48 QCUT_LIST40 ", " QCUT_W5
#define QCUT_LIST64 QCUT_LIST48 ", " QCUT_W6 ", " QCUT_W7
#define QCUT_LIST80 QCUT_LIST64 ", " QCUT_W8 ", " QCUT_W9
#define QCUT_LIST96 QCUT_LIST80 ", " QCUT_W10 ", " QCUT_W11
#define QCUT_LIST128 QCUT_LIST96 ", " QCUT_W12 ", " QCUT_W13 ", " QCUT_W14 ", " QCUT_W15
#define QCUT_REGS4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define QCUT_REGS8(i) QCUT_REGS4(i), QCUT_REGS4(i + 4)
#define QCUT_ALL32 QCUT_REGS8(0), QCUT_REGS8(8), QCUT_REGS8(16), QCUT_REGS8(24)
#define QCUT_ALL40 QCUT_ALL32, QCUT_REGS8(32)
#define QCUT_ALL48 QCUT_ALL40, QCUT_REGS8(40)
#define QCUT_ALL64 QCUT_ALL48, QCUT_REGS8(48), QCUT_REGS8(56)
#define QCUT_ALL80 QCUT_ALL64, QCUT_REGS8(64), QCUT_REGS8(72)
#define QCUT_ALL96 QCUT_ALL80, QCUT_REGS8(80), QCUT_REGS8(88)
#define QCUT_ALL128 QCUT_ALL96, QCUT_REGS8(96), QCUT_REGS8(104), QCUT_REGS8(112), QCUT_REGS8(120)
#define QCUT_WGMMA(T, columns, words, kind, r0, r1, r2, r3, r4)                                                       \
  template <>                                                                                                         \
  struct WgmmaFloat<T, columns> {                                                                                     \
    static __device__ __forceinline__ void shared(float (&c)[words], unsigned long long a_descriptor,                 \
                                                  unsigned long long b_descriptor, int accumulate) {                  \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " r2 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #columns    \
                   "k16.f32." kind " {" QCUT_LIST##words "}, " r0 ", " r1 ", p, 1, 1, 0, 0;\n\t}"                     \
                   : QCUT_ALL##words                                                                                  \
                   : "l"(a_descriptor), "l"(b_descriptor), "r"(accumulate));                                          \
    }                                                                                                                 \
    static __device__ __forceinline__ void tall(float (&c)[words], const uint32_t (&a)[4],                            \
                                                unsigned long long b_descriptor) {                                    \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.eq.b32 p, 0, 0;\n\twgmma.mma_async.sync.aligned.m64n" #columns         \
                   "k16.f32." kind " {" QCUT_LIST##words "}, {" r0 ", " r1 ", " r2 ", " r3 "}, " r4                   \
                   ", p, 1, 1, 1;\n\t}"                                                                               \
                   : QCUT_ALL##words                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor));                                  \
    }                                                                                                                 \
  };

#define QCUT_WGMMA_TYPES(columns, words, ...)                                                                         \
  QCUT_WGMMA(__half, columns, words, "f16.f16", __VA_ARGS__)                                                          \
  QCUT_WGMMA(__nv_bfloat16, columns, words, "bf16.bf16", __VA_ARGS__)

QCUT_WGMMA_TYPES(64, 32, "%32", "%33", "%34", "%35", "%36")
QCUT_WGMMA_TYPES(80, 40, "%40", "%41", "%42", "%43", "%44")
QCUT_WGMMA_TYPES(96, 48, "%48", "%49", "%50", "%51", "%52")
QCUT_WGMMA_TYPES(128, 64, "%64", "%65", "%66", "%67", "%68")
QCUT_WGMMA_TYPES(160, 80, "%80", "%81", "%82", "%83", "%84")
QCUT_WGMMA_TYPES(192, 96, "%96", "%97", "%98", "%99", "%100")
QCUT_WGMMA_TYPES(256, 128, "%128", "%129", "%130", "%131", "%132")

#undef QCUT_WGMMA_TYPES
#undef QCUT_WGMMA
#undef QCUT_REGS8
#undef QCUT_REGS4
#undef QCUT_W0
#undef QCUT_W1
#undef QCUT_W2
#undef QCUT_W3
#undef QCUT_W4
#undef QCUT_W5
#undef QCUT_W6
#undef QCUT_W7
#undef QCUT_W8
#undef QCUT_W9
#undef QCUT_W10
#undef QCUT_W11
#undef QCUT_W12
#undef QCUT_W13
#undef QCUT_W14
#undef QCUT_W15
#undef QCUT_LIST32
#undef QCUT_LIST40
#undef QCUT_LIST48
#undef QCUT_LIST64
#undef QCUT_LIST80
#undef QCUT_LIST96
#undef QCUT_LIST128
#undef QCUT_ALL32
#undef QCUT_ALL40
#undef QCUT_ALL48
#undef QCUT_ALL64
#undef QCUT_ALL80
#undef QCUT_ALL96
#undef QCUT_ALL128

}  // namespace qcut
