// Keys and values of 4 bits: rotated rows, and 16 levels with a scale and a zero point for each row.
//
// A rotated row is H (s * x) / sqrt(d): fixed signs s, the Walsh-Hadamard matrix H. A level is scale * (c - m), with a
// code c of 0 to 15 and m = 5.5 + z / 8; a row's word holds the upper 11 bits of a float16 scale, and z of 5 bits. The
// code of an even column is the lower half of its byte.
//
// Keys may be calibrated: the guide of a head of keys has their mean, which is subtracted before rounding, and the main
// directions of the queries, along which errors cancel.
//
// Exactness: codes and words are bitwise those of qcut.numerics.int4: butterflies of neighbours come first, and a row's
// loss and the errors along directions are sums of integers, so that their order does not matter.
#pragma once

#include <qcut/core/common.cuh>
#include <qcut/core/rounding.cuh>

namespace qcut {

// Two columns of 4 bits.
struct Nibbles {
  unsigned char pair;
};

// A type of a cache: its bits, whether rows have scales, and the type of a row's scale.
template <class C>
struct CacheType {
  static constexpr int kBits = 8 * sizeof(C);
  static constexpr bool kScaled = sizeof(C) == 1;
  static constexpr bool kTurned = false;
  using Scale = float;
};
template <>
struct CacheType<Nibbles> {
  static constexpr int kBits = 4;
  static constexpr bool kScaled = true;
  static constexpr bool kTurned = true;
  using Scale = unsigned short;
};

template <class A, class B>
constexpr bool kSameTypes = false;
template <class A>
constexpr bool kSameTypes<A, A> = true;

// The sign of a column before a row is rotated.
__device__ __forceinline__ float turned_sign(int column) {
  uint32_t h = static_cast<uint32_t>(column) * 0x9E3779B1u;
  h = (h ^ h >> 15) * 0x85EBCA6Bu;
  return __uint_as_float(0x3f800000u | (h ^ h >> 13) << 31);
}

// 1 / sqrt(kHead).
template <int kHead>
__device__ __forceinline__ float turned_size() {
  static_assert(kHead == 32 || kHead == 64 || kHead == 128 || kHead == 256, "heads that are turned");
  return kHead == 32 ? 0.17677669529663687f : kHead == 64 ? 0.125f : kHead == 128 ? 0.08838834764831845f : 0.0625f;
}

// The butterfly of a value and that of the lane `offset` away: the lower lane gets the sum.
__device__ __forceinline__ float butterfly(float v, int offset) {
  const float other = __shfl_xor_sync(0xffffffffu, v, offset);
  return threadIdx.x & offset ? other - v : v + other;
}

__device__ __forceinline__ void butterfly(float& low, float& high) {
  const float sum = low + high, difference = low - high;
  low = sum, high = difference;
}

// A row's word, decoded: level c is scale * (c - 8 + lift).
struct RowScale {
  float scale, lift;
  __device__ __forceinline__ explicit RowScale(uint32_t word) {
    const unsigned short half = static_cast<unsigned short>(word >> 1 & 0x7ff0u);
    scale = __half2float(__ushort_as_half(half));
    uint32_t z;  // (word & 31) | 2^20; the last bit is 1 / 8
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(z) : "r"(word), "r"(31u), "r"(0x49800000u));
    lift = 1048578.5f - __uint_as_float(z);  // 2.5 - z / 8
  }
};

// Sums of two products of signed 16-bit and 8-bit integers: with the lower or the upper two bytes of `bytes`.
__device__ __forceinline__ int add_products_low(int pair, int bytes, int sum) {
  int d;
  asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(bytes), "r"(sum));
  return d;
}
__device__ __forceinline__ int add_products_high(int pair, int bytes, int sum) {
  int d;
  asm("dp2a.hi.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(bytes), "r"(sum));
  return d;
}

// A column of a head's guide: eight directions of one byte, the bits of the keys' mean, and the cost of a move. After
// the columns of a head come the directions' eight strengths, in two of these.
struct alignas(16) GuideColumn {
  int directions[2], mean, cost;
};

// A row of 4 bits. A thread has kCount elements, at `column(i)`. Reduce has `least`, `most` (of floats),
// `total`, `largest` (of uint32_t) and `any` over the threads of the row; all lanes of the warp call. `guide`, or
// null, is the same for the threads of a row, and may differ between rows of a warp.
template <int kCount, class Reduce>
struct RowQuantizer {
  uint32_t word;
  int codes[kCount];

  template <class Column>
  __device__ __forceinline__ RowQuantizer(const float (&row)[kCount], const GuideColumn* guide, const Column& column,
                                          const Reduce& reduce) {
    float y[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = row[i];
    if (guide != nullptr) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) y[i] -= __int_as_float(guide[column(i)].mean);
    }
    float lo = y[0], hi = y[0];
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      lo = fminf(lo, y[i]);
      hi = fmaxf(hi, y[i]);
      peak = max(peak, __float_as_uint(y[i]) & 0x7fffffffu);
    }
    lo = reduce.least(lo);
    hi = reduce.most(hi);
    const bool finite = !reduce.any(peak >= 0x7f800000u);
    const float span = fabsf(fmaxf(hi - lo, fmaxf(hi, -lo) * 1.6f));  // 0 has no sign then
    const float center = (hi + lo) * 0.5f;
    float least = __int_as_float(0x7f800000), inverse = 0.0f, middle = 0.0f;
    word = 0xfc00u;
    constexpr float kShrinks[3] = {static_cast<float>(1.0 / 15.0), static_cast<float>(0.95 / 15.0),
                                   static_cast<float>(0.9 / 15.0)};
#pragma unroll
    for (int f = 0; f < 3; ++f) {
      const uint32_t wide = __half_as_ushort(__float2half_rn(span * kShrinks[f]));
      const uint32_t bits = min((wide + 8u) & 0xfff0u, 0x7bf0u);
      const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
      const float inv = scale == 0.0f ? 0.0f : __frcp_rn(scale);
      const float z = fminf(fmaxf(rintf((2.0f - center * inv) * 8.0f), 0.0f), 31.0f);
      const float m = z * 0.125f + 5.5f;
      uint32_t squares = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float t = y[i] * inv + m;
        const int steps = steps_off(t, code_of(t));
        squares += static_cast<uint32_t>(steps * steps);
      }
      const float loss = static_cast<float>(static_cast<int>(reduce.total(squares))) * (scale * scale);
      if (finite && loss < least) {
        least = loss, inverse = inv, middle = m;
        word = bits << 1 | static_cast<uint32_t>(z);
      }
    }
    int off[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float t = y[i] * inverse + middle, code = code_of(t);
      codes[i] = finite ? static_cast<int>(code) : 0;
      off[i] = finite ? steps_off(t, code) : 0;
    }
    if (__any_sync(0xffffffffu, guide != nullptr)) move(off, finite, guide, column, reduce);
  }

 private:
  static __device__ __forceinline__ float code_of(float t) { return fminf(fmaxf(rintf(t), 0.0f), 15.0f); }
  // The distance from a code in steps of 1/1024, two codes at most.
  static __device__ __forceinline__ int steps_off(float t, float code) {
    const float off = fminf(fmaxf(t - code, -2.0f), 2.0f);
    return __float_as_int(fmaf(off, 1024.0f, kRoundingBias)) - __float_as_int(kRoundingBias);
  }
  static __device__ __forceinline__ int byte_of(const int (&words)[2], int k) {
    return static_cast<signed char>(words[k / 4] >> 8 * (k % 4));
  }

  // Moves single codes to their other neighbour, so that errors cancel along the guide's directions.
  template <class Column>
  __device__ __forceinline__ void move(int (&off)[kCount], bool finite, const GuideColumn* guide, const Column& column,
                                       const Reduce& reduce) {
    constexpr int kMoves = 4;
    int along[8] = {};
    GuideColumn mine[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int4 w = make_int4(0, 0, 0, 0x7fffffff);
      if (guide != nullptr) w = *reinterpret_cast<const int4*>(guide + column(i));
      mine[i] = {{w.x, w.y}, w.z, w.w};
#pragma unroll
      for (int k = 0; k < 8; ++k) along[k] += off[i] * byte_of(mine[i].directions, k);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) along[k] = static_cast<int>(reduce.total(static_cast<uint32_t>(along[k])));
    float strengths[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      strengths[k] = guide != nullptr ? reinterpret_cast<const float*>(guide + Reduce::kColumns)[k] : 0.0f;
    }
#pragma unroll 1
    for (int n = 0; n < kMoves; ++n) {
      int pairs[4];
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        const int low = pull(along[k], strengths[k]), high = pull(along[k + 1], strengths[k + 1]);
        pairs[k / 2] = static_cast<int>(__byte_perm(low, high, 0x5410));
      }
      uint32_t best = 0;  // gain, the first column among equals, and whether the code goes up
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        int g = add_products_low(pairs[0], mine[i].directions[0], 8 * off[i]);
        g = add_products_high(pairs[1], mine[i].directions[0], g);
        g = add_products_low(pairs[2], mine[i].directions[1], g);
        g = add_products_high(pairs[3], mine[i].directions[1], g);
        const int gain = min(2 * abs(g) - mine[i].cost, (1 << 22) - 1);
        const bool up = g >= 0, may = finite && gain > 0 && (up ? codes[i] < 15 : codes[i] > 0);
        const uint32_t rank = static_cast<uint32_t>(gain) << 9 | (255u - column(i)) << 1 | (up ? 1u : 0u);
        best = max(best, may ? rank : 0u);
      }
      best = reduce.largest(best);
      const int sign = best == 0 ? 0 : best % 2 == 1 ? 1 : -1;
      const int moved = 255 - static_cast<int>(best >> 1 & 255u);
      int2 w = make_int2(0, 0);
      if (sign != 0) w = *reinterpret_cast<const int2*>(guide + moved);
      const int directions[2] = {w.x, w.y};
#pragma unroll
      for (int k = 0; k < 8; ++k) along[k] -= 1024 * sign * byte_of(directions, k);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int change = column(i) == moved ? sign : 0;
        codes[i] += change, off[i] -= 1024 * change;
      }
    }
  }
  static __device__ __forceinline__ int pull(int along, float strength) {
    const float v = rintf(static_cast<float>(along) * strength);
    return static_cast<int>(fminf(fmaxf(v, -32767.0f), 32767.0f));
  }
};

// Reductions over groups of kLanes neighbouring lanes, which share a row of kColumns.
template <int kLanes, int kColumns_>
struct LaneGroup {
  static constexpr int kColumns = kColumns_;
  __device__ __forceinline__ float least(float v) const {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) v = fminf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
  }
  __device__ __forceinline__ float most(float v) const {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
  }
  __device__ __forceinline__ uint32_t total(uint32_t v) const {
    if constexpr (kLanes == 32) {
      uint32_t sum;
      asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(v));
      return sum;
    } else {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
      return v;
    }
  }
  __device__ __forceinline__ uint32_t largest(uint32_t v) const {
    if constexpr (kLanes == 32) return warp_max(v);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
  }
  __device__ __forceinline__ bool any(bool v) const {
    const unsigned where = __ballot_sync(0xffffffffu, v);
    if constexpr (kLanes == 32) return where != 0;
    return where >> (threadIdx.x % 32 / kLanes * kLanes) & ((1u << kLanes % 32) - 1u);
  }
};

}  // namespace qcut
