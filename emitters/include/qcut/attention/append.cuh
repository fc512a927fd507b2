// Decode attention in one launch: norms of heads, rotary positions, the new key and value of each sequence to the
// cache, and attention over the cache. The results are those of norm_rows (decoder/norm.cuh) of each
// head, rotate_and_append (decoder/append.cuh) and TensorAttention (mma.cuh).
//
// No CTA reads the new row of the cache back. Every CTA rotates its queries into shared memory. A CTA whose part of the
// context contains the new row's slot also puts the new key and value into shared memory, in the cache's type. They
// replace the data that the CTA has loaded from the slot. One of the CTAs that share the head of keys writes them to
// the cache.
#pragma once

#include <qcut/attention/mma.cuh>
#include <qcut/decoder/rope.cuh>

namespace qcut {

// AttentionAppend in emitters/attention/append.py describes the sizes. With kNormed, queries and keys are
// RMS-normalized head by head before they are rotated. With kSettled, nothing but q, k and v is written by kernels that
// may still run: the first keys and values are in flight before the kernel waits for those. merge.cuh describes
// Rotation.
template <class T, class C, class V, int kHead, int kGroup, int kWarps, int kTiles, int kCluster, bool kRotary,
          bool kWindowed = false, bool kCapped = false, bool kRing = false, bool kNormed = false,
          bool kSettled = false, bool kSinks = false, class Rotation = NotRotated>
struct AppendAttention {
  using Attention =
      TensorAttention<T, C, V, kHead, kGroup, kWarps, kTiles, kCluster, kWindowed, kCapped, kRing, kSinks>;
  using Merge =
      AttentionMerge<T, kHead, kGroup, kWarps, kCluster, Attention::kTurnedValues, kSinks, 1, Rotation>;
  using Tile = typename Attention::Tile;
  using Rows = typename Attention::Rows;
  using Stored = StoredRow<T, kHead>;
  using KeyScale = typename Attention::KeyScale;
  using ValueScale = typename Attention::ValueScale;
  using Row = HeadRow<T, kHead>;
  static constexpr bool kScaled = Attention::kScaled;
  static constexpr int kItems = (kGroup + 2 + kWarps - 1) / kWarps;  // rows of a warp
  // Queries are the first rows of all warps, key and value the last: only a warp's last row may have to be quantized.
  static constexpr int kKeyItem = kItems * kWarps - 2, kValueItem = kKeyItem + 1;

  struct Shared {
    typename Merge::Shared merge;
    alignas(16) T queries[kGroup][kHead + 8];
    alignas(16) C key[kHead * CacheType<C>::kBits / 8 / sizeof(C)];  // the new ones
    alignas(16) V value[kHead * CacheType<V>::kBits / 8 / sizeof(V)];
    KeyScale key_scale;
    ValueScale value_scale;
  };

  // Stores a new key or value in shared memory, and with `writes` in row `slot` of the cache.
  template <class Stores, class Scale>
  static __device__ __forceinline__ void keep(Row& row, Stores* shared, Scale& shared_scale, const Stores* cache,
                                              const Scale* scales, const GuideColumn* guide, int slot, bool writes,
                                              int lane) {
    constexpr int kBits = CacheType<Stores>::kBits;
    constexpr int kRow = kHead * kBits / 8 / static_cast<int>(sizeof(Stores));
    Stores* const to = const_cast<Stores*>(cache) + static_cast<long long>(slot) * kRow;
    if constexpr (!kScaled) {
      row.store(shared, lane);
      if (writes) row.store(to, lane);
    } else {
      const auto quantized = row.template quantized<Stores>(guide);
      quantized.store(shared, lane);
      if (lane == 0) shared_scale = quantized.scale;
      if (!writes) return;
      quantized.store(to, lane);
      if (lane == 0) const_cast<Scale*>(scales)[slot] = quantized.scale;
    }
  }

  // Weights of a head's columns, of the norms of queries and of keys.
  struct Norms {
    Stored queries, keys;
    float eps;
  };

  // Whether a warp's row i may be a key or a value.
  static __device__ constexpr bool may_be_new(int i) { return (i + 1) * kWarps > kKeyItem; }

  // Starts the loads of a warp's share of the token: every kWarps-th of the rows.
  static __device__ __forceinline__ void fetch(Stored (&rows)[kItems], const T* q, const T* k, const T* v, int mine) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = threadIdx.x / 32 + i * kWarps;
      const T* row = q + static_cast<long long>(item) * kHead;
      if (may_be_new(i) && item >= kKeyItem) row = item == kKeyItem ? k : v;
      if (item < mine || (may_be_new(i) && item >= kKeyItem)) rows[i].load(row, threadIdx.x % 32);
    }
  }

  // Normalizes and rotates the loaded rows and writes them to shared memory: queries, and if the CTA has the slot, key
  // and value. With `writes`, key and value also go to the cache.
  static __device__ __forceinline__ void prepare(Shared& shared, const Stored (&rows)[kItems], const Norms& norms,
                                                 const Stored& cosines, const Stored& sines, const Rows& cache,
                                                 const GuideColumn* guide, int mine, int slot, bool has_slot,
                                                 bool writes) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = threadIdx.x / 32 + i * kWarps;
      const bool is_new = may_be_new(i) && item >= kKeyItem;
      if (is_new ? !has_slot : item >= mine) continue;
      const bool is_value = may_be_new(i) && item == kValueItem;
      Row row(rows[i]);
      if (kNormed && !is_value) {
        // Each warp's records are free until the end.
        T* const room = reinterpret_cast<T*>(shared.merge.records[threadIdx.x / 32]);
        Stored weight = norms.queries;  // a choice of values: one of references would put both in local memory
        if (is_new) weight = norms.keys;
        row.normalize(weight, norms.eps, room);
      }
      if (kRotary && !is_value) row.rotate(cosines, sines);
      if constexpr (Attention::kTurnedKeys || Attention::kTurnedValues) {
        if (is_value ? Attention::kTurnedValues : Attention::kTurnedKeys) row.turn_columns();
      }
      if (!is_new) {
        row.store(shared.queries[item], lane);
      } else if constexpr (kSameTypes<C, V>) {  // one copy of the code for both
        keep(row, is_value ? shared.value : shared.key, is_value ? shared.value_scale : shared.key_scale,
             is_value ? cache.values : cache.keys, is_value ? cache.value_scales : cache.key_scales,
             is_value ? nullptr : guide, slot, writes, lane);
      } else if (is_value) {
        keep(row, shared.value, shared.value_scale, cache.values, cache.value_scales, nullptr, slot, writes, lane);
      } else {
        keep(row, shared.key, shared.key_scale, cache.keys, cache.key_scales, guide, slot, writes, lane);
      }
    }
  }

  // Replaces a lane's share of the slot's key and value, also past the end, where the last key is repeated.
  static __device__ __forceinline__ void replace(Tile& into, const Shared& shared, const Rows& rows, int tile, int slot,
                                                 int g, int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (min(Attention::key_of(tile, r, g), rows.length - 1) != slot) continue;
      Attention::KeyPieces::copy(into.keys[r], reinterpret_cast<const char*>(shared.key), t);
      if constexpr (kScaled) {
        into.key_scale[r] = shared.key_scale;
        into.value_scale[r] = shared.value_scale;
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (min(Attention::value_of(tile, r, t), rows.length - 1) != slot) continue;
      Attention::ValuePieces::copy(into.values[r], reinterpret_cast<const char*>(shared.value), g);
    }
  }

  // The kernel. The arguments are those of rotate_and_append and TensorAttention::run, but q is not written. If absmax
  // [batch] is not null, each of its elements is raised to the largest magnitude of the sequence's row of out. The
  // weights of norms are [kHead].
  static __device__ __forceinline__ void run(const T* q, const T* k, const T* v, const T* cos, const T* sin,
                                             const int* positions, const int* slots, C* keys, V* values,
                                             KeyScale* key_scales, ValueScale* value_scales, const void* guide, T* out,
                                             float* workspace, unsigned* counters, float* absmax, long long q_stride,
                                             long long kv_stride, long long batch_stride, int kv_heads, int queries,
                                             int context, float scale, int window = 0, float softcap = 0.0f,
                                             int ring = 0, const T* query_weight = nullptr,
                                             const T* key_weight = nullptr, float eps = 0.0f,
                                             const float* sinks = nullptr, Rotation rotation = {}) {
    __shared__ Shared shared;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int part = blockIdx.x, parts = kCluster > 1 ? kCluster : gridDim.x;
    const typename Attention::Place place(kv_heads, queries);
    launch_dependents();
    Merge::begin(shared.merge, place.mine);
    Rows rows = place.rows(keys, values, key_scales, value_scales, batch_stride, context);
    if constexpr (!kSettled) wait_for_dependencies();
    Merge::fetch_sinks(shared.merge, sinks + place.head, place.mine);

    const int position = min(max(positions[place.batch], 0), (kRing ? ring : context) - 1), slot = slots[place.batch];
    rows.length = position + 1;
    // Positions and the slot are counted from the first visible one: before it, a slot is below 0.
    const int first = kWindowed ? first_seen(rows.length, window) : 0;
    if constexpr (kRing) {
      rows.skip_places(first, context);
    } else if constexpr (kWindowed) {
      rows.skip(first);
    }
    // The small loads are issued before the large ones, and used while the large ones are in flight.
    Stored token[kItems], cosines{}, sines{};
    const long long at = place.batch * kv_stride + static_cast<long long>(place.kv) * kHead;
    const T* const first_query = q + place.batch * q_stride + place.head * kHead;
    if constexpr (!kSettled) fetch(token, first_query, k + at, v + at, place.mine);
    if constexpr (kRotary) {
      cosines.load(cos + static_cast<long long>(position) * kHead, threadIdx.x % 32);
      sines.load(sin + static_cast<long long>(position) * kHead, threadIdx.x % 32);
    }
    [[maybe_unused]] Norms norms;
    if constexpr (kNormed) {
      norms.queries.load(query_weight, threadIdx.x % 32);
      norms.keys.load(key_weight, threadIdx.x % 32);
      norms.eps = eps;
    }
    typename Attention::State state{};
    state.peak[0] = state.peak[1] = kNoScore;
    Tile tiles[kTiles] = {};
    int tile[kTiles];
    Attention::fetch(tiles, tile, rows, part + parts * warp, parts * kWarps, g, t);
    if constexpr (kSettled) {
      wait_for_dependencies();
      fetch(token, first_query, k + at, v + at, place.mine);
    }

    int own_slot = kWindowed ? max(slot, -1) - first : slot, row = own_slot;
    bool has_slot = slot >= 0 && slot < (kRing ? ring : context);
    if constexpr (kRing) {
      // The visible position in the slot's row; none without a slot, since its remainder may be that of a position.
      own_slot = has_slot ? (own_slot % context + context) % context : -1;
      row = rows.row(max(own_slot, 0));
    }
    if constexpr (kWindowed) {
      has_slot = has_slot && max(own_slot, 0) / 16 % parts == part;
    } else {
      has_slot = has_slot && slot / 16 % parts == part;
    }
    const GuideColumn* mine_guide = nullptr;
    if constexpr (Attention::kTurnedKeys) {
      if (guide != nullptr) mine_guide = static_cast<const GuideColumn*>(guide) + place.kv * (kHead + 2);
    }
    prepare(shared, token, norms, cosines, sines, rows, mine_guide, place.mine, row, has_slot, place.first == 0);
    __syncthreads();
    uint32_t query[Attention::kSteps][2];
    Attention::load_queries(query, shared.queries[g < place.mine ? g : 0], true, g < place.mine, t);
    const auto arrive = [&](Tile& arrived, int at) {
      if (at == own_slot / 16) replace(arrived, shared, rows, at, own_slot, g, t);
    };
    Attention::attend(state, tiles, tile, query, rows, parts * kWarps, scale, g, t, arrive, softcap);
    Attention::record(shared.merge.records[warp], state, g, t);
    Merge::await_sinks();
    __syncthreads();
    if constexpr (Rotation::kRotates) {
      const ResultPlace to{static_cast<int>(place.batch), static_cast<int>(gridDim.z),
                           static_cast<int>(place.head) * kHead};
      Merge::run(shared.merge, out, place.mine, workspace, counters, nullptr, 0, rotation, to);
    } else {
      Merge::run(shared.merge, out + place.first_out() * kHead, place.mine, workspace, counters,
                 absmax == nullptr ? nullptr : absmax + place.batch);
    }
  }
};

}  // namespace qcut
