// Quantization of floats to int16, per token and per tensor, as rows of int8: 16 for each eight tokens, first the rows of their high
// halves, then those of their low ones. Rows of tokens past m are not written.
//
// Threads and rows are as in quantize.cuh.
#pragma once

#include <qcut/core/int16.cuh>
#include <qcut/decoder/quantize.cuh>

namespace qcut {

template <class T, int kThreads, int kRows, int kVecs, bool kAligned>
__device__ __forceinline__ void quantize_halves(const T* x, int8_t* q, float* scale, long long x_stride, int m, int k,
                                                int k_padded) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kWarps = kThreads / 32;
  constexpr int kStep = kThreads * kSize;
  launch_dependents();
  wait_for_dependencies();

  const int local_row = threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  const long long row = static_cast<long long>(blockIdx.x) * kRows + local_row;
  const bool live = row < m;  // threads of a row past m still take part in the CTA's barrier
  const int columns = live ? k : 0;
  const T* x_row = x + row * x_stride;
  int8_t* const high = q + (row / 8 * 16 + row % 8) * k_padded;
  int8_t* const low = high + 8LL * k_padded;

  Vector<T> v[kVecs > 0 ? kVecs : 1];
  uint32_t peak = 0;
  if constexpr (kVecs > 0) {
    load_vectors<T, kVecs, kAligned>(v, x_row, thread * kSize, kStep, columns);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) peak = max(peak, v[i].abs_max());
  } else {
#pragma unroll 4
    for (int col = thread * kSize; col < columns; col += kStep) {
      load_vectors<T, 1, kAligned>(v, x_row, col, 0, columns);
      peak = max(peak, v[0].abs_max());
    }
  }
  peak = warp_max(peak);
  if constexpr (kWarps > 1) {
    __shared__ uint32_t partial[kRows * kWarps];
    const int lane = threadIdx.x % 32;
    if (lane == 0) partial[threadIdx.x / 32] = peak;
    __syncthreads();
    peak = warp_max(lane < kWarps ? partial[local_row * kWarps + lane] : 0u);
  }
  if (!live) return;

  const QuantizedRow16 quantized(peak);
  if (thread == 0) scale[row] = quantized.scale();

  const auto emit = [&](const Vector<T>& vector, int col) {
    float f[kSize];
    uint32_t words[kSize], packed[kSize / 4];
    vector.to_float(f);
    quantized.quantize(f, words);
    pack_half<true>(words, packed);
    store_bytes<kSize, kAligned>(high, col, k_padded, packed);
    pack_half<false>(words, packed);
    store_bytes<kSize, kAligned>(low, col, k_padded, packed);
  };
  if constexpr (kVecs > 0) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int col = i * kStep + thread * kSize;
      if (col < k_padded) emit(v[i], col);
    }
  } else {
    for (int col = thread * kSize; col < k_padded; col += kStep) {
      load_vectors<T, 1, kAligned>(v, x_row, col, 0, columns);
      emit(v[0], col);
    }
  }
}

// q = clamp(rne(x * (1 / scale)), -32639, 32639) with one scale. NaN becomes 0, +-Inf saturate. blockIdx.y counts parts of
// a row, kVecs vectors per thread.
template <class T, int kThreads, int kRows, int kVecs, bool kAligned>
__device__ __forceinline__ void quantize_halves_per_tensor(const T* x, int8_t* q, long long x_stride, int m, int k,
                                                           int k_padded, float scale) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr float kLimit = 32639.0f;
  launch_dependents();
  wait_for_dependencies();

  const int thread = threadIdx.x % kThreads;
  const long long row = static_cast<long long>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  if (row >= m) return;
  const int first = (blockIdx.y * kVecs * kThreads + thread) * kSize;
  Vector<T> v[kVecs];
  load_vectors<T, kVecs, kAligned>(v, x + row * x_stride, first, kThreads * kSize, k);
  int8_t* const high = q + (row / 8 * 16 + row % 8) * k_padded;
  int8_t* const low = high + 8LL * k_padded;

  const float inv = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int col = first + i * kThreads * kSize;
    if (col >= k_padded) break;
    float f[kSize];
    uint32_t words[kSize], packed[kSize / 4];
    v[i].to_float(f);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float t = __fmul_rn(f[j], inv);
      const float inside = t == t && col + j < k ? fminf(fmaxf(t, -kLimit), kLimit) : 0.0f;
      words[j] = __float_as_uint(__fadd_rn(inside, kRoundingBias));
    }
    pack_half<true>(words, packed);
    store_bytes<kSize, kAligned>(high, col, k_padded, packed);
    pack_half<false>(words, packed);
    store_bytes<kSize, kAligned>(low, col, k_padded, packed);
  }
}

}  // namespace qcut
