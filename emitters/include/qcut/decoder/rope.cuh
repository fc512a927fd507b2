// Rotary positions, and a head of a token in a warp's registers: columns i and i + kHead / 2 lie in the same lane.
//
// Exactness: the products of a rotation and their sum are each rounded to T, as in an eager model in T.
#pragma once

#include <qcut/core/quantize.cuh>

namespace qcut {

template <class T>
__device__ __forceinline__ float rounded(float v) {
  return to_float(from_float<T>(v));
}

// Rotates a pair of columns a and b, each with its own cosine and sine from the tables.
template <class T>
__device__ __forceinline__ void turn(float& a, float& b, float cos_a, float sin_a, float cos_b, float sin_b) {
  const float x = a, y = b;
  a = rounded<T>(rounded<T>(x * cos_a) + rounded<T>(-y * sin_a));
  b = rounded<T>(rounded<T>(y * cos_b) + rounded<T>(x * sin_b));
}

// A lane's columns of a head in the type of memory, so that loads stay in flight until HeadRow uses them.
template <class T, int kHead>
struct StoredRow {
  static constexpr int kHalf = kHead / 2;
  static constexpr int kPairs = (kHalf + 31) / 32;  // pairs of a lane
  T low[kPairs], high[kPairs];

  __device__ __forceinline__ void load(const T* row, int lane) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = lane + 32 * i;
      low[i] = column < kHalf ? row[column] : from_float<T>(0.0f);
      high[i] = column < kHalf ? row[column + kHalf] : from_float<T>(0.0f);
    }
  }
};

// A head of a token in a warp's registers, as float32.
template <class T, int kHead>
struct HeadRow {
  using Stored = StoredRow<T, kHead>;
  static constexpr int kHalf = Stored::kHalf, kPairs = Stored::kPairs;
  float low[kPairs], high[kPairs];

  __device__ __forceinline__ explicit HeadRow(const Stored& row) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      low[i] = to_float(row.low[i]);
      high[i] = to_float(row.high[i]);
    }
  }

  // Rotates by the rows of the tables for the token's position.
  __device__ __forceinline__ void rotate(const Stored& cos, const Stored& sin) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      turn<T>(low[i], high[i], to_float(cos.low[i]), to_float(sin.low[i]), to_float(cos.high[i]),
              to_float(sin.high[i]));
    }
  }

  __device__ __forceinline__ void store(T* to, int lane) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = lane + 32 * i;
      if (column >= kHalf) continue;
      to[column] = from_float<T>(low[i]);
      to[column + kHalf] = from_float<T>(high[i]);
    }
  }

  // The scale of the head as int8, in every lane; NaN if the head holds NaN or Inf.
  __device__ __forceinline__ float scale() const {
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      peak = max(peak, max(__float_as_uint(low[i]) & 0x7fffffffu, __float_as_uint(high[i]) & 0x7fffffffu));
    }
    return QuantizedRow(warp_max(peak)).scale();
  }

  // Stores the head as int8, divided by `scale`; zeros if the scale is NaN.
  __device__ __forceinline__ void store(int8_t* to, float scale, int lane) const {
    // |v / scale| is at most 127 before rounding: the conversion never saturates.
    const auto quantize = [&](float v) { return from_float<int8_t>(scale == scale ? __fdiv_rn(v, scale) : 0.0f); };
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = lane + 32 * i;
      if (column >= kHalf) continue;
      to[column] = quantize(low[i]);
      to[column + kHalf] = quantize(high[i]);
    }
  }
};

}  // namespace qcut
