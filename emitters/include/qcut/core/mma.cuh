// Instructions of the raw GEMMs: cp.async, ldmatrix, mma.sync, and the exact conversion of int8 to 16-bit floats.
//
// Source: PTX ISA 8.x, "cp.async" (ignore-src), "ldmatrix", "Matrix Fragments for
// mma.m16n8k32 / mma.m16n8k16", "prmt", "fma" (.bf16x2).
//
// The elements of a fragment that lane 4g + t holds, as (row, column):
//   m16n8k32 s8   A a0 (g, 4t..4t+3)  a1 (g+8, 4t..)  a2 (g, 16+4t..)  a3 (g+8, 16+4t..)
//                 B b0 (4t..4t+3, g)  b1 (16+4t.., g)
//   m16n8k16 f16  A a0 (g, 2t..2t+1)  a1 (g+8, 2t..)  a2 (g, 8+2t..)   a3 (g+8, 8+2t..)
//                 B b0 (2t..2t+1, g)  b1 (8+2t.., g)
//   both          C c0 (g, 2t)  c1 (g, 2t+1)  c2 (g+8, 2t)  c3 (g+8, 2t+1)
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// Copies kSize bytes from global to shared memory. With `zero` the copy reads nothing and writes zeros. Copies of 16
// bytes skip the L1 (`.cg`), which tiles do not need; shorter copies exist only as `.ca`.
template <int kSize>
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, bool zero) {
  static_assert(kSize == 4 || kSize == 8 || kSize == 16, "what cp.async copies");
  const int ignore = zero;
  if constexpr (kSize == 16) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t"
        "cp.async.cg.shared.global [%0], [%1], 16, p;\n\t}" ::"r"(shared),
        "l"(global), "r"(ignore)
        : "memory");
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\t"
        "cp.async.ca.shared.global [%0], [%1], %2, p;\n\t}" ::"r"(shared),
        "l"(global), "n"(kSize), "r"(ignore)
        : "memory");
  }
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_shared_16(uint32_t shared, const uint32_t (&w)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t shared, uint32_t w) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(w) : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t shared, uint32_t w0, uint32_t w1) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared), "r"(w0), "r"(w1) : "memory");
}

__device__ __forceinline__ void load_shared_16(uint32_t (&w)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared) {
  uint32_t w;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(shared) : "memory");
  return w;
}

__device__ __forceinline__ void load_shared_8(uint32_t (&w)[2], uint32_t shared) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(shared) : "memory");
}

// Loads four matrices of 8 rows x 16 bytes. Lane l supplies the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Loads four such matrices, each transposed as 8 x 8 pairs of bytes: lane 4g + t receives pair g of rows 2t and 2t + 1.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Loads two such matrices. Lanes 16..31 supply no address.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void mma_s8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A float of 8 bits with 4 of exponent and 3 of fraction. Weights hold no NaN.
struct E4M3 {
  unsigned char bits;
};
template <class B>
constexpr bool kIsE4M3 = false;
template <>
constexpr bool kIsE4M3<E4M3> = true;

// Operations of a 16-bit float type: the tensor core's product, and the exact conversion of a word of four
// int8, or E4M3, to two words of two T each, in order.
template <class T>
struct Float16;

// The same of bytes B.
template <class T, class B>
__device__ __forceinline__ void from_bytes(uint32_t q, uint32_t& low, uint32_t& high) {
  if constexpr (kIsE4M3<B>) {
    Float16<T>::from_e4m3(q, low, high);
  } else {
    Float16<T>::from_int8(q, low, high);
  }
}

// (v & mask) | magic, in one instruction.
__device__ __forceinline__ uint32_t masked(uint32_t v, uint32_t mask, uint32_t magic) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(v), "r"(mask), "r"(magic));
  return d;
}

// Bytes 0 and 1, or 2 and 3, of a word as the halves of another, each after eight copies of its sign.
template <bool kUpper>
__device__ __forceinline__ uint32_t signed_halves(uint32_t q) {
  uint32_t d;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(q), "n"(kUpper ? 0xb3a2 : 0x9180));
  return d;
}

// The eight nibbles of a word in their order, less 8 and plus `lift`.
template <class Float>
__device__ __forceinline__ void nibbles_in_order(uint32_t q, uint32_t lift, uint32_t (&w)[4]) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const uint32_t even = Float::add(Float::from_nibbles(q, k), lift);
    const uint32_t odd = Float::add(Float::from_nibbles(q, k + 1), lift);
    w[k / 2] = __byte_perm(even, odd, 0x5410);
    w[2 + k / 2] = __byte_perm(even, odd, 0x7632);
  }
}

template <>
struct Float16<__half> {
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  // The byte q + 128 under exponent 2^10 is the half 1024 + 128 + q; subtracting 1152 is exact.
  static __device__ __forceinline__ void from_int8(uint32_t q, uint32_t& low, uint32_t& high) {
    const uint32_t biased = q ^ 0x80808080u;
    const uint32_t l = __byte_perm(biased, 0x64646464u, 0x4140);
    const uint32_t h = __byte_perm(biased, 0x64646464u, 0x4342);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(l), "r"(0x64806480u));
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(h), "r"(0x64806480u));
  }

  static __device__ __forceinline__ void from_e4m3(uint32_t q, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high)
        : "r"(q));
#else
    low = from_signed(signed_halves<false>(q));
    high = from_signed(signed_halves<true>(q));
#endif
  }
  // Exponent and fraction move to where they are those of 2^-8 of the value, also where it is subnormal; the product with
  // 2^8 is exact.
  static __device__ __forceinline__ uint32_t from_signed(uint32_t halves) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(halves << 7 & 0xbf80bf80u), "r"(0x5c005c00u));
    return d;
  }

  // Nibbles k and k + 4 of a word. Under exponent 2^10 a nibble counts ones, four bits further up under 2^6: it is there
  // with 1024 or 64, which `from_nibbles` takes away, and 8. `near_nibbles` leaves kNear[k % 2] and takes 8 more away.
  static constexpr float kNear[2] = {0.0f, 72.0f};
  static __device__ __forceinline__ uint32_t near_nibbles(uint32_t q, int k) {
    const uint32_t shifted = k < 2 ? q : q >> 8;
    if (k % 2) return masked(shifted, 0x00f000f0u, 0x54005400u);
    return less(masked(shifted, 0x000f000fu, 0x64006400u), 0x64086408u);
  }
  static __device__ __forceinline__ uint32_t from_nibbles(uint32_t q, int k) {
    return k % 2 ? less(near_nibbles(q, k), 0x54805480u) : near_nibbles(q, k);
  }
  static __device__ __forceinline__ uint32_t less(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ void from_nibbles(uint32_t q, uint32_t lift, uint32_t (&w)[4]) {
    nibbles_in_order<Float16>(q, lift, w);
  }
};

template <>
struct Float16<__nv_bfloat16> {
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  // A bfloat16 has 7 fraction bits, too few for all 8 bits of q. The low bits and the sign bit therefore
  // become two numbers: 0x4300 | (q & 0x7f) is 128 plus the low bits, and 0x4300 | (q & 0x80) is 128, or
  // 256 for negative q. Their difference is exactly q. sm_80 has no bfloat16 subtraction: the difference
  // is an FMA with -1.
  static __device__ __forceinline__ uint32_t pair(uint32_t q, uint32_t selector) {
    const uint32_t spread = __byte_perm(q, 0x43434343u, selector);
    const uint32_t low = spread & 0xff7fff7fu;
    const uint32_t base = spread & 0xff80ff80u;
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(base), "r"(0xbf80bf80u), "r"(low));
    return d;
  }
  static __device__ __forceinline__ void from_int8(uint32_t q, uint32_t& low, uint32_t& high) {
    low = pair(q, 0x4140);
    high = pair(q, 0x4342);
  }

  static __device__ __forceinline__ void from_e4m3(uint32_t q, uint32_t& low, uint32_t& high) {
    low = from_signed(signed_halves<false>(q));
    high = from_signed(signed_halves<true>(q));
  }
  // As above: 2^-120 of the value, and an FMA with 2^120, since sm_80 has no bfloat16 product.
  static __device__ __forceinline__ uint32_t from_signed(uint32_t halves) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(halves << 4 & 0x87f087f0u), "r"(0x7b807b80u), "r"(0x80008000u));
    return d;
  }

  // Nibbles k and k + 4 of a word, as above: under exponent 2^7 there are 128 with a nibble.
  static constexpr float kNear[2] = {136.0f, 136.0f};
  static __device__ __forceinline__ uint32_t near_nibbles(uint32_t q, int k) {
    return masked(q >> 4 * k, 0x000f000fu, 0x43004300u);
  }
  static __device__ __forceinline__ uint32_t from_nibbles(uint32_t q, int k) {
    return add(near_nibbles(q, k), 0xc308c308u);
  }
  static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return d;
  }
  static __device__ __forceinline__ void from_nibbles(uint32_t q, uint32_t lift, uint32_t (&w)[4]) {
    nibbles_in_order<Float16>(q, lift, w);
  }
};

}  // namespace qcut
