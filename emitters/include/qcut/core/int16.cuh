// int16 tokens as two int8: a = 256 * high + low, low from -128 to 127. Quantization, and the combination of both sums.
//
// Exactness: every integer equals qcut.numerics.int16 bitwise; a sum is exact in 64 bits and rounded once.
#pragma once

#include <qcut/core/common.cuh>
#include <qcut/core/rounding.cuh>

namespace qcut {

// The quantization of a row, from the bits `peak` of its largest magnitude: scale = peak / 32639, at least the smallest
// normal number, or 1 if the peak is 0, and q = rne(x * (1 / scale)), which is 32639 at most. A row that holds NaN or
// Inf gets scale NaN and q = 0.
struct QuantizedRow16 {
  float s, inv;
  bool finite;

  __device__ __forceinline__ explicit QuantizedRow16(uint32_t peak)
      : s(fmaxf(__fdiv_rn(__uint_as_float(peak), 32639.0f), 0x1p-126f)), finite(peak < 0x7f800000u) {
    if (peak == 0) s = 1.0f;
    inv = __frcp_rn(s);
  }
  __device__ __forceinline__ float scale() const { return finite ? s : __uint_as_float(0x7fc00000u); }
  // Words whose low 16 bits are the int16.
  template <int kSize>
  __device__ __forceinline__ void quantize(const float (&f)[kSize], uint32_t (&q)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      q[i] = finite ? __float_as_uint(__fadd_rn(__fmul_rn(f[i], inv), kRoundingBias)) : 0u;
    }
  }
};

// One part of int16, packed: the low bytes as signed numbers, or the high bytes, (q - low) / 256.
template <bool kHigh, int kSize>
__device__ __forceinline__ void pack_half(const uint32_t (&q)[kSize], uint32_t (&packed)[kSize / 4]) {
  constexpr uint32_t kCarry = kHigh ? 0x80u : 0u, kByte = kHigh ? 0x0051u : 0x0040u;
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) {
    const uint32_t ab = __byte_perm(q[4 * i] + kCarry, q[4 * i + 1] + kCarry, kByte);
    const uint32_t cd = __byte_perm(q[4 * i + 2] + kCarry, q[4 * i + 3] + kCarry, kByte);
    packed[i] = __byte_perm(ab, cd, 0x5410);
  }
}

__device__ __forceinline__ long long combine_halves(int high, int low) { return 256LL * high + low; }

}  // namespace qcut
