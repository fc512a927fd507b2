// Keys and values of 4 bits: rows turned by a rotation, and 16 levels with a scale and a zero point for each row.
//
// A turned row is H (s * x) / sqrt(d): fixed signs s, the Walsh-Hadamard matrix H. A level is scale * (c - m), with a
// code c of 0 to 15 and m = 5.5 + z / 8; a row's word holds the upper 11 bits of a float16 scale, and z of 5 bits. The
// code of an even column is the lower half of its byte.
//
// Exactness: codes and words are bitwise those of qcut.numerics.int4: butterflies of neighbours come first, and a row's
// loss is a sum of integers, whose order is of no matter.
#pragma once

#include <qcut/core/common.cuh>
#include <qcut/core/rounding.cuh>

namespace qcut {

// Two columns of 4 bits.
struct Nibbles {
  unsigned char pair;
};

// A type of a cache: its bits, whether rows have scales, and the type of a row's scale.
template <class C>
struct CacheType {
  static constexpr int kBits = 8 * sizeof(C);
  static constexpr bool kScaled = sizeof(C) == 1;
  static constexpr bool kTurned = false;
  using Scale = float;
};
template <>
struct CacheType<Nibbles> {
  static constexpr int kBits = 4;
  static constexpr bool kScaled = true;
  static constexpr bool kTurned = true;
  using Scale = unsigned short;
};

template <class A, class B>
constexpr bool kSameTypes = false;
template <class A>
constexpr bool kSameTypes<A, A> = true;

// The sign of a column before a row is turned.
__device__ __forceinline__ float turned_sign(int column) {
  uint32_t h = static_cast<uint32_t>(column) * 0x9E3779B1u;
  h = (h ^ h >> 15) * 0x85EBCA6Bu;
  return __uint_as_float(0x3f800000u | (h ^ h >> 13) << 31);
}

// 1 / sqrt(kHead).
template <int kHead>
__device__ __forceinline__ float turned_size() {
  static_assert(kHead == 32 || kHead == 64 || kHead == 128 || kHead == 256, "heads that are turned");
  return kHead == 32 ? 0.17677669529663687f : kHead == 64 ? 0.125f : kHead == 128 ? 0.08838834764831845f : 0.0625f;
}

// The butterfly of a value and that of the lane `offset` away: the lower lane gets the sum.
__device__ __forceinline__ float butterfly(float v, int offset) {
  const float other = __shfl_xor_sync(0xffffffffu, v, offset);
  return threadIdx.x & offset ? other - v : v + other;
}

__device__ __forceinline__ void butterfly(float& low, float& high) {
  const float sum = low + high, difference = low - high;
  low = sum, high = difference;
}

// What a row's word says: level c is scale * (c - 8 + lift).
struct RowScale {
  float scale, lift;
  __device__ __forceinline__ explicit RowScale(uint32_t word) {
    const unsigned short half = static_cast<unsigned short>(word >> 1 & 0x7ff0u);
    scale = __half2float(__ushort_as_half(half));
    uint32_t z;  // (word & 31) | 2^20, whose last bit is 1 / 8
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(z) : "r"(word), "r"(31u), "r"(0x49800000u));
    lift = 1048578.5f - __uint_as_float(z);  // 2.5 - z / 8
  }
};

// Chooses the scale and the zero point of a row of which a thread has kCount elements. Reduce has `least`, `most` (of
// floats), `total` (of uint32_t) and `any` over the threads of the row, which all call.
template <int kCount, class Reduce>
struct RowQuantizer {
  uint32_t word;
  float inverse, middle;
  bool finite;

  __device__ __forceinline__ RowQuantizer(const float (&y)[kCount], const Reduce& reduce) {
    float lo = y[0], hi = y[0];
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      lo = fminf(lo, y[i]);
      hi = fmaxf(hi, y[i]);
      peak = max(peak, __float_as_uint(y[i]) & 0x7fffffffu);
    }
    lo = reduce.least(lo);
    hi = reduce.most(hi);
    finite = !reduce.any(peak >= 0x7f800000u);
    const float span = fabsf(fmaxf(hi - lo, fmaxf(hi, -lo) * 1.6f));  // 0 has no sign then
    const float center = (hi + lo) * 0.5f;
    float least = __int_as_float(0x7f800000);
    word = 0xfc00u, inverse = 0.0f, middle = 0.0f;
    constexpr float kShrinks[3] = {static_cast<float>(1.0 / 15.0), static_cast<float>(0.95 / 15.0),
                                   static_cast<float>(0.9 / 15.0)};
#pragma unroll
    for (int f = 0; f < 3; ++f) {
      const uint32_t wide = __half_as_ushort(__float2half_rn(span * kShrinks[f]));
      const uint32_t bits = min((wide + 8u) & 0xfff0u, 0x7bf0u);
      const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
      const float inv = scale == 0.0f ? 0.0f : __frcp_rn(scale);
      const float z = fminf(fmaxf(rintf((2.0f - center * inv) * 8.0f), 0.0f), 31.0f);
      const float m = z * 0.125f + 5.5f;
      uint32_t squares = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float t = y[i] * inv + m;
        const float off = fminf(fmaxf(t - code_of(t), -2.0f), 2.0f);
        const int steps = __float_as_int(fmaf(off, 1024.0f, kRoundingBias)) - __float_as_int(kRoundingBias);
        squares += static_cast<uint32_t>(steps * steps);
      }
      const float loss = static_cast<float>(static_cast<int>(reduce.total(squares))) * (scale * scale);
      if (finite && loss < least) {
        least = loss, inverse = inv, middle = m;
        word = bits << 1 | static_cast<uint32_t>(z);
      }
    }
  }

  static __device__ __forceinline__ float code_of(float t) { return fminf(fmaxf(rintf(t), 0.0f), 15.0f); }
  __device__ __forceinline__ uint32_t code(float y) const {
    return finite ? static_cast<uint32_t>(code_of(y * inverse + middle)) : 0u;
  }
};

// Reductions over groups of kLanes neighbouring lanes.
template <int kLanes>
struct LaneGroup {
  __device__ __forceinline__ float least(float v) const {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) v = fminf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
  }
  __device__ __forceinline__ float most(float v) const {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
  }
  __device__ __forceinline__ uint32_t total(uint32_t v) const {
    if constexpr (kLanes == 32) {
      uint32_t sum;
      asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(v));
      return sum;
    } else {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
      return v;
    }
  }
  __device__ __forceinline__ bool any(bool v) const {
    const unsigned where = __ballot_sync(0xffffffffu, v);
    if constexpr (kLanes == 32) return where != 0;
    return where >> (threadIdx.x % 32 / kLanes * kLanes) & ((1u << kLanes % 32) - 1u);
  }
};

}  // namespace qcut
