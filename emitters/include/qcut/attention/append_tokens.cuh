// Decode attention of several new tokens of each sequence in one launch, as drafted tokens are verified: norms of
// heads, rotary positions, the new keys and values to the cache, and attention of each token over the cache up to
// itself.
//
// A CTA has kTokens tokens of a sequence: the columns of the products are each token's kGroup queries, and the keys and
// values that the CTA loads serve all of them. A column sees the keys up to its own token.
//
// No CTA reads new rows of the cache back. A CTA whose part of the context contains new rows, of its own tokens or of
// those before them, prepares them in shared memory. They replace the data that the CTA has loaded from their slots. A
// CTA that has the row's token writes a row to the cache.
//
// Exactness: results are those of rotate_and_append (decoder/append.cuh) of all tokens and then TensorAttention
// (mma.cuh) of each, bit by bit where new values are finite and windows leave no position out. Else tiles are counted
// from the first position that the first of a CTA's tokens sees, so that sums have another order.
#pragma once

#include <qcut/attention/append.cuh>

namespace qcut {

// A launch has kRows tokens of each sequence, in CTAs of kTokens. With several tokens in a CTA, kGroup is all queries
// of a head of keys. The other sizes are those of AppendAttention.
template <class T, class C, class V, int kHead, int kGroup, int kWarps, int kTiles, int kCluster, int kTokens,
          int kRows, bool kRotary, bool kWindowed = false, bool kCapped = false, bool kRing = false,
          bool kNormed = false, bool kSettled = false, bool kSinks = false, class Rotation = NotRotated>
struct AppendTokens {
  static constexpr int kColumns = kGroup * kTokens;
  using Attention =
      TensorAttention<T, C, V, kHead, kColumns, kWarps, kTiles, kCluster, kWindowed, kCapped, kRing, kSinks>;
  using One = AppendAttention<T, C, V, kHead, kColumns, kWarps, kTiles, kCluster, kRotary, kWindowed, kCapped, kRing,
                              kNormed, kSettled, kSinks>;
  using Merge = AttentionMerge<T, kHead, kColumns, kWarps, kCluster, Attention::kTurnedValues, kSinks, kTokens,
                               Rotation>;
  using Tile = typename Attention::Tile;
  using Rows = typename Attention::Rows;
  using Stored = StoredRow<T, kHead>;
  using KeyScale = typename Attention::KeyScale;
  using ValueScale = typename Attention::ValueScale;
  using Row = HeadRow<T, kHead>;
  static constexpr bool kScaled = Attention::kScaled;
  static constexpr unsigned kAll = Attention::kAll;
  static constexpr int kChunks = (kRows + kTokens - 1) / kTokens;   // CTAs that share the tokens of a sequence
  static constexpr int kItems = (kColumns + kWarps - 1) / kWarps;   // queries of a warp, side by side
  static constexpr int kTables = kTokens == 1 || kGroup % kItems == 0 ? 1 : kItems;  // positions that these may have
  static constexpr int kRounds = (kRows + kWarps - 1) / kWarps;     // new tokens of a warp
  static_assert(kTokens <= kRows && kRows <= 8, "a lane has a token's place");

  struct Shared {
    typename Merge::Shared merge;
    alignas(16) T queries[kColumns][kHead + 8];
    alignas(16) C keys[kRows][kHead * CacheType<C>::kBits / 8 / sizeof(C)];  // the new ones
    alignas(16) V values[kRows][kHead * CacheType<V>::kBits / 8 / sizeof(V)];
    KeyScale key_scales[kRows];
    ValueScale value_scales[kRows];
    SeeApart<kTokens == 1 || kGroup % 2 == 0, kWindowed> sees;
  };

  // The CTA's tokens among those of its sequence; `first` and `mine` are of each token's queries.
  struct Place : Attention::Place {
    int token, tokens;

    __device__ __forceinline__ Place(int kv_heads, int queries) : Attention::Place(kv_heads, queries) {
      const int rest = blockIdx.y % (gridDim.y / kv_heads);
      token = rest % kChunks * kTokens;
      tokens = min(kTokens, kRows - token);
      this->first = rest / kChunks * kGroup;
      this->head = static_cast<long long>(this->kv) * queries + this->first;
      this->mine = min(kGroup, queries - this->first);
    }
    // The CTA's columns: a token's side by side.
    __device__ __forceinline__ int columns() const { return kTokens > 1 ? tokens * kGroup : this->mine; }
  };

  // The new rows that the CTA's queries may see: those of `count` tokens at neighbouring places, counted from the first
  // visible one, so that the first may be below 0.
  struct NewRows {
    int first, count, context;

    // The place of row j; in a ring, that of a visible position in the same row of the cache.
    __device__ __forceinline__ int place(int j) const {
      const int at = first + j;
      return kRing && at >= context ? at - context : at;
    }
    // The row that lies at a place; others than 0 to count - 1 are none.
    __device__ __forceinline__ int at(int place) const {
      const int j = place - first;
      return kRing && j < 0 ? j + context : j;
    }
    __device__ __forceinline__ bool has(int j) const { return static_cast<unsigned>(j) < static_cast<unsigned>(count); }
    // Whether a part of the context has row j. Rows before the first visible place are the first tile's.
    __device__ __forceinline__ bool in_part(int j, int part, int parts) const {
      return has(j) && max(place(j), 0) / 16 % parts == part;
    }
    // Whether a tile may have new rows: those of a ring may begin anew in the first tile.
    __device__ __forceinline__ bool in_tile(int tile) const {
      return (16 * tile + 15 >= first && 16 * tile < first + count) || (kRing && tile == 0);
    }
  };

  // Replaces a lane's share of the new keys and values in a tile, also past the end, where the last key is repeated.
  static __device__ __forceinline__ void replace(Tile& into, const Shared& shared, const Rows& rows, int tile,
                                                 const NewRows& fresh, int g, int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int j = fresh.at(min(Attention::key_of(tile, r, g), rows.length - 1));
      if (!fresh.has(j)) continue;
      Attention::KeyPieces::copy(into.keys[r], reinterpret_cast<const char*>(shared.keys[j]), t);
      if constexpr (kScaled) {
        into.key_scale[r] = shared.key_scales[j];
        into.value_scale[r] = shared.value_scales[j];
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int j = fresh.at(min(Attention::value_of(tile, r, t), rows.length - 1));
      if (!fresh.has(j)) continue;
      Attention::ValuePieces::copy(into.values[r], reinterpret_cast<const char*>(shared.values[j]), g);
    }
  }

  // The kernel. The arguments are those of AppendAttention::run with kRows tokens of each sequence, side by side: q,
  // k, v, positions, slots, out and absmax have an element for each token. The tokens of a sequence have consecutive
  // slots. The first token without the next slot of the cache, and tokens after it, are not stored; their results are
  // unspecified.
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int part = blockIdx.x, parts = kCluster > 1 ? kCluster : gridDim.x;
    const Place place(kv_heads, queries);
    const int columns = place.columns(), end = place.token + place.tokens;
    launch_dependents();
    Merge::begin(shared.merge, columns);
    Rows rows = place.rows(keys, values, key_scales, value_scales, batch_stride, context);
    if constexpr (!kSettled) wait_for_dependencies();
    Merge::fetch_sinks(shared.merge, sinks + place.head, columns);

    // A lane has the position and the slot of a token. A slot that does not follow the one before ends the new rows.
    const long long first_token = place.batch * kRows;
    const int limit = kRing ? ring : context;
    const int position = min(max(positions[first_token + min(lane, end - 1)], 0), limit - 1);
    const int slot = slots[first_token + min(lane, end - 1)], first_slot = __shfl_sync(kAll, slot, 0);
    const bool is_stored = lane < end && slot >= 0 && slot < limit && slot - lane == first_slot;
    NewRows fresh{first_slot, __ffs(~__ballot_sync(kAll, is_stored)) - 1, context};

    // A lane has a column's length, that of the last stored token before it where its own token is not stored: what the
    // cache holds there, perhaps NaN, would reach other columns.
    const int own = min(place.token + min(lane, columns - 1) / kGroup, max(fresh.count, 1) - 1);
    const int length = __shfl_sync(kAll, position, own) + 1;
    rows.length = __reduce_max_sync(kAll, length);
    const int seen = kWindowed ? first_seen(length, window) : 0, first = kWindowed ? __reduce_min_sync(kAll, seen) : 0;
    if (warp == 0) {
      const int all_first = kWindowed ? __reduce_max_sync(kAll, seen) : 0, all_end = __reduce_min_sync(kAll, length);
      if (lane < 8) shared.sees.columns[lane] = make_int2(seen - first, length - first);
      if (lane == 0) shared.sees.all_first = all_first - first, shared.sees.all_end = all_end - first;
    }
    if constexpr (kRing) {
      rows.skip_places(first, context);
      rows.length = min(rows.length, context);
      fresh.first = fresh.count > 0 ? ((first_slot - first) % context + context) % context : 0;
    } else if constexpr (kWindowed) {
      rows.skip(first);
      fresh.first = fresh.count > 0 ? first_slot - first : 0;
    }

    // The small loads are issued before the large ones, and used while the large ones are in flight.
    Stored mine[kItems], cosines[kTables]{}, sines[kTables]{};
    Stored new_key{}, new_value{}, new_cosines{}, new_sines{};
    const auto fetch_queries = [&] {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int column = warp * kItems + i;
        if (column >= columns) continue;
        const T* const row = q + (first_token + place.token + column / kGroup) * q_stride;
        mine[i].load(row + (place.head + column % kGroup) * kHead, lane);
      }
    };
    const auto fetch_table = [&](Stored& cosine, Stored& sine, int token) {
      const long long at = static_cast<long long>(__shfl_sync(kAll, position, token)) * kHead;
      cosine.load(cos + at, lane);
      sine.load(sin + at, lane);
    };
    const auto fetch_new = [&](int j) {
      const long long at = (first_token + j) * kv_stride + static_cast<long long>(place.kv) * kHead;
      new_key.load(k + at, lane);
      new_value.load(v + at, lane);
    };
    const bool has_new = fresh.in_part(warp, part, parts);
    if constexpr (!kSettled) {
      fetch_queries();
      if (has_new) fetch_new(warp);
    }
    if constexpr (kRotary) {
#pragma unroll
      for (int i = 0; i < kTables; ++i) {
        fetch_table(cosines[i], sines[i], place.token + min(warp * kItems + i, columns - 1) / kGroup);
      }
      if (has_new) fetch_table(new_cosines, new_sines, warp);
    }
    [[maybe_unused]] Stored query_norm{}, key_norm{};
    if constexpr (kNormed) {
      query_norm.load(query_weight, lane);
      key_norm.load(key_weight, lane);
    }
    typename Attention::State state{};
    state.peak[0] = state.peak[1] = kNoScore;
    Tile tiles[kTiles] = {};
    int tile[kTiles];
    Attention::fetch(tiles, tile, rows, part + parts * warp, parts * kWarps, g, t);
    if constexpr (kSettled) {
      wait_for_dependencies();
      fetch_queries();
      if (has_new) fetch_new(warp);
    }

    // Each warp's records are free until the end.
    [[maybe_unused]] T* const room = reinterpret_cast<T*>(shared.merge.records[warp]);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int column = warp * kItems + i;
      if (column >= columns) continue;
      Row row(mine[i]);
      if constexpr (kNormed) row.normalize(query_norm, eps, room);
      if constexpr (kRotary) row.rotate(cosines[kTables > 1 ? i : 0], sines[kTables > 1 ? i : 0]);
      if constexpr (Attention::kTurnedKeys) row.turn_columns();
      row.store(shared.queries[column], lane);
    }
    const GuideColumn* mine_guide = nullptr;
    if constexpr (Attention::kTurnedKeys) {
      if (guide != nullptr) mine_guide = static_cast<const GuideColumn*>(guide) + place.kv * (kHead + 2);
    }
#pragma unroll 1
    for (int i = 0; i < kRounds; ++i) {
      const int j = warp + i * kWarps;
      if (!fresh.in_part(j, part, parts)) continue;
      if (i > 0) {
        fetch_new(j);
        if constexpr (kRotary) fetch_table(new_cosines, new_sines, j);
      }
      int at = fresh.place(j);
      if constexpr (kRing) at = rows.row(at);
      const bool writes = j >= place.token && place.first == 0;
      Row key(new_key);
      if constexpr (kNormed) key.normalize(key_norm, eps, room);
      if constexpr (kRotary) key.rotate(new_cosines, new_sines);
      if constexpr (Attention::kTurnedKeys) key.turn_columns();
      One::keep(key, shared.keys[j], shared.key_scales[j], rows.keys, rows.key_scales, mine_guide, at, writes, lane);
      Row value(new_value);
      if constexpr (Attention::kTurnedValues) value.turn_columns();
      One::keep(value, shared.values[j], shared.value_scales[j], rows.values, rows.value_scales, nullptr, at, writes,
                lane);
    }
    __syncthreads();
    uint32_t query[Attention::kSteps][2];
    Attention::load_queries(query, shared.queries[g < columns ? g : 0], true, g < columns, t);
    const auto arrive = [&](Tile& arrived, int at) {
      if (fresh.in_tile(at)) replace(arrived, shared, rows, at, fresh, g, t);
    };
    Attention::attend(state, tiles, tile, query, rows, parts * kWarps, scale, g, t, arrive, softcap, shared.sees);
    Attention::record(shared.merge.records[warp], state, g, t);
    Merge::await_sinks();
    __syncthreads();
    const long long at = first_token + place.token, width = place.heads * kHead;
    if constexpr (Rotation::kRotates) {
      const ResultPlace to{static_cast<int>(at), static_cast<int>(gridDim.z) * kRows,
                           static_cast<int>(place.head) * kHead};
      Merge::run(shared.merge, out, columns, workspace, counters, nullptr, 0, rotation, to);
    } else {
      Merge::run(shared.merge, out + at * width + place.head * kHead, columns, workspace, counters,
                 absmax == nullptr ? nullptr : absmax + at, width);
    }
  }
};

}  // namespace qcut
