// Copies of queries, keys and values to shared memory by 128 threads, for all kernels of prompt attention.
//
// A tile in shared memory is blocks of 64 columns of 16-bit floats: rows of 128 bytes one after the other, the 16-byte
// chunk c of row r at c ^ (r % 8). Columns past the head and rows that do not exist are 0.
#pragma once

#include <qcut/core/mma.cuh>
#include <qcut/decoder/attention/prompt.cuh>

namespace qcut {

// The least power of two that is no less than v.
template <int v>
constexpr int kNextPower = 2 * kNextPower<(v + 1) / 2>;
template <>
constexpr int kNextPower<1> = 1;

// The shared address of 16 bytes of a row, in a tile of blocks of `block` bytes.
__device__ __forceinline__ uint32_t tile_at(int row, int chunk, int block) {
  return chunk / 8 * block + row * 128 + ((chunk ^ row) & 7) * 16;
}

// kColumns, a multiple of 16, are those of products: kHead and zeros.
template <class T, int kHead, int kColumns, int kKeys>
struct PromptCopy {
  static constexpr int kBlock = 128 * kKeys;
  static constexpr int kLanes = kNextPower<kColumns / 8>;  // neighbours that copy a row, 16 bytes each
  static constexpr int kStep = 128 / kLanes;               // rows copied at once
  static constexpr int kCount = (kKeys + kStep - 1) / kStep;
  static constexpr int kRawLanes = kNextPower<(kHead + 15) / 16>;  // of int8 rows
  static constexpr int kRawStep = 128 / kRawLanes;
  static constexpr int kRawCount = (kKeys + kRawStep - 1) / kRawStep;
  static constexpr int kScaleBytes = 12 * kKeys;

  int thread;  // 0..127

  // The queries of a tile of kRows rows.
  template <int kRows, class Args>
  __device__ __forceinline__ void queries(const Args& args, const PromptRows& rows, uint32_t to) const {
    const int chunk = thread % kLanes;
    if (chunk >= kColumns / 8) return;
#pragma unroll 4
    for (int i = thread / kLanes; i < kRows; i += kStep) {
      long long token;
      int query;
      const bool exists = rows.find(args, i, token, query) && 8 * chunk < kHead;
      const T* from = exists ? args.q + token * args.q_stride + query * kHead + 8 * chunk : args.q;
      copy_async<16>(to + tile_at(i, chunk, 128 * kRows), from, !exists);
    }
  }

  // The first `count` rows of a block of the cache.
  __device__ __forceinline__ void rows(const T* from, int count, uint32_t to) const {
    const int chunk = thread % kLanes;
    const int row = thread / kLanes;
    const bool past = 8 * chunk >= kHead;
    if (chunk >= kColumns / 8) return;
    const T* mine = past ? from : from + row * kHead + 8 * chunk;
    if (count >= kKeys) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (kKeys % kStep != 0 && row + i * kStep >= kKeys) break;
        copy_async<16>(to + tile_at(row + i * kStep, chunk, kBlock), mine + i * kStep * kHead, past);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (kKeys % kStep != 0 && row + i * kStep >= kKeys) break;
        const bool absent = row + i * kStep >= count;
        copy_async<16>(to + tile_at(row + i * kStep, chunk, kBlock), absent ? from : mine + i * kStep * kHead,
                       past || absent);
      }
    }
  }

  // The same of int8 rows, in two steps: raw bytes, of which each thread gets those that it is to convert, and 16-bit
  // floats, exactly. With keys come what the scores of the block need of its scales.
  static constexpr int kRawBytes = 2048 * kRawCount + 8 * kKeys;

  template <bool kHasScales, class Args>
  __device__ __forceinline__ void fetch(const Args& args, long long first, int count, uint32_t raw) const {
    const int8_t* from = (kHasScales ? args.keys : args.values) + first * kHead;
    const int chunk = thread % kRawLanes;
    const int row = thread / kRawLanes;
#pragma unroll
    for (int i = 0; i < kRawCount; ++i) {
      const bool absent = row + i * kRawStep >= count || 16 * chunk >= kHead;
      copy_async<16>(raw + 16 * thread + 2048 * i, absent ? from : from + (row + i * kRawStep) * kHead + 16 * chunk,
                     absent);
    }
    if (kHasScales && thread < kKeys) {
      const bool absent = thread >= count;
      const long long at = absent ? first : first + thread;
      copy_async<4>(raw + 2048 * kRawCount + 8 * thread, args.key_scales + at, absent);
      copy_async<4>(raw + 2048 * kRawCount + 8 * thread + 4, args.value_scales + at, absent);
    }
  }
  __device__ __forceinline__ void convert(uint32_t raw, uint32_t to) const {
    const int chunk = thread % kRawLanes;
    const int row = thread / kRawLanes;
    if (16 * chunk >= kColumns) return;
    // Lanes of every other 64 columns store their halves in the other order: other banks.
    const int odd = chunk / 4 & 1;
    constexpr int kBatch = kRawCount < 4 ? kRawCount : 4;  // loads in flight
#pragma unroll
    for (int i0 = 0; i0 < kRawCount; i0 += kBatch) {
      uint32_t bytes[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i0 + i < kRawCount) load_shared_16(bytes[i], raw + 16 * thread + 2048 * (i0 + i));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int to_row = row + (i0 + i) * kRawStep;
        if (i0 + i >= kRawCount || (kKeys % kRawStep != 0 && to_row >= kKeys)) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int which = half ^ odd;
          uint32_t w[4];
          Float16<T>::from_int8(which ? bytes[i][2] : bytes[i][0], w[0], w[1]);
          Float16<T>::from_int8(which ? bytes[i][3] : bytes[i][1], w[2], w[3]);
          store_shared_16(to + tile_at(to_row, 2 * chunk + which, kBlock), w);
        }
      }
    }
  }
  // Three float32 of each key: see weigh_block.
  __device__ __forceinline__ void convert_scales(uint32_t raw, float scale, uint32_t to) const {
    if (thread >= kKeys) return;
    uint32_t w[2];
    load_shared_8(w, raw + 2048 * kRawCount + 8 * thread);
    const float value = __uint_as_float(w[1]);
    const float held = value < 0x1p-100f ? 0x1p-100f : value;  // 0 has no logarithm; NaN stays
    store_shared_8(to + 8 * thread, bits(__uint_as_float(w[0]) * scale), bits(log2f(held)));
    store_shared_4(to + 8 * kKeys + 4 * thread, bits(1.0f / held));
  }
};

// Makes weights of a block's scores, the first of which is at place `at`, and returns by what to multiply earlier sums.
// Scores of an int8 cache become s * key_scale + log2(value_scale), so that a weight holds its value's scale, relative
// to the largest such product of a row; the sum that divides takes weights without it. `scales` is the shared address
// of PromptCopy's.
template <bool kInt8, int kScores>
__device__ __forceinline__ float2 weigh_block(PromptSoftmax& softmax, float (&s)[kScores], float scale, uint32_t scales,
                                              const PromptRows& rows, int at, int last, int last8) {
  constexpr int kKeys = 2 * kScores;
  const uint32_t mine = scales + 16 * (threadIdx.x % 4);
  if constexpr (kInt8) {
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      uint32_t w[4];
      load_shared_16(w, mine + 64 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[4 * j + e] = fmaf(s[4 * j + e], __uint_as_float(w[e % 2 * 2]), __uint_as_float(w[e % 2 * 2 + 1]));
      }
    }
  }
  if (at + kKeys > rows.clear) hide_scores(s, at, last, last8);
  if constexpr (kInt8) {
    const uint32_t counts = scales + 8 * kKeys + 8 * (threadIdx.x % 4);
    return softmax.weigh(s, 1.0f, [&](int j) {
      uint32_t w[2];
      load_shared_8(w, counts + 32 * j);
      return make_float2(__uint_as_float(w[0]), __uint_as_float(w[1]));
    });
  } else {
    return softmax.weigh(s, scale, [](int) { return make_float2(1.0f, 1.0f); });
  }
}

// Rounds a block's weights to the first operands of the products with its values.
template <class T, int kScores>
__device__ __forceinline__ void round_weights(uint32_t (&p)[kScores / 8][4], const float (&s)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 8; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) p[i][k] = pack_pair<T>(s[8 * i + 2 * k], s[8 * i + 2 * k + 1]);
  }
}

}  // namespace qcut
