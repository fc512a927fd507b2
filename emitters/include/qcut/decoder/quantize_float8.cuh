// Quantization of floats to e4m3, per token and per tensor, stored as Q: bytes, or __half.
//
// Threads and rows are as in quantize.cuh.
#pragma once

#include <qcut/core/float8.cuh>
#include <qcut/decoder/quantize.cuh>

namespace qcut {

// A row of Q, in memory that the kernel's argument calls bytes.
template <class Q>
struct Float8Row {
  Q* q;

  __device__ __forceinline__ Float8Row(int8_t* q, long long row, int k_padded)
      : q(reinterpret_cast<Q*>(q) + row * k_padded) {}
  // Rounds the products of a vector and `inv`.
  template <bool kAligned, int kSize>
  __device__ __forceinline__ void store(float inv, const float (&f)[kSize], int col, int k_padded) const {
    uint32_t words[kSize / 4][sizeof(Q)];
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = __fmul_rn(f[4 * i + j], inv);
      round_e4m3<Q>(v, words[i]);
    }
    int8_t* const bytes = reinterpret_cast<int8_t*>(q);
    if constexpr (sizeof(Q) == 1) {
      uint32_t packed[kSize / 4];
#pragma unroll
      for (int i = 0; i < kSize / 4; ++i) packed[i] = words[i][0];
      store_bytes<kSize, kAligned>(bytes, col, k_padded, packed);
    } else {
#pragma unroll
      for (int i = 0; i < kSize / 4; ++i) store_pairs<kAligned>(words[i], col + 4 * i, k_padded);
    }
  }
  // Two words of four elements.
  template <bool kAligned>
  __device__ __forceinline__ void store_pairs(const uint32_t (&words)[sizeof(Q)], int col, int k_padded) const {
    if constexpr (kAligned) {
      *reinterpret_cast<uint2*>(q + col) = make_uint2(words[0], words[sizeof(Q) - 1]);
    } else {
      unsigned short* const halves = reinterpret_cast<unsigned short*>(q);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (col + i < k_padded) halves[col + i] = static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2)));
      }
    }
  }
  template <bool kAligned, class Quantized, int kSize>
  __device__ __forceinline__ void store(const Quantized& quantized, const float (&f)[kSize], int col,
                                        int k_padded) const {
    float kept[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) kept[i] = quantized.finite ? f[i] : 0.0f;
    store<kAligned>(quantized.inv, kept, col, k_padded);
  }
};

// The quantization of a row, from the bits `peak` of its largest magnitude: scale = max(peak / 448, 2^-126), and
// q = e4m3(x * (1 / scale)). A row that holds NaN or Inf gets scale NaN and q = 0.
struct QuantizedFloat8 {
  float s, inv;
  bool finite;

  __device__ __forceinline__ explicit QuantizedFloat8(uint32_t peak)
      : s(fmaxf(__fdiv_rn(__uint_as_float(peak), 448.0f), 0x1p-126f)), inv(__frcp_rn(s)), finite(peak < 0x7f800000u) {}
  __device__ __forceinline__ float scale() const { return finite ? s : __uint_as_float(0x7fc00000u); }
};

// See QuantizedFloat8.
template <class Q, class T, int kThreads, int kRows, int kVecs, bool kAligned>
__device__ __forceinline__ void quantize_float8(const T* x, int8_t* q, float* scale, long long x_stride, int m, int k,
                                                int k_padded) {
  quantize_rows<QuantizedFloat8, Float8Row<Q>, T, kThreads, kRows, kVecs, kAligned>(x, q, scale, x_stride, m, k,
                                                                                    k_padded);
}

// q = e4m3(x * (1 / scale)) with one scale. blockIdx.y counts parts of a row, kVecs vectors per thread.
template <class Q, class T, int kThreads, int kRows, int kVecs, bool kAligned>
__device__ __forceinline__ void quantize_float8_per_tensor(const T* x, int8_t* q, long long x_stride, int m, int k,
                                                           int k_padded, float scale) {
  constexpr int kSize = Vector<T>::kSize;
  launch_dependents();
  wait_for_dependencies();

  const int thread = threadIdx.x % kThreads;
  const long long row = static_cast<long long>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  if (row >= m) return;
  const int first = (blockIdx.y * kVecs * kThreads + thread) * kSize;
  Vector<T> v[kVecs];
  load_vectors<T, kVecs, kAligned>(v, x + row * x_stride, first, kThreads * kSize, k);
  const Float8Row<Q> q_row(q, row, k_padded);

  const float inv = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int col = first + i * kThreads * kSize;
    if (col >= k_padded) break;
    float f[kSize];
    v[i].to_float(f);
    q_row.template store<kAligned>(inv, f, col, k_padded);
  }
}

}  // namespace qcut
