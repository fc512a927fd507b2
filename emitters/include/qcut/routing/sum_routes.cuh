// The weighted sum of each token's results over its routes, in order.
//
// A thread has 16 bytes of a row. Exactness: every product, and every sum, is rounded to float32; the last sum is
// rounded to T, and its sum with `added` once more.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// The kernel. results [m * top_k, columns] and added [m, columns], which may be null, are contiguous; with kAligned
// their rows start at multiples of 16 bytes. Routes whose expert is not 0 to count - 1 are left out. Few tokens load
// the results of such routes too, so that no load waits for another.
template <class T, bool kMany, int kThreads, bool kAligned>
__device__ __forceinline__ void sum_routes(const T* results, const float* weights, const int* experts, const T* added,
                                           T* y, int top_k, int count, int columns) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kUnroll = 8;
  wait_for_dependencies();
  launch_dependents();  // only after the wait, so that a kernel two launches later may read these results early
  const long long row = blockIdx.x;
  const int first = (blockIdx.y * kThreads + threadIdx.x) * kSize;
  Vector<T> last[1] = {};
  if (added != nullptr) load_vectors<T, 1, kAligned>(last, added + row * columns, first, 0, columns);
  float total[kSize] = {};
  for (int begin = 0; begin < top_k; begin += kUnroll) {
    float weight[kUnroll];
    bool is_computed[kUnroll];
    Vector<T> loaded[kUnroll][1];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const bool is_route = begin + u < top_k;
      const long long route = row * top_k + begin + u;
      weight[u] = is_route ? weights[route] : 0.0f;
      is_computed[u] = is_route && static_cast<unsigned>(experts[route]) < count;
      if (kMany ? is_computed[u] : is_route) {
        load_vectors<T, 1, kAligned>(loaded[u], results + route * columns, first, 0, columns);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!is_computed[u]) continue;
      float f[kSize];
      loaded[u][0].to_float(f);
#pragma unroll
      for (int i = 0; i < kSize; ++i) total[i] = __fadd_rn(total[i], __fmul_rn(weight[u], f[i]));
    }
  }
  if (added != nullptr) {
    float f[kSize];
    last[0].to_float(f);
#pragma unroll
    for (int i = 0; i < kSize; ++i) total[i] = to_float(from_float<T>(total[i])) + f[i];
  }
  store_vector<T, kAligned>(y + row * columns, first, columns, total);
}

}  // namespace qcut
