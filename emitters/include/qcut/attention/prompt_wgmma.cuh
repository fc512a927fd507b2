// Prefill attention with wgmma (sm_90a).
//
// The last warpgroup of a CTA copies queries, keys and values to shared memory. Each of the others has 64 rows of a
// tile: S = Q K^T of a block of keys, the softmax of its rows, O += P V with P in registers. While the tensor cores
// multiply a block's P by V, the next block's scores, which precede them, become weights. Warpgroups take turns in
// issuing products, so that one's softmax overlaps another's products. Blocks go from the last visible position
// to the first: those that some rows do not see come first.
//
// Keys and values lie in one ring of slots in the order of their use: K of the last block, then K and V of two
// neighbours in turn. int8 rows are fetched to a buffer of their own and become 16-bit floats, exactly, in the
// ring; their scales lie with the slot of the keys.
#pragma once

#include <qcut/core/barrier.cuh>
#include <qcut/core/wgmma_shared.cuh>
#include <qcut/attention/prompt_copy.cuh>

namespace qcut {

template <class T_, class Keys_, class Values_, int kHead_, int kColumns_, int kGroups_, int kKeys_, int kSlots_,
          int kParts_, bool kWindowed = false, bool kCapped = false, bool kCacheRing = false, bool kSinks = false>
struct PromptTile {
  using T = T_;
  using Keys = Keys_;
  using Values = Values_;
  using Args = typename PromptArgsOf<T, Keys, Values, kWindowed, kCapped, kCacheRing, kSinks>::Type;
  static constexpr int kHead = kHead_;
  static constexpr int kColumns = kColumns_;  // of a product: kHead and zeros
  static constexpr int kGroups = kGroups_;    // warpgroups that multiply
  static constexpr int kKeys = kKeys_;        // of a block
  static constexpr int kSlots = kSlots_;
  static constexpr int kParts = kParts_;  // CTAs of a cluster that divide the positions of a tile
  static constexpr bool kScaled = CacheType<Keys>::kScaled;
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kThreads = 128 * kGroups + 128;
  static constexpr int kBlocks = (kColumns + 63) / 64;  // of 64 columns, 128 bytes a row
  static constexpr int kQueryBlock = 128 * kRows;
  static constexpr int kKeyBlock = 128 * kKeys;
  static constexpr int kSlotBytes = kBlocks * kKeyBlock;
  static constexpr int kScaleBytes = kScaled ? 12 * kKeys : 0;  // of a slot of keys: three float32 of each
  static constexpr int kAhead = 2;  // tiles of int8 rows that are fetched before they are converted
  // Byte offsets in shared memory.
  static constexpr int kRing = kBlocks * kQueryBlock;
  static constexpr int kScales = kRing + kSlots * kSlotBytes;
  static constexpr int kFull = kScales + kSlots * kScaleBytes;
  static constexpr int kEmpty = kFull + 8 * kSlots;
  static constexpr int kQueryFull = kEmpty + 8 * kSlots;
  static constexpr int kQueryEmpty = kQueryFull + 8;
  static constexpr int kRaw = kQueryEmpty + 8;
  // What a CTA of a cluster leaves of each row: weighted values, the largest score, the sum; in the place of the ring.
  static constexpr int kLeft = kRing;
  static constexpr int kLeftPitch = 4 * kColumns + 16;
  // Registers of a thread after setmaxnreg, where a launch gives each thread of three warpgroups 168.
  static constexpr bool kNibbles = CacheType<Keys>::kTurned || CacheType<Values>::kTurned;
  static constexpr int kFeedRegisters = !kNibbles ? 72 : kColumns > 128 ? 88 : 104;
  static constexpr int kRegisters = (3 * 168 - kFeedRegisters) / 2;
  static_assert(kGroups == 1 || kGroups == 2, "see emitters/attention/prompt_wgmma.py");
};

// The tiles of a CTA, one in each round: rounds go through the CTAs in turns from the first and from the last, so that
// no CTA has the longest tile of every round. A cluster counts as one CTA, and goes through one tile.
template <int kParts>
struct TileRounds {
  int tiles;
  int round = 0;
  // The next tile; -1 after the last.
  __device__ __forceinline__ int next() {
    const int ctas = gridDim.x / kParts, cta = blockIdx.x / kParts;
    const int tile = round * ctas + (round % 2 ? ctas - 1 - cta : cta);
    ++round;
    return tile < tiles ? tile : -1;
  }
};

// This CTA's positions of a tile: `first` to the tile's last, `at` the first of the last block; at < first: none.
template <int kParts, int kKeys>
struct PromptPart {
  int first, at;
  bool alone;  // the CTA has all positions of the tile

  __device__ __forceinline__ explicit PromptPart(const PromptRows& rows) {
    const int blocks = (rows.places + kKeys - 1) / kKeys;
    const int rank = blockIdx.x % kParts;
    alone = kParts == 1 || blocks <= 2;
    const int share = alone ? blocks : (blocks + kParts - 1) / kParts;
    first = rank * share * kKeys;
    at = (min(blocks, (rank + 1) * share) - 1) * kKeys;
  }
  __device__ __forceinline__ bool is_empty() const { return at < first; }
};

// A place in a ring of slots.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  int parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Keeps what follows behind the computation of v, which is at least 0. The assembler would move a wait for products up
// to the products, above the softmax that is to overlap them, but not across a barrier of the warp.
__device__ __forceinline__ void hold(float v) {
  asm volatile("bar.warp.sync %0;" ::"r"(v < 0.0f ? 0 : -1) : "memory");
}

// The warpgroup that copies. `thread` is 0..127.
template <class Tile>
struct PromptFeed {
  using T = typename Tile::T;
  using Copy =
      PromptCopy<T, typename Tile::Keys, typename Tile::Values, Tile::kHead, Tile::kColumns, Tile::kKeys, true>;

  uint32_t base;
  Copy copy;
  RingPlace<Tile::kSlots> place;
  // Compressed rows: tiles fetched and not converted, two bits each, 1 for keys and 2 for an odd first row, and the
  // positions of the next ones.
  int held = 0, fetched = 0, converted = 0;
  unsigned kinds = 0;

  __device__ __forceinline__ PromptFeed(uint32_t base, int thread) : base(base), copy{thread} {}

  __device__ __forceinline__ uint32_t slot() const { return base + Tile::kRing + place.slot * Tile::kSlotBytes; }

  __device__ __forceinline__ void await_slot() const {
    barrier_wait(base + Tile::kEmpty + 8 * place.slot, place.parity ^ 1);
  }

  // Fills the next slot with `count` rows of the cache from `row` on; with keys come the scales of an int8 cache.
  template <bool kKeys, class Args>
  __device__ __forceinline__ void fill(const Args& args, long long row, int count) {
    if constexpr (Tile::kScaled) {
      copy.template fetch<kKeys>(args, row, count, raw(fetched));
      copy_async_commit();
      kinds = kinds << 2 | static_cast<unsigned>(row % 2) << 1 | kKeys;
      fetched = fetched == Tile::kAhead ? 0 : fetched + 1;
      if (++held > Tile::kAhead) {
        copy_async_wait<Tile::kAhead>();
        convert(args.scale);
      }
    } else {
      await_slot();
      copy.rows((kKeys ? args.keys : args.values) + row * Tile::kHead, count, slot());
      barrier_arrive_copied(base + Tile::kFull + 8 * place.slot);
      place.advance();
    }
  }

  // Converts the rows that were fetched first of those held.
  __device__ __forceinline__ void convert(float scale) {
    const uint32_t from = raw(converted);
    --held;
    await_slot();
    const unsigned kind = kinds >> 2 * held;
    const bool odd = kind & 2;
    if (kSameTypes<typename Tile::Keys, typename Tile::Values> || kind & 1) {
      copy.template convert<true>(from, slot(), odd);
    } else {
      copy.template convert<false>(from, slot(), odd);
    }
    if (kind & 1) copy.convert_scales(from, scale, base + Tile::kScales + place.slot * Tile::kScaleBytes, odd);
    barrier_arrive(base + Tile::kFull + 8 * place.slot);
    converted = converted == Tile::kAhead ? 0 : converted + 1;
    place.advance();
  }
  __device__ __forceinline__ uint32_t raw(int i) const { return base + Tile::kRaw + i * Copy::kRawBytes; }

  template <class Args>
  __device__ __forceinline__ void run(const Args& args, int tiles) {
    int turn = 0;
    TileRounds<Tile::kParts> rounds{tiles};
    for (int tile = rounds.next(); tile >= 0; tile = rounds.next()) {
      const PromptRows rows(args, tile, Tile::kRows, Tile::kKeys);
      const PromptPart<Tile::kParts, Tile::kKeys> part(rows);
      if (part.is_empty()) continue;
      const auto first = rows.cache_row(args);
      int at = part.at;
      fill<true>(args, first + at, rows.places - at);
      barrier_wait(base + Tile::kQueryEmpty, turn ^ 1);
      turn ^= 1;
      copy.template queries<Tile::kRows>(args, rows, base);
      barrier_arrive_copied(base + Tile::kQueryFull);
      for (; at > part.first; at -= Tile::kKeys) {
        fill<true>(args, first + at - Tile::kKeys, Tile::kKeys);
        fill<false>(args, first + at, rows.places - at);
      }
      fill<false>(args, first + at, rows.places - at);
      if constexpr (Tile::kScaled) {
        copy_async_wait<0>();
        while (held > 0) convert(args.scale);
      }
    }
    copy_async_wait_all();
  }
};

// A warpgroup that multiplies: rows 64 * group of each tile and those that follow.
template <class Tile>
struct PromptGroup {
  using T = typename Tile::T;
  using Scores = WgmmaFloat<T, Tile::kKeys>;
  using Values = WgmmaFloat<T, Tile::kColumns>;

  uint32_t base;
  int group;
  RingPlace<Tile::kSlots> place;
  float s[Tile::kKeys / 2];
  uint32_t p[Tile::kKeys / 16][4];
  float o[Tile::kColumns / 2];
  PromptSoftmax softmax;

  __device__ __forceinline__ PromptGroup(uint32_t base, int group) : base(base), group(group) {}

  // Waits for the next slots, and makes what others stored there visible to the tensor cores.
  template <int kSlots>
  __device__ __forceinline__ void await() const {
    RingPlace<Tile::kSlots> next = place;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      barrier_wait(base + Tile::kFull + 8 * next.slot, next.parity);
      next.advance();
    }
    fence_shared_for_async();
  }
  __device__ __forceinline__ void release(int slot) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(base + Tile::kEmpty + 8 * slot);
  }
  __device__ __forceinline__ uint32_t slot() const {
    return __shfl_sync(0xffffffffu, base + Tile::kRing + place.slot * Tile::kSlotBytes, 0);
  }

  __device__ __forceinline__ void multiply_keys() {
    const unsigned long long a = wgmma_descriptor(__shfl_sync(0xffffffffu, base + group * (64 * 128), 0));
    const unsigned long long b = wgmma_descriptor(slot());
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 16; ++i) {
      Scores::shared(s, a + i / 4 * (Tile::kQueryBlock / 16) + i % 4 * kWgmmaStep,
                     b + i / 4 * (Tile::kKeyBlock / 16) + i % 4 * kWgmmaStep, i > 0);
    }
    wgmma_commit();
  }
  // After multiply_keys: no register that the products use has changed since.
  __device__ __forceinline__ void multiply_values_too() {
    const unsigned long long b = wgmma_tall_descriptor(slot(), Tile::kKeyBlock);
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 16; ++i) Values::tall(o, p[i], b + i * kWgmmaTallStep);
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values() {
    wgmma_fence();
    multiply_values_too();
  }
  __device__ __forceinline__ void pin_scores() {
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 2; ++i) pin(s[i]);
  }
  __device__ __forceinline__ void pin_values() {
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) pin(o[i]);
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 16; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) asm volatile("" : "+r"(p[i][k])::"memory");
    }
  }
  template <class Args>
  __device__ __forceinline__ float2 weigh(const Args& args, const PromptRows& rows, int at, int slot, int last,
                                          int last8) {
    const uint32_t scales = base + Tile::kScales + slot * Tile::kScaleBytes;
    return weigh_block<Tile::kScaled>(args, softmax, s, scales, rows, at, last, last8);
  }

  // Warpgroups take turns: each waits for the one before, and lets the next one go.
  __device__ __forceinline__ void take_turn() const {
    if constexpr (Tile::kGroups > 1) named_barrier_sync<256>(1 + group);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Tile::kGroups > 1) named_barrier_arrive<256>(1 + (group + 1) % Tile::kGroups);
  }

  template <class Args>
  __device__ __forceinline__ void run(const Args& args, int tiles) {
    int turn = 0;
    if (Tile::kGroups > 1 && group == Tile::kGroups - 1) pass_turn();
    const int row = 64 * group + static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    TileRounds<Tile::kParts> rounds{tiles};
    for (int tile = rounds.next(); tile >= 0; tile = rounds.next()) {
      const PromptRows rows(args, tile, Tile::kRows, Tile::kKeys);
      softmax = PromptSoftmax();
#pragma unroll
      for (int i = 0; i < Tile::kColumns / 2; ++i) o[i] = 0.0f;
      const PromptPart<Tile::kParts, Tile::kKeys> part(rows);
      if (!part.is_empty()) {
        const int last = rows.last_place(row), last8 = rows.last_place(row + 8);
        int at = part.at;
        barrier_wait(base + Tile::kQueryFull, turn);
        turn ^= 1;
        await<1>();
        take_turn();
        multiply_keys();
        pass_turn();
        wgmma_wait<0>();
        pin_scores();
        weigh(args, rows, at, place.slot, last, last8);
        release(place.slot);
        place.advance();
        round_weights<T>(p, s);
#pragma unroll 1
        for (at -= Tile::kKeys; at >= part.first; at -= Tile::kKeys) {
          await<2>();
          take_turn();
          multiply_keys();
          const int keys = place.slot;
          place.advance();
          multiply_values_too();
          pass_turn();
          wgmma_wait<1>();
          pin_scores();
          if constexpr (!Tile::kScaled) release(keys);
          const float2 scale = weigh(args, rows, at, keys, last, last8);
          if constexpr (Tile::kScaled) release(keys);
          hold(fminf(softmax.sum[0], softmax.sum[1]));
          wgmma_wait<0>();
          pin_values();
          release(place.slot);
          place.advance();
          round_weights<T>(p, s);
          // Later blocks seldom hold a row's largest score.
          if (!__all_sync(0xffffffffu, scale.x == 1.0f && scale.y == 1.0f)) {
#pragma unroll
            for (int i = 0; i < Tile::kColumns / 2; ++i) o[i] *= i / 2 % 2 ? scale.y : scale.x;
          }
        }
        if (threadIdx.x % 32 == 0) barrier_arrive(base + Tile::kQueryEmpty);
        await<1>();
        multiply_values();
        wgmma_wait<0>();
        pin_values();
        release(place.slot);
        place.advance();
        // Of a tile in several parts, merge_parts adds them.
        if constexpr (Args::kSinks) {
          if (part.alone) softmax.add_sinks(rows.sinks(args, row), weight_scale<Tile::kScaled>(args));
        }
      }
      if constexpr (CacheType<typename Tile::Values>::kTurned) turn_rows_back<Tile::kHead>(o);
      if (part.alone) {
        if (part.first > 0) continue;
        const float factor[2] = {1.0f / softmax.total(0), 1.0f / softmax.total(1)};
        store_rows<T, Tile::kHead>(args, rows, row, o, factor);
      } else {
        leave(row);
      }
    }
  }

  // Leaves this part of a tile in shared memory for merge_parts, in the place of the ring.
  __device__ __forceinline__ void leave(int row) {
    static_assert(Tile::kParts == 1 || Tile::kGroups == 1, "the barrier is that of one warpgroup");
    named_barrier_sync<128>(1);  // all have read the ring
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float all = softmax.total(r);
      const uint32_t to = base + Tile::kLeft + Tile::kLeftPitch * (row + 8 * r) + 8 * (threadIdx.x % 4);
#pragma unroll
      for (int j = 0; j < Tile::kColumns / 8; ++j) {
        store_shared_8(to + 32 * j, bits(o[4 * j + 2 * r]), bits(o[4 * j + 2 * r + 1]));
      }
      if (threadIdx.x % 4 == 0) store_shared_8(to + 4 * Tile::kColumns, bits(softmax.largest[r]), bits(all));
    }
  }
};

// Adds up what the CTAs of a cluster left of a tile, and stores a part of its rows. All threads of the CTA call.
template <class Tile, class Args>
__device__ __forceinline__ void merge_parts(const Args& args, const PromptRows& rows, uint32_t base) {
  using T = typename Tile::T;
  constexpr int kQuads = Tile::kHead / 4;
  constexpr int kShare = Tile::kRows / Tile::kParts;
  const float scale = Tile::kScaled || Args::kCapped ? 1.0f : args.scale;
  const int begin = blockIdx.x % Tile::kParts * kShare;
  for (int i = threadIdx.x; i < kShare * kQuads; i += Tile::kThreads) {
    const int row = begin + i / kQuads, column = i % kQuads * 4;
    long long token;
    int query;
    if (!rows.find(args, row, token, query)) continue;
    [[maybe_unused]] float sink;
    if constexpr (Args::kSinks) sink = args.sinks[query];
    const uint32_t from = base + Tile::kLeft + Tile::kLeftPitch * row;
    float largest[Tile::kParts], sums[Tile::kParts], most = QCUT_HIDDEN;
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
      uint32_t w[4];
      load_cluster_16(w, from + 4 * Tile::kColumns, part);
      largest[part] = __uint_as_float(w[0]);
      sums[part] = __uint_as_float(w[1]);
      most = fmaxf(most, largest[part]);
    }
    float all = 0.0f, v[4] = {};
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
      // A part without positions has weights and sums of 0. NaN is no maximum: its sum is NaN.
      const float factor = largest[part] == QCUT_HIDDEN ? (sums[part] == 0.0f ? 0.0f : 1.0f)
                                                        : power((largest[part] - most) * scale);
      uint32_t w[4];
      load_cluster_16(w, from + 4 * column, part);
      all = fmaf(sums[part], factor, all);
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = fmaf(__uint_as_float(w[e]), factor, v[e]);
    }
    uint32_t packed[2] = {};
    if (rows.is_real(row)) {
      if constexpr (Args::kSinks) all += sink_weight(sink, most * scale);
      const float inverse = 1.0f / all;
      packed[0] = pack_pair<T>(v[0] * inverse, v[1] * inverse);
      packed[1] = pack_pair<T>(v[2] * inverse, v[3] * inverse);
    }
    const long long heads = args.kv_heads * args.group;
    *reinterpret_cast<uint2*>(args.out + (token * heads + query) * Tile::kHead + column) =
        make_uint2(packed[0], packed[1]);
    const uint32_t peak = Vector<T>{packed[0], packed[1], 0, 0}.abs_max();
    if (args.absmax != nullptr && peak > 0) atomicMax(reinterpret_cast<unsigned*>(args.absmax) + token, peak);
  }
}

template <class Tile>
__device__ __forceinline__ void prompt_attention_wgmma(const typename Tile::Args& args) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kSlots; ++i) {
      barrier_init(base + Tile::kFull + 8 * i, 128);
      barrier_init(base + Tile::kEmpty + 8 * i, 4 * Tile::kGroups);
    }
    barrier_init(base + Tile::kQueryFull, 128);
    barrier_init(base + Tile::kQueryEmpty, 4 * Tile::kGroups);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_dependencies();
  const int tiles = (args.length * args.group + Tile::kRows - 1) / Tile::kRows * args.kv_heads * args.sequences;
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == Tile::kGroups) {
    if constexpr (Tile::kGroups > 1) give_registers<Tile::kFeedRegisters>();
    PromptFeed<Tile>(base, threadIdx.x % 128).run(args, tiles);
  } else {
    if constexpr (Tile::kGroups > 1) take_registers<Tile::kRegisters>();
    PromptGroup<Tile>(base, group).run(args, tiles);
  }
  if constexpr (Tile::kParts > 1) {
    const PromptRows rows(args, blockIdx.x / Tile::kParts, Tile::kRows, Tile::kKeys);
    if (PromptPart<Tile::kParts, Tile::kKeys>(rows).alone) return;  // so it is for all CTAs of the cluster
    cluster_arrive();
    cluster_wait();
    merge_parts<Tile>(args, rows, base);
    // No CTA ends while others read what it left.
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace qcut
