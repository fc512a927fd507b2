// Shared by all prefill attention kernels: arguments, the rows of a tile, the softmax of a row, and its result.
//
// A row is one query of a token. The rows of a sequence and a head of keys are its tokens' queries for that head, token
// by token; a tile is some consecutive rows. Rows of token i see positions 0 to start + i of the cache, or the last of
// these within a window.
#pragma once

#include <qcut/attention/softmax.cuh>
#include <qcut/decoder/nibbles.cuh>

namespace qcut {

template <class T, class Keys, class Values>
struct PromptArgs {
  static constexpr bool kWindowed = false, kCapped = false, kRing = false, kSinks = false;

  const T* q;
  const Keys* keys;
  const Values* values;
  const typename CacheType<Keys>::Scale* key_scales;
  const typename CacheType<Values>::Scale* value_scales;
  const int* starts;
  const int* lengths;
  T* out;
  float* absmax;
  long long q_stride;  // elements between the queries of two tokens
  int sequences;
  int length;  // rows of q for each sequence
  int kv_heads;
  int group;  // queries for each head of keys
  int context;
  float scale;  // of scores, times log2(e)
};

// With kWindowed, a token sees `window` positions, 1 or more, up to its own. With kCapped, scores are softcap *
// tanh(q K / softcap), times log2(e): `scale` then has capped()'s factor. With kRing, positions are below `ring`, and
// position p is row p % context; the keys of a block divide the context. With kSinks, each head of queries has a sink.
template <class T, class Keys, class Values, bool kWindowed_, bool kCapped_, bool kRing_, bool kSinks_>
struct MaskedPromptArgs : PromptArgs<T, Keys, Values> {
  static constexpr bool kWindowed = kWindowed_, kCapped = kCapped_, kRing = kRing_, kSinks = kSinks_;

  int window;
  float softcap;
  int ring;
  const float* sinks;
};

template <class T, class Keys, class Values, bool kWindowed, bool kCapped, bool kRing, bool kSinks>
struct PromptArgsOf {
  using Type = MaskedPromptArgs<T, Keys, Values, kWindowed, kCapped, kRing, kSinks>;
};
template <class T, class Keys, class Values>
struct PromptArgsOf<T, Keys, Values, false, false, false, false> {
  using Type = PromptArgs<T, Keys, Values>;
};

// Offset of a position's row in a ring cache, where a head has `rows` rows from `first` on. A ring
// holds whole blocks of consecutive rows.
struct RingRow {
  long long first;
  int place, rows;

  __device__ __forceinline__ RingRow operator+(int count) const { return {first, place + count, rows}; }
  __device__ __forceinline__ RingRow operator-(int count) const { return {first, place - count, rows}; }
  __device__ __forceinline__ operator long long() const { return first + place % rows; }
};

// The rows of a tile, and the positions that they see. With a window, positions are counted from `origin`: no row sees
// the blocks before it.
struct PromptRows {
  int sequence, kv_head, group;
  int row;     // the first
  int tokens;  // real tokens of the sequence
  int start;   // positions before its first token
  int places;  // seen by a row of the tile; 0 without real tokens
  int clear;   // seen by all rows of the tile
  int origin = 0;

  // Tiles are numbered with the last rows first: rows that see most take longest. `block` counts the keys of a block.
  template <class Args>
  __device__ __forceinline__ PromptRows(const Args& args, int tile, int tile_rows, int block) : group(args.group) {
    const int heads = args.kv_heads * args.sequences;
    const int tiles = (args.length * group + tile_rows - 1) / tile_rows;
    const int head = tile % heads;
    row = (tiles - 1 - tile / heads) * tile_rows;
    sequence = head / args.kv_heads;
    kv_head = head % args.kv_heads;
    int limit = args.context;  // of positions
    if constexpr (Args::kRing) limit = args.ring;
    start = min(max(args.starts[sequence], 0), limit);
    tokens = min(min(max(args.lengths[sequence], 0), args.length), limit - start);
    const int first = row / group;
    const int last = min((row + tile_rows - 1) / group, tokens - 1);
    places = first < tokens ? start + last + 1 : 0;
    clear = start + first + 1;
    if constexpr (Args::kWindowed) {
      // Blocks begin at the same positions of the cache for every tile, so that a row's sums do not depend on its tile.
      origin = places > 0 ? first_seen(clear, args.window) / block * block : 0;
      start -= origin, places -= origin, clear -= origin;
    }
  }

  // Finds the token of row `i` among those of all sequences, and its query; false: there is no such row.
  template <class Args>
  __device__ __forceinline__ bool find(const Args& args, int i, long long& token, int& query) const {
    const int own = (row + i) / group;
    token = static_cast<long long>(sequence) * args.length + own;
    query = kv_head * group + (row + i) % group;
    return own < args.length;
  }

  // Sinks of the rows `i` and i + 8.
  template <class Args>
  __device__ __forceinline__ float2 sinks(const Args& args, int i) const {
    const float* const mine = args.sinks + kv_head * group;
    return make_float2(mine[(row + i) % group], mine[(row + i + 8) % group]);
  }
  __device__ __forceinline__ bool is_real(int i) const { return (row + i) / group < tokens; }
  __device__ __forceinline__ int last_place(int i) const { return start + (row + i) / group; }

  // Offset of this head's key or value at `origin` among a cache's rows.
  template <class Args>
  __device__ __forceinline__ auto cache_row(const Args& args) const {
    if constexpr (Args::kRing) {
      const long long head = static_cast<long long>(sequence) * args.kv_heads + kv_head;
      return RingRow{head * args.context, origin, args.context};
    } else {
      return (static_cast<long long>(sequence) * args.kv_heads + kv_head) * args.context + origin;
    }
  }
};

// The score of a position that a row does not see.
#define QCUT_HIDDEN __int_as_float(static_cast<int>(0xff800000u))

// Scores of two rows, those of lane / 4 and 8 further, in the order of an accumulator of m16n8k16 or of wgmma; lanes
// of a quad share the rows.
struct PromptSoftmax {
  float largest[2];  // the largest score so far
  float sum[2];      // of this lane's weights, relative to `largest`

  __device__ __forceinline__ PromptSoftmax() : largest{QCUT_HIDDEN, QCUT_HIDDEN}, sum{0.0f, 0.0f} {}

  // Makes weights 2^(s * scale) of scores, relative to a row's largest, and returns by what to multiply earlier sums.
  // A weight counts `count(j)[e]` times in the sum that divides: e is the column's parity, j its tile of 8 columns.
  template <int kScores, class Count>
  __device__ __forceinline__ float2 weigh(float (&s)[kScores], float scale, const Count& count) {
    float factor[2], offset[2], part[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top[2] = {largest[r], largest[r]};
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        top[0] = fmaxf(top[0], s[i + 2 * r]);
        top[1] = fmaxf(top[1], s[i + 2 * r + 1]);
      }
      float most = fmaxf(top[0], top[1]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      offset[r] = most == QCUT_HIDDEN ? 0.0f : -most * scale;  // no position is seen so far: all weights are 0
      factor[r] = power(fmaf(largest[r], scale, offset[r]));
      largest[r] = most;
    }
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 times = count(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& v = s[4 * j + i];
        v = power(fmaf(v, scale, offset[i / 2]));
        part[i / 2][i % 2] = fmaf(v, i % 2 ? times.y : times.x, part[i / 2][i % 2]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], factor[r], part[r][0] + part[r][1]);
    return make_float2(factor[0], factor[1]);
  }

  // Adds sinks of the two rows to the sums of all their weights.
  __device__ __forceinline__ void add_sinks(float2 sinks, float scale) {
    if (threadIdx.x % 4 != 0) return;
    sum[0] += sink_weight(sinks.x, largest[0] * scale);
    sum[1] += sink_weight(sinks.y, largest[1] * scale);
  }

  // The sum of a row's weights.
  __device__ __forceinline__ float total(int r) const {
    float all = sum[r];
    all += __shfl_xor_sync(0xffffffffu, all, 1);
    return all + __shfl_xor_sync(0xffffffffu, all, 2);
  }
};

// Hides scores of positions past a row's last one. `place` is the position of the first score of lane 0.
template <int kScores>
__device__ __forceinline__ void hide_scores(float (&s)[kScores], int place, int last, int last8) {
  const int column = place + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int limit = (i / 2 % 2 ? last8 : last) - column;
    if (i / 4 * 8 + i % 2 > limit) s[i] = QCUT_HIDDEN;
  }
}

// Hides scores of positions outside a window: up to `before`, and in the rows 8 further up to `before8`.
template <int kScores>
__device__ __forceinline__ void hide_early_scores(float (&s)[kScores], int place, int before, int before8) {
  const int column = place + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int limit = (i / 2 % 2 ? before8 : before) - column;
    if (i / 4 * 8 + i % 2 <= limit) s[i] = QCUT_HIDDEN;
  }
}

// Exchanges words of the lanes of a quad: word i of lane t goes to word t of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
    (high ? w[i] : w[i + 2]) = got;
  }
}

// Rotates rows of weighted 4-bit values back (nibbles.cuh), columns in the order of an accumulator.
template <int kHead, int kValues>
__device__ __forceinline__ void turn_rows_back(float (&o)[kValues]) {
  constexpr int kTiles = kHead / 8;
  static_assert(4 * kTiles <= kValues, "an accumulator has all columns");
#pragma unroll
  for (int i = 0; i < 4 * kTiles; i += 2) {
    butterfly(o[i], o[i + 1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      o[i + e] = butterfly(o[i + e], 1);
      o[i + e] = butterfly(o[i + e], 2);
    }
  }
#pragma unroll
  for (int apart = 4; apart < 4 * kTiles; apart *= 2) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      if (!(i & apart)) butterfly(o[i], o[i + apart]);
    }
  }
  int first = 2 * static_cast<int>(threadIdx.x % 4);
  asm volatile("" : "+r"(first));  // signs are made here: made before a kernel's loop, they would take its registers
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) o[i] *= turned_sign(i / 4 * 8 + first + i % 2) * turned_size<kHead>();
}

// Stores the rows `i` and i + 8 of a tile, columns in the order of an accumulator, times `factor`; rows without a real
// token are 0. All lanes of a warp call.
template <class T, int kHead, int kValues, class Args>
__device__ __forceinline__ void store_rows(const Args& args, const PromptRows& rows, int i, const float (&o)[kValues],
                                           const float (&factor)[2]) {
  constexpr int kTiles = kValues / 4;
  const int heads = args.kv_heads * args.group;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    long long token;
    int query;
    const bool exists = rows.find(args, i + 8 * r, token, query);
    T* const to = args.out + (token * heads + query) * kHead;
    const bool real = rows.is_real(i + 8 * r);
    uint32_t peak = 0;
#pragma unroll
    for (int j = 0; j < kTiles; j += 4) {
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        w[k] = 0;
        if (j + k < kTiles && real) {
          w[k] = pack_pair<T>(o[4 * (j + k) + 2 * r] * factor[r], o[4 * (j + k) + 2 * r + 1] * factor[r]);
        }
      }
      transpose_quad(w);
      const int column = 8 * (j + static_cast<int>(threadIdx.x % 4));
      if (exists && column < kHead) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(w[0], w[1], w[2], w[3]);
        peak = max(peak, Vector<T>{w[0], w[1], w[2], w[3]}.abs_max());
      }
    }
    if (args.absmax == nullptr) continue;
    peak = max(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
    peak = max(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
    if (threadIdx.x % 4 == 0 && exists && peak > 0) {
      atomicMax(reinterpret_cast<unsigned*>(args.absmax) + token, peak);
    }
  }
}

}  // namespace qcut
