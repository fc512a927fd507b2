// The index of the largest element of each row; of equal elements, the lowest index.
//
// A CTA has a row. Its threads read 16-byte vectors and keep the largest key, an integer that orders elements and their
// indices. Exactness: comparisons alone.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// A key that is larger for larger values and, among equal values, for lower indices. -0 equals 0; NaN is below all
// other values.
__device__ __forceinline__ unsigned long long argmax_key(float v, int index) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
  const uint32_t ordered = v != v ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(ordered) << 32 | static_cast<uint32_t>(~index);
}

// The kernel. Rows of `columns` elements are `stride` elements apart and may start at any element. With kAdvances, each
// row's position and slot are raised by one, up to context - 1 and context.
template <class T, bool kAdvances, int kThreads, int kUnroll>
__device__ __forceinline__ void argmax_rows(const T* x, long long* best, int* positions, int* slots, long long stride,
                                            int columns, int context) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kWarps = kThreads / 32;
  __shared__ unsigned long long partial[kWarps];
  launch_dependents();
  wait_for_dependencies();
  const T* row = x + blockIdx.x * stride;
  const int lead = min(columns, static_cast<int>((16 - reinterpret_cast<size_t>(row) % 16) % 16 / sizeof(T)));
  const int vectors = (columns - lead) / kSize;
  const int tail = lead + vectors * kSize;
  const int thread = threadIdx.x;
  unsigned long long best_key = 0;
  if (thread < lead) best_key = argmax_key(to_float(row[thread]), thread);
  if (thread < columns - tail) best_key = max(best_key, argmax_key(to_float(row[tail + thread]), tail + thread));
  const uint4* body = reinterpret_cast<const uint4*>(row + lead);
  for (int first = thread; first < vectors; first += kThreads * kUnroll) {
    uint4 raw[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads < vectors) raw[u] = body[first + u * kThreads];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int vector = first + u * kThreads;
      if (vector >= vectors) break;
      float f[kSize];
      Vector<T>{raw[u].x, raw[u].y, raw[u].z, raw[u].w}.to_float(f);
#pragma unroll
      for (int j = 0; j < kSize; ++j) best_key = max(best_key, argmax_key(f[j], lead + vector * kSize + j));
    }
  }
  best_key = warp_max(best_key);
  if (thread % 32 == 0) partial[thread / 32] = best_key;
  __syncthreads();
  if (thread >= 32) return;
  best_key = thread < kWarps ? partial[thread] : 0;
  best_key = warp_max(best_key);
  // If all elements are NaN, the upper half of every key is 0, and the first element has the largest key.
  if (thread == 0) {
    best[blockIdx.x] = static_cast<int>(~static_cast<uint32_t>(best_key));
    if constexpr (kAdvances) {
      positions[blockIdx.x] = min(positions[blockIdx.x] + 1, context - 1);
      slots[blockIdx.x] = min(slots[blockIdx.x] + 1, context);
    }
  }
}

}  // namespace qcut
