// Prefill attention with mma.sync, on every architecture.
//
// Each of the four warps of a CTA has 16 rows of a tile. Blocks of keys and values come to one of two stages of shared
// memory while the other stage is multiplied; blocks go from the last visible position to the first.
//
// Shared memory: queries; two stages of keys, values, and the scales of an int8 cache.
#pragma once

#include <qcut/attention/prompt_copy.cuh>

namespace qcut {

template <class T_, class Keys_, class Values_, int kHead_, int kColumns_, int kKeys_, bool kWindowed = false,
          bool kCapped = false, bool kRing = false, bool kSinks = false>
struct PromptMmaTile {
  using T = T_;
  using Keys = Keys_;
  using Values = Values_;
  using Args = typename PromptArgsOf<T, Keys, Values, kWindowed, kCapped, kRing, kSinks>::Type;
  using Copy = PromptCopy<T, Keys, Values, kHead_, kColumns_, kKeys_, false>;
  static constexpr int kHead = kHead_;
  static constexpr int kColumns = kColumns_;  // of products: kHead and zeros
  static constexpr int kKeys = kKeys_;        // of a block
  static constexpr bool kScaled = CacheType<Keys>::kScaled;
  static constexpr int kRows = 64;
  static constexpr int kBlocks = (kColumns + 63) / 64;
  static constexpr int kQueryBlock = 128 * kRows;
  static constexpr int kKeyBlock = 128 * kKeys;
  static constexpr int kTileBytes = kBlocks * kKeyBlock;
  static constexpr int kStageBytes = 2 * kTileBytes + (kScaled ? Copy::kScaleBytes : 0);
  static constexpr int kStages = kBlocks * kQueryBlock;  // offset of the first stage
  static constexpr int kRaw = kStages + 2 * kStageBytes;  // int8 keys and values before they are converted
  // Queries stay in registers where these suffice.
  static constexpr bool kHoldsQueries = kColumns <= (kScaled ? 96 : 128);
};

template <class Tile>
struct PromptWarp {
  using T = typename Tile::T;
  static constexpr int kSteps = Tile::kColumns / 16;

  uint32_t base;
  int warp, lane;
  float o[Tile::kColumns / 2] = {};
  uint32_t held[Tile::kHoldsQueries ? kSteps : 1][4];
  PromptSoftmax softmax;

  __device__ __forceinline__ PromptWarp(uint32_t base) : base(base), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void load_query(uint32_t (&a)[4], int step) const {
    load_matrices(a, base + tile_at(16 * warp + lane % 16, 2 * step + lane / 16, Tile::kQueryBlock));
  }
  __device__ __forceinline__ void hold_queries() {
    if constexpr (Tile::kHoldsQueries) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) load_query(held[i], i);
    }
  }

  // One block: the first key is at position `at`.
  template <class Args>
  __device__ __forceinline__ void attend(const Args& args, const PromptRows& rows, int at, uint32_t stage, int last,
                                         int last8) {
    float s[Tile::kKeys / 2] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t loaded[4];
      if constexpr (!Tile::kHoldsQueries) load_query(loaded, i);
      const uint32_t(&a)[4] = Tile::kHoldsQueries ? held[Tile::kHoldsQueries ? i : 0] : loaded;
#pragma unroll
      for (int j = 0; j < Tile::kKeys / 16; ++j) {
        uint32_t k[4];
        load_matrices(k, stage + tile_at(16 * j + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2, Tile::kKeyBlock));
        multiply(s, 8 * j, a, k);
      }
    }
    const float2 factor =
        weigh_block<Tile::kScaled>(args, softmax, s, stage + 2 * Tile::kTileBytes, rows, at, last, last8);
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) o[i] *= i / 2 % 2 ? factor.y : factor.x;
    uint32_t p[Tile::kKeys / 16][4];
    round_weights<T>(p, s);
    const uint32_t values = stage + Tile::kTileBytes;
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        uint32_t v[4];
        load_matrices_transposed(
            v, values + tile_at(16 * i + lane / 8 % 2 * 8 + lane % 8, 2 * j + lane / 16, Tile::kKeyBlock));
        multiply(o, 8 * j, p[i], v);
      }
    }
  }

  // c += a b of 16 columns; the first accumulator is c[first].
  template <int kSums>
  static __device__ __forceinline__ void multiply(float (&c)[kSums], int first, const uint32_t (&a)[4],
                                                  const uint32_t (&b)[4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float part[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) part[e] = c[first + 4 * n + e];
      Float16<T>::mma(part, a, {b[2 * n], b[2 * n + 1]});
#pragma unroll
      for (int e = 0; e < 4; ++e) c[first + 4 * n + e] = part[e];
    }
  }
};

template <class Tile>
__device__ __forceinline__ void prompt_attention_mma(const typename Tile::Args& args) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  launch_dependents();
  wait_for_dependencies();
  const PromptRows rows(args, blockIdx.x, Tile::kRows, Tile::kKeys);
  const typename Tile::Copy copy{static_cast<int>(threadIdx.x)};
  PromptWarp<Tile> warp(base);
  const int row = 16 * warp.warp + warp.lane / 4;
  float factor[2] = {0.0f, 0.0f};
  if (rows.places > 0) {
    const auto first = rows.cache_row(args);
    const uint32_t raw = base + Tile::kRaw;
    const bool odd = first % 2 != 0;  // blocks start at even positions
    const auto stage = [&](int i) { return base + Tile::kStages + (i & 1) * Tile::kStageBytes; };
    const auto fetch = [&](int at, uint32_t to) {
      const int count = min(rows.places - at, Tile::kKeys);
      if constexpr (Tile::kScaled) {
        copy.template fetch<true>(args, first + at, count, raw);
        copy.template fetch<false>(args, first + at, count, raw + Tile::Copy::kRawBytes);
      } else {
        copy.rows(args.keys + (first + at) * Tile::kHead, count, to);
        copy.rows(args.values + (first + at) * Tile::kHead, count, to + Tile::kTileBytes);
      }
      copy_async_commit();
    };
    // Waits for a thread's own copies, and has all see each other's.
    const auto settle = [&](uint32_t to) {
      copy_async_wait<0>();
      if constexpr (Tile::kScaled) {
        copy.template convert<true>(raw, to, odd);
        copy.template convert<false>(raw + Tile::Copy::kRawBytes, to + Tile::kTileBytes, odd);
        copy.convert_scales(raw, args.scale, to + 2 * Tile::kTileBytes, odd);
      }
      __syncthreads();
    };
    const int last = rows.last_place(row), last8 = rows.last_place(row + 8);
    int at = (rows.places - 1) / Tile::kKeys * Tile::kKeys;
    copy.template queries<Tile::kRows>(args, rows, base);
    fetch(at, stage(0));
    settle(stage(0));
    warp.hold_queries();
#pragma unroll 1
    for (int i = 0; at >= 0; ++i, at -= Tile::kKeys) {
      if (at > 0) fetch(at - Tile::kKeys, stage(i + 1));
      warp.attend(args, rows, at, stage(i), last, last8);
      settle(stage(i + 1));
    }
    if constexpr (Tile::Args::kSinks) {
      warp.softmax.add_sinks(rows.sinks(args, row), weight_scale<Tile::kScaled>(args));
    }
    factor[0] = 1.0f / warp.softmax.total(0);
    factor[1] = 1.0f / warp.softmax.total(1);
  }
  if constexpr (CacheType<typename Tile::Values>::kTurned) turn_rows_back<Tile::kHead>(warp.o);
  store_rows<typename Tile::T, Tile::kHead>(args, rows, row, warp.o, factor);
}

}  // namespace qcut
