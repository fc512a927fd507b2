// Rotates rows that a kernel has computed in registers, and stores them in blocks of tokens, or in rows of int8, as
// rotate.cuh does.
//
// A thread holds vectors of 8 columns, a warp 256 neighbouring columns of each; or of 4 columns, a warp 128. Groups are
// whole ones of 32, 64 or 128 columns, so that butterflies stay within a warp.
//
// Exactness: bitwise RowRotation of the same rows.
#pragma once

#include <qcut/codebook/rotate.cuh>

namespace qcut {

// A kernel calls begin() before it waits for its predecessor, which does not write the signs, and store() last, with
// all threads of the CTA. A CTA has one row, or with 16-bit tokens a part of one: the vectors from column `first` on,
// `step` columns apart, kVecs for each of kThreads threads. With kInRows, int8 columns lie in natural order in rows of
// k_padded columns, a multiple of kSize.
template <class T, class Out, int kGroup, int kPasses, int kVecs, int kThreads, int kSize = 8, bool kInRows = false>
struct RotatedRows {
  static constexpr bool kRotates = true;
  static constexpr bool kQuantized = sizeof(Out) == 1;
  static constexpr int kWarps = kThreads / 32;
  static_assert(sizeof(T) == 2 && (kSize == 8 || (kSize == 4 && !kQuantized)), "16-bit rows");
  static_assert(!kInRows || (kQuantized && kPasses == 1), "rows are of int8 products");
  static_assert(kGroup >= 32 && kGroup <= 128, "groups lie within a warp's columns");

  const uint32_t* signs;
  int k_padded;
  float factor;
  uint32_t flips[kVecs][kPasses];

  __device__ __forceinline__ RotatedRows(const uint32_t* signs, int k_padded, float factor)
      : signs(signs), k_padded(k_padded), factor(factor) {}

  __device__ __forceinline__ void begin(int first, int step) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int place = first + i * step;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        flips[i][pass] = place < k_padded ? signs[(pass * k_padded + place) / 32] >> place % 32 : 0u;
      }
    }
  }

  __device__ __forceinline__ void rotate(float (&r)[kSize], uint32_t flip) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      r[j] = __uint_as_float(__float_as_uint(r[j]) ^ (flip << (31 - j) & 0x80000000u));
    }
    butterflies<kGroup, 1>(r, kGroup, threadIdx.x, nullptr);
#pragma unroll
    for (int j = 0; j < kSize; ++j) r[j] *= factor;
  }

  // Rows from column k on are 0 in f. `rows` counts the rows of y.
  __device__ __forceinline__ void store(const float (&f)[kVecs][kSize], int row, int rows, int first, int step, void* y,
                                        float* scale) const {
    float r[kVecs][kPasses][kSize];
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        float(&part)[kSize] = r[i][pass];
#pragma unroll
        for (int j = 0; j < kSize; ++j) part[j] = f[i][j];
        rotate(part, flips[i][pass]);
        if constexpr (kQuantized) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) peak = max(peak, __float_as_uint(part[j]) & 0x7fffffffu);
        } else {
          const int place = first + i * step;
          if (place >= k_padded) continue;
          uint32_t w[kSize / 2];
#pragma unroll
          for (int j = 0; j < kSize / 2; ++j) w[j] = pack_pair<Out>(part[2 * j], part[2 * j + 1]);
          const int m8 = (rows + 7) / 8, column_bytes = 2 * (pass * k_padded + place);
          if constexpr (kSize == 8) {
            store_chunk(static_cast<char*>(y), row, m8, column_bytes, w);
          } else {
            char* const chunk = chunk_of(static_cast<char*>(y), row, m8, column_bytes);
            *reinterpret_cast<uint2*>(chunk + column_bytes % 16) = make_uint2(w[0], w[1]);
          }
        }
      }
    }
    if constexpr (kQuantized) {
      const QuantizedRow quantized(row_max(peak));
      if (threadIdx.x == 0) scale[row] = quantized.scale();
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          if constexpr (kInRows) {
            store_in_row(r[i][pass], quantized, row, first + i * step, y);
          } else {
            store_half(r[i][pass], quantized, row, (rows + 7) / 8, pass * k_padded, first + i * step, y);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t row_max(uint32_t peak) {
    __shared__ uint32_t peaks[kWarps];
    const int lane = threadIdx.x % 32;
    peak = warp_max(peak);
    if constexpr (kWarps == 1) return peak;
    if (lane == 0) peaks[threadIdx.x / 32] = peak;
    __syncthreads();
    return warp_max(lane < kWarps ? peaks[lane] : 0u);
  }

  __device__ __forceinline__ void store_in_row(const float (&r)[kSize], const QuantizedRow& quantized, int row,
                                               int place, void* y) const {
    if (place >= k_padded) return;
    uint32_t words[2];
    quantized.quantize(r, words);
    char* const to = static_cast<char*>(y) + static_cast<long long>(row) * k_padded + place;
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }

  // Lanes 2i and 2i + 1 hold the 16 columns of a chunk, in which word i has columns 2i, 2i + 1, 8 + 2i, 9 + 2i: each
  // stores two words, half of whose columns are the other's.
  __device__ __forceinline__ void store_half(const float (&r)[kSize], const QuantizedRow& quantized, int row, int m8,
                                             int before, int place, void* y) const {
    const bool odd = threadIdx.x % 2;
    uint32_t words[2];
    quantized.quantize(r, words);
    const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
    const uint32_t low = odd ? received : words[0];
    const uint32_t high = odd ? words[1] : received;
    if (place >= k_padded) return;
    char* const chunk = chunk_of(static_cast<char*>(y), row, m8, before + place);
    *reinterpret_cast<uint2*>(chunk + 8 * odd) =
        make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
  }
};

}  // namespace qcut
