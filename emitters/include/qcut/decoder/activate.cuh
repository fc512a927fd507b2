// The activation between an MLP's projections, where no GEMM's epilogue computes it.
#pragma once

#include <qcut/core/activation.cuh>
#include <qcut/core/common.cuh>

namespace qcut {

// kGated: y = rne(rne(silu(x)) * up); else y = rne(gelu_tanh(x)). CTA (row, part) has kThreads vectors of a row; rows
// of x are x_stride elements apart, of up up_stride, those of y lie close. absmax, where there is one, [m], is raised
// to the largest magnitude of each row of y.
template <class T, bool kGated, int kThreads, bool kAligned>
__device__ __forceinline__ void activate_rows(const T* x, const T* up, T* y, float* absmax, long long x_stride,
                                              long long up_stride, int columns) {
  constexpr int kSize = Vector<T>::kSize;
  launch_dependents();
  wait_for_dependencies();
  const long long row = blockIdx.x;
  const int first = (blockIdx.y * kThreads + threadIdx.x) * kSize;
  Vector<T> loaded[1], factor[1];
  load_vectors<T, 1, kAligned>(loaded, x + row * x_stride, first, 0, columns);
  if constexpr (kGated) load_vectors<T, 1, kAligned>(factor, up + row * up_stride, first, 0, columns);
  float f[kSize], g[kSize];
  loaded[0].to_float(f);
  if constexpr (kGated) factor[0].to_float(g);
#pragma unroll
  for (int i = 0; i < kSize; ++i) f[i] = kGated ? to_float(from_float<T>(silu(f[i]))) * g[i] : gelu_tanh(f[i]);
  store_vector<T, kAligned>(y + row * columns, first, columns, f);
  if (absmax == nullptr) return;
  Vector<T> stored{};
#pragma unroll
  for (int i = 0; i < kSize; ++i) stored.set(i, from_float<T>(first + i < columns ? f[i] : 0.0f));
  const uint32_t peak = warp_max(stored.abs_max());
  if (threadIdx.x % 32 == 0 && peak > 0) atomicMax(reinterpret_cast<unsigned*>(absmax) + row, peak);
}

}  // namespace qcut
