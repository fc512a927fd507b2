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
// Of 4-bit rows, fragments hold codes as MaskedNibbles has them. Their units are powers of two: of keys, products of odd
// nibbles come first, so that one multiplication by the units' ratio stands between; of values, odd nibbles are rows g +
// 8 of a fragment. Zero points, and what is added to codes, are the same for all columns: of keys they multiply the sum
// of the query's columns, of values the sum of weights.
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
#include <qcut/attention/merge.cuh>
#include <qcut/decoder/nibbles.cuh>

namespace qcut {

// Loads 16, 8, 4 or 2 bytes that are read once; two bytes are the low half of a word.
template <int kWords>
__device__ __forceinline__ void load_streamed(uint32_t (&w)[kWords], const void* p, bool half = false) {
  if constexpr (kWords == 4) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(p)
                 : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
  } else if (half) {
    asm volatile("{\n\t.reg .u16 h;\n\tld.global.L1::no_allocate.u16 h, [%1];\n\tcvt.u32.u16 %0, h;\n\t}"
                 : "=r"(w[0])
                 : "l"(p)
                 : "memory");
  } else {
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
  }
}

// Transposes an 8 x 8 matrix of 16-bit elements; lane 4g + t holds (g, 2t) and (g, 2t + 1).
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

// Pairs of nibbles as 16-bit floats, only by a mask, for products in float32. Nibbles k and k + 4 of a word are its low
// and its high half, k of 0 to 3; a float is kOffset + code * kUnit[k % 2].
//
// Source: subnormal operands of mma.sync are exact: Fasi et al., "Numerical behavior of NVIDIA tensor cores" (2021).
template <class T>
struct MaskedNibbles;

// Under a zero exponent a code is a subnormal half: nothing has to be taken away.
template <>
struct MaskedNibbles<__half> {
  static constexpr float kOffset = 0.0f;
  static constexpr float kUnit[2] = {0x1p-24f, 0x1p-20f};
  static __device__ __forceinline__ uint32_t pair(uint32_t q, int k) {
    return (k < 2 ? q : q >> 8) & (k % 2 ? 0x00f000f0u : 0x000f000fu);
  }
};

// Subnormal bfloat16 would be subnormal float32, and seven bits of a fraction hold one nibble: under exponent 2^7 there
// are 128 with a code.
template <>
struct MaskedNibbles<__nv_bfloat16> {
  static constexpr float kOffset = 128.0f;
  static constexpr float kUnit[2] = {1.0f, 1.0f};
  static __device__ __forceinline__ uint32_t pair(uint32_t q, int k) {
    return masked(q >> 4 * k, 0x000f000fu, 0x43004300u);
  }
};

// The address of element i of kBytes, as one product and sum: 4-bit rows are bound by instructions.
template <int kBytes>
__device__ __forceinline__ const char* element_at(const void* first, int i) {
  unsigned long long at;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(i), "n"(kBytes), "l"(first));
  return reinterpret_cast<const char*>(at);
}

// A row's scale in a register: a word of 16 bits is the low half.
__device__ __forceinline__ float load_scale(const float* scales, int i) { return scales[i]; }
__device__ __forceinline__ uint32_t load_scale(const unsigned short* words, int i) {
  uint32_t w;
  asm volatile("{\n\t.reg .u16 h;\n\tld.global.u16 h, [%1];\n\tcvt.u32.u16 %0, h;\n\t}"
               : "=r"(w)
               : "l"(element_at<2>(words, i))
               : "memory");
  return w;
}

// Pieces of a row of a cache that kLanes lanes share: of 16 bytes, or, of 4-bit rows, of a lane's share up to that.
template <class C, int kHead, int kLanes>
struct RowPieces {
  static constexpr int kBits = CacheType<C>::kBits;
  static constexpr int kRowBytes = kHead * kBits / 8;
  static constexpr int kBytes = kBits == 4 && kRowBytes / kLanes < 16 ? kRowBytes / kLanes : 16;
  static constexpr int kSize = kBytes * 8 / kBits;          // columns of a piece
  static constexpr int kPieces = kHead / kSize;             // pieces of a row
  static constexpr int kOwn = (kPieces + kLanes - 1) / kLanes;  // a lane's
  static constexpr int kWords = (kBytes + 3) / 4;
  static_assert(kHead % kSize == 0 && kHead % 8 == 0, "heads are whole pieces");

  // Loads the pieces `lane`, lane + kLanes, ... of row i.
  static __device__ __forceinline__ void load(uint32_t (&w)[kOwn][kWords], const C* rows, int i, int lane) {
    const char* const first = reinterpret_cast<const char*>(rows);
    const char* row = first + static_cast<long long>(i) * kRowBytes + lane * kBytes;
    if constexpr (kBits == 4) row = element_at<kRowBytes>(first + lane * kBytes, i);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (lane + kLanes * j < kPieces) load_streamed(w[j], row + kLanes * j * kBytes, kBytes == 2);
    }
  }
  // Loads the pieces from shared memory.
  static __device__ __forceinline__ void copy(uint32_t (&w)[kOwn][kWords], const char* row, int lane) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (lane + kLanes * i >= kPieces) continue;
      const char* const from = row + (lane + kLanes * i) * kBytes;
      if constexpr (kBytes == 16) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
      } else if constexpr (kBytes == 8) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        w[i][0] = v.x, w[i][1] = v.y;
      } else if constexpr (kBytes == 4) {
        w[i][0] = *reinterpret_cast<const uint32_t*>(from);
      } else {
        w[i][0] = *reinterpret_cast<const unsigned short*>(from);
      }
    }
  }
};

// All columns of the products see the same keys, up to the end.
struct SeeAlike {
  static constexpr bool kApart = false;
};
// Columns see keys of their own, a lane's two the same with kPairs, all from the first key on without kWindowed. The
// struct lies in shared memory: most tiles are seen by all columns, and registers are few.
template <bool kPairs, bool kWindowed>
struct SeeApart {
  static constexpr bool kApart = true;
  int2 columns[8];         // each column sees keys x to y - 1
  int all_first, all_end;  // every column sees keys all_first to all_end - 1

  // Whether some keys of these tiles are not seen by all columns.
  __device__ __forceinline__ bool is_partial(int first_tile, int last_tile) const {
    return 16 * (last_tile + 1) > all_end || (kWindowed && 16 * first_tile < all_first);
  }
  // Whether a lane's column 2t + h sees a key.
  __device__ __forceinline__ bool sees(int h, int key) const {
    const int2& own = columns[2 * (threadIdx.x % 4) + (kPairs ? 0 : h)];
    return key < own.y && (!kWindowed || key >= own.x);
  }
};

// T is the type of queries and results; C and V are those of keys and values: T for both, or each int8_t or Nibbles.
// Queries are rotated like 4-bit keys. AttentionMma in emitters/attention/mma.py describes the sizes.
// With kWindowed, a query sees the last `window` keys up to its own: the others are not loaded. With kCapped, scores are
// softcap * tanh(q K / softcap): `scale` then has capped()'s factor. With kRing, positions are below `ring`, and
// position p is row p % context. With kSinks, each head of queries has a sink.
template <class T, class C, class V, int kHead_, int kGroup_, int kWarps_, int kTiles_, int kCluster_,
          bool kWindowed_ = false, bool kCapped_ = false, bool kRing_ = false, bool kSinks = false>
struct TensorAttention {
  static constexpr int kHead = kHead_, kGroup = kGroup_, kWarps = kWarps_, kTiles = kTiles_, kCluster = kCluster_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kWindowed = kWindowed_, kCapped = kCapped_, kRing = kRing_;
  using KeyPieces = RowPieces<C, kHead, 4>;
  using ValuePieces = RowPieces<V, kHead, 8>;
  using KeyScale = typename CacheType<C>::Scale;
  using ValueScale = typename CacheType<V>::Scale;
  static constexpr bool kScaled = CacheType<C>::kScaled;
  static constexpr bool kTurnedKeys = CacheType<C>::kTurned, kTurnedValues = CacheType<V>::kTurned;
  using Codes = MaskedNibbles<T>;
  static constexpr int kSteps = KeyPieces::kOwn * KeyPieces::kSize / 4;    // products of S: 16 columns each
  static constexpr int kRows = ValuePieces::kOwn * ValuePieces::kSize / 2;  // products of O: 16 columns each
  using Merge = AttentionMerge<T, kHead, kGroup, kWarps, kCluster, kTurnedValues, kSinks>;
  static constexpr unsigned kAll = 0xffffffffu;
  static_assert(kScaled == CacheType<V>::kScaled, "keys and values have scales, or neither");
  static_assert(1 <= kGroup && kGroup <= 8, "queries are the columns of a product");

  // The addresses of the keys and values of a sequence and head, and their number.
  struct Rows : RingRows<kRing> {
    const C* keys;
    const V* values;
    const KeyScale* key_scales;
    const ValueScale* value_scales;
    int length;

    // Leaves the first `count` rows out. Rows are whole pieces, so that what is loaded together stays aligned.
    __device__ __forceinline__ void skip(int count) {
      keys += static_cast<long long>(count) * (kHead * CacheType<C>::kBits / (8 * static_cast<int>(sizeof(C))));
      values += static_cast<long long>(count) * (kHead * CacheType<V>::kBits / (8 * static_cast<int>(sizeof(V))));
      if constexpr (kScaled) key_scales += count, value_scales += count;
      length -= count;
    }
    // Leaves out positions of a ring, which has `count` rows.
    __device__ __forceinline__ void skip_places(int places, int count) {
      this->first = places % count, this->rows = count;
      length -= places;
    }
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
    __device__ __forceinline__ Rows rows(const C* keys, const V* values, const KeyScale* key_scales,
                                         const ValueScale* value_scales, long long batch_stride, int context) const {
      const long long at = batch * batch_stride + static_cast<long long>(kv) * context * kHead;
      const C* const first_key = keys + at * CacheType<C>::kBits / (8 * static_cast<int>(sizeof(C)));
      const V* const first_value = values + at * CacheType<V>::kBits / (8 * static_cast<int>(sizeof(V)));
      if constexpr (!kScaled) return {{}, first_key, first_value, nullptr, nullptr, 0};
      const long long scale_at = (batch * kv_heads + kv) * context;
      return {{}, first_key, first_value, key_scales + scale_at, value_scales + scale_at, 0};
    }
  };

  // A lane's share of 16 keys and 16 values.
  struct Tile {
    uint32_t keys[2][KeyPieces::kOwn][KeyPieces::kWords];
    uint32_t values[4][ValuePieces::kOwn][ValuePieces::kWords];
    decltype(load_scale(static_cast<const KeyScale*>(nullptr), 0)) key_scale[2];
    decltype(load_scale(static_cast<const ValueScale*>(nullptr), 0)) value_scale[2];
  };

  // The state of queries 2t and 2t + 1: the largest score so far, as an exponent of 2 that includes the scale of the
  // score's value; this lane's part of the sum of weights; and the sum of weighted values, relative to 2^peak. With
  // 4-bit values, the term that all columns share is this lane's part of `lift`.
  struct State {
    float peak[2], sum[2], values[kRows][4];
    float lift[2];
  };

  // The key of row g + 8 r of S, and the value of a lane's row, of 2t, 2t + 1, 2t + 8 and 2t + 9, of P^T: which is which
  // is free as long as both agree. Of 4-bit values, that are half a line of the L2, a load then has neighbours.
  static constexpr bool kNeighbours = kTurnedValues;
  static __device__ __forceinline__ int key_of(int tile, int r, int g) {
    return 16 * tile + (kNeighbours ? g / 2 + g % 2 * 4 : g) + 8 * r;
  }
  static __device__ __forceinline__ int value_of(int tile, int row, int t) {
    return 16 * tile + (kNeighbours ? t + row % 2 * 4 : 2 * t + row % 2) + row / 2 * 8;
  }

  // Loads the lane's share of 16 keys. Keys past the end repeat the last key and get no weight: memory past the end may
  // hold NaN.
  static __device__ __forceinline__ void load_keys(Tile& into, const Rows& rows, int tile, int g, int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int key = min(key_of(tile, r, g), rows.length - 1);
      if constexpr (kRing) key = rows.row(key);
      KeyPieces::load(into.keys[r], rows.keys, key, t);
    }
  }

  static __device__ __forceinline__ void load_scales(Tile& into, const Rows& rows, int tile, int g) {
#pragma unroll
    for (int r = 0; kScaled && r < 2; ++r) {
      int key = min(key_of(tile, r, g), rows.length - 1);
      if constexpr (kRing) key = rows.row(key);
      into.key_scale[r] = load_scale(rows.key_scales, key);
      into.value_scale[r] = load_scale(rows.value_scales, key);
    }
  }

  static __device__ __forceinline__ void load_values(Tile& into, const Rows& rows, int tile, int g, int t) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      int value = min(value_of(tile, r, t), rows.length - 1);
      if constexpr (kRing) value = rows.row(value);
      ValuePieces::load(into.values[r], rows.values, value, g);
    }
  }

  // The A operand of one product of S, from the lane's columns of keys g and g + 8.
  static __device__ __forceinline__ void key_fragment(uint32_t (&a)[4], const Tile& tile, int step) {
    constexpr int kPieceSteps = KeyPieces::kSize / 4;
    const int i = step / kPieceSteps, word = step % kPieceSteps;
    if constexpr (kTurnedKeys) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = Codes::pair(tile.keys[j % 2][i][word / 2], word % 2 + j / 2 * 2);
    } else if constexpr (kScaled) {
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
      if constexpr (kTurnedValues) {
        const uint32_t both = __byte_perm(even[pair / 4], odd[pair / 4], pair / 2 % 2 ? 0x7632 : 0x5410);
        a[j] = Codes::pair(both, pair % 2 * 2);
        a[j + 1] = Codes::pair(both, pair % 2 * 2 + 1);
      } else if constexpr (kScaled) {
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
    constexpr int kSize = KeyPieces::kSize, kVector = kSize < 8 ? kSize : 8;
#pragma unroll
    for (int i = 0; i < KeyPieces::kOwn; ++i) {
#pragma unroll
      for (int half = 0; half < kSize / kVector; ++half) {
        const int column = (t + 4 * i) * kSize + kVector * half;
        Vector<T> v{};
        if (there && t + 4 * i < KeyPieces::kPieces) {
          if (aligned) {
            const uint4 raw = *reinterpret_cast<const uint4*>(row + column);
            v = Vector<T>{raw.x, raw.y, raw.z, raw.w};
          } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) v.set(j, row[column + j]);
          }
        }
        if constexpr (kTurnedKeys) {  // a word of keys has pairs of the columns k and k + 4
          const uint32_t pairs[4] = {__byte_perm(v.w[0], v.w[2], 0x5410), __byte_perm(v.w[0], v.w[2], 0x7632),
                                     __byte_perm(v.w[1], v.w[3], 0x5410), __byte_perm(v.w[1], v.w[3], 0x7632)};
#pragma unroll
          for (int j = 0; j < 4; ++j) v.w[j] = pairs[j];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // Even nibbles of a word of 4-bit keys are one step, odd ones the next.
          const int step = kTurnedKeys ? j % 2 : j / 2, pair = kTurnedKeys ? j / 2 : j % 2;
          query[i * kSize / 4 + 2 * half + step][pair] = v.w[j];
        }
      }
    }
  }

  // The sums of all columns of queries 2t and 2t + 1, as rounded to T.
  static __device__ __forceinline__ void add_columns(float (&sum)[2], const uint32_t (&query)[kSteps][2], int t) {
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const Vector<T> v{query[i][0], query[i][1]};
      float f[8];
      v.to_float(f);
      own += (f[0] + f[1]) + (f[2] + f[3]);
    }
    own += __shfl_xor_sync(kAll, own, 1);
    own += __shfl_xor_sync(kAll, own, 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = __shfl_sync(kAll, own, 4 * (2 * t + h));
  }

  // Makes weights of the scores of a warp's tiles, relative to a common maximum, the B operand of O. With `partial`,
  // some keys lie past the end, or are not seen by all columns.
  template <class Sees>
  static __device__ __forceinline__ void soften(State& state, const Tile (&tiles)[kTiles], float (&score)[kTiles][4],
                                                uint32_t (&weight)[kTiles][2], const int (&tile)[kTiles], int length,
                                                bool partial, float scale, const float (&columns)[2], int g,
                                                [[maybe_unused]] float softcap, [[maybe_unused]] const Sees& sees) {
    float size[kTiles][2];  // log2 of the values' scales, which multiply the weights
    float value_scale[kTiles][2], value_lift[kTiles][2];
    float top[2] = {state.peak[0], state.peak[1]};
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The bound keeps a weight in the sum finite if its scale is 0 or tiny.
        if constexpr (kTurnedValues) {
          const RowScale row(tiles[u].value_scale[r]);
          value_scale[u][r] = row.scale, value_lift[u][r] = row.lift - (8.0f + Codes::kOffset);
        } else if constexpr (kScaled) {
          value_scale[u][r] = tiles[u].value_scale[r];
        }
        size[u][r] = kScaled ? fmaxf(log2_approx(value_scale[u][r]), -100.0f) : 0.0f;
        float key_scale = scale, key_lift = 0.0f;
        if constexpr (kTurnedKeys) {
          const RowScale row(tiles[u].key_scale[r]);
          key_scale = scale * row.scale, key_lift = row.lift - (8.0f + Codes::kOffset);
        } else if constexpr (kScaled) {
          key_scale = scale * tiles[u].key_scale[r];
        }
        bool there = !partial || key_of(tile[u], r, g) < length;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if constexpr (Sees::kApart) there = !partial || sees.sees(h, key_of(tile[u], r, g));
          float& s = score[u][2 * r + h];
          if constexpr (kTurnedKeys) s = fmaf(key_lift, columns[h], s);
          if constexpr (kCapped) {
            s = there ? capped(s * key_scale, softcap) : -__int_as_float(0x7f800000);
          } else {
            s = there ? s * key_scale : -__int_as_float(0x7f800000);
          }
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
        if constexpr (kTurnedValues) state.lift[h] *= kept;
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
            w[h] *= value_scale[u][r];
          }
        }
        const uint32_t pair = pack_pair<T>(w[0], w[1]);
        if constexpr (!kScaled || kTurnedValues) {
          // Sums add the rounded weights that the product uses: the result is then a mean of the values, and zero points
          // of 4-bit ones cancel what rounding adds to all columns.
          const Vector<T> rounded{pair};
          float f[8];
          rounded.to_float(f);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if constexpr (kTurnedValues) {
              state.lift[h] = fmaf(f[h], value_lift[u][r], state.lift[h]);
            } else {
              state.sum[h] += f[h];
            }
          }
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
      if constexpr (kTurnedValues) {
        state.lift[0] += __shfl_xor_sync(kAll, state.lift[0], offset);
        state.lift[1] += __shfl_xor_sync(kAll, state.lift[1], offset);
      }
    }
    constexpr int kSize = ValuePieces::kSize;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = 2 * t + h;
      if (query >= kGroup) continue;
#pragma unroll
      for (int m = 0; m < kRows; m += 2) {
        const int piece = g + m / (kSize / 2) * 8, pair = m % (kSize / 2);
        const auto &low = state.values[m], &high = state.values[m + 1];
        if (piece >= ValuePieces::kPieces) continue;
        float4 v = make_float4(low[h], low[h + 2], high[h], high[h + 2]);
        if constexpr (kTurnedValues) {
          constexpr float kEven = 1.0f / Codes::kUnit[0], kOdd = 1.0f / Codes::kUnit[1];
          v.x = fmaf(v.x, kEven, state.lift[h]), v.y = fmaf(v.y, kOdd, state.lift[h]);
          v.z = fmaf(v.z, kEven, state.lift[h]), v.w = fmaf(v.w, kOdd, state.lift[h]);
        }
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
  // used. `sees` is SeeAlike or SeeApart.
  template <class Arrived, class Sees = SeeAlike>
  static __device__ __forceinline__ void attend(State& state, Tile (&tiles)[kTiles], int (&tile)[kTiles],
                                                const uint32_t (&query)[kSteps][2], const Rows& rows, int stride,
                                                float scale, int g, int t, const Arrived& arrived,
                                                float softcap = 0.0f, const Sees& sees = {}) {
    const int count = (rows.length + 15) / 16;
    float columns[2] = {};
    if constexpr (kTurnedKeys) {  // in units of even codes, as scores are
      add_columns(columns, query, t);
      columns[0] *= Codes::kUnit[0], columns[1] *= Codes::kUnit[0];
      scale *= 1.0f / Codes::kUnit[0];
    }
#pragma unroll 1
    while (tile[0] < count) {
#pragma unroll
      for (int u = 0; u < kTiles; ++u) arrived(tiles[u], tile[u]);
      float score[kTiles][4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = !kTurnedKeys ? i : i < kSteps / 2 ? 2 * i + 1 : 2 * i - kSteps;
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          if (kTurnedKeys && i == kSteps / 2) {
            for (float& s : score[u]) s *= Codes::kUnit[0] / Codes::kUnit[1];
          }
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
      bool partial = 16 * (tile[kTiles - 1] + 1) > rows.length;
      if constexpr (Sees::kApart) partial = sees.is_partial(tile[0], tile[kTiles - 1]);
      uint32_t weight[kTiles][2];
      soften(state, tiles, score, weight, tile, rows.length, partial, scale, columns, g, softcap, sees);
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          uint32_t a[4];
          value_fragment(a, tiles[u], m / (ValuePieces::kSize / 2), m % (ValuePieces::kSize / 2));
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
  // cache has a scale. AttentionMerge describes results, workspace and counters. A window is 1 or more.
  static __device__ __forceinline__ void run(const T* q, const C* keys, const V* values, const KeyScale* key_scales,
                                             const ValueScale* value_scales, const int* positions, T* out,
                                             float* workspace, unsigned* counters, long long q_stride,
                                             long long batch_stride, int kv_heads, int queries, int context,
                                             float scale, int window = 0, float softcap = 0.0f, int ring = 0,
                                             const float* sinks = nullptr) {
    __shared__ typename Merge::Shared shared;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int parts = kCluster > 1 ? kCluster : gridDim.x;
    const Place place(kv_heads, queries);
    launch_dependents();
    Merge::begin(shared, place.mine);
    Rows rows = place.rows(keys, values, key_scales, value_scales, batch_stride, context);
    wait_for_dependencies();

    rows.length = min(max(positions[place.batch], 0), (kRing ? ring : context) - 1) + 1;
    if constexpr (kRing) {
      rows.skip_places(first_seen(rows.length, window), context);
    } else if constexpr (kWindowed) {
      rows.skip(first_seen(rows.length, window));
    }
    const T* const row = q + place.batch * q_stride + (place.head + g) * kHead;
    uint32_t query[kSteps][2];
    load_queries(query, row, reinterpret_cast<unsigned long long>(row) % 16 == 0, g < place.mine, t);
    State state{};
    state.peak[0] = state.peak[1] = kNoScore;
    Tile tiles[kTiles] = {};
    int tile[kTiles];
    fetch(tiles, tile, rows, blockIdx.x + parts * warp, parts * kWarps, g, t);
    Merge::fetch_sinks(shared, sinks + place.head, place.mine);
    attend(state, tiles, tile, query, rows, parts * kWarps, scale, g, t, [](Tile&, int) {}, softcap);
    record(shared.records[warp], state, g, t);
    Merge::await_sinks();
    __syncthreads();
    Merge::run(shared, out + place.first_out() * kHead, place.mine, workspace, counters);
  }
};

}  // namespace qcut
