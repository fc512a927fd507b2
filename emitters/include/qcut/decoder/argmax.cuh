// The index of the largest element of each row; of equal elements, the lowest index.
//
// A CTA, or a cluster of CTAs, has a row. Its threads read 16-byte vectors and keep the largest key, an integer that
// orders elements and their indices. Exactness: only comparisons.
#pragma once

#include <qcut/core/cluster.cuh>

namespace qcut {

// A key that is larger for larger values and, among equal values, for lower indices. -0 equals 0; NaN is below all
// other values.
__device__ __forceinline__ unsigned long long argmax_key(float v, int index) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
  const uint32_t ordered = v != v ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(ordered) << 32 | static_cast<uint32_t>(~index);
}

// The kernel. Rows of `columns` elements are `stride` elements apart and may start at any element. With kAdvances, each
// row's position and slot are raised by one, up to context - 1 and context. A cluster of kParts CTAs along x has a row,
// and rows are along y; without clusters, rows are along x. If host_copy is not null, [turns, rows] in pinned host
// memory, its row turn[row] also gets the result, and turn[row] is raised by one, modulo turns.
template <class T, bool kAdvances, int kThreads, int kUnroll, int kParts = 1>
__device__ __forceinline__ void argmax_rows(const T* x, long long* best, int* positions, int* slots, long long stride,
                                            int columns, int context, long long* host_copy = nullptr,
                                            int* turn = nullptr, int turns = 0) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kWarps = kThreads / 32;
  constexpr int kStep = kThreads * kParts;
  __shared__ unsigned long long partial[kWarps];
  const unsigned at = kParts > 1 ? blockIdx.y : blockIdx.x;
  if constexpr (kParts > 1) cluster_arrive_relaxed();  // no CTA sends before all have started
  launch_dependents();
  wait_for_dependencies();
  const T* row = x + at * stride;
  const int lead = min(columns, static_cast<int>((16 - reinterpret_cast<size_t>(row) % 16) % 16 / sizeof(T)));
  const int vectors = (columns - lead) / kSize;
  const int tail = lead + vectors * kSize;
  const int thread = (kParts > 1 ? blockIdx.x * kThreads : 0) + threadIdx.x;
  unsigned long long best_key = 0;
  if (thread < lead) best_key = argmax_key(to_float(row[thread]), thread);
  if (thread < columns - tail) best_key = max(best_key, argmax_key(to_float(row[tail + thread]), tail + thread));
  const uint4* body = reinterpret_cast<const uint4*>(row + lead);
  for (int first = thread; first < vectors; first += kStep * kUnroll) {
    uint4 raw[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kStep < vectors) raw[u] = body[first + u * kStep];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int vector = first + u * kStep;
      if (vector >= vectors) break;
      float f[kSize];
      Vector<T>{raw[u].x, raw[u].y, raw[u].z, raw[u].w}.to_float(f);
#pragma unroll
      for (int j = 0; j < kSize; ++j) best_key = max(best_key, argmax_key(f[j], lead + vector * kSize + j));
    }
  }
  best_key = warp_max(best_key);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = best_key;
  __syncthreads();
  if constexpr (kParts == 1) {
    if (threadIdx.x >= 32) return;
  }
  best_key = threadIdx.x < kWarps ? partial[threadIdx.x] : 0;
  best_key = warp_max(best_key);
  if constexpr (kParts > 1) {
    __shared__ unsigned long long parts[kParts];
    cluster_wait();
    if (threadIdx.x == 0) {
      const uint32_t to = shared_address(&parts[blockIdx.x]);
      store_cluster_4(to, 0, static_cast<uint32_t>(best_key));
      store_cluster_4(to + 4, 0, static_cast<uint32_t>(best_key >> 32));
    }
    cluster_arrive();
    cluster_wait();
    if (thread != 0) return;
#pragma unroll
    for (int i = 0; i < kParts; ++i) best_key = max(best_key, parts[i]);
  }
  // If all elements are NaN, the upper half of every key is 0, and the first element has the largest key.
  if (thread == 0) {
    const int index = static_cast<int>(~static_cast<uint32_t>(best_key));
    best[at] = index;
    if constexpr (kAdvances) {
      positions[at] = min(positions[at] + 1, context - 1);
      slots[at] = min(slots[at] + 1, context);
    }
    if (host_copy != nullptr) {
      const int now = turn[at];
      host_copy[static_cast<long long>(now) * (kParts > 1 ? gridDim.y : gridDim.x) + at] = index;
      turn[at] = now + 1 < turns ? now + 1 : 0;
    }
  }
}

}  // namespace qcut
