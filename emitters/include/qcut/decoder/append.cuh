// Applies rotary positions to queries and keys and appends keys and values to the cache, in one launch, for one token
// of each sequence or for many.
//
// A thread has the same columns of kHeads heads of one token: the thread reads positions, slots and rows of the tables
// once for all of these heads. The thread has both columns of every rotated pair, so that queries are rotated in place.
//
// Exactness: products and sums are rounded as in rope.cuh, int8 keys and values as in core/quantize.cuh.
//
// Source: Su et al., "RoFormer", arXiv 2104.09864, section 3.4.2, pairs neighbours; GPT-NeoX and Llama pair halves.
#pragma once

#include <qcut/core/quantize.cuh>
#include <qcut/decoder/rope.cuh>

namespace qcut {

// Reads or writes kBytes bytes, 1 to 16, at once. Fewer than four bytes are the low bytes of a word.
template <int kBytes>
__device__ __forceinline__ void read_words(uint32_t* w, const void* from) {
  if constexpr (kBytes == 16) {
    const uint4 raw = *static_cast<const uint4*>(from);
    w[0] = raw.x, w[1] = raw.y, w[2] = raw.z, w[3] = raw.w;
  } else if constexpr (kBytes == 8) {
    const uint2 raw = *static_cast<const uint2*>(from);
    w[0] = raw.x, w[1] = raw.y;
  } else if constexpr (kBytes == 4) {
    w[0] = *static_cast<const uint32_t*>(from);
  } else {
    w[0] = *static_cast<const unsigned short*>(from);
  }
}

template <int kBytes>
__device__ __forceinline__ void write_words(void* to, const uint32_t* w) {
  if constexpr (kBytes == 16) {
    *static_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(to) = make_uint2(w[0], w[1]);
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(to) = w[0];
  } else if constexpr (kBytes == 2) {
    *static_cast<unsigned short*>(to) = static_cast<unsigned short>(w[0]);
  } else {
    *static_cast<unsigned char*>(to) = static_cast<unsigned char>(w[0]);
  }
}

// kCount contiguous elements of T.
template <class T, int kCount>
struct Piece {
  static constexpr int kBytes = kCount * sizeof(T);
  uint32_t w[(kBytes + 3) / 4];

  __device__ __forceinline__ void load(const T* from) { read_words<kBytes>(w, from); }
  __device__ __forceinline__ void store(T* to) const { write_words<kBytes>(to, w); }

  __device__ __forceinline__ void get(float (&f)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 4) {
        f[i] = __uint_as_float(w[i]);
      } else {
        const unsigned short bits = static_cast<unsigned short>(w[i / 2] >> (16 * (i % 2)));
        f[i] = to_float(*reinterpret_cast<const T*>(&bits));
      }
    }
  }
  __device__ __forceinline__ void set(const float (&f)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4 / sizeof(T)) {
      if constexpr (sizeof(T) == 4) {
        w[i] = __float_as_uint(f[i]);
      } else {
        w[i / 2] = pack_pair<T>(f[i], i + 1 < kCount ? f[i + 1] : 0.0f);
      }
    }
  }
};

// The columns that are rotated together: none; i and i + kHead / 2; 2 i and 2 i + 1.
enum class Pairs { kNone, kHalves, kNeighbours };

// The number of lanes that hold a head's shares: a power of two, for reductions.
__device__ constexpr int lanes_of(int shares) {
  int lanes = 1;
  while (lanes < shares && lanes < 32) lanes *= 2;
  return lanes;
}

// A lane's columns of a head of a token: kPieces times kVec columns and the kVec columns that lie kApart further on.
// kApart is half the head, or 1 for single columns that are paired with their neighbours.
template <class T, int kHead, Pairs kPairs, int kVec>
struct HeadShare {
  static constexpr bool kSingle = kPairs == Pairs::kNeighbours && kVec == 1;
  static constexpr int kApart = kSingle ? 1 : kHead / 2;
  static constexpr int kShares = kHead / 2 / kVec;
  static constexpr int kLanes = lanes_of(kShares);
  static constexpr int kPieces = (kShares + kLanes - 1) / kLanes;
  Piece<T, kVec> low[kPieces], high[kPieces];

  static __device__ __forceinline__ bool has(int piece, int lane) {
    return kShares % kLanes == 0 || lane + piece * kLanes < kShares;
  }
  static __device__ __forceinline__ int column(int piece, int lane) {
    return (lane + piece * kLanes) * (kSingle ? 2 : kVec);
  }

  // Loads the lane's columns; columns that do not exist are zero.
  __device__ __forceinline__ void load(const T* row, int lane, bool live) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      low[i] = high[i] = Piece<T, kVec>{};
      if (!live || !has(i, lane)) continue;
      low[i].load(row + column(i, lane));
      high[i].load(row + column(i, lane) + kApart);
    }
  }

  // Rotates by the rows of the tables for the token's position.
  __device__ __forceinline__ void rotate(const HeadShare& cos, const HeadShare& sin) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float a[kVec], b[kVec], cos_a[kVec], sin_a[kVec], cos_b[kVec], sin_b[kVec];
      low[i].get(a), cos.low[i].get(cos_a), sin.low[i].get(sin_a);
      high[i].get(b), cos.high[i].get(cos_b), sin.high[i].get(sin_b);
      if constexpr (kPairs == Pairs::kNeighbours && kVec > 1) {
#pragma unroll
        for (int j = 0; j < kVec; j += 2) {
          turn<T>(a[j], a[j + 1], cos_a[j], sin_a[j], cos_a[j + 1], sin_a[j + 1]);
          turn<T>(b[j], b[j + 1], cos_b[j], sin_b[j], cos_b[j + 1], sin_b[j + 1]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kVec; ++j) turn<T>(a[j], b[j], cos_a[j], sin_a[j], cos_b[j], sin_b[j]);
      }
      low[i].set(a), high[i].set(b);
    }
  }

  __device__ __forceinline__ void store(T* to, int lane) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (!has(i, lane)) continue;
      low[i].store(to + column(i, lane));
      high[i].store(to + column(i, lane) + kApart);
    }
  }

  // Rotates the head (nibbles.cuh), and returns its columns: those of `low`, then those of `high`. All lanes call.
  static constexpr bool kTurns = kPieces == 1 && kShares == kLanes && kApart == kHead / 2;
  __device__ __forceinline__ void turned(float (&y)[2 * kVec], int lane) const {
    static_assert(kTurns, "a lane has one piece of each half");
    float a[kVec], b[kVec];
    low[0].get(a), high[0].get(b);
    const int first = column(0, lane);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      y[j] = a[j] * turned_sign(first + j);
      y[kVec + j] = b[j] * turned_sign(first + j + kHead / 2);
    }
#pragma unroll
    for (int apart = 1; apart < kVec; apart *= 2) {
#pragma unroll
      for (int j = 0; j < 2 * kVec; ++j) {
        if (!(j & apart)) butterfly(y[j], y[j + apart]);
      }
    }
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
#pragma unroll
      for (int j = 0; j < 2 * kVec; ++j) y[j] = butterfly(y[j], offset);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      butterfly(y[j], y[kVec + j]);
      y[j] *= turned_size<kHead>(), y[kVec + j] *= turned_size<kHead>();
    }
  }
  __device__ __forceinline__ void set(const float (&y)[2 * kVec]) {
    float a[kVec], b[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) a[j] = y[j], b[j] = y[kVec + j];
    low[0].set(a), high[0].set(b);
  }

  // Stores the head in a cache at element `at`, with its scale at `scale_at`; `y` are rotated columns. `guide` is
  // null or their KV calibration. All lanes call; those of heads that are `kept` store.
  template <class C, class Scale>
  __device__ __forceinline__ void keep(C* cache, Scale* scales, long long at, long long scale_at,
                                       const float (&y)[2 * kVec], const GuideColumn* guide, int lane,
                                       bool kept) const {
    if constexpr (CacheType<C>::kTurned) {
      const int first = column(0, lane);
      const auto column_of = [&](int i) { return first + i % kVec + i / kVec * (kHead / 2); };
      const RowQuantizer<2 * kVec, LaneGroup<kLanes, kHead>> row(y, guide, column_of, {});
      if (!kept) return;
      if (lane == 0) scales[scale_at] = static_cast<unsigned short>(row.word);
      store(cache + at / 2, row.codes, lane);
    } else if constexpr (CacheType<C>::kScaled) {
      const QuantizedRow quantized(peak());
      if (!kept) return;
      if (lane == 0) scales[scale_at] = quantized.scale();
      store(cache + at, quantized, lane);
    } else {
      if (kept) store(cache + at, lane);
    }
  }

  // Stores codes as Nibbles.
  static __device__ __forceinline__ void store(Nibbles* to, const int (&codes)[2 * kVec], int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[1] = {};
#pragma unroll
      for (int j = 0; j < kVec; ++j) w[0] |= static_cast<uint32_t>(codes[half * kVec + j]) << 4 * j;
      write_words<kVec / 2>(to + (column(0, lane) + half * (kHead / 2)) / 2, w);
    }
  }

  // The bits of the head's largest magnitude, in each of the head's lanes. All lanes of the warp must call.
  __device__ __forceinline__ uint32_t peak() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float a[kVec], b[kVec];
      low[i].get(a), high[i].get(b);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        largest = max(largest, max(__float_as_uint(a[j]) & 0x7fffffffu, __float_as_uint(b[j]) & 0x7fffffffu));
      }
    }
    if constexpr (kLanes == 32) return warp_max(largest);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    return largest;
  }

  __device__ __forceinline__ void store(int8_t* to, const QuantizedRow& quantized, int lane) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (!has(i, lane)) continue;
      store_int8(to + column(i, lane), low[i], quantized);
      store_int8(to + column(i, lane) + kApart, high[i], quantized);
    }
  }

 private:
  static __device__ __forceinline__ void store_int8(int8_t* to, const Piece<T, kVec>& row,
                                                    const QuantizedRow& quantized) {
    constexpr int kWords = (kVec + 3) / 4;
    float f[kVec], padded[4 * kWords] = {};
    row.get(f);
#pragma unroll
    for (int j = 0; j < kVec; ++j) padded[j] = f[j];
    uint32_t w[kWords];
    quantized.quantize(padded, w);
    write_words<kVec>(to, w);
  }
};

// The kernel. q [tokens, heads, kHead] is rotated in place; k and v are [tokens, kv_heads, kHead]. Tokens are q_stride
// and kv_stride elements apart; the `length` tokens of a sequence follow one another. cos and sin [context, kHead] hold
// the factors of each column in T. C and V are the types of keys and values: T for both, or each int8 or Nibbles with a
// scale for each token and head. Queries are rotated like keys. `guide`, kHead + 2 columns for each head of keys,
// is the KV calibration of Nibbles, or null. Caches are [sequences, kv_heads, context, kHead], batch_stride elements
// between sequences. kVec elements are read at once: rows,
// tables and caches start at multiples of kVec elements. A CTA has kTokens tokens; each thread has kHeads heads. With
// kRing, slots are below `ring`, and a slot's row of the cache is slot % context.
template <class T, class C, class V, int kHead, Pairs kPairs, int kVec, int kTokens, int kHeads, int kThreads,
          bool kRing = false>
__device__ __forceinline__ void rotate_and_append(T* q, const T* k, const T* v, const T* cos, const T* sin,
                                                  const int* positions, const int* slots, C* keys, V* values,
                                                  typename CacheType<C>::Scale* key_scales,
                                                  typename CacheType<V>::Scale* value_scales, const void* guide,
                                                  long long q_stride, long long kv_stride, long long batch_stride,
                                                  int heads, int kv_heads, int context, int tokens, int length,
                                                  int ring = 0) {
  using Share = HeadShare<T, kHead, kPairs, kVec>;
  constexpr bool kRotary = kPairs != Pairs::kNone;
  constexpr int kGroups = kThreads / Share::kLanes;
  constexpr int kAtOnce = kGroups / kTokens;  // heads of a token at a time
  static_assert(kAtOnce * kTokens == kGroups, "every group of lanes has a token");
  const int lane = threadIdx.x % Share::kLanes, group = threadIdx.x / Share::kLanes;
  const int token = blockIdx.x * kTokens + group % kTokens;
  const int first = blockIdx.y * (kAtOnce * kHeads) + group / kTokens;  // queries, then keys, then values
  const int rotated = heads + kv_heads, total = rotated + kv_heads;
  const bool live = token < tokens;
  launch_dependents();
  wait_for_dependencies();

  const int slot = live ? slots[token] : 0;
  const long long position = kRotary && live ? positions[token] : 0;
  T* const query = q + token * q_stride;
  const T *const key = k + token * kv_stride, *const value = v + token * kv_stride;
  Share rows[kHeads], cosines, sines;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first + i * kAtOnce;
    const T* const row = head < heads     ? query + head * kHead
                         : head < rotated ? key + (head - heads) * kHead
                                          : value + (head - rotated) * kHead;
    rows[i].load(row, lane, live && head < total);
  }
  if constexpr (kRotary) {
    cosines.load(cos + position * kHead, lane, live && first < rotated);
    sines.load(sin + position * kHead, lane, live && first < rotated);
  }
  const long long sequence = token / length;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first + i * kAtOnce;
    constexpr bool kTurnedKeys = CacheType<C>::kTurned, kTurnedValues = CacheType<V>::kTurned;
    if constexpr (kRotary) {
      if (head < rotated) rows[i].rotate(cosines, sines);
    }
    float y[2 * kVec];
    if constexpr (kTurnedKeys || kTurnedValues) rows[i].turned(y, lane);
    if constexpr (kTurnedKeys) {
      if (head < heads) rows[i].set(y);
    }
    if constexpr (kRotary || kTurnedKeys) {
      if (head < heads && live) rows[i].store(query + head * kHead, lane);
    }
    if (kAtOnce == 1 && head < heads) continue;  // uniform over the CTA: every group has this query
    const bool is_key = head < rotated;
    // Tested here: as a flag from before the loop it splits the stores of queries.
    const bool has_place = static_cast<unsigned>(slot) < static_cast<unsigned>(kRing ? ring : context);
    const bool kept = live && head >= heads && head < total && has_place;
    const int mine = head - (is_key ? heads : rotated);
    const long long place = static_cast<long long>(mine) * context + (kRing ? slot % context : slot);
    const long long at = sequence * batch_stride + place * kHead, scale_at = sequence * kv_heads * context + place;
    const GuideColumn* mine_guide = nullptr;
    if constexpr (kTurnedKeys) {
      if (guide != nullptr && is_key && head >= heads) {
        mine_guide = static_cast<const GuideColumn*>(guide) + static_cast<long long>(mine) * (kHead + 2);
      }
    }
    if constexpr (kSameTypes<C, V>) {
      rows[i].keep(is_key ? keys : values, is_key ? key_scales : value_scales, at, scale_at, y, mine_guide, lane, kept);
    } else {
      rows[i].keep(keys, key_scales, at, scale_at, y, mine_guide, lane, kept && is_key);
      rows[i].keep(values, value_scales, at, scale_at, y, nullptr, lane, kept && !is_key);
    }
  }
}

}  // namespace qcut
