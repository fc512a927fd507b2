// RMSNorm and LayerNorm of rows, the residual added before and the result quantized after where that is wanted.
//
// A CTA has a row, which its threads hold in registers. Roundings are those of the eager model between its modules: the
// sum with the residual is rounded to T, an RMS-normalized value too before its weight multiplies it.
#pragma once

#include <qcut/quantize.cuh>

namespace qcut {

template <int kThreads>
__device__ __forceinline__ float cta_sum(float v, float* shared) {
  constexpr int kWarps = kThreads / 32;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  if constexpr (kWarps > 1) {
    const int lane = threadIdx.x % 32;
    __syncthreads();  // what was there has been read
    if (lane == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    v = lane < kWarps ? shared[lane] : 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  }
  return v;
}

// kLayer: LayerNorm, with `bias` where it is not null. kResidual: adds `residual` and writes the sum to `sum`, which may
// be x or the residual itself. kQuantized: y is int8 [m, k_padded] with `scale`, as quantize_per_token makes it of the
// norm rounded to T; else T [m, k]. Rows of x, residual and sum are x_stride elements apart; those of y lie close.
template <class T, bool kLayer, bool kResidual, bool kQuantized, int kVecs, int kThreads, bool kAligned>
__device__ __forceinline__ void norm_rows(const T* x, const T* residual, T* sum, const T* weight, const T* bias, void* y,
                                          float* scale, long long x_stride, int k, int k_padded, float eps) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kStep = kThreads * kSize;
  __shared__ float shared[32];
  const long long row = blockIdx.x;
  const int first = threadIdx.x * kSize;
  Vector<T> weights[kVecs], biases[kVecs];
  load_vectors<T, kVecs, kAligned>(weights, weight, first, kStep, k);
  if (kLayer && bias != nullptr) {
    load_vectors<T, kVecs, kAligned>(biases, bias, first, kStep, k);
  } else {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) biases[i] = Vector<T>{};
  }
  launch_dependents();
  wait_for_dependencies();

  Vector<T> loaded[kVecs];
  load_vectors<T, kVecs, kAligned>(loaded, x + row * x_stride, first, kStep, k);
  float f[kVecs][kSize];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) loaded[i].to_float(f[i]);
  if constexpr (kResidual) {
    load_vectors<T, kVecs, kAligned>(loaded, residual + row * x_stride, first, kStep, k);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      float added[kSize];
      loaded[i].to_float(added);
#pragma unroll
      for (int j = 0; j < kSize; ++j) f[i][j] = to_float(from_float<T>(f[i][j] + added[j]));
      store_vector<T, kAligned>(sum + row * x_stride, first + i * kStep, k, f[i]);
    }
  }
  float mean = 0.0f;
  const float columns = static_cast<float>(k);
  if constexpr (kLayer) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) total += f[i][j];
    }
    mean = __fdiv_rn(cta_sum<kThreads>(total, shared), columns);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float centered = first + i * kStep + j < k ? f[i][j] - mean : 0.0f;
      squares = fmaf(centered, centered, squares);
    }
  }
  const float inv = __frsqrt_rn(__fdiv_rn(cta_sum<kThreads>(squares, shared), columns) + eps);
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    float w[kSize], b[kSize];
    weights[i].to_float(w);
    biases[i].to_float(b);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float scaled = (f[i][j] - mean) * inv;
      const float v = kLayer ? fmaf(scaled, w[j], b[j]) : to_float(from_float<T>(scaled)) * w[j];
      f[i][j] = first + i * kStep + j < k ? to_float(from_float<T>(v)) : 0.0f;
      peak = max(peak, __float_as_uint(f[i][j]) & 0x7fffffffu);
    }
    if constexpr (!kQuantized) store_vector<T, kAligned>(static_cast<T*>(y) + row * k, first + i * kStep, k, f[i]);
  }
  if constexpr (kQuantized) {
    peak = warp_max(peak);
    if constexpr (kThreads > 32) {
      __syncthreads();
      if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = __uint_as_float(peak);
      __syncthreads();
      peak = warp_max(threadIdx.x % 32 < kThreads / 32 ? __float_as_uint(shared[threadIdx.x % 32]) : 0u);
    }
    const bool finite = peak < 0x7f800000u;
    float s = __fdiv_rn(__uint_as_float(peak), 127.0f);
    if (s == 0.0f) s = 1.0f;
    if (threadIdx.x == 0) scale[row] = finite ? s : __uint_as_float(0x7fc00000u);
    const float reciprocal = __frcp_rn(s);
    char* const out = static_cast<char*>(y) + row * k_padded;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int col = first + i * kStep;
      if (col >= k_padded) break;
      float t[kSize];
      uint32_t packed[kSize / 4] = {};
      if (finite) {
        round_quotients(f[i], s, reciprocal, 127.0f, t);
#pragma unroll
        for (int j = 0; j < kSize / 4; ++j) {
          packed[j] = pack_low_bytes(t[4 * j], t[4 * j + 1], t[4 * j + 2], t[4 * j + 3]);
        }
      }
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) *reinterpret_cast<uint32_t*>(out + col + 4 * j) = packed[j];
    }
  }
}

}  // namespace qcut
