// Tools of all attention kernels: powers of two, and the initial maximum of a running softmax.
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

}  // namespace qcut
