// Rounding of float32 to e4m3, as bytes or as 16-bit floats, which have every value of e4m3.
//
// Exactness: round to nearest even, magnitudes beyond 448 become 448, NaN stays NaN; the same on every architecture.
//
// Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5.2; PTX ISA "cvt" (.rn.satfinite.e4m3x2, sm_89).
#pragma once

#include <qcut/core/mma.cuh>

namespace qcut {

// The e4m3 nearest to v, as a float32. Below 2^-6 values are multiples of 2^-9, as floats from 2^14 to 2^15 are; from
// there on they have three bits of fraction.
__device__ __forceinline__ float nearest_e4m3(float v) {
  const float a = fminf(fabsf(v), 448.0f);
  const uint32_t w = __float_as_uint(a);
  const uint32_t rounded = (w + 0x7ffffu + (w >> 20 & 1)) & 0xfff00000u;
  const float small = __fsub_rn(__fadd_rn(a, 16384.0f), 16384.0f);
  const float magnitude = a < 0x1p-6f ? small : __uint_as_float(rounded);
  return v == v ? copysignf(magnitude, v) : v;
}

// Rounds four values to e4m3 and stores them as Q: one word of E4M3, two of __half.
template <class Q>
__device__ __forceinline__ void round_e4m3(const float (&v)[4], uint32_t (&words)[sizeof(Q)]) {
#if __CUDA_ARCH__ >= 890
  uint32_t packed;
  asm("{.reg .b16 l, h;\n cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\n"
      " mov.b32 %0, {l, h};}"
      : "=r"(packed)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
  if constexpr (kIsE4M3<Q>) {
    words[0] = packed;
  } else {
    Float16<Q>::from_e4m3(packed, words[0], words[1]);
  }
#else
  static_assert(!kIsE4M3<Q>, "bytes of e4m3 need sm_89");
  words[0] = pack_pair<Q>(nearest_e4m3(v[0]), nearest_e4m3(v[1]));
  words[1] = pack_pair<Q>(nearest_e4m3(v[2]), nearest_e4m3(v[3]));
#endif
}

}  // namespace qcut
