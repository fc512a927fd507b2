// Quantization of floats to int8 per token and per tensor, dequantization of int8, and column sums of weights.
//
// kThreads threads have a row, in 16-byte vectors of floats; kRows rows share a CTA. Exactness: results equal
// qcut.numerics bitwise, because every quotient that decides a rounding is the IEEE division.
//
// Source: schemes.md section 2; Markstein, "IA-64 and Elementary Functions", ch. 8 (deciding a
// division's rounding from a product with the reciprocal); PTX ISA "div.rn", "rcp.rn", "dp4a".
#pragma once

#include <qcut/core/quantize.cuh>

namespace qcut {

template <int kBytes, bool kAligned>
__device__ __forceinline__ void store_bytes(int8_t* row, int col, int columns, const uint32_t* packed) {
  if (kAligned) {
    if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(row + col) = make_uint2(packed[0], packed[1]);
    } else {
      *reinterpret_cast<uint32_t*>(row + col) = packed[0];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      if (col + i < columns) row[col + i] = static_cast<int8_t>(packed[i / 4] >> (8 * (i % 4)));
    }
  }
}

// A row of int8.
struct Int8Row {
  int8_t* q;

  __device__ __forceinline__ Int8Row(int8_t* q, long long row, int k_padded) : q(q + row * k_padded) {}
  template <bool kAligned, int kSize>
  __device__ __forceinline__ void store(const QuantizedRow& quantized, const float (&f)[kSize], int col,
                                        int k_padded) const {
    uint32_t packed[kSize / 4];
    quantized.quantize(f, packed);
    store_bytes<kSize, kAligned>(q, col, k_padded, packed);
  }
};

// Quantizes each row of x as Quantized does with the row's largest magnitude, writes its scale, and stores the row as
// Row does; columns k..k_padded are 0.
//
// With kVecs > 0, threads keep the row in registers between the two passes, and kVecs * kThreads vectors cover
// k_padded. With kVecs = 0, threads read the row twice, for any k.
template <class Quantized, class Row, class T, int kThreads, int kRows, int kVecs, bool kAligned>
__device__ __forceinline__ void quantize_rows(const T* x, int8_t* q, float* scale, long long x_stride, int m, int k,
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
  const Row q_row(q, row, k_padded);

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

  const Quantized quantized(peak);
  if (thread == 0) scale[row] = quantized.scale();

  const auto emit = [&](const Vector<T>& vector, int col) {
    float f[kSize];
    vector.to_float(f);
    q_row.template store<kAligned>(quantized, f, col, k_padded);
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

// scale[m] = max_k |x[m, k]| / 127, or 1 if this is 0; q = clamp(rne(x / scale), -127, 127). See QuantizedRow.
template <class T, int kThreads, int kRows, int kVecs, bool kAligned>
__device__ __forceinline__ void quantize_per_token(const T* x, int8_t* q, float* scale, long long x_stride, int m,
                                                   int k, int k_padded) {
  quantize_rows<QuantizedRow, Int8Row, T, kThreads, kRows, kVecs, kAligned>(x, q, scale, x_stride, m, k, k_padded);
}

// q = clamp(rne(x / scale) + zero_point, -128, 127) with one scale. NaN becomes zero_point, +-Inf
// saturate, columns k..k_padded are 0. blockIdx.y counts parts of a row, kVecs vectors per thread.
template <class T, int kThreads, int kRows, int kVecs, bool kAligned>
__device__ __forceinline__ void quantize_per_tensor(const T* x, int8_t* q, long long x_stride, int m, int k,
                                                    int k_padded, float scale, int zero_point) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr float kLimit = 512.0f;  // quotients beyond 255 saturate with every zero point
  launch_dependents();
  wait_for_dependencies();

  const int thread = threadIdx.x % kThreads;
  const long long row = static_cast<long long>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  if (row >= m) return;
  const int first = (blockIdx.y * kVecs * kThreads + thread) * kSize;
  const T* x_row = x + row * x_stride;
  Vector<T> v[kVecs];
  load_vectors<T, kVecs, kAligned>(v, x_row, first, kThreads * kSize, k);

  const float inv = __frcp_rn(scale);
  const float bound = kLimit * scale;
  const float zero = static_cast<float>(zero_point);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int col = first + i * kThreads * kSize;
    if (col >= k_padded) break;
    float f[kSize];
    float t[kSize];
    uint32_t packed[kSize / 4];
    v[i].to_float(f);
#pragma unroll
    for (int j = 0; j < kSize; ++j) f[j] = f[j] == f[j] ? fminf(fmaxf(f[j], -bound), bound) : 0.0f;
    round_quotients(f, scale, inv, kLimit, t);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float r = fminf(fmaxf(t[j] - kRoundingBias + zero, -128.0f), 127.0f);
      t[j] = (col + j < k ? r : 0.0f) + kRoundingBias;
    }
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
      packed[j] = pack_low_bytes(t[4 * j], t[4 * j + 1], t[4 * j + 2], t[4 * j + 3]);
    }
    store_bytes<kSize, kAligned>(q + row * k_padded, col, k_padded, packed);
  }
}

// out = T(f32(q) * scale[row]) with q [rows, columns], rows q_stride elements apart, and a contiguous out.
template <class T, int kThreads, int kRows, int kVecs, bool kAligned>
__device__ __forceinline__ void dequantize(const int8_t* q, const float* scale, T* out, long long q_stride, int rows,
                                           int columns) {
  constexpr int kSize = Vector<T>::kSize;
  launch_dependents();
  wait_for_dependencies();

  const int thread = threadIdx.x % kThreads;
  const long long row = static_cast<long long>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  if (row >= rows) return;
  const float s = scale[row];
  const int8_t* q_row = q + row * q_stride;
  T* out_row = out + row * columns;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int col = ((blockIdx.y * kVecs + i) * kThreads + thread) * kSize;
    if (kAligned && col + kSize <= columns) {
      uint32_t raw[kSize / 4];
      if constexpr (kSize == 8) {
        const uint2 pair = *reinterpret_cast<const uint2*>(q_row + col);
        raw[0] = pair.x;
        raw[kSize / 4 - 1] = pair.y;
      } else {
        raw[0] = *reinterpret_cast<const uint32_t*>(q_row + col);
      }
      Vector<T> v{};
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const int value = static_cast<int8_t>(raw[j / 4] >> (8 * (j % 4)));
        v.set(j, from_float<T>(static_cast<float>(value) * s));
      }
      *reinterpret_cast<uint4*>(out_row + col) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (col + j < columns) out_row[col + j] = from_float<T>(static_cast<float>(q_row[col + j]) * s);
      }
    }
  }
}

// colsum[n] = sum_k q[n, k] in int32, exact for k < 2^24. A warp sums a row.
template <int kRows, bool kAligned>
__device__ __forceinline__ void colsum(const int8_t* q, int32_t* out, long long q_stride, int n, int k) {
  launch_dependents();
  wait_for_dependencies();

  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * kRows + threadIdx.x / 32;
  if (row >= n) return;
  const int8_t* q_row = q + row * q_stride;
  int sum = 0;
  int col = lane * 16;
  if constexpr (kAligned) {
#pragma unroll 4
    for (; col + 16 <= k; col += 512) {
      const uint4 raw = *reinterpret_cast<const uint4*>(q_row + col);
      sum = __dp4a(static_cast<int>(raw.x), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(raw.y), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(raw.z), 0x01010101, sum);
      sum = __dp4a(static_cast<int>(raw.w), 0x01010101, sum);
    }
  }
  for (; col < k; col += 512) {
    for (int i = col; i < min(col + 16, k); ++i) sum += q_row[i];
  }
  sum = warp_sum(sum);
  if (lane == 0) out[row] = sum;
}

}  // namespace qcut
