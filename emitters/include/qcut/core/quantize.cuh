// Quantization of float32 values to int8: rne(x / scale), by a product with the reciprocal of the scale.
//
// Exactness: every integer equals the rounded IEEE quotient, bitwise. Where the product could decide the rounding
// differently, the division is carried out.
//
// Source: Markstein, "IA-64 and Elementary Functions", ch. 8 (deciding a division's rounding from a product with the
// reciprocal); PTX ISA "div.rn", "rcp.rn".
#pragma once

#include <qcut/core/common.cuh>
#include <qcut/core/rounding.cuh>

namespace qcut {

// The distance of x * inv from the nearest integer beyond which the division is carried out. With inv = rn(1/s)
// and |x/s| <= 256: |x * inv - x/s| <= 256 * 2^-24 = 2^-16 (the product is exact inside the FMA) and
// |rn(x/s) - x/s| <= 2^-16; the FMA that forms the distance errs by 2^-25. Unless a half-integer lies within
// 2^-14 of x * inv, the values x * inv, x/s and rn(x/s) round to the same integer.
constexpr float kNearTie = 0.5f - 0x1p-14f;

// Outside this range of scales the reciprocal is infinite or subnormal, or its relative error exceeds 2^-24.
constexpr float kScaleMin = 0x1p-120f;
constexpr float kScaleMax = 0x1p+122f;

__device__ __forceinline__ uint32_t pack_low_bytes(float a, float b, float c, float d) {
  const uint32_t ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
  const uint32_t cd = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
  return __byte_perm(ab, cd, 0x5410);
}

// The integers rne(f / scale), each as a float to which kRoundingBias is added. A quotient of magnitude above
// `limit` becomes some integer of its sign and of magnitude at least `limit`.
template <int kSize>
__device__ __forceinline__ void round_quotients(const float (&f)[kSize], float scale, float inv, float limit,
                                                float (&t)[kSize]) {
  bool near_tie = scale < kScaleMin || scale > kScaleMax;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    t[i] = fmaf(f[i], inv, kRoundingBias);
    near_tie |= !(fabsf(fmaf(f[i], inv, kRoundingBias - t[i])) <= kNearTie);
  }
  if (near_tie) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      t[i] = fminf(fmaxf(__fdiv_rn(f[i], scale), -limit), limit) + kRoundingBias;
    }
  }
}

// The quantization of a row, from the bits `peak` of its largest magnitude: scale = peak / 127, or 1 if this is 0,
// and q = clamp(rne(x / scale), -127, 127). A row that holds NaN or Inf gets scale NaN and q = 0.
struct QuantizedRow {
  float s, inv;
  bool finite;

  __device__ __forceinline__ explicit QuantizedRow(uint32_t peak)
      : s(__fdiv_rn(__uint_as_float(peak), 127.0f)), finite(peak < 0x7f800000u) {
    if (s == 0.0f) s = 1.0f;
    inv = __frcp_rn(s);
  }
  __device__ __forceinline__ float scale() const { return finite ? s : __uint_as_float(0x7fc00000u); }
  template <int kSize>
  __device__ __forceinline__ void quantize(const float (&f)[kSize], uint32_t (&packed)[kSize / 4]) const {
    float t[kSize];
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) packed[i] = 0;
    if (!finite) return;
    round_quotients(f, s, inv, 127.0f, t);
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      packed[i] = pack_low_bytes(t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]);
    }
  }
};

}  // namespace qcut
