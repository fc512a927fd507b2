// Tools of all kernels: integer names under NVRTC, dependent launch, sums over a warp, 16-byte vectors, conversions.
//
// Source: PTX ISA 8.x, "griddepcontrol", "redux.sync", "max" (.NaN), "prmt".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if defined(__CUDACC_RTC__)  // NVRTC has no <cstdint>
typedef signed char int8_t;
typedef int int32_t;
typedef unsigned int uint32_t;
#else
#include <cstdint>
#endif

namespace qcut {

// Programmatic dependent launch (sm_90 and later): after this call the GPU may schedule the next kernel, which calls
// wait_for_dependencies before it touches this grid's memory. Both functions do nothing in a launch without the
// attribute, and on older architectures.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the previous kernel. The call comes before the first access to memory that the previous kernel wrote or
// still reads. Loads after the call are plain ld.global, because the compiler may hoist an ld.global.nc over the wait.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Waits for the previous kernel and reads a count that it wrote; from 0 to the bound that the grid was made for.
__device__ __forceinline__ int device_count(const int* count, int bound) {
  launch_dependents();
  wait_for_dependencies();
  return min(max(*count, 0), bound);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The largest word of the warp's 32 lanes, in every lane. The bits of non-negative floats are ordered as unsigned
// integers are, and NaN's bits are above Inf's: the function therefore also gives the maximum of absolute values, which
// is NaN if one of them is NaN.
__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
  uint32_t out;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(out) : "r"(v));
  return out;
}

__device__ __forceinline__ unsigned long long warp_max(unsigned long long v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

// The sum of the 32 lanes' values, in every lane. The order of the additions is fixed: lanes 16 apart are added first.
template <class T>
__device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

// Sixteen bytes of T as four words, and the elements of T as float32. The conversions to float32 are exact.
template <class T>
struct Vector;

template <>
struct Vector<float> {
  static constexpr int kSize = 4;
  uint32_t w[4];

  __device__ __forceinline__ void set(int i, float v) { w[i] = __float_as_uint(v); }
  __device__ __forceinline__ void to_float(float (&f)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] = __uint_as_float(w[i]);
  }
  // The bits of max|v[i]| as float32; NaN if an element is NaN.
  __device__ __forceinline__ uint32_t abs_max() const {
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) peak = max(peak, w[i] & 0x7fffffffu);
    return peak;
  }
};

template <>
struct Vector<__half> {
  static constexpr int kSize = 8;
  uint32_t w[4];

  __device__ __forceinline__ void set(int i, __half v) {
    w[i / 2] |= static_cast<uint32_t>(__half_as_ushort(v)) << (16 * (i % 2));
  }
  __device__ __forceinline__ void to_float(float (&f)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
      f[2 * i] = pair.x;
      f[2 * i + 1] = pair.y;
    }
  }
  __device__ __forceinline__ uint32_t abs_max() const {
    const auto larger = [](uint32_t a, uint32_t b) {
      uint32_t d;
      asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
      return d;
    };
    constexpr uint32_t kAbs = 0x7fff7fffu;
    const uint32_t peak = larger(larger(w[0] & kAbs, w[1] & kAbs), larger(w[2] & kAbs, w[3] & kAbs));
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&peak));
    return max(__float_as_uint(pair.x), __float_as_uint(pair.y));
  }
};

template <>
struct Vector<__nv_bfloat16> {
  static constexpr int kSize = 8;
  uint32_t w[4];

  __device__ __forceinline__ void set(int i, __nv_bfloat16 v) {
    w[i / 2] |= static_cast<uint32_t>(__bfloat16_as_ushort(v)) << (16 * (i % 2));
  }
  // A bfloat16 is the upper half of a float32.
  __device__ __forceinline__ void to_float(float (&f)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(w[i] << 16);
      f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }
  __device__ __forceinline__ uint32_t abs_max() const {
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      peak = max(peak, max((w[i] << 16) & 0x7fffffffu, w[i] & 0x7fff0000u));
    }
    return peak;
  }
};

// Conversions from and to float32. A conversion from float32 rounds to nearest even; a conversion to int8 also
// saturates and turns NaN into 0.
template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ int8_t from_float<int8_t>(float v) {
  int out;
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(out) : "f"(v));
  return static_cast<int8_t>(out);
}

template <class T>
__device__ __forceinline__ float to_float(T v) {
  return static_cast<float>(v);
}

// Two floats rounded to T in one word, `low` in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t bits(float v) { return __float_as_uint(v); }
__device__ __forceinline__ uint32_t bits(int v) { return static_cast<uint32_t>(v); }
template <class T>
__device__ __forceinline__ T from_bits(uint32_t w);
template <>
__device__ __forceinline__ float from_bits<float>(uint32_t w) {
  return __uint_as_float(w);
}
template <>
__device__ __forceinline__ int from_bits<int>(uint32_t w) {
  return static_cast<int>(w);
}

// Sixteen int8 elements, for copies only.
template <>
struct Vector<int8_t> {
  static constexpr int kSize = 16;
  uint32_t w[4];

  __device__ __forceinline__ void set(int i, int8_t v) {
    w[i / 4] |= (static_cast<uint32_t>(v) & 0xffu) << (8 * (i % 4));
  }
};

// Loads the vectors first, first + step, ... of a row of `k` elements; elements past the end are zero. With
// kAligned the row starts at a multiple of 16 bytes. A second loop loads the partial vector at the end of a
// row, so that the first loop consists only of predicated 16-byte loads, which are in flight together.
template <class T, int kVecs, bool kAligned>
__device__ __forceinline__ void load_vectors(Vector<T> (&v)[kVecs], const T* row, int first, int step, int k) {
  constexpr int kSize = Vector<T>::kSize;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int col = first + i * step;
    v[i] = Vector<T>{};
    if (kAligned && col + kSize <= k) {
      const uint4 raw = *reinterpret_cast<const uint4*>(row + col);
      v[i] = Vector<T>{raw.x, raw.y, raw.z, raw.w};
    }
  }
  if (kAligned && k % kSize == 0) return;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int col = first + i * step;
    if (kAligned && col + kSize <= k) continue;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (col + j < k) v[i].set(j, row[col + j]);
    }
  }
}

// Writes the elements of a vector that lie before column k.
template <class T, bool kAligned>
__device__ __forceinline__ void store_vector(T* row, int col, int k, const float (&f)[Vector<T>::kSize]) {
  constexpr int kSize = Vector<T>::kSize;
  if (kAligned && col + kSize <= k) {
    Vector<T> v{};
#pragma unroll
    for (int i = 0; i < kSize; ++i) v.set(i, from_float<T>(f[i]));
    *reinterpret_cast<uint4*>(row + col) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (col + i < k) row[col + i] = from_float<T>(f[i]);
  }
}

}  // namespace qcut
