// Attention of one new token to the keys and values in a cache: softmax(scale q K^T) V, in float32.
//
// A CTA has a sequence, a head of keys, up to kGroup of the queries that share this head, and a part of the context. A
// key lies in a set of kLanes lanes, kChunks chunks of 16 bytes each. A warp reads one key for each of its sets of
// lanes at a time, and has kUnroll such reads in flight. Every set of lanes keeps the maximum, the sum of weights and
// the weighted values of its own keys. Sets of a warp are combined by shuffles, warps in shared memory, and parts of
// the context in a workspace, where the last CTA adds up the records.
//
// Exactness: float32, with exponentials of 2 ulp. The order of all sums is fixed by the length and the number of parts.
//
// Source: Dao et al., "Flash-Decoding" (2023); Milakov and Gimelshein, "Online normalizer calculation for softmax"
// (2018).
#pragma once

#include <qcut/core/mma.cuh>
#include <qcut/attention/softmax.cuh>

namespace qcut {

// The elements of 16 bytes of a cache, as float32.
template <class C>
struct CacheVector {
  static constexpr int kSize = Vector<C>::kSize;
  static __device__ __forceinline__ void to_float(const uint4& raw, float (&f)[kSize]) {
    Vector<C>{raw.x, raw.y, raw.z, raw.w}.to_float(f);
  }
};

template <>
struct CacheVector<int8_t> {
  static constexpr int kSize = 16;
  static __device__ __forceinline__ void to_float(const uint4& raw, float (&f)[kSize]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pairs[2];
      Float16<__half>::from_int8(words[i], pairs[0], pairs[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&pairs[j]));
        f[4 * i + 2 * j] = pair.x;
        f[4 * i + 2 * j + 1] = pair.y;
      }
    }
  }
};

__device__ constexpr int next_power_of_two(int v) { return v <= 1 ? 1 : 2 * next_power_of_two((v + 1) / 2); }

// T is the type of queries and results; C is the cache's type, T or int8_t. AttentionDecode in
// emitters/attention/simt.py describes the sizes.
// With kWindowed, a query sees the last `window` keys up to its own. With kCapped, scores are softcap *
// tanh(q K / softcap): `scale` then has capped()'s factor. With kRing, positions are below `ring`, and position p is
// row p % context. With kSinks, each head of queries has a sink.
template <class T, class C, int kHead_, int kGroup_, int kWarps_, int kUnroll_, bool kWindowed = false,
          bool kCapped = false, bool kRing = false, bool kSinks = false>
struct DecodeAttention {
  static constexpr int kHead = kHead_, kGroup = kGroup_, kWarps = kWarps_, kUnroll = kUnroll_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kScaled = sizeof(C) == 1;
  static constexpr int kSize = CacheVector<C>::kSize;
  static constexpr int kVectors = kHead / kSize;  // vectors of a key
  static constexpr int kLanes = kVectors < 32 ? next_power_of_two(kVectors) : 32;
  static constexpr int kChunks = (kVectors + kLanes - 1) / kLanes;
  static constexpr int kSlots = 32 / kLanes;           // keys side by side
  static constexpr int kStep = kSlots * kUnroll;       // keys of a warp in flight
  static constexpr int kElements = kChunks * kSize;    // columns of a lane
  static constexpr int kRecord = kHead + 2;            // weighted values, maximum, sum
  static_assert(kHead % kSize == 0, "heads are whole vectors of 16 bytes");

  // The state of each query: the largest score, as an exponent of 2; the sum of weights relative to this score; and the
  // sum of values with the same weights.
  struct State {
    float peak[kGroup], sum[kGroup], values[kGroup][kElements];
  };

  struct Combined {
    float peak, weights, value;
  };

  static __device__ __forceinline__ void load(uint4 (&raw)[kChunks], const C* row, int lane) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int vector = c * kLanes + lane;
      raw[c] = make_uint4(0, 0, 0, 0);
      if (vector < kVectors) raw[c] = *reinterpret_cast<const uint4*>(row + vector * kSize);
    }
  }

  static __device__ __forceinline__ void widen(const uint4 (&raw)[kChunks], float (&f)[kElements]) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float part[kSize];
      CacheVector<C>::to_float(raw[c], part);
#pragma unroll
      for (int i = 0; i < kSize; ++i) f[c * kSize + i] = part[i];
    }
  }

  // Adds up `count` states in order, for one column; `word(i, j)` is word j of state i.
  template <class Word>
  static __device__ __forceinline__ Combined combined(int count, int column, const Word& word) {
    float peak = kNoScore;
    for (int i = 0; i < count; ++i) peak = fmaxf(peak, word(i, kHead));
    Combined sum{peak, 0.0f, 0.0f};
    for (int i = 0; i < count; ++i) {
      const float weight = power(word(i, kHead) - peak);
      sum.value = fmaf(weight, word(i, column), sum.value);
      sum.weights = fmaf(weight, word(i, kHead + 1), sum.weights);
    }
    return sum;
  }

  // A column of the result of query g, of those whose sinks begin at `sinks`.
  static __device__ __forceinline__ T divided(const Combined& sum, [[maybe_unused]] const float* sinks,
                                              [[maybe_unused]] int g) {
    float weights = sum.weights;
    if constexpr (kSinks) weights += sink_weight(sinks[g], sum.peak);
    return from_float<T>(__fdiv_rn(sum.value, weights));
  }

  // The kernel. `queries` counts the queries of a head of keys. Strides are in elements; each token and head of an int8
  // cache has a scale. The workspace holds a record for every part and query; counters are 0 before the first launch
  // and after every launch.
  static __device__ __forceinline__ void run(const T* q, const C* keys, const C* values, const float* key_scales,
                                             const float* value_scales, const int* positions, T* out, float* workspace,
                                             unsigned* counters, long long q_stride, long long batch_stride,
                                             int kv_heads, int queries, int context, float scale, int window = 0,
                                             float softcap = 0.0f, int ring = 0, const float* sinks = nullptr) {
    __shared__ float records[kWarps][kGroup][kRecord];
    __shared__ bool last;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % kLanes;
    const int slot = threadIdx.x % 32 / kLanes;
    const int parts = gridDim.x;
    const int groups = gridDim.y / kv_heads;
    const int kv = blockIdx.y / groups;
    const int first_query = blockIdx.y % groups * kGroup;
    const int batch = blockIdx.z;
    launch_dependents();
    wait_for_dependencies();

    // Positions are counted from the first visible one.
    const int whole = min(max(positions[batch], 0), (kRing ? ring : context) - 1) + 1;
    int first_key = kWindowed ? first_seen(whole, window) : 0;
    const int length = whole - first_key;
    [[maybe_unused]] RingRows<kRing> seen;
    if constexpr (kRing) {
      seen = {first_key % context, context};
      first_key = 0;
    }
    const int part = (length + parts - 1) / parts;
    const int begin = blockIdx.x * part;
    const int end = min(begin + part, length);
    const int mine = min(kGroup, queries - first_query);
    const long long head0 = static_cast<long long>(kv) * queries + first_query;

    float query[kGroup][kElements];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int column = (c * kLanes + lane) * kSize + i;
          const bool there = g < mine && column < kHead;
          const T* at = q + batch * q_stride + (head0 + g) * kHead + column;
          query[g][c * kSize + i] = there ? to_float(*at) * scale : 0.0f;
        }
      }
    }

    State state;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      state.peak[g] = kNoScore;
      state.sum[g] = 0.0f;
#pragma unroll
      for (int i = 0; i < kElements; ++i) state.values[g][i] = 0.0f;
    }
    const long long rows = batch * batch_stride + (static_cast<long long>(kv) * context + first_key) * kHead;
    const C* const key_rows = keys + rows;
    const C* const value_rows = values + rows;
    const long long scale0 = (batch * static_cast<long long>(kv_heads) + kv) * context + first_key;
#pragma unroll 1
    for (int base = begin + warp * kStep; base < end; base += kWarps * kStep) {
      uint4 raw_keys[kUnroll][kChunks], raw_values[kUnroll][kChunks];
      float key_scale[kUnroll], value_scale[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        // Keys past the end repeat the last key and get no weight.
        int key = min(base + u * kSlots + slot, end - 1);
        if constexpr (kRing) key = seen.row(key);
        load(raw_keys[u], key_rows + static_cast<long long>(key) * kHead, lane);
        load(raw_values[u], value_rows + static_cast<long long>(key) * kHead, lane);
        if constexpr (kScaled) {
          key_scale[u] = key_scales[scale0 + key];
          value_scale[u] = value_scales[scale0 + key];
        }
      }
      float score[kUnroll][kGroup];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float key[kElements];
        widen(raw_keys[u], key);
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          float sum = 0.0f;
#pragma unroll
          for (int i = 0; i < kElements; ++i) sum = fmaf(query[g][i], key[i], sum);
#pragma unroll
          for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
          if constexpr (kScaled) sum *= key_scale[u];
          if constexpr (kCapped) sum = capped(sum, softcap);
          score[u][g] = base + u * kSlots + slot < end ? sum : kNoScore;
        }
      }
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        float peak = state.peak[g];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) peak = fmaxf(peak, score[u][g]);
        const float kept = power(state.peak[g] - peak);
        state.peak[g] = peak;
        state.sum[g] *= kept;
#pragma unroll
        for (int i = 0; i < kElements; ++i) state.values[g][i] *= kept;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const bool there = base + u * kSlots + slot < end;
          score[u][g] = there ? power(score[u][g] - peak) : 0.0f;
          state.sum[g] += score[u][g];
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float value[kElements];
        widen(raw_values[u], value);
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          const float weight = kScaled ? score[u][g] * value_scale[u] : score[u][g];
#pragma unroll
          for (int i = 0; i < kElements; ++i) state.values[g][i] = fmaf(weight, value[i], state.values[g][i]);
        }
      }
    }

    // Combines the sets of lanes of a warp.
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        const float other_peak = __shfl_xor_sync(0xffffffffu, state.peak[g], offset);
        const float peak = fmaxf(state.peak[g], other_peak);
        const float kept = power(state.peak[g] - peak);
        const float taken = power(other_peak - peak);
        // Both sides add the lower set's share first.
        const bool upper = threadIdx.x & offset;
        const auto merge = [&](float own) {
          const float other = __shfl_xor_sync(0xffffffffu, own, offset);
          const float low = upper ? other * taken : own * kept;
          const float high = upper ? own * kept : other * taken;
          return low + high;
        };
        state.peak[g] = peak;
        state.sum[g] = merge(state.sum[g]);
#pragma unroll
        for (int i = 0; i < kElements; ++i) state.values[g][i] = merge(state.values[g][i]);
      }
    }
    if (slot == 0) {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const int column = (e / kSize * kLanes + lane) * kSize + e % kSize;
          if (column < kHead) records[warp][g][column] = state.values[g][e];
        }
        if (lane == 0) {
          records[warp][g][kHead] = state.peak[g];
          records[warp][g][kHead + 1] = state.sum[g];
        }
      }
    }
    __syncthreads();

    const long long place = batch * static_cast<long long>(gridDim.y) + blockIdx.y;
    float* const mine0 = workspace + place * parts * (kGroup * kRecord);
    for (int i = threadIdx.x; i < mine * kHead; i += kThreads) {
      const int g = i / kHead;
      const int column = i % kHead;
      const Combined sum = combined(kWarps, column, [&](int w, int j) { return records[w][g][j]; });
      if (parts == 1) {
        out[(batch * static_cast<long long>(kv_heads) * queries + head0 + g) * kHead + column] =
            divided(sum, sinks + head0, g);
      } else {
        float* at = mine0 + (blockIdx.x * kGroup + g) * kRecord;
        at[column] = sum.value;
        if (column == 0) {
          at[kHead] = sum.peak;
          at[kHead + 1] = sum.weights;
        }
      }
    }
    if (parts == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counters + place, parts - 1) == static_cast<unsigned>(parts - 1);
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < mine * kHead; i += kThreads) {
      const int g = i / kHead;
      const int column = i % kHead;
      // These loads skip the L1, which is not coherent with stores of other multiprocessors.
      const auto word = [&](int p, int j) { return __ldcg(mine0 + (p * kGroup + g) * kRecord + j); };
      const Combined sum = combined(parts, column, word);
      out[(batch * static_cast<long long>(kv_heads) * queries + head0 + g) * kHead + column] =
          divided(sum, sinks + head0, g);
    }
  }
};

}  // namespace qcut
