// The rotation of the one token that stream/w8a8.cuh quantizes: Hadamard groups of 32, 64 or 128 columns.
//
// Every CTA rotates the whole token to find its largest magnitude, eight columns of a thread at a time, and each warp
// then rotates the columns that it multiplies, four of a lane. A group lies within a warp's columns in both.
//
// Exactness: the order of the butterflies is that of codebook/rotate.cuh, and results are equal bitwise.
#pragma once

#include <qcut/codebook/rotate.cuh>
#include <qcut/stream/w8a8.cuh>

namespace qcut {

template <int kGroup>
struct TokenRotation {
  static constexpr bool kRotates = true;
  static_assert(kGroup == 32 || kGroup == 64 || kGroup == 128, "groups lie within a unit of a warp");

  const uint32_t* signs;
  float factor;  // 1 / sqrt(kGroup)

  // The bits that flip the signs of the columns from `col` on; the token has `columns`.
  __device__ __forceinline__ uint32_t flips(int col, int columns) const {
    return col < columns ? signs[col / 32] >> col % 32 : 0u;
  }
  template <int kSize>
  static __device__ __forceinline__ void flip(float (&r)[kSize], uint32_t bits) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      r[j] = __uint_as_float(__float_as_uint(r[j]) ^ (bits << (31 - j) & 0x80000000u));
    }
  }
  template <int kSize>
  __device__ __forceinline__ void scale(float (&r)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) r[j] *= factor;
  }
  // Columns of neighbouring lanes follow one another.
  template <int kSize>
  __device__ __forceinline__ void rotate(float (&r)[kSize], uint32_t bits) const {
    flip(r, bits);
    butterflies<kGroup, 1>(r, kGroup, threadIdx.x, nullptr);
    scale(r);
  }
  // Lane 4g + t has the four columns from 64 * (g / 4) + 16 t + 4 (g % 4) on.
  __device__ __forceinline__ void rotate_words(float (&r)[4], uint32_t bits) const {
    flip(r, bits);
    butterflies<4, 1>(r, 4, 0, nullptr);
    across<4>(r);
    across<8>(r);
    across<1>(r);
    if constexpr (kGroup > 32) across<2>(r);
    if constexpr (kGroup > 64) across<16>(r);
    scale(r);
  }
  template <int kLane>
  static __device__ __forceinline__ void across(float (&r)[4]) {
    const float sign = threadIdx.x & kLane ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) r[j] = fmaf(r[j], sign, __shfl_xor_sync(0xffffffffu, r[j], kLane));
  }
};

}  // namespace qcut
