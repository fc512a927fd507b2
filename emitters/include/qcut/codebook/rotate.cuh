// Tokens into rotated blocks: walsh_hadamard(x * signs) * factor for each group of columns, or x as it is, after an
// optional norm; written in the 16-bit type or as int8 with a scale for each token.
//
// A thread holds 16 neighbouring columns of memory's order (a group and its padding), which is one 16-byte chunk of
// int8 tokens or two of 16-bit ones. Butterflies over 1 to 8 columns stay in its registers, those over 16 to 256 are
// shuffles, wider ones go through shared memory: the order of qcut.codebooks.rotation.walsh_hadamard, so that results are equal
// bitwise. A group that is shorter than the others leaves out the butterflies that it does not have.
//
// Memory is laid out as qcut/codebooks/layout.py says.
#pragma once

#include <qcut/codebook/codebook.cuh>
#include <qcut/core/quantize.cuh>

namespace qcut {

constexpr int kLaneColumns = 16;
constexpr int kWarpColumns = 32 * kLaneColumns;

enum class Norm { kNone, kRms, kLayer };

// Butterflies of a group of `size` columns, a power of two up to kGroup. `thread` counts within the row; `exchange` is
// this row's part of shared memory, kStride threads wide, for groups beyond a warp's columns.
template <int kGroup, int kStride>
__device__ __forceinline__ void butterflies(float (&r)[kLaneColumns], int size, int thread, float4* exchange) {
#pragma unroll
  for (int half = 1; half < kLaneColumns && half < kGroup; half *= 2) {
    if (half < size) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        if (i & half) continue;
        const float low = r[i];
        const float high = r[i + half];
        r[i] = low + high;
        r[i + half] = low - high;
      }
    }
  }
  // fma(own, +-1, other) is own + other, or other - own in the upper half, with the same rounding.
#pragma unroll
  for (int half = kLaneColumns; half < kWarpColumns && half < kGroup; half *= 2) {
    const float sign = thread & half / kLaneColumns ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, r[i], half / kLaneColumns);
      if (half < size) r[i] = fmaf(r[i], sign, other);
    }
  }
#pragma unroll 1
  for (int half = kWarpColumns; half < kGroup; half *= 2) {
    const float sign = thread & half / kLaneColumns ? -1.0f : 1.0f;
    __syncthreads();  // what was there before has been read
#pragma unroll
    for (int i = 0; i < kLaneColumns / 4; ++i) {
      exchange[i * kStride + thread] = make_float4(r[4 * i], r[4 * i + 1], r[4 * i + 2], r[4 * i + 3]);
    }
    __syncthreads();
    if (half < size) {
      const int partner = thread ^ half / kLaneColumns;
#pragma unroll
      for (int i = 0; i < kLaneColumns / 4; ++i) {
        const float4 other = exchange[i * kStride + partner];
        r[4 * i] = fmaf(r[4 * i], sign, other.x);
        r[4 * i + 1] = fmaf(r[4 * i + 1], sign, other.y);
        r[4 * i + 2] = fmaf(r[4 * i + 2], sign, other.z);
        r[4 * i + 3] = fmaf(r[4 * i + 3], sign, other.w);
      }
    }
  }
}

__device__ __forceinline__ void store_chunk(char* y, int row, int m8, int column_bytes, const uint32_t (&w)[4]) {
  const long long block = static_cast<long long>(column_bytes / 128) * m8 + row / 8;
  *reinterpret_cast<uint4*>(y + block * 1024 + token_chunk_offset(row, column_bytes % 128 / 16)) =
      make_uint4(w[0], w[1], w[2], w[3]);
}

// kThreads threads own a row, kRows rows share a CTA. kHeld: threads hold all columns that the CTA writes, which
// blockIdx.y chooses; otherwise the CTA goes over its rows again for every sum or maximum. kPaddedGroup: columns
// of a group in memory. x rows start at multiples of 16 bytes, and groups of them too, if kAligned.
template <class T, class Out, bool kHadamard, int kGroup, int kPaddedGroup, int kPasses, int kThreads, int kRows,
          bool kHeld, bool kAligned, Norm kNorm>
struct RowRotation {
  static constexpr int kSize = Vector<T>::kSize;
  static constexpr int kVecs = kLaneColumns / kSize;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kStep = kThreads * kLaneColumns;
  static constexpr bool kQuantized = sizeof(Out) == 1;

  // Where 16 columns of memory come from: `count` of them exist, from column `source` of x on; their group has `size`.
  struct Columns {
    int source, count, size;
  };
  struct Raw {
    Vector<T> v[kVecs];
  };

  const T* x_row;
  const T* norm_weight;
  const T* norm_bias;
  const uint32_t* signs;
  char* y;
  float* partial;  // a float for each warp
  float4* exchange;
  int row, m8, k, k_padded, thread, local_row;
  float factor, mean, inv_deviation;

  __device__ __forceinline__ Columns columns(int place) const {
    const int group = place / kPaddedGroup;
    const int offset = place % kPaddedGroup;
    const int size = min(kGroup, k - group * kGroup);
    return {group * kGroup + offset, min(max(size - offset, 0), kLaneColumns), size};
  }

  __device__ __forceinline__ Raw load(const T* from, const Columns& c) const {
    Raw raw;
    load_vectors<T, kVecs, kAligned>(raw.v, from + c.source, 0, kSize, c.count);
    return raw;
  }

  static __device__ __forceinline__ void widen(const Raw& raw, float (&f)[kLaneColumns]) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      float part[kSize];
      raw.v[i].to_float(part);
#pragma unroll
      for (int j = 0; j < kSize; ++j) f[i * kSize + j] = part[j];
    }
  }

  // Bits that flip the signs of 16 columns in a pass.
  __device__ __forceinline__ uint32_t flips(int pass, int place) const {
    if (!kHadamard || place >= k_padded) return 0;
    return signs[(pass * k_padded + place) / 32] >> place % 32;
  }

  __device__ __forceinline__ void rotate(float (&r)[kLaneColumns], uint32_t flip, int size) const {
    if constexpr (kHadamard) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        r[i] = __uint_as_float(__float_as_uint(r[i]) ^ (flip << (31 - i) & 0x80000000u));
      }
      butterflies<kGroup, kThreads * kRows>(r, size, thread, exchange);
      // Both are powers of two: the product with their ratio is exact.
      const float scaled = factor * static_cast<float>(kGroup >> (31 - __clz(max(size, 1))));
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) r[i] *= scaled;
    }
  }

  // A value of each warp of the row, in lane w % 32 of all of them; `rest` in the other lanes.
  __device__ __forceinline__ float gather(float v, float rest) const {
    if constexpr (kWarps == 1) return threadIdx.x % 32 ? rest : v;
    const int lane = threadIdx.x % 32;
    __syncthreads();  // the previous values have been read
    if (lane == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    return lane < kWarps ? partial[local_row * kWarps + lane] : rest;
  }

  __device__ __forceinline__ float row_sum(float v) const { return warp_sum(gather(warp_sum(v), 0.0f)); }
  __device__ __forceinline__ uint32_t row_max(uint32_t v) const {
    return warp_max(__float_as_uint(gather(__uint_as_float(warp_max(v)), 0.0f)));
  }

  static __device__ __forceinline__ float sum(const float (&f)[kLaneColumns]) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) total += f[i];
    return total;
  }
  __device__ __forceinline__ float square_sum(const float (&f)[kLaneColumns], int count) const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const float centered = f[i] - mean;
      if (i < count) total = fmaf(centered, centered, total);
    }
    return total;
  }
  __device__ __forceinline__ void set_deviation(float square_total, float eps, int row_columns) {
    inv_deviation = __frsqrt_rn(__fdiv_rn(square_total, static_cast<float>(row_columns)) + eps);
  }

  // The norm of 16 columns, rounded to T as between two layers.
  __device__ __forceinline__ void normalize(float (&f)[kLaneColumns], const Raw& weight, const Raw& bias,
                                            int count) const {
    float w[kLaneColumns];
    float b[kLaneColumns] = {};
    widen(weight, w);
    if constexpr (kNorm == Norm::kLayer) widen(bias, b);
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const float v = fmaf((f[i] - mean) * inv_deviation, w[i], b[i]);
      f[i] = i < count ? to_float(from_float<T>(v)) : 0.0f;
    }
  }

  static __device__ __forceinline__ uint32_t abs_max(const float (&r)[kLaneColumns], uint32_t peak) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) peak = max(peak, __float_as_uint(r[i]) & 0x7fffffffu);
    return peak;
  }

  // 16-bit: lanes 2i and 2i + 1 exchange a chunk, so that they write 32 contiguous bytes at once.
  __device__ __forceinline__ void store(const float (&r)[kLaneColumns], int pass, int place) const {
    const bool odd = thread % 2;
    uint32_t first[4];
    uint32_t second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = pack_pair<Out>(r[2 * i], r[2 * i + 1]);
      const uint32_t high = pack_pair<Out>(r[8 + 2 * i], r[8 + 2 * i + 1]);
      const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
      first[i] = odd ? received : low;
      second[i] = odd ? high : received;
    }
    if (place >= k_padded) return;
    const int column_bytes = 2 * (pass * k_padded + place);
    store_chunk(y, row, m8, column_bytes + (odd ? -16 : 0), first);
    store_chunk(y, row, m8, column_bytes + (odd ? 16 : 32), second);
  }

  // int8, columns permuted within 16: word i has columns 2i, 2i + 1, 8 + 2i, 9 + 2i. Two words at a time, for the sake
  // of registers.
  __device__ __forceinline__ void store_quantized(const float (&r)[kLaneColumns], int pass, int place, float s,
                                                  float inv, bool finite) const {
    if (place >= k_padded) return;
    uint32_t packed[4] = {};
    if (finite) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float f[8] = {r[4 * i],     r[4 * i + 1], r[4 * i + 8],  r[4 * i + 9],
                            r[4 * i + 2], r[4 * i + 3], r[4 * i + 10], r[4 * i + 11]};
        float t[8];
        round_quotients(f, s, inv, 127.0f, t);
        packed[2 * i] = pack_low_bytes(t[0], t[1], t[2], t[3]);
        packed[2 * i + 1] = pack_low_bytes(t[4], t[5], t[6], t[7]);
      }
    }
    store_chunk(y, row, m8, pass * k_padded + place, packed);
  }

  // Sets the row's scale of the largest magnitude; false where that is no finite number.
  __device__ __forceinline__ bool set_scale(uint32_t peak, float* scale, float& s) const {
    const bool finite = peak < 0x7f800000u;
    s = __fdiv_rn(__uint_as_float(peak), 127.0f);
    if (s == 0.0f) s = 1.0f;
    if (thread == 0 && x_row) scale[row] = finite ? s : __uint_as_float(0x7fc00000u);
    return finite;
  }

  __device__ __forceinline__ void run_held(float* scale, float eps, int row_columns) {
    const int place = (blockIdx.y * kThreads + thread) * kLaneColumns;
    const Columns c = columns(place);
    uint32_t flip[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) flip[pass] = flips(pass, place);
    Raw weight;
    Raw bias;
    const auto load_norm = [&] {
      if constexpr (kNorm != Norm::kNone) weight = load(norm_weight, c);
      if constexpr (kNorm == Norm::kLayer) bias = load(norm_bias, c);
    };
    constexpr bool kEarly = kThreads <= 512;  // more threads lack the registers to keep them meanwhile
    if constexpr (kEarly) load_norm();
    wait_for_dependencies();

    float f[kLaneColumns];
    widen(load(x_row, c), f);
    if constexpr (kNorm == Norm::kLayer) mean = __fdiv_rn(row_sum(sum(f)), static_cast<float>(row_columns));
    if constexpr (kNorm != Norm::kNone) {
      set_deviation(row_sum(square_sum(f, c.count)), eps, row_columns);
      if constexpr (!kEarly) load_norm();
      normalize(f, weight, bias, c.count);
    }
    float r[kPasses][kLaneColumns];
    uint32_t peak = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) r[pass][i] = f[i];
      rotate(r[pass], flip[pass], c.size);
      if constexpr (kQuantized) {
        peak = abs_max(r[pass], peak);
      } else {
        if (x_row) store(r[pass], pass, place);
      }
    }
    if constexpr (kQuantized) {
      float s;
      const bool finite = set_scale(row_max(peak), scale, s);
      if (!x_row) return;
      const float inv = __frcp_rn(s);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) store_quantized(r[pass], pass, place, s, inv, finite);
    }
  }

  // Sums `value(floats, count)` over the row.
  template <class Value>
  __device__ __forceinline__ float sum_over_row(const Value& value) const {
    float total = 0.0f;
    for (int place = thread * kLaneColumns; place < k_padded; place += kStep) {
      const Columns c = columns(place);
      float f[kLaneColumns];
      widen(load(x_row, c), f);
      total += value(f, c.count);
    }
    return row_sum(total);
  }

  // Hands every rotated piece of the row to `take(floats, pass, place)`. All threads take part in all of them.
  template <class Take>
  __device__ __forceinline__ void for_rotated(const Take& take) const {
    for (int first = 0; first < k_padded; first += kStep) {
      const int place = first + thread * kLaneColumns;
      const Columns c = columns(place);
      float f[kLaneColumns];
      widen(load(x_row, c), f);
      if constexpr (kNorm != Norm::kNone) {
        normalize(f, load(norm_weight, c), load(kNorm == Norm::kLayer ? norm_bias : norm_weight, c), c.count);
      }
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        float r[kLaneColumns];
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i) r[i] = f[i];
        rotate(r, flips(pass, place), c.size);
        take(r, pass, place);
      }
    }
  }

  __device__ __forceinline__ void run_over(float* scale, float eps, int row_columns) {
    wait_for_dependencies();
    if constexpr (kNorm == Norm::kLayer) {
      const float total = sum_over_row([](const float(&f)[kLaneColumns], int) { return sum(f); });
      mean = __fdiv_rn(total, static_cast<float>(row_columns));
    }
    if constexpr (kNorm != Norm::kNone) {
      const float total =
          sum_over_row([this](const float(&f)[kLaneColumns], int count) { return square_sum(f, count); });
      set_deviation(total, eps, row_columns);
    }
    if constexpr (kQuantized) {
      uint32_t peak = 0;
      for_rotated([&](const float(&r)[kLaneColumns], int, int) { peak = abs_max(r, peak); });
      float s;
      const bool finite = set_scale(row_max(peak), scale, s);
      const float inv = __frcp_rn(s);
      for_rotated([&](const float(&r)[kLaneColumns], int pass, int place) {
        if (x_row) store_quantized(r, pass, place, s, inv, finite);
      });
    } else {
      for_rotated([&](const float(&r)[kLaneColumns], int pass, int place) {
        if (x_row) store(r, pass, place);
      });
    }
  }

  static __device__ __forceinline__ void run(const T* x, void* y, float* scale, const uint32_t* signs,
                                             const T* norm_weight, const T* norm_bias, long long x_stride, int m, int k,
                                             int k_padded, float eps, float factor) {
    extern __shared__ float4 exchange[];
    __shared__ float partial[kRows * kWarps];
    launch_dependents();
    const int local_row = threadIdx.x / kThreads;
    const int row = blockIdx.x * kRows + local_row;
    const bool live = row < m;  // the CTA's other rows still need this one at their barriers
    RowRotation self{live ? x + row * x_stride : nullptr,
                     norm_weight,
                     norm_bias,
                     signs,
                     static_cast<char*>(y),
                     partial,
                     exchange + local_row * kThreads,
                     row,
                     (m + 7) / 8,
                     live ? k : 0,
                     k_padded,
                     static_cast<int>(threadIdx.x % kThreads),
                     local_row,
                     factor,
                     0.0f,
                     0.0f};
    if constexpr (kHeld) {
      self.run_held(scale, eps, k);
    } else {
      self.run_over(scale, eps, k);
    }
  }
};

}  // namespace qcut
