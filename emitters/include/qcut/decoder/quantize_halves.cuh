// Quantization of floats to int16, per token and per tensor, as a hi/lo split: 16 rows of int8 for eight tokens, first
// their high bytes, then their low bytes. Rows of tokens past m are not written.
//
// Threads and rows are as in quantize.cuh.
#pragma once

#include <qcut/core/int16.cuh>
#include <qcut/decoder/quantize.cuh>

namespace qcut {

// A row of int16 as a hi/lo split: a row of high bytes, and one of low bytes.
struct HalvesRow {
  int8_t *high, *low;

  __device__ __forceinline__ HalvesRow(int8_t* q, long long row, int k_padded)
      : high(q + (row / 8 * 16 + row % 8) * k_padded), low(high + 8LL * k_padded) {}
  // Words whose low 16 bits are the int16.
  template <bool kAligned, int kSize>
  __device__ __forceinline__ void store(const uint32_t (&words)[kSize], int col, int k_padded) const {
    uint32_t packed[kSize / 4];
    pack_half<true>(words, packed);
    store_bytes<kSize, kAligned>(high, col, k_padded, packed);
    pack_half<false>(words, packed);
    store_bytes<kSize, kAligned>(low, col, k_padded, packed);
  }
  template <bool kAligned, int kSize>
  __device__ __forceinline__ void store(const QuantizedRow16& quantized, const float (&f)[kSize], int col,
                                        int k_padded) const {
    uint32_t words[kSize];
    quantized.quantize(f, words);
    store<kAligned>(words, col, k_padded);
  }
};

// See QuantizedRow16.
template <class T, int kThreads, int kRows, int kVecs, bool kAligned>
__device__ __forceinline__ void quantize_halves(const T* x, int8_t* q, float* scale, long long x_stride, int m, int k,
                                                int k_padded) {
  quantize_rows<QuantizedRow16, HalvesRow, T, kThreads, kRows, kVecs, kAligned>(x, q, scale, x_stride, m, k, k_padded);
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
  const HalvesRow q_row(q, row, k_padded);

  const float inv = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int col = first + i * kThreads * kSize;
    if (col >= k_padded) break;
    float f[kSize];
    uint32_t words[kSize];
    v[i].to_float(f);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float t = __fmul_rn(f[j], inv);
      const float inside = t == t && col + j < k ? fminf(fmaxf(t, -kLimit), kLimit) : 0.0f;
      words[j] = __float_as_uint(__fadd_rn(inside, kRoundingBias));
    }
    q_row.template store<kAligned>(words, col, k_padded);
  }
}

}  // namespace qcut
