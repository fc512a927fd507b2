// Copies of queries, keys and values to shared memory by 128 threads, for all prefill attention kernels.
//
// A tile in shared memory is blocks of 64 columns of 16-bit floats: rows of 128 bytes one after the other, the 16-byte
// chunk c of row r at c ^ (r % 8). Columns past the head and rows that do not exist are 0.
#pragma once

#include <qcut/core/mma.cuh>
#include <qcut/attention/prompt.cuh>

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

// Copy of a block of int8 or Nibbles rows by 128 threads, 16 bytes each, to be converted to 16-bit floats.
template <class C, int kHead, int kColumns, int kKeys>
struct RawRows {
  static constexpr bool kNibbles = CacheType<C>::kTurned;
  static constexpr int kRowBytes = kHead * CacheType<C>::kBits / 8;
  static constexpr int kLanes = kNextPower<(kColumns * CacheType<C>::kBits / 8 + 15) / 16>;
  static constexpr int kStep = 128 / kLanes;
  static constexpr int kCount = (kKeys + kStep - 1) / kStep;
  static constexpr int kBytes = 2048 * kCount;
  static constexpr int kWordBytes = kNibbles ? 512 * kCount : 0;  // words for each thread's own rows
};

// Copies the four bytes that hold the 16-bit word `i`: words start at a multiple of four bytes.
__device__ __forceinline__ void copy_word(uint32_t shared, const unsigned short* words, long long i, bool zero) {
  copy_async<4>(shared, words + (i & ~1ll), zero);
}
__device__ __forceinline__ uint32_t word_of(uint32_t both, bool odd) { return odd ? both >> 16 : both & 0xffffu; }

// kColumns, a multiple of 16, are those of products: kHead and zeros. kInTurns: keys and values use the same raw bytes in
// turns, with no barrier between them.
template <class T, class Keys, class Values, int kHead, int kColumns, int kKeys, bool kInTurns>
struct PromptCopy {
  static constexpr int kBlock = 128 * kKeys;
  static constexpr int kLanes = kNextPower<kColumns / 8>;  // neighbours that copy a row, 16 bytes each
  static constexpr int kStep = 128 / kLanes;               // rows copied at once
  static constexpr int kCount = (kKeys + kStep - 1) / kStep;
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

  // Copy of compressed rows in two steps: raw bytes, each to the thread that converts them, and
  // 16-bit floats, exactly. With keys come what the scores of the block need of its scales. `odd`: the first row is an
  // odd one of all rows of the cache.
  template <class C>
  using Raw = RawRows<C, kHead, kColumns, kKeys>;
  static constexpr int kMostRows = Raw<Keys>::kBytes > Raw<Values>::kBytes ? Raw<Keys>::kBytes : Raw<Values>::kBytes;
  // Byte offsets after the rows. In turns, rows, scales and words of both lie at the same places, where each thread
  // overwrites only what it has read itself.
  template <class C>
  static constexpr int kRawScales = kInTurns ? kMostRows : Raw<C>::kBytes;
  template <class C>
  static constexpr int kRawWords = kRawScales<C> + 8 * kKeys;
  template <class C>
  static constexpr int kRawEnd = kRawWords<C> + Raw<C>::kWordBytes;
  static constexpr int kRawBytes = kRawEnd<Keys> > kRawEnd<Values> ? kRawEnd<Keys> : kRawEnd<Values>;

  template <bool kOfKeys, class Args>
  __device__ __forceinline__ void fetch(const Args& args, long long first, int count, uint32_t raw) const {
    if constexpr (kOfKeys) {
      fetch_rows(args.keys, args.key_scales, first, count, raw);
      if (thread >= kKeys) return;
      const bool absent = thread >= count;
      const long long at = absent ? first : first + thread;
      const uint32_t to = raw + kRawScales<Keys> + 8 * thread;
      fetch_scale(to, args.key_scales, at, absent);
      fetch_scale(to + 4, args.value_scales, at, absent);
    } else {
      fetch_rows(args.values, args.value_scales, first, count, raw);
    }
  }
  template <bool kOfKeys>
  __device__ __forceinline__ void convert(uint32_t raw, uint32_t to, bool odd) const {
    if constexpr (kOfKeys) {
      convert_rows<Keys>(raw, to, odd);
    } else {
      convert_rows<Values>(raw, to, odd);
    }
  }
  // Three float32 of each key: see weigh_block.
  __device__ __forceinline__ void convert_scales(uint32_t raw, float scale, uint32_t to, bool odd) const {
    if (thread >= kKeys) return;
    uint32_t w[2];
    load_shared_8(w, raw + kRawScales<Keys> + 8 * thread);
    const float value = scale_of<Values>(w[1], odd);
    const float held = value < 0x1p-100f ? 0x1p-100f : value;  // 0 has no logarithm; NaN stays
    store_shared_8(to + 8 * thread, bits(scale_of<Keys>(w[0], odd) * scale), bits(log2f(held)));
    store_shared_4(to + 8 * kKeys + 4 * thread, bits(1.0f / held));
  }

 private:
  __device__ __forceinline__ void fetch_scale(uint32_t to, const float* scales, long long at, bool absent) const {
    copy_async<4>(to, scales + at, absent);
  }
  __device__ __forceinline__ void fetch_scale(uint32_t to, const unsigned short* words, long long at,
                                              bool absent) const {
    copy_word(to, words, at, absent);
  }
  template <class C>
  __device__ __forceinline__ float scale_of(uint32_t w, bool odd) const {
    if constexpr (CacheType<C>::kTurned) {
      return RowScale(word_of(w, odd != (thread % 2 == 1))).scale;
    } else {
      return __uint_as_float(w);
    }
  }

  template <class C, class Scale>
  __device__ __forceinline__ void fetch_rows(const C* rows, const Scale* scales, long long first, int count,
                                             uint32_t raw) const {
    using Rows = Raw<C>;
    const char* from = reinterpret_cast<const char*>(rows) + first * Rows::kRowBytes;
    const int chunk = thread % Rows::kLanes;
    const int row = thread / Rows::kLanes;
#pragma unroll
    for (int i = 0; i < Rows::kCount; ++i) {
      const bool absent = row + i * Rows::kStep >= count || 16 * chunk >= Rows::kRowBytes;
      copy_async<16>(raw + 16 * thread + 2048 * i,
                     absent ? from : from + (row + i * Rows::kStep) * Rows::kRowBytes + 16 * chunk, absent);
      if constexpr (Rows::kNibbles) {
        copy_word(raw + kRawWords<C> + 512 * i + 4 * thread, scales, absent ? first : first + row + i * Rows::kStep,
                  absent);
      }
    }
  }
  template <class C>
  __device__ __forceinline__ void convert_rows(uint32_t raw, uint32_t to, bool odd) const {
    using Rows = Raw<C>;
    constexpr int kChunk = 128 / CacheType<C>::kBits;  // columns
    const int chunk = thread % Rows::kLanes;
    const int row = thread / Rows::kLanes;
    if (kChunk * chunk >= kColumns) return;
    // Lanes of every other 64 columns store their halves in the other order: other banks.
    const int other = chunk / (64 / kChunk) & 1;
    constexpr int kMost = Rows::kNibbles ? 2 : 4, kBatch = Rows::kCount < kMost ? Rows::kCount : kMost;  // in flight
#pragma unroll
    for (int i0 = 0; i0 < Rows::kCount; i0 += kBatch) {
      uint32_t bytes[kBatch][4], words[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i0 + i >= Rows::kCount) break;
        load_shared_16(bytes[i], raw + 16 * thread + 2048 * (i0 + i));
        if constexpr (Rows::kNibbles) words[i] = load_shared_4(raw + kRawWords<C> + 512 * (i0 + i) + 4 * thread);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int to_row = row + (i0 + i) * Rows::kStep;
        if (i0 + i >= Rows::kCount || (kKeys % Rows::kStep != 0 && to_row >= kKeys)) break;
        if constexpr (Rows::kNibbles) {
          const float lift = RowScale(word_of(words[i], odd != (to_row % 2 == 1))).lift;
          const uint32_t lifts = pack_pair<T>(lift, lift);
#pragma unroll
          for (int part = 0; part < 4; ++part) {
            const int which = part ^ other;
            uint32_t w[4];
            Float16<T>::from_nibbles(which & 2 ? (which & 1 ? bytes[i][3] : bytes[i][2])
                                               : (which & 1 ? bytes[i][1] : bytes[i][0]),
                                     lifts, w);
            if (kColumns % 32 != 0 && 32 * chunk + 8 * which >= kColumns) continue;
            store_shared_16(to + tile_at(to_row, 4 * chunk + which, kBlock), w);
          }
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int which = half ^ other;
            uint32_t w[4];
            Float16<T>::from_int8(which ? bytes[i][2] : bytes[i][0], w[0], w[1]);
            Float16<T>::from_int8(which ? bytes[i][3] : bytes[i][1], w[2], w[3]);
            store_shared_16(to + tile_at(to_row, 2 * chunk + which, kBlock), w);
          }
        }
      }
    }
  }
};

// By what scores are multiplied when they become powers of two: once scaled or capped, by 1.
template <bool kScaled, class Args>
__device__ __forceinline__ float weight_scale(const Args& args) {
  return kScaled || Args::kCapped ? 1.0f : args.scale;
}

// Turns a block's scores, which start at position `at`, into weights, and returns the factor of earlier sums.
// Scores of a compressed cache become s * key_scale + log2(value_scale), so that a weight holds its value's scale, relative
// to the largest such product of a row; the sum that divides takes weights without it. `scales` is the shared address
// of PromptCopy's.
template <bool kScaled, int kScores, class Args>
__device__ __forceinline__ float2 weigh_block(const Args& args, PromptSoftmax& softmax, float (&s)[kScores],
                                              uint32_t scales, const PromptRows& rows, int at, int last, int last8) {
  constexpr int kKeys = 2 * kScores;
  const uint32_t mine = scales + 16 * (threadIdx.x % 4);
  if constexpr (kScaled) {
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      uint32_t w[4];
      load_shared_16(w, mine + 64 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float key = __uint_as_float(w[e % 2 * 2]), value = __uint_as_float(w[e % 2 * 2 + 1]);
        if constexpr (Args::kCapped) {
          s[4 * j + e] = capped(s[4 * j + e] * key, args.softcap) + value;
        } else {
          s[4 * j + e] = fmaf(s[4 * j + e], key, value);
        }
      }
      // The assembler would start all loads and all powers at once, for which a thread has no registers.
      if constexpr (Args::kCapped) __syncwarp();
    }
  } else if constexpr (Args::kCapped) {
#pragma unroll
    for (float& score : s) score = capped(score * args.scale, args.softcap);
  }
  if (at + kKeys > rows.clear) hide_scores(s, at, last, last8);
  if constexpr (Args::kWindowed) {
    if (at < rows.places - args.window) hide_early_scores(s, at, last - args.window, last8 - args.window);
  }
  if constexpr (kScaled) {
    const uint32_t counts = scales + 8 * kKeys + 8 * (threadIdx.x % 4);
    return softmax.weigh(s, 1.0f, [&](int j) {
      uint32_t w[2];
      load_shared_8(w, counts + 32 * j);
      return make_float2(__uint_as_float(w[0]), __uint_as_float(w[1]));
    });
  } else {
    return softmax.weigh(s, Args::kCapped ? 1.0f : args.scale, [](int) { return make_float2(1.0f, 1.0f); });
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
