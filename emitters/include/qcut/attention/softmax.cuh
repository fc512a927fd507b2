// Tools of all attention kernels: powers of two, the initial maximum of a running softmax, windows, rings, softcaps and
// sinks.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// A number below every score: exp2 of the distance to a score is 0.
constexpr float kNoScore = -1e30f;

// 2^v within 2 ulp; 0 if 2^v is subnormal.
__device__ __forceinline__ float power(float v) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// Softcap of scores: cap * tanh(x), of y = 2 log2(e) x, is cap - 2 cap / (2^y + 1), within 2^-20 of cap. Where
// 2^y is infinite or 0, that is +-cap; NaN stays.
__device__ __forceinline__ float capped(float y, float cap) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(power(y) + 1.0f));
  return fmaf(-2.0f * cap, d, cap);
}

// The weight of a sink relative to 2^peak. A sink adds to the sum of weights, and has no value: where its weight is
// infinite, 2^128 times the largest one, results are 0.
__device__ __forceinline__ float sink_weight(float sink, float peak) {
  return power(fmaf(sink, 1.4426950408889634f, -peak));
}

// The first position that the last of `length` tokens sees through a window.
__device__ __forceinline__ int first_seen(int length, int window) { return max(length - window, 0); }

// Arguments of a ring cache, in which position p is row p % rows; empty for other caches.
template <bool kRing>
struct RingRows {};
template <>
struct RingRows<true> {
  int first, rows;  // row of the first visible position, and the number of rows

  // Row of the i-th visible position; i is below `rows`. Before the end, the row minus `rows` is negative.
  __device__ __forceinline__ int row(int i) const {
    return static_cast<int>(min(static_cast<unsigned>(first + i), static_cast<unsigned>(first + i - rows)));
  }
};

}  // namespace qcut
