// Elementwise functions of the GEMM epilogues, float32 in and out.
//
// gelu_tanh and silu are written through exp: x * sigmoid(u) costs one ex2 and one reciprocal where
// tanhf takes a branch, and stays accurate for large negative x.
//
// Exactness: GELU and SiLU are within 2**-21 |x| of the exact functions on the GPU. erff and __fdividef are
// within 2 ulp. __expf has a relative error of 2**-22 + 2**-24 |u|; the result inherits this error times
// e^-u / (1 + e^-u) <= 1, and |u| e^-|u| <= 0.37.
// Source: CUDA C++ Programming Guide, mathematical functions; Hendrycks & Gimpel 2016 (GELU).
#pragma once

#include <qcut/core/rounding.cuh>

#if defined(__CUDACC__)
#define QCUT_HD __host__ __device__ __forceinline__
#else
#include <cmath>
#define QCUT_HD inline
#endif

namespace qcut {

QCUT_HD float relu(float v) { return v > 0.f ? v : (v != v ? v : 0.f); }

QCUT_HD float sigmoid_times(float v, float u) {
#if defined(__CUDA_ARCH__)
  return __fdividef(v, 1.f + __expf(-u));
#else
  return v / (1.f + expf(-u));
#endif
}

// 0.5 * v * (1 + erf(v / sqrt(2)))
QCUT_HD float gelu_erf(float v) { return 0.5f * v * (1.f + erff(v * 0.7071067811865476f)); }

// 0.5 * v * (1 + tanh(sqrt(2/pi) * (v + 0.044715 * v^3))) = v * sigmoid(2 * sqrt(2/pi) * (...))
QCUT_HD float gelu_tanh(float v) {
  return sigmoid_times(v, 1.5957691216057308f * (v + 0.044715f * (v * v * v)));
}

QCUT_HD float silu(float v) { return sigmoid_times(v, v); }

// Returns rne(v * inv_scale) + zero_point as a float that holds an integer. The conversion to int8 that
// follows saturates to -128 .. 127 and turns NaN into 0. The fused addition of kRoundingBias rounds the
// exact product v * inv_scale once, to an integer, ties to even; rintf would take a slower unit. Beyond
// 2^22 the sum is inexact, but such a sum is far outside int8.
QCUT_HD float requantize(float v, float inv_scale, float zero_point) {
  return fmaf(v, inv_scale, kRoundingBias) + (zero_point - kRoundingBias);
}

}  // namespace qcut
