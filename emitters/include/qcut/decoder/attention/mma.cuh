// Attention of one new token to the keys and values in a cache on tensor cores: softmax(scale q K^T) V.
//
// A CTA has a sequence, a head of keys, up to eight of the queries that share this head, and a part of the context.
// The cache is the A operand of both products: each lane loads keys and values from global memory straight to its
// registers of the fragments. The queries are the eight columns of both products:
//
//   S^T = K Q^T    The rows are 16 keys. Lane 4g + t loads pieces of 16 bytes t, t + 4, ... of keys g and g + 8. This
//                  places other columns in the fragment than the instruction names; queries are placed in the same way.
//   O^T = V^T P^T  The rows are 16 columns of the head. The lane loads pieces g, g + 8, ... of the values 2t, 2t + 1,
//                  2t + 8 and 2t + 9, and pairs values byte by byte. P^T is S^T transposed 8 x 8 within the warp.
//
// Tiles of 16 keys are dealt in turn to the parts of the context, and the tiles of a part to the part's warps. A warp
// holds kTiles tiles. As soon as the scores of a tile are known, the next tile's keys replace its keys; as soon as the
// values are added up, the next tile's values replace them. All tiles but the one being multiplied are thus in flight.
//
// Exactness: queries, keys and weights are multiplied in T and added in float32. Warps are combined in shared memory,
// parts of the context in the shared memory of a cluster or in a workspace (merge.cuh); the order is fixed.
//
// Source: PTX ISA 8.x, "Matrix Fragments for mma.m16n8k16", "movmatrix"; Dao et al., "Flash-Decoding" (2023);
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
#pragma once

#include <qcut/core/mma.cuh>
#include <qcut/decoder/attention/merge.cuh>

namespace qcut {

// Loads sixteen bytes that are read once.
__device__ __forceinline__ void load_streamed(uint32_t (&w)[4], const void* p) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(p)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which lane 4g + t holds (g, 2t) and (g, 2t + 1).
__device__ __forceinline__ uint32_t transposed(uint32_t w) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(w));
  return d;
}

__device__ __forceinline__ float log2_approx(float v) {
  float d;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// T is the type of queries and results; C is the cache's type, T or int8_t. AttentionMma in
// emitters/decoder/attention/mma.py describes the sizes.
template <class T, class C, int kHead_, int kGroup_, int kWarps_, int kTiles_, int kCluster_>
struct TensorAttention {
  static constexpr int kHead = kHead_, kGroup = kGroup_, kWarps = kWarps_, kTiles = kTiles_, kCluster = kCluster_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kScaled = sizeof(C) == 1;
  static constexpr int kSize = 16 / sizeof(C);             // columns of a piece
  static constexpr int kPieces = kHead / kSize;            // pieces of a row
  static constexpr int kKeyPieces = (kPieces + 3) / 4;     // a lane's pieces of a key
  static constexpr int kValuePieces = (kPieces + 7) / 8;   // a lane's pieces of a value
  static constexpr int kSteps = kKeyPieces * kSize / 4;    // products of S: 16 columns each
  static constexpr int kRows = kValuePieces * kSize / 2;   // products of O: 16 columns each
  using Merge = AttentionMerge<T, kHead, kGroup, kWarps, kCluster>;
  static constexpr unsigned kAll = 0xffffffffu;
  static_assert(kHead % kSize == 0 && kHead % 8 == 0, "heads are whole pieces");
  static_assert(1 <= kGroup && kGroup <= 8, "queries are the columns of a product");

  // The addresses of the keys and values of a sequence and head, and their number.
  struct Rows {
    const C *keys, *values;
    const float *key_scales, *value_scales;
    int length;
  };

  // The sequence, the head of keys and the queries of a CTA.
  struct Place {
    long long batch, heads, head;  // sequence, heads of all queries, the CTA's first head of queries
    int kv_heads, kv, first, mine;  // heads of keys, the CTA's head, its first query of this head, its queries

    __device__ __forceinline__ Place(int kv_heads_, int queries)
        : batch(blockIdx.z), heads(static_cast<long long>(kv_heads_) * queries), kv_heads(kv_heads_) {
      const int groups = gridDim.y / kv_heads;
      kv = blockIdx.y / groups;
      first = blockIdx.y % groups * kGroup;
      head = static_cast<long long>(kv) * queries + first;
      mine = min(kGroup, queries - first);
    }

    __device__ __forceinline__ long long first_out() const { return batch * heads + head; }
    // The rows of the CTA's sequence and head; the length is still to be set.
    __device__ __forceinline__ Rows rows(const C* keys, const C* values, const float* key_scales,
                                         const float* value_scales, long long batch_stride, int context) const {
      const long long at = batch * batch_stride + static_cast<long long>(kv) * context * kHead;
      if constexpr (!kScaled) return {keys + at, values + at, nullptr, nullptr, 0};
      const long long scale_at = (batch * kv_heads + kv) * context;
      return {keys + at, values + at, key_scales + scale_at, value_scales + scale_at, 0};
    }
  };

  // A lane's share of 16 keys and 16 values.
  struct Tile {
    uint32_t keys[2][kKeyPieces][4];
    uint32_t values[4][kValuePieces][4];
    float key_scale[2], value_scale[2];
  };

  // The state of queries 2t and 2t + 1: the largest score so far, as an exponent of 2 that includes the scale of the
  // score's value; this lane's part of the sum of weights; and the sum of weighted values, relative to 2^peak.
  struct State {
    float peak[2], sum[2], values[kRows][4];
  };

  static __device__ __forceinline__ int value_of(int tile, int row, int t) {
    return 16 * tile + 2 * t + row % 2 + row / 2 * 8;
  }

  // Loads the lane's share of 16 keys. Keys past the end repeat the last key and get no weight: memory past the end may
  // hold NaN.
  static __device__ __forceinline__ void load_keys(Tile& into, const Rows& rows, int tile, int g, int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = min(16 * tile + g + 8 * r, rows.length - 1);
      const C* const row = rows.keys + static_cast<long long>(key) * kHead;
#pragma unroll
      for (int i = 0; i < kKeyPieces; ++i) {
        if (t + 4 * i < kPieces) load_streamed(into.keys[r][i], row + (t + 4 * i) * kSize);
      }
    }
  }

  static __device__ __forceinline__ void load_scales(Tile& into, const Rows& rows, int tile, int g) {
#pragma unroll
    for (int r = 0; kScaled && r < 2; ++r) {
      const int key = min(16 * tile + g + 8 * r, rows.length - 1);
      into.key_scale[r] = rows.key_scales[key];
      into.value_scale[r] = rows.value_scales[key];
    }
  }

  static __device__ __forceinline__ void load_values(Tile& into, const Rows& rows, int tile, int g, int t) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const C* const row = rows.values + static_cast<long long>(min(value_of(tile, r, t), rows.length - 1)) * kHead;
#pragma unroll
      for (int i = 0; i < kValuePieces; ++i) {
        if (g + 8 * i < kPieces) load_streamed(into.values[r][i], row + (g + 8 * i) * kSize);
      }
    }
  }

  // The A operand of one product of S, from the lane's columns of keys g and g + 8.
  static __device__ __forceinline__ void key_fragment(uint32_t (&a)[4], const Tile& tile, int step) {
    const int i = step / (kSize / 4), word = step % (kSize / 4);
    if constexpr (kScaled) {
      Float16<T>::from_int8(tile.keys[0][i][word], a[0], a[2]);
      Float16<T>::from_int8(tile.keys[1][i][word], a[1], a[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = tile.keys[j % 2][i][2 * word + j / 2];
    }
  }

  // The A operand of one product of O, from piece i of 16 values: column 2 * pair in row g, 2 * pair + 1 in row g + 8.
  static __device__ __forceinline__ void value_fragment(uint32_t (&a)[4], const Tile& tile, int i, int pair) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const auto& even = tile.values[j][i];
      const auto& odd = tile.values[j + 1][i];
      if constexpr (kScaled) {
        const uint32_t bytes = __byte_perm(even[pair / 2], odd[pair / 2], pair % 2 ? 0x7362 : 0x5140);
        Float16<T>::from_int8(bytes, a[j], a[j + 1]);
      } else {
        a[j] = __byte_perm(even[pair], odd[pair], 0x5410);
        a[j + 1] = __byte_perm(even[pair], odd[pair], 0x7632);
      }
    }
  }

  // Loads the queries as the B operand of S, in the order of the keys' pieces; columns past the head and queries past
  // the last one are zero. With `aligned`, the row starts at a multiple of 16 bytes.
  static __device__ __forceinline__ void load_queries(uint32_t (&query)[kSteps][2], const T* row, bool aligned,
                                                      bool there, int t) {
#pragma unroll
    for (int i = 0; i < kKeyPieces; ++i) {
#pragma unroll
      for (int half = 0; half < kSize / 8; ++half) {
        const int column = (t + 4 * i) * kSize + 8 * half;
        Vector<T> v{};
        if (there && t + 4 * i < kPieces) {
          if (aligned) {
            const uint4 raw = *reinterpret_cast<const uint4*>(row + column);
            v = Vector<T>{raw.x, raw.y, raw.z, raw.w};
          } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) v.set(j, row[column + j]);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) query[i * kSize / 4 + 2 * half + j / 2][j % 2] = v.w[j];
      }
    }
  }

  // Turns the scores of a warp's tiles into weights relative to a common maximum, the B operand of O. With `partial`,
  // some keys lie past the end.
  static __device__ __forceinline__ void soften(State& state, const Tile (&tiles)[kTiles], float (&score)[kTiles][4],
                                                uint32_t (&weight)[kTiles][2], const int (&tile)[kTiles], int length,
                                                bool partial, float scale, int g) {
    float size[kTiles][2];  // log2 of the values' scales, which multiply the weights
    float top[2] = {state.peak[0], state.peak[1]};
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The bound keeps a weight in the sum finite if its scale is 0 or tiny.
        size[u][r] = kScaled ? fmaxf(log2_approx(tiles[u].value_scale[r]), -100.0f) : 0.0f;
        const bool there = !partial || 16 * tile[u] + g + 8 * r < length;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& s = score[u][2 * r + h];
          s = there ? s * (kScaled ? scale * tiles[u].key_scale[r] : scale) : -__int_as_float(0x7f800000);
          top[h] = fmaxf(top[h], s + size[u][r]);
        }
      }
    }
    if (__any_sync(kAll, top[0] > state.peak[0] || top[1] > state.peak[1])) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) top[h] = fmaxf(top[h], __shfl_xor_sync(kAll, top[h], offset));
        const float kept = power(state.peak[h] - top[h]);
        state.peak[h] = top[h];
        state.sum[h] *= kept;
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          state.values[m][h] *= kept;
          state.values[m][h + 2] *= kept;
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float w[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          w[h] = power(score[u][2 * r + h] - state.peak[h]);
          if constexpr (kScaled) {
            state.sum[h] += w[h];
            w[h] *= tiles[u].value_scale[r];
          }
        }
        const uint32_t pair = pack_pair<T>(w[0], w[1]);
        if constexpr (!kScaled) {
          // The sum adds the rounded weights that the product uses: the result is then a mean of the values.
          const Vector<T> rounded{pair};
          float f[8];
          rounded.to_float(f);
          state.sum[0] += f[0];
          state.sum[1] += f[1];
        }
        weight[u][r] = transposed(pair);
      }
    }
  }

  // Writes a warp's state to shared memory.
  static __device__ __forceinline__ void record(float (&to)[kGroup][Merge::kRecord], State& state, int g, int t) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      state.sum[0] += __shfl_xor_sync(kAll, state.sum[0], offset);
      state.sum[1] += __shfl_xor_sync(kAll, state.sum[1], offset);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = 2 * t + h;
      if (query >= kGroup) continue;
#pragma unroll
      for (int m = 0; m < kRows; m += 2) {
        const int piece = g + m / (kSize / 2) * 8, pair = m % (kSize / 2);
        const auto &low = state.values[m], &high = state.values[m + 1];
        if (piece >= kPieces) continue;
        const float4 v = make_float4(low[h], low[h + 2], high[h], high[h + 2]);
        *reinterpret_cast<float4*>(&to[query][piece * kSize + 2 * pair]) = v;
      }
      if (g == 0) *reinterpret_cast<float2*>(&to[query][kHead]) = make_float2(state.peak[h], state.sum[h]);
    }
  }

  // Starts the loads of the warp's first tiles.
  static __device__ __forceinline__ void fetch(Tile (&tiles)[kTiles], int (&tile)[kTiles], const Rows& rows, int first,
                                               int stride, int g, int t) {
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      tile[u] = first + u * stride;
      if (16 * tile[u] >= rows.length) continue;
      load_keys(tiles[u], rows, tile[u], g, t);
      load_scales(tiles[u], rows, tile[u], g);
      load_values(tiles[u], rows, tile[u], g, t);
    }
  }

  // Processes these tiles and every stride-th tile after them. `arrived(tiles[u], tile[u])` is called before a tile is
  // used.
  template <class Arrived>
  static __device__ __forceinline__ void attend(State& state, Tile (&tiles)[kTiles], int (&tile)[kTiles],
                                                const uint32_t (&query)[kSteps][2], const Rows& rows, int stride,
                                                float scale, int g, int t, const Arrived& arrived) {
    const int count = (rows.length + 15) / 16;
#pragma unroll 1
    while (tile[0] < count) {
#pragma unroll
      for (int u = 0; u < kTiles; ++u) arrived(tiles[u], tile[u]);
      float score[kTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          uint32_t a[4];
          key_fragment(a, tiles[u], step);
          Float16<T>::mma(score[u], a, query[step]);
        }
      }
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        if (tile[u] + kTiles * stride < count) load_keys(tiles[u], rows, tile[u] + kTiles * stride, g, t);
      }
      // Only the context's last tile may be partial. Tiles after it do not exist; their registers hold old values.
      const bool partial = 16 * (tile[kTiles - 1] + 1) > rows.length;
      uint32_t weight[kTiles][2];
      soften(state, tiles, score, weight, tile, rows.length, partial, scale, g);
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          uint32_t a[4];
          value_fragment(a, tiles[u], m / (kSize / 2), m % (kSize / 2));
          Float16<T>::mma(state.values[m], a, weight[u]);
        }
        tile[u] += kTiles * stride;
        if (tile[u] < count) {
          load_scales(tiles[u], rows, tile[u], g);
          load_values(tiles[u], rows, tile[u], g, t);
        }
      }
    }
  }

  // The kernel. `queries` counts the queries of a head of keys. Strides are in elements; each token and head of an int8
  // cache has a scale. AttentionMerge describes results, workspace and counters.
  static __device__ __forceinline__ void run(const T* q, const C* keys, const C* values, const float* key_scales,
                                             const float* value_scales, const int* positions, T* out, float* workspace,
                                             unsigned* counters, long long q_stride, long long batch_stride,
                                             int kv_heads, int queries, int context, float scale) {
    __shared__ typename Merge::Shared shared;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int parts = kCluster > 1 ? kCluster : gridDim.x;
    const Place place(kv_heads, queries);
    launch_dependents();
    Merge::begin(shared, place.mine);
    Rows rows = place.rows(keys, values, key_scales, value_scales, batch_stride, context);
    wait_for_dependencies();

    rows.length = min(max(positions[place.batch], 0), context - 1) + 1;
    const T* const row = q + place.batch * q_stride + (place.head + g) * kHead;
    uint32_t query[kSteps][2];
    load_queries(query, row, reinterpret_cast<unsigned long long>(row) % 16 == 0, g < place.mine, t);
    State state{};
    state.peak[0] = state.peak[1] = kNoScore;
    Tile tiles[kTiles] = {};
    int tile[kTiles];
    fetch(tiles, tile, rows, blockIdx.x + parts * warp, parts * kWarps, g, t);
    attend(state, tiles, tile, query, rows, parts * kWarps, scale, g, t, [](Tile&, int) {});
    record(shared.records[warp], state, g, t);
    __syncthreads();
    Merge::run(shared, out + place.first_out() * kHead, place.mine, workspace, counters);
  }
};

}  // namespace qcut
