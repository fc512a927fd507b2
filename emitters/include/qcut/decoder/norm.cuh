// RMSNorm or LayerNorm of rows, with an optional residual that is added before and an optional quantization or rotation
// after, in place of the plain rows or beside them.
//
// A CTA has a row, which its threads hold in registers. Exactness: values are rounded to T wherever the eager model
// stores them. The sum with the residual is rounded, and so is an RMS-normalized value before its weight multiplies it.
// Sums over a row are added in float32 in a fixed order.
#pragma once

#include <qcut/core/quantize.cuh>
#include <qcut/core/rotation.cuh>

namespace qcut {

// The sum of a row's chunks: neighbouring chunks are added first, then neighbouring sums. Zeros past the row's end do
// not change the sum, which therefore does not depend on the number of chunks. Each thread adds up to 32 chunks by
// itself, which takes fewer cycles than shuffles.
template <int kCount>
__device__ __forceinline__ float chunk_total(const float* chunks) {
  if constexpr (kCount <= 32) {
    float v[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = chunks[i];
#pragma unroll
    for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
      for (int i = 0; i + step < kCount; i += 2 * step) v[i] += v[i + step];
    }
    return v[0];
  } else {
    float v = 0.0f;
    for (int i = threadIdx.x % 32; i < kCount; i += 32) v += chunks[i];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
  }
}

// The sum of the CTA's row, in every thread. A chunk is 32 vectors, one per lane. Each thread has kVecs vectors, kWarps
// chunks apart; `sums` holds the sum of the elements of each.
template <int kVecs, int kWarps>
__device__ __forceinline__ float row_total(const float (&sums)[kVecs], float* chunks) {
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const float sum = warp_sum(sums[i]);
    if (threadIdx.x % 32 == 0) chunks[i * kWarps + threadIdx.x / 32] = sum;
  }
  __syncthreads();
  return chunk_total<kVecs * kWarps>(chunks);
}

__device__ __forceinline__ float inverse_root(float squares, float columns, float eps) {
  return __frsqrt_rn(__fdiv_rn(squares, columns) + eps);
}

// One element of the norm, rounded to T.
template <class T, bool kLayer>
__device__ __forceinline__ float normalized(float v, float mean, float inv, float weight, float bias) {
  const float scaled = (v - mean) * inv;
  return to_float(from_float<T>(kLayer ? fmaf(scaled, weight, bias) : to_float(from_float<T>(scaled)) * weight));
}

// A residual that has a row for each row of x.
struct OneResidual {
  template <class T, int kVecs, bool kAligned>
  __device__ __forceinline__ void load(float (&f)[kVecs][Vector<T>::kSize], const T* residual, long long row,
                                       long long stride, int first, int step, int k) const {
    Vector<T> loaded[kVecs];
    load_vectors<T, kVecs, kAligned>(loaded, residual + row * stride, first, step, k);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) loaded[i].to_float(f[i]);
  }
};

// One that is the weighted sum of top_k rows, rounded to T, as routing/sum_routes.cuh adds them. Loads of kUnroll rows are
// in flight.
template <int kUnroll>
struct RoutedResidual {
  const float* weights;  // [m, top_k]
  int top_k;
  template <class T, int kVecs, bool kAligned>
  __device__ __forceinline__ void load(float (&f)[kVecs][Vector<T>::kSize], const T* residual, long long row,
                                       long long stride, int first, int step, int k) const {
    constexpr int kSize = Vector<T>::kSize;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) f[i][j] = 0.0f;
    }
    for (int begin = 0; begin < top_k; begin += kUnroll) {
      float weight[kUnroll];
      Vector<T> loaded[kUnroll][kVecs];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (begin + u >= top_k) break;
        const long long route = row * top_k + begin + u;
        weight[u] = weights[route];
        load_vectors<T, kVecs, kAligned>(loaded[u], residual + route * stride, first, step, k);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (begin + u >= top_k) break;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          float result[kSize];
          loaded[u][i].to_float(result);
#pragma unroll
          for (int j = 0; j < kSize; ++j) f[i][j] = __fadd_rn(f[i][j], __fmul_rn(weight[u], result[j]));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) f[i][j] = to_float(from_float<T>(f[i][j]));
    }
  }
};

// The kernel. With kLayer, LayerNorm with `bias` if it is not null; otherwise RMSNorm. With kResidual, the kernel adds
// `residual` and writes the sum to `sum`, which may be x or the residual itself. With kQuantized, y is int8
// [m, k_padded] with `scale`, as quantize_per_token computes them from the norm rounded to T; otherwise y is T [m, k].
// Rows of x, residual and sum are x_stride elements apart; y is contiguous. `source` makes the residual of a row of
// several, which then is not overwritten. A rotation rounds y to T and stores it as
// blocks of tokens. With kPlain, the norm rounded to T is also written to `plain` [m, k], contiguous, beside a quantized
// or rotated y.
template <class T, bool kLayer, bool kResidual, bool kQuantized, int kVecs, int kThreads, bool kAligned,
          bool kPlain = false, class Rotation = NotRotated, class Source = OneResidual>
__device__ __forceinline__ void norm_rows(const T* x, const T* residual, T* sum, const T* weight, const T* bias,
                                          void* y, float* scale, long long x_stride, int k, int k_padded, float eps,
                                          Rotation rotation = {}, T* plain = nullptr, Source source = {}) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kStep = kThreads * kSize;
  constexpr int kWarps = kThreads / 32;
  __shared__ float chunks[2][kVecs * kWarps];
  __shared__ float peaks[kWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
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
  if constexpr (Rotation::kRotates) rotation.begin(first, kStep);
  launch_dependents();
  wait_for_dependencies();

  Vector<T> loaded[kVecs];
  load_vectors<T, kVecs, kAligned>(loaded, x + row * x_stride, first, kStep, k);
  float f[kVecs][kSize], added[kVecs][kSize];
  if constexpr (kResidual) {
    source.template load<T, kVecs, kAligned>(added, residual, row, x_stride, first, kStep, k);
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) loaded[i].to_float(f[i]);
  if constexpr (kResidual) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) f[i][j] = to_float(from_float<T>(f[i][j] + added[i][j]));
      store_vector<T, kAligned>(sum + row * x_stride, first + i * kStep, k, f[i]);
    }
  }
  float mean = 0.0f;
  const float columns = static_cast<float>(k);
  float sums[kVecs] = {};
  if constexpr (kLayer) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) sums[i] += f[i][j];
    }
    mean = __fdiv_rn(row_total<kVecs, kWarps>(sums, chunks[0]), columns);
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    sums[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float centered = first + i * kStep + j < k ? f[i][j] - mean : 0.0f;
      sums[i] = fmaf(centered, centered, sums[i]);
    }
  }
  const float inv = inverse_root(row_total<kVecs, kWarps>(sums, chunks[1]), columns, eps);
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    float w[kSize], b[kSize];
    weights[i].to_float(w);
    biases[i].to_float(b);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      f[i][j] = first + i * kStep + j < k ? normalized<T, kLayer>(f[i][j], mean, inv, w[j], b[j]) : 0.0f;
      peak = max(peak, __float_as_uint(f[i][j]) & 0x7fffffffu);
    }
    if constexpr (kPlain || (!kQuantized && !Rotation::kRotates)) {
      T* const rows = kPlain ? plain : static_cast<T*>(y);
      store_vector<T, kAligned>(rows + row * k, first + i * kStep, k, f[i]);
    }
  }
  if constexpr (Rotation::kRotates) rotation.store(f, row, gridDim.x, first, kStep, y, scale);
  if constexpr (kQuantized) {
    peak = warp_max(peak);
    if constexpr (kWarps > 1) {
      if (lane == 0) peaks[warp] = __uint_as_float(peak);
      __syncthreads();
      peak = warp_max(lane < kWarps ? __float_as_uint(peaks[lane]) : 0u);
    }
    const QuantizedRow quantized(peak);
    if (threadIdx.x == 0) scale[row] = quantized.scale();
    char* const out = static_cast<char*>(y) + row * k_padded;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int col = first + i * kStep;
      if (col >= k_padded) break;
      uint32_t packed[kSize / 4];
      quantized.quantize(f[i], packed);
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) *reinterpret_cast<uint32_t*>(out + col + 4 * j) = packed[j];
    }
  }
}

}  // namespace qcut
