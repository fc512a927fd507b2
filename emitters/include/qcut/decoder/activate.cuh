// The activation between an MLP's projections, for layers whose GEMM epilogue does not compute the activation.
//
// Each thread computes 16 bytes of a row, or several times 16; a row may need several CTAs. Exactness:
// core/activation.cuh, then rounding to T.
#pragma once

#include <qcut/core/activation.cuh>
#include <qcut/core/common.cuh>

namespace qcut {

// One element before it is rounded to T, of rne(silu(x)) * up with kGated, else of GELU.
struct PlainGate {
  template <class T, bool kGated>
  __device__ __forceinline__ float activated(float x, float up) const {
    return kGated ? to_float(from_float<T>(silu(x))) * up : gelu_tanh(x);
  }
};

// rne(g * sigmoid(alpha * g)) * rne(u + 1), u without plus_one, of x and up within a limit that is rounded to T:
// g = min(x, limit), u = clamp(up, -limit, limit). NaN stays; an infinite limit is none.
struct ClampedGate {
  float alpha, limit;
  int plus_one;

  template <class T, bool kGated>
  __device__ __forceinline__ float activated(float x, float up) const {
    const float most = to_float(from_float<T>(limit));
    const float g = x > most ? most : x;
    const float u = up > most ? most : up < -most ? -most : up;
    return to_float(from_float<T>(sigmoid_times(g, alpha * g))) * (plus_one ? to_float(from_float<T>(u + 1.0f)) : u);
  }
};

// The kernel: y = rne(activated(x, up)). CTA (row, part) has kThreads vectors of a row. Rows of x and up are x_stride
// and up_stride elements apart; y is contiguous. If absmax [m] is not null, each of its elements is raised to the
// largest magnitude of the row of y.
template <class T, bool kGated, int kThreads, bool kAligned, class Gate = PlainGate>
__device__ __forceinline__ void activate_rows(const T* x, const T* up, T* y, float* absmax, long long x_stride,
                                              long long up_stride, int columns, Gate gate = {}) {
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
  for (int i = 0; i < kSize; ++i) f[i] = gate.template activated<T, kGated>(f[i], g[i]);
  store_vector<T, kAligned>(y + row * columns, first, columns, f);
  if (absmax == nullptr) return;
  Vector<T> stored{};
#pragma unroll
  for (int i = 0; i < kSize; ++i) stored.set(i, from_float<T>(first + i < columns ? f[i] : 0.0f));
  const uint32_t peak = warp_max(stored.abs_max());
  if (threadIdx.x % 32 == 0 && peak > 0) atomicMax(reinterpret_cast<unsigned*>(absmax) + row, peak);
}

// The kernel with a rotation (codebook/rotate_rows.cuh), which stores rows, rounded to T, as blocks of tokens. Each of
// kThreads threads has kVecs vectors of a row; rotations that need a row's largest magnitude have one CTA for each row.
template <class T, bool kGated, int kThreads, int kVecs, bool kAligned, class Rotation, class Gate = PlainGate>
__device__ __forceinline__ void activate_rotated(const T* x, const T* up, void* y, float* scale, long long x_stride,
                                                 long long up_stride, int columns, Rotation rotation, Gate gate = {}) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kStep = kThreads * kSize;
  const long long row = blockIdx.x;
  const int first = blockIdx.y * kVecs * kStep + threadIdx.x * kSize;
  rotation.begin(first, kStep);
  launch_dependents();
  wait_for_dependencies();
  Vector<T> loaded[kVecs], factor[kVecs];
  load_vectors<T, kVecs, kAligned>(loaded, x + row * x_stride, first, kStep, columns);
  if constexpr (kGated) load_vectors<T, kVecs, kAligned>(factor, up + row * up_stride, first, kStep, columns);
  float f[kVecs][kSize];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    float g[kSize];
    loaded[i].to_float(f[i]);
    if constexpr (kGated) factor[i].to_float(g);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      f[i][j] = to_float(from_float<T>(gate.template activated<T, kGated>(f[i][j], g[j])));
    }
  }
  rotation.store(f, row, gridDim.x, first, kStep, y, scale);
}

}  // namespace qcut
