// Rotary positions, and a head of a token in a warp's registers: columns i and i + kHead / 2 lie in the same lane.
//
// Exactness: the products of a rotation and their sum are each rounded to T, as in an eager model in T.
#pragma once

#include <qcut/core/quantize.cuh>
#include <qcut/decoder/nibbles.cuh>
#include <qcut/decoder/norm.cuh>

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

// A head of a token as int8: a lane has column `lane + 32 i` and the column half a head further on.
template <int kHead>
struct HeadInt8 {
  static constexpr int kHalf = kHead / 2, kPairs = (kHalf + 31) / 32;
  float scale;                              // NaN if the head holds NaN or Inf
  unsigned char low[kPairs], high[kPairs];  // 0 then

  __device__ __forceinline__ HeadInt8(const float (&low_)[kPairs], const float (&high_)[kPairs]) {
    float f[2 * kPairs], rounded[2 * kPairs];
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      f[2 * i] = low_[i], f[2 * i + 1] = high_[i];
      peak = max(peak, max(__float_as_uint(low_[i]) & 0x7fffffffu, __float_as_uint(high_[i]) & 0x7fffffffu));
    }
    const QuantizedRow row(warp_max(peak));
    scale = row.scale();
    round_quotients(f, row.s, row.inv, 127.0f, rounded);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      low[i] = static_cast<unsigned char>(row.finite ? __float_as_uint(rounded[2 * i]) : 0u);
      high[i] = static_cast<unsigned char>(row.finite ? __float_as_uint(rounded[2 * i + 1]) : 0u);
    }
  }
  __device__ __forceinline__ void store(int8_t* to, int lane) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = lane + 32 * i;
      if (column >= kHalf) continue;
      to[column] = static_cast<int8_t>(low[i]);
      to[column + kHalf] = static_cast<int8_t>(high[i]);
    }
  }
};

// A rotated head as Nibbles, columns as in an int8 head.
template <int kHead>
struct HeadNibbles {
  static constexpr int kHalf = kHead / 2, kPairs = (kHalf + 31) / 32;
  static constexpr int kLanes = kHalf < 32 ? kHalf : 32;
  unsigned short scale;
  unsigned char low[kPairs], high[kPairs];  // two codes each, in even lanes

  __device__ __forceinline__ HeadNibbles(const float (&low_)[kPairs], const float (&high_)[kPairs],
                                         const GuideColumn* guide) {
    const int first = threadIdx.x % kLanes;
    float y[2 * kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) y[2 * i] = low_[i], y[2 * i + 1] = high_[i];
    const auto column = [&](int i) { return first + i / 2 * 32 + i % 2 * kHalf; };
    const RowQuantizer<2 * kPairs, LaneGroup<kLanes, kHead>> row(y, guide, column, {});
    scale = static_cast<unsigned short>(row.word);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t codes = row.codes[2 * i] | row.codes[2 * i + 1] << 8;
      const uint32_t next = __shfl_down_sync(0xffffffffu, codes, 1);
      const uint32_t pairs = codes | next << 4;
      low[i] = static_cast<unsigned char>(pairs), high[i] = static_cast<unsigned char>(pairs >> 8);
    }
  }
  __device__ __forceinline__ void store(Nibbles* to, int lane) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = lane + 32 * i;
      if (column >= kHalf || lane % 2) continue;
      to[column / 2].pair = low[i];
      to[(column + kHalf) / 2].pair = high[i];
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

  // RMS-normalizes the head, bit by bit as norm_rows does: a lane adds the squares of a vector. `room` is aligned
  // shared memory for a head. All lanes call.
  __device__ __forceinline__ void normalize(const Stored& weight, float eps, T* room) {
    constexpr int kSize = Vector<T>::kSize;
    static_assert(kHead % kSize == 0 && kHead / kSize <= 32, "each lane has a vector at most");
    const int lane = threadIdx.x % 32;
    store(room, lane);
    __syncwarp();
    float squares = 0.0f;
    if (lane < kHead / kSize) {
      const uint4 raw = reinterpret_cast<const uint4*>(room)[lane];
      float f[kSize];
      Vector<T>{raw.x, raw.y, raw.z, raw.w}.to_float(f);
#pragma unroll
      for (int i = 0; i < kSize; ++i) squares = fmaf(f[i], f[i], squares);
    }
    __syncwarp();
    const float inv = inverse_root(warp_sum(squares), static_cast<float>(kHead), eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      low[i] = normalized<T, false>(low[i], 0.0f, inv, to_float(weight.low[i]), 0.0f);
      high[i] = normalized<T, false>(high[i], 0.0f, inv, to_float(weight.high[i]), 0.0f);
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

  // Rotates the head (nibbles.cuh). All lanes call.
  __device__ __forceinline__ void turn_columns() {
    constexpr int kLanes = kHalf < 32 ? kHalf : 32;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      low[i] *= turned_sign(lane + 32 * i);
      high[i] *= turned_sign(lane + 32 * i + kHalf);
    }
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        low[i] = butterfly(low[i], offset);
        high[i] = butterfly(high[i], offset);
      }
    }
#pragma unroll
    for (int apart = 1; apart < kPairs; apart *= 2) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (i & apart) continue;
        butterfly(low[i], low[i + apart]);
        butterfly(high[i], high[i + apart]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      butterfly(low[i], high[i]);
      low[i] *= turned_size<kHead>(), high[i] *= turned_size<kHead>();
    }
  }

  // The head as int8, or, rotated and with a KV calibration or null, as Nibbles. All lanes call.
  template <class C>
  __device__ __forceinline__ auto quantized(const GuideColumn* guide) const {
    if constexpr (CacheType<C>::kTurned) {
      return HeadNibbles<kHead>(low, high, guide);
    } else {
      return HeadInt8<kHead>(low, high);
    }
  }
};

}  // namespace qcut
