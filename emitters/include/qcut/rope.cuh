// The step between a decoder's projections and its attention: rotary positions for queries and keys, and the new keys
// and values into the cache, in one launch. A warp has a head: columns i and i + kHead / 2 lie in the same lane.
//
// Rotary products and their sum are rounded to T one by one, as an eager model does in T.
#pragma once

#include <qcut/common.cuh>

namespace qcut {

template <class T>
__device__ __forceinline__ float rounded(float v) {
  return to_float(from_float<T>(v));
}

// A row of a head as it lies in memory, a warp's: loads that nobody waits for yet.
template <class T, int kHead>
struct StoredRow {
  static constexpr int kHalf = kHead / 2;
  static constexpr int kPairs = (kHalf + 31) / 32;  // of a lane
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

// A head of a token in a warp's registers.
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

  // By the position's rows of the tables.
  __device__ __forceinline__ void rotate(const Stored& cos, const Stored& sin) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float a = low[i], b = high[i];
      low[i] = rounded<T>(rounded<T>(a * to_float(cos.low[i])) + rounded<T>(-b * to_float(sin.low[i])));
      high[i] = rounded<T>(rounded<T>(b * to_float(cos.high[i])) + rounded<T>(a * to_float(sin.high[i])));
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

  // What it is stored with as int8, in every lane: NaN where the row is not finite.
  __device__ __forceinline__ float scale() const {
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      peak = max(peak, max(__float_as_uint(low[i]) & 0x7fffffffu, __float_as_uint(high[i]) & 0x7fffffffu));
    }
    peak = warp_max(peak);
    const float s = __fdiv_rn(__uint_as_float(peak), 127.0f);
    return peak >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : s == 0.0f ? 1.0f : s;
  }

  // Divided by scale(); zeros where that is NaN.
  __device__ __forceinline__ void store(int8_t* to, float scale, int lane) const {
    // |v / scale| is at most 127 before rounding: saturation never decides.
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

// q [tokens, heads, kHead], k and v [tokens, kv_heads, kHead], rows of tokens q_stride and kv_stride elements apart; q is
// rotated in place. cos, sin [context, kHead] in T. C: of the cache, T, or int8 with a scale for each token and head.
// Caches [batch, kv_heads, context, kHead], batch_stride elements between sequences. Grid: heads / kWarps x tokens.
template <class T, class C, int kHead, bool kRotary, int kWarps>
__device__ __forceinline__ void rotate_and_append(T* q, const T* k, const T* v, const T* cos, const T* sin,
                                                  const int* positions, const int* slots, C* keys, C* values,
                                                  float* key_scales, float* value_scales, long long q_stride,
                                                  long long kv_stride, long long batch_stride, int heads, int kv_heads,
                                                  int context) {
  const int lane = threadIdx.x % 32;
  const int head = blockIdx.x * kWarps + threadIdx.x / 32;  // queries, then keys, then values
  const long long token = blockIdx.y;
  launch_dependents();
  wait_for_dependencies();
  if (head >= heads + 2 * kv_heads) return;

  const bool is_query = head < heads;
  const bool is_key = !is_query && head < heads + kv_heads;
  const int mine = is_query ? head : is_key ? head - heads : head - heads - kv_heads;
  const T* const from = is_query ? q + token * q_stride : (is_key ? k : v) + token * kv_stride;
  StoredRow<T, kHead> stored;
  stored.load(from + static_cast<long long>(mine) * kHead, lane);
  HeadRow<T, kHead> row(stored);
  if (kRotary && (is_query || is_key)) {
    const long long at = static_cast<long long>(positions[token]) * kHead;
    StoredRow<T, kHead> cosines, sines;
    cosines.load(cos + at, lane);
    sines.load(sin + at, lane);
    row.rotate(cosines, sines);
  }
  if (is_query) {
    if constexpr (kRotary) row.store(q + token * q_stride + static_cast<long long>(mine) * kHead, lane);
    return;
  }
  const long long place = static_cast<long long>(mine) * context + slots[token];
  C* const to = (is_key ? keys : values) + token * batch_stride + place * kHead;
  if constexpr (sizeof(C) > 1) {
    row.store(to, lane);
  } else {
    const float scale = row.scale();
    const long long scale_at = token * static_cast<long long>(kv_heads) * context + place;
    if (lane == 0) (is_key ? key_scales : value_scales)[scale_at] = scale;
    row.store(to, scale, lane);
  }
}

}  // namespace qcut
