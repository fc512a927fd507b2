// Rotates tokens and stores them in blocks or in rows: walsh_hadamard(x * signs) * factor for each group of columns, or
// x itself, in the 16-bit type or as int8 with a scale for each token.
//
// A thread holds 16 neighbouring columns of a group with its padding: one 16-byte chunk of int8 tokens, or two chunks
// of 16-bit tokens. Butterflies over 1 to 8 columns stay in the thread's registers, butterflies over 16 to 256 columns
// are shuffles, wider ones go through shared memory. A group that is shorter than the others skips the widest
// butterflies.
//
// Exactness: the order of the butterflies is that of qcut.numerics.codebook.rotation.walsh_hadamard, and results are equal
// bitwise.
//
// qcut/numerics/codebook/layout.py describes the layout of blocks, groups and padding in memory.
#pragma once

#include <qcut/codebook/codebook.cuh>
#include <qcut/core/quantize.cuh>

namespace qcut {

constexpr int kLaneColumns = 16;
constexpr int kWarpColumns = 32 * kLaneColumns;

// The butterflies of a group of `size` columns, a power of two up to kGroup; each thread has kColumns of them. `thread`
// counts the row's threads. `exchange` is the row's part of shared memory, kStride threads wide, for groups wider than a
// warp's columns.
template <int kGroup, int kStride, int kColumns>
__device__ __forceinline__ void butterflies(float (&r)[kColumns], int size, int thread, float4* exchange) {
#pragma unroll
  for (int half = 1; half < kColumns && half < kGroup; half *= 2) {
    if (half < size) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i & half) continue;
        const float low = r[i];
        const float high = r[i + half];
        r[i] = low + high;
        r[i + half] = low - high;
      }
    }
  }
  // fma(own, +-1, other) is own + other, or other - own in the upper half, rounded as the sum or difference is.
#pragma unroll
  for (int half = kColumns; half < 32 * kColumns && half < kGroup; half *= 2) {
    const float sign = thread & half / kColumns ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, r[i], half / kColumns);
      if (half < size) r[i] = fmaf(r[i], sign, other);
    }
  }
#pragma unroll 1
  for (int half = 32 * kColumns; half < kGroup; half *= 2) {
    const float sign = thread & half / kColumns ? -1.0f : 1.0f;
    __syncthreads();  // all threads have read the previous exchange
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      exchange[i * kStride + thread] = make_float4(r[4 * i], r[4 * i + 1], r[4 * i + 2], r[4 * i + 3]);
    }
    __syncthreads();
    if (half < size) {
      const int partner = thread ^ half / kColumns;
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        const float4 other = exchange[i * kStride + partner];
        r[4 * i] = fmaf(r[4 * i], sign, other.x);
        r[4 * i + 1] = fmaf(r[4 * i + 1], sign, other.y);
        r[4 * i + 2] = fmaf(r[4 * i + 2], sign, other.z);
        r[4 * i + 3] = fmaf(r[4 * i + 3], sign, other.w);
      }
    }
  }
}

// The place of a row's 16 bytes from column_bytes on, in m8 blocks of 8 rows.
__device__ __forceinline__ char* chunk_of(char* y, int row, int m8, int column_bytes) {
  const long long block = static_cast<long long>(column_bytes / 128) * m8 + row / 8;
  return y + block * 1024 + token_chunk_offset(row, column_bytes % 128 / 16);
}

__device__ __forceinline__ void store_chunk(char* y, int row, int m8, int column_bytes, const uint32_t (&w)[4]) {
  *reinterpret_cast<uint4*>(chunk_of(y, row, m8, column_bytes)) = make_uint4(w[0], w[1], w[2], w[3]);
}

// kThreads threads own a row; kRows rows share a CTA. With kHeld, threads hold all columns that the CTA writes, which
// blockIdx.y chooses; otherwise the CTA goes over its rows a second time once their maximum is known. kPaddedGroup is
// the number of columns of a group in memory. With kAligned, rows of x and their groups start at multiples of 16 bytes.
// With kNaturalOrder, int8 columns lie in natural order. With kRowMajor they lie in rows of k_padded columns, which need
// not be whole units but are a multiple of 16, and all groups are rotated without a factor of the last.
template <class T, class Out, bool kHadamard, int kGroup, int kPaddedGroup, int kPasses, int kThreads, int kRows,
          bool kHeld, bool kAligned, bool kNaturalOrder, bool kRowMajor>
struct RowRotation {
  static constexpr int kSize = Vector<T>::kSize;
  static constexpr int kVecs = kLaneColumns / kSize;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kStep = kThreads * kLaneColumns;
  static constexpr bool kQuantized = sizeof(Out) == 1;

  // The source of 16 columns of a block: `count` columns of x from column `source` on, in a group of `size` columns.
  struct Columns {
    int source, count, size;
  };

  const T* x_row;
  const uint32_t* signs;
  char* y;
  uint32_t* partial;  // a word for each warp
  float4* exchange;
  int row, scale_row, m8, k, k_padded, thread, local_row;
  float factor;

  __device__ __forceinline__ Columns columns(int place) const {
    const int group = place / kPaddedGroup;
    const int offset = place % kPaddedGroup;
    const int size = min(kGroup, k - group * kGroup);
    return {group * kGroup + offset, min(max(size - offset, 0), kLaneColumns), size};
  }

  __device__ __forceinline__ void load(float (&f)[kLaneColumns], const Columns& c) const {
    Vector<T> raw[kVecs];
    load_vectors<T, kVecs, kAligned>(raw, x_row + c.source, 0, kSize, c.count);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      float part[kSize];
      raw[i].to_float(part);
#pragma unroll
      for (int j = 0; j < kSize; ++j) f[i * kSize + j] = part[j];
    }
  }

  // The bits that flip the signs of 16 columns in a pass.
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
      // kGroup and size are powers of two: the product with their ratio is exact.
      const int columns = max(size, 1);
      const float scaled = kRowMajor ? __frsqrt_rn(static_cast<float>(columns))
                                     : factor * static_cast<float>(kGroup >> (31 - __clz(columns)));
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) r[i] *= scaled;
    }
  }

  // The largest word of the row's threads, in each of them.
  __device__ __forceinline__ uint32_t row_max(uint32_t v) const {
    v = warp_max(v);
    if constexpr (kWarps == 1) return v;
    const int lane = threadIdx.x % 32;
    if (lane == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_max(lane < kWarps ? partial[local_row * kWarps + lane] : 0u);
  }

  static __device__ __forceinline__ uint32_t abs_max(const float (&r)[kLaneColumns], uint32_t peak) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) peak = max(peak, __float_as_uint(r[i]) & 0x7fffffffu);
    return peak;
  }

  // Stores 16-bit results. Lanes 2i and 2i + 1 exchange a chunk, so that the pair writes 32 contiguous bytes at once.
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

  // The column of 16 that is byte i of int8 results: unless in natural order, word i has columns 2i, 2i + 1, 8 + 2i, 9 + 2i.
  static constexpr __device__ int column_of(int i) { return kNaturalOrder ? i : i / 4 * 2 + i % 2 + i % 4 / 2 * 8; }

  // Stores int8 results. Two words at a time take fewer registers than four.
  __device__ __forceinline__ void store(const float (&r)[kLaneColumns], int pass, int place,
                                        const QuantizedRow& quantized) const {
    if (place >= k_padded) return;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float f[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) f[j] = r[column_of(4 * i + j)];
      uint32_t words[2];
      quantized.quantize(f, words);
      packed[i] = words[0];
      packed[i + 1] = words[1];
    }
    if constexpr (kRowMajor) {
      char* const to = y + static_cast<long long>(row) * k_padded + place;
      *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    } else {
      store_chunk(y, row, m8, pass * k_padded + place, packed);
    }
  }

  // Returns the row's quantization and stores the row's scale.
  __device__ __forceinline__ QuantizedRow quantize(uint32_t peak, float* scale) const {
    const QuantizedRow quantized(row_max(peak));
    if (thread == 0 && x_row) scale[scale_row] = quantized.scale();
    return quantized;
  }

  __device__ __forceinline__ void run_held(float* scale) {
    const int place = (blockIdx.y * kThreads + thread) * kLaneColumns;
    const Columns c = columns(place);
    uint32_t flip[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) flip[pass] = flips(pass, place);
    wait_for_dependencies();

    float f[kLaneColumns];
    load(f, c);
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
      const QuantizedRow quantized = quantize(peak, scale);
      if (!x_row) return;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) store(r[pass], pass, place, quantized);
    }
  }

  // Calls `take(floats, pass, place)` with every rotated piece of the row. All threads take part in every piece.
  template <class Take>
  __device__ __forceinline__ void for_rotated(const Take& take) const {
    for (int first = 0; first < k_padded; first += kStep) {
      const int place = first + thread * kLaneColumns;
      const Columns c = columns(place);
      float f[kLaneColumns];
      load(f, c);
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

  __device__ __forceinline__ void run_over(float* scale) {
    static_assert(kQuantized, "only the row's maximum takes more than the CTA's own columns");
    wait_for_dependencies();
    uint32_t peak = 0;
    for_rotated([&](const float(&r)[kLaneColumns], int, int) { peak = abs_max(r, peak); });
    const QuantizedRow quantized = quantize(peak, scale);
    for_rotated([&](const float(&r)[kLaneColumns], int pass, int place) {
      if (x_row) store(r, pass, place, quantized);
    });
  }

  // kOfRoutes: the next kernel begins once the last one has ended, so that it may read what that one wrote before it
  // waits for this one. With `routes` [m], row i is the token of route routes[i] of `total`, per_row of which each row of
  // x has; its scale is the route's, and rows of no route are left as they are.
  template <bool kOfRoutes = false>
  static __device__ __forceinline__ void run(const T* x, void* y, float* scale, const uint32_t* signs,
                                             long long x_stride, int m, int k, int k_padded, float factor,
                                             const int* routes = nullptr, int per_row = 1, int total = 0) {
    extern __shared__ float4 exchange[];
    __shared__ uint32_t partial[kRows * kWarps];
    if constexpr (kOfRoutes) wait_for_dependencies();
    launch_dependents();
    const int local_row = threadIdx.x / kThreads;
    const int row = blockIdx.x * kRows + local_row;
    int from = row, scale_row = row;
    if (kOfRoutes && routes != nullptr) {
      scale_row = row < m ? routes[row] : -1;
      if (scale_row >= total) scale_row = -1;
      from = scale_row / per_row;
    }
    // Threads of a row that is not there still take part in the CTA's barriers.
    const bool live = row < m && (!kOfRoutes || scale_row >= 0);
    RowRotation self{live ? x + from * x_stride : nullptr,
                     signs,
                     static_cast<char*>(y),
                     partial,
                     exchange + local_row * kThreads,
                     row,
                     scale_row,
                     (m + 7) / 8,
                     live ? k : 0,
                     k_padded,
                     static_cast<int>(threadIdx.x % kThreads),
                     local_row,
                     factor};
    if constexpr (kHeld) {
      self.run_held(scale);
    } else {
      self.run_over(scale);
    }
  }
};

}  // namespace qcut
