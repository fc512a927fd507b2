// D^T = epilogue(W X^T) of many rotated tokens X and codebook weights W (sm_90a), for prefill. Decoded weights are the
// operand of wgmma that lies in registers.
//
// A CTA computes tiles of 128 rows of weights x kTokens tokens with three warpgroups. Two of them multiply 64 rows
// each; the third gives its registers to these two. One warp of the third warpgroup copies tokens to shared
// memory. The previous kernel has stored the tokens as wgmma reads them, so that plain bulk copies suffice; a
// stage holds the tokens of one unit of K, 128 columns. Indices and norms are too small for bulk copies: each
// multiplying warp loads its own to registers, a unit ahead, and decodes them. For int8, the other warps of the
// third warpgroup compute the int8 codebook of each row from its norms. While the tensor core multiplies one half
// of a unit, a warp decodes the other half as a whole; decoding the weights of a single product would be a chain
// of latencies that nothing hides.
//
// kCluster CTAs along N share their tokens: each CTA fetches a part and multicasts it to all. CTAs are
// persistent, and the fetching warp runs ahead into the next tile. The first warpgroup is kLead units ahead of
// the second: each writes its part of D while the other has the tensor core to itself. With kSplits > 1, the CTAs
// of a cluster share the units of one tile instead. An expert's last tile may have few routes: its products then are of
// half as many tokens.
//
// Each lane's accumulators are of neighbouring tokens, whereas neighbouring channels are contiguous in D. 16-bit
// results without a residual are finished where they lie and transposed on their way to shared memory, from which
// each lane writes 16 bytes of a row. Else raw sums of kBatch times 16 tokens at a time are staged there, and of
// each 16 tokens every warp of a warpgroup writes four rows of 64 channels.
//
// Exactness: int8 products are added in int32. 16-bit weights times their norms are rounded once (bfloat16: the
// norms, too), and float32 sums are added in a fixed order, those of splits in the order of their ranks.
//
// Source: PTX ISA 8.x, "wgmma.mma_async", "cp.async.bulk" (.multicast::cluster), "mbarrier", "barrier".
#pragma once

#include <qcut/codebook/wgmma_feed.cuh>

namespace qcut {

// Stages sixteen tokens of a warp's accumulators in the order of staged_token: of each eight, the even ones come first.
template <class Stage, class Acc>
__device__ __forceinline__ void stage_tokens(const Acc* acc, uint32_t shared, int warp) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  const uint32_t mine = shared + Stage::offset(t, 0) + 4 * (16 * warp + g);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int j = i / 4, row8 = i / 2 % 2, odd = i % 2;
    store_shared_4(mine + Stage::offset(8 * j + 4 * odd, 0) + 32 * row8, bits(acc[i]));
  }
}

// The rows of D that a tile writes, neighbours or an expert's routes, and the epilogue's arguments for them. Routes, and
// scales of tokens by token of the tile, are in shared memory: each sixteen rows would wait for the load of their routes,
// and then for that of their scales.
template <class E, bool kOfExperts>
struct WrittenRows {
  typename E::Args args;
  const int* routes;
  int first, m;  // the first neighbour; the number of all rows of D

  template <class T, class Rows>
  __device__ __forceinline__ WrittenRows(const PromptWork<T, Rows>& work, const typename E::Args& all, int tile, int first,
                                      int n, const int* routes, const float* scales)
      : args(all), routes(routes), first(first), m(work.total()) {
    args.row_scale = scales;
    if constexpr (kOfExperts) {
      const long long expert = work.expert(tile);
      args.col_scale_per_channel += expert * n;
      if (args.bias != nullptr) args.bias += expert * n;
    }
  }
  // The row of a token, not written from m on.
  __device__ __forceinline__ int row(int token) const {
    if constexpr (kOfExperts) {
      return min(static_cast<unsigned>(routes[token]), static_cast<unsigned>(m));
    } else {
      return first + token;
    }
  }
  __device__ __forceinline__ typename E::Row vectors(int token) const { return E::row(args, token, token + 1); }
  __device__ __forceinline__ bool ends_before(int token) const {
    return kOfExperts ? routes[token] < 0 : first + token >= m;
  }
  // Fetches what a lane's rows of sixteen tokens need.
  template <class Writer>
  __device__ __forceinline__ void fetch(const Writer& writer, typename Writer::Rows& rows, int round) const {
#pragma unroll
    for (int p = 0; p < Writer::kPasses; ++p) {
      const int token = 16 * round + staged_token(writer.staged + p * Writer::kRowsPerPass);
      rows.at[p] = row(token);
      rows.across[p] = vectors(token);
      writer.fetch_residual(rows, p);
    }
  }
};

// What a warpgroup has of the rows of its tile in shared memory: routes and, of int8 tokens, scales. There are two places
// for what is copied first, for a warp may be a tile ahead of the others.
template <class T, bool kOfExperts>
struct TileVectors {
  static constexpr bool kScales = sizeof(typename T::X) == 1;
  static constexpr int kPlace = 4 * T::kTokens;
  static constexpr int kBytes = kPlace * (2 * (kOfExperts || kScales) + (kOfExperts && kScales));
  const int* all_routes;  // nullptr of neighbours
  const float* row_scale;
  uint32_t base;
  int offset, odd = 0;  // of the warpgroup's memory; whether this tile has the second place

  __device__ __forceinline__ int first_place() const { return offset + odd * kPlace; }
  __device__ __forceinline__ const int* routes() const {
    return reinterpret_cast<const int*>(dynamic_shared() + first_place());
  }
  __device__ __forceinline__ int scales_at() const { return kOfExperts ? offset + 2 * kPlace : first_place(); }
  __device__ __forceinline__ const float* scales() const {
    return reinterpret_cast<const float*>(dynamic_shared() + scales_at());
  }
  // Starts the copies of a tile's routes, or of its tokens' scales; `total` counts all routes or tokens.
  __device__ __forceinline__ void begin(int first, int total) {
    odd ^= 1;
    if constexpr (kOfExperts || kScales) {
      for (int i = threadIdx.x % 128; i < T::kTokens; i += 128) {
        const uint32_t to = base + first_place() + 4 * i;
        if constexpr (kOfExperts) {
          copy_async<4>(to, all_routes + first + i, false);
        } else {
          const bool none = first + i >= total;
          copy_async<4>(to, row_scale + (none ? 0 : first + i), none);
        }
      }
    }
  }
  // Waits for them, and then for the scales of routes. All threads of the warpgroup call.
  __device__ __forceinline__ void settle(int total, int barrier) const {
    if constexpr (kOfExperts || kScales) {
      copy_async_wait_all();
      named_barrier_sync<128>(barrier);
    }
    if constexpr (kOfExperts && kScales) {
      for (int i = threadIdx.x % 128; i < T::kTokens; i += 128) {
        const int route = routes()[i];
        const bool none = static_cast<unsigned>(route) >= static_cast<unsigned>(total);
        copy_async<4>(base + scales_at() + 4 * i, row_scale + (none ? 0 : route), none);
      }
      copy_async_wait_all();
      named_barrier_sync<128>(barrier);
    }
  }
};

// Writes a warpgroup's tile of 16-bit results without a residual. Each warp finishes sums of its 16 channels, sixteen
// tokens at a time, and transposes them on their way to a buffer of many tokens. Of a filled buffer, each lane writes
// pieces of 16 bytes while the other one is filled.
template <class T, class E, int kAlign>
struct TransposedTile {
  using Out = typename E::Out;
  static constexpr int kPitch = 128 + 16;  // of a row of 64 channels: eight rows' 16 bytes meet every bank once
  static constexpr int kBufferRounds = T::kBuffers;
  static constexpr int kBufferBytes = 16 * kBufferRounds * kPitch;
  static_assert(sizeof(Out) == 2 && !E::kHasResidual, "results of 16 bits that are finished before they move");
  static_assert(2 * kBufferBytes <= T::kBuffers * T::Stage::kBytes, "two buffers in the warpgroup's staging memory");

  // Writes channels channel0 .. channel0 + 63, those from n on left out. All threads of the warpgroup call; `staging` and
  // `barrier` are theirs. `odd` is the buffer that is filled next.
  template <class Rows>
  static __device__ __forceinline__ void write(const typename T::Acc (&acc)[T::kTokens / 2], const Rows& rows, Out* d,
                                               int channel0, int n, int ldd, uint32_t staging, int& odd, int barrier) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int channel = channel0 + 16 * warp + lane / 4;
    const auto low = E::column(rows.args, channel, n), high = E::column(rows.args, channel + 8, n);
    const uint32_t filled = staging + kPitch * (lane / 16 * 8 + lane % 8) + 16 * (2 * warp + lane / 8 % 2);
    const int my_token = threadIdx.x % 128 / 8, my_channel = channel0 + 8 * (lane % 8);
    const uint32_t read = staging + kPitch * my_token + 16 * (lane % 8);
#pragma unroll
    for (int first = 0; first < T::kRounds; first += kBufferRounds) {
      if (rows.ends_before(16 * first)) break;
      const uint32_t buffer = odd * kBufferBytes;
      odd ^= 1;
#pragma unroll
      for (int round = first; round < first + kBufferRounds && round < T::kRounds; ++round) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int token = 16 * round + 8 * j + 2 * (lane % 4);
          const auto even = rows.vectors(token), uneven = rows.vectors(token + 1);
          const typename T::Acc* const sums = acc + 8 * round + 4 * j;
          const auto value = [&](int i) {
            const auto v = E::apply(sums[i], i % 2 ? uneven : even, i / 2 ? high : low);
            return E::finish(v, 0.0f, rows.args);
          };
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            words[2 * j + half] = pack_pair<Out>(value(2 * half), value(2 * half + 1));
          }
        }
        store_matrices_transposed(filled + buffer + 16 * kPitch * (round - first), words);
      }
      // At the barrier all have read the other buffer, which is filled next.
      named_barrier_sync<128>(barrier);
#pragma unroll
      for (int round = first; round < first + kBufferRounds && round < T::kRounds; ++round) {
        const int row = rows.row(16 * round + my_token);
        if (row >= rows.m) continue;
        uint32_t words[4];
        load_shared_16(words, read + buffer + 16 * kPitch * (round - first));
        char* const to = reinterpret_cast<char*>(d + static_cast<long long>(row) * ldd + my_channel);
#pragma unroll
        for (int at = 0; at < 16; at += kAlign) {
          if (my_channel + at / 2 < n) store_piece<kAlign>(to + at, words, at);
        }
      }
    }
  }
};

// Products with weights that a stream loads and a decoder decodes to registers. They are issued in batches of kBatch,
// whose weights are decoded together into one of kRing buffers.
template <class T, class Weights, class B>
struct DecodedProducts {
  using Decoder = typename Weights::template Decoder<T>;
  static constexpr int kSteps = Decoder::kSteps;
  static constexpr int kBatch = T::kFine ? 1 : kSteps / 2;
  static constexpr int kBatches = kSteps / kBatch;
  static constexpr int kRing = T::kFine ? 4 : 2;
  Decoder decoder;
  typename Weights::template Stream<T> stream;
  uint32_t a[kRing][kBatch][4] = {};

  __device__ __forceinline__ DecodedProducts(const Weights& weights, const B& book, uint32_t base, int warp, int lane)
      : decoder(book, base, warp, lane), stream(weights) {}
  template <class Work>
  __device__ __forceinline__ void begin(const Weights& weights, const Work& work, int tile, int warp, int lane) {
    stream.begin(weights, work, tile, warp, lane);
  }
  // Goes to the next unit, of which there are `more`.
  __device__ __forceinline__ void advance(bool more, int lane) { stream.advance(more, lane); }
  // Products in flight read these registers, which must therefore live until the wait for these products.
  __device__ __forceinline__ void keep_operands(int buffer) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) pin(a[buffer][i]);
  }
  __device__ __forceinline__ void keep_all() {
#pragma unroll
    for (int k = 0; k < kRing; ++k) keep_operands(k);
  }
  // Issues batch k with kTokens tokens, whose sums are the first ones.
  template <int kTokens>
  __device__ __forceinline__ void issue(typename T::Acc (&acc)[T::kTokens / 2], unsigned long long tokens0,
                                        uint32_t tokens, int k) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int step = k * kBatch + i;
      // A unit of 16-bit tokens has two blocks of 128 bytes, a unit of int8 tokens one; a block feeds four products.
      const uint32_t at = tokens + step / 4 * (8 * T::kTokens) + step % 4 * static_cast<uint32_t>(kWgmmaStep);
      Wgmma<typename T::X, kTokens>::issue(reinterpret_cast<typename T::Acc(&)[kTokens / 2]>(acc), a[k % kRing][i],
                                           tokens0 >> 32 << 32 | at, 1);
    }
    wgmma_commit();
  }
  // Multiplies a unit whose stage is filled. Calls `release` once the unit before has been multiplied.
  template <class Release>
  __device__ __forceinline__ void multiply(typename T::Acc (&acc)[T::kTokens / 2], unsigned long long tokens0, int stage,
                                           bool is_short, const Release& release) {
    const uint32_t tokens = static_cast<uint32_t>(tokens0) + stage * (T::kTokenBytes / 16);
#pragma unroll
    for (int k = 0; k < kBatches; ++k) {
      wgmma_wait<kRing - 1>();
      keep_operands(k % kRing);
      if (k == kRing - 1) release();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        decoder.fetch(k * kBatch + i, stage);
        decoder.decode(a[k % kRing][i], stream, k * kBatch + i);
      }
      if (is_short) {
        issue<T::kShort>(acc, tokens0, tokens, k);
      } else {
        issue<T::kTokens>(acc, tokens0, tokens, k);
      }
    }
  }
};

// The work of the two multiplying warpgroups. Each writes its 64 channels of D.
template <class T, class E, int kAlign, class Products, class Weights, class B, class Rows>
__device__ __forceinline__ void multiply_prompt(const PromptWork<T, Rows>& work, const Weights& weights,
                                                typename E::Out* d, int n, int ldd, const B& book,
                                                const typename E::Args& args, uint32_t base) {
  using Acc = typename T::Acc;
  using Stage = typename T::Stage;
  constexpr int kLeadBarrier = 1, kGroupBarrier = 2;
  const int lane = keep(threadIdx.x % 32);
  const int warp = keep(threadIdx.x / 32);
  const int group = warp / 4;
  const uint32_t staging = base + T::kStaging + group * (T::kBuffers * Stage::kBytes);
  const unsigned long long tokens0 = wgmma_descriptor(base + T::kFirstStage);

  const uint32_t empty = T::kCluster > 1 ? map_to_rank(base + T::kEmpty, lane % T::kCluster) : base + T::kEmpty;
  const auto release = [&](int stage) {
    if (lane >= T::kCluster) return;
    if constexpr (T::kCluster > 1) {
      barrier_arrive_cluster(empty + 8 * stage);
    } else {
      barrier_arrive(empty + 8 * stage);
    }
  };
  const auto wait_stage = [&](const RingPlace<T::kStages>& place) {
    if constexpr (T::kSupplyBytes > 0) barrier_wait(base + T::kSupplied + 8 * place.stage, place.parity);
    barrier_wait(base + T::kFull + 8 * place.stage, place.parity);
  };

  Products products(weights, book, base, warp, lane);
  const auto begin_tile = [&](int tile) {
    if (tile < work.count() && work.units > 0) products.begin(weights, work, tile, warp, lane);
  };
  if constexpr (Rows::kOfExperts) wait_for_dependencies();
  begin_tile(work.first());
  bool is_short = work.is_short(work.first());
  if constexpr (!Rows::kOfExperts) wait_for_dependencies();
  RingPlace<T::kStages> place;
  int lead = T::kSplits == 1 && work.first() < work.count() ? min(T::kLead, work.units) : 0;
  int buffer = 0;
  using Vectors = TileVectors<T, Rows::kOfExperts>;
  Vectors vectors{nullptr, args.row_scale, base, T::kVectors + group * Vectors::kBytes};
  if constexpr (Rows::kOfExperts) vectors.all_routes = work.rows.routes;
  if (lead > 0 && group == 1) named_barrier_sync<T::kThreads>(kLeadBarrier);
  int next = 0;
  for (int tile = work.first(); tile < work.count(); tile = next) {
    const int2 at = work.tile(tile);
    const int channel0 = 16 * at.y + 64 * group;
    if constexpr (T::kSplits == 1) vectors.begin(at.x, work.total());
    Acc acc[T::kTokens / 2];
#pragma unroll
    for (int i = 0; i < T::kTokens / 2; ++i) acc[i] = 0;
#pragma unroll
    for (int i = 0; i < T::kTokens / 2; ++i) pin(acc[i]);

    // With scales of units, products of a unit are a sum of their own, which is multiplied by its scale and added.
    float sums_of_units[E::kUnitScales ? T::kTokens / 2 : 1] = {};
    const float* scales = nullptr;
    if constexpr (E::kUnitScales) {
      const int row_tiles = (n + 15) / 16;
      const long long rows = work.expert(tile) * row_tiles + min(channel0 / 16 + warp % 4, row_tiles - 1);
      scales = args.col_scale_per_unit + rows * work.units;
    }
    const auto add_unit = [&] {
      wgmma_wait<0>();
      products.keep_all();
      const float scale = *scales++;
#pragma unroll
      for (int i = 0; i < T::kTokens / 2; ++i) {
        pin(acc[i]);  // not read before the wait
        sums_of_units[i] = fmaf(scale, acc[i], sums_of_units[i]);
        acc[i] = 0;
      }
    };

    int previous = 0;
    bool next_is_short = false;
    for (int u = 0; u < work.units; ++u) {
      if constexpr (E::kUnitScales) {
        if (u > 0) add_unit();
      }
      const int stage = place.stage;
      products.advance(u + 1 < work.units, lane);
      wait_stage(place);
      place.advance();
      products.multiply(acc, tokens0, stage, is_short, [&] {
        if (u > 0) release(previous);
      });
      // Here products hide the loads of what the next tile is.
      if (Rows::kOfExperts && u == 0) {
        next = work.next(tile);
        next_is_short = work.is_short(next);
      }
      previous = stage;
      if (lead > 0 && group == 0 && --lead == 0) named_barrier_arrive<T::kThreads>(kLeadBarrier);
    }
    if constexpr (!Rows::kOfExperts) next = work.next(tile);
    begin_tile(next);
    is_short = next_is_short;

    if constexpr (T::kSplits == 1) {
      vectors.settle(work.total(), kGroupBarrier + group);
      const WrittenRows<E, Rows::kOfExperts> written(work, args, tile, at.x, n, vectors.routes(), vectors.scales());
      const auto finish_products = [&] {
        if constexpr (E::kUnitScales) {
          add_unit();
          release(previous);
#pragma unroll
          for (int i = 0; i < T::kTokens / 2; ++i) acc[i] = sums_of_units[i];
          return;
        }
        wgmma_wait<0>();
        products.keep_all();
        release(previous);
#pragma unroll
        for (int i = 0; i < T::kTokens / 2; ++i) pin(acc[i]);
      };
      if constexpr (sizeof(typename E::Out) == 2 && !E::kHasResidual) {
        using Writer = TransposedTile<T, E, kAlign>;
        finish_products();
        if (channel0 < n) {
          Writer::write(acc, written, d, channel0, n, ldd, staging, buffer, kGroupBarrier + group);
        }
        continue;
      }
      // A warp writes four of sixteen tokens, as a CTA of a cluster of four does.
      using Writer = TileWriter<E, kAlign, false, Acc, 64, Stage, 4>;
      constexpr int kAhead = (E::kHasResidual ? 2 : 4) / Writer::kPasses;  // rounds whose vectors are in flight
      const Writer writer(d, written.first, channel0, written.m, n, ldd, written.args, warp % 4);
      typename Writer::Rows rows[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) written.fetch(writer, rows[i], i);
      finish_products();
      if (channel0 >= n) continue;
#pragma unroll
      for (int i = 0; i < T::kRounds; i += T::kBatch) {
        if (written.ends_before(16 * i)) break;
        const uint32_t to = staging + buffer * (T::kBatch * Stage::kBytes);
        // With two batches of buffers, all warps have read this buffer at the barrier of the batch in between.
        buffer = T::kBuffers > 1 ? buffer ^ 1 : 0;
        if constexpr (T::kBuffers == 1) named_barrier_sync<128>(kGroupBarrier + group);
#pragma unroll
        for (int b = 0; b < T::kBatch; ++b) stage_tokens<Stage>(&acc[8 * (i + b)], to + b * Stage::kBytes, warp % 4);
        named_barrier_sync<128>(kGroupBarrier + group);
        typename Writer::Sums sums[T::kBatch];
#pragma unroll
        for (int b = 0; b < T::kBatch; ++b) {
#pragma unroll
          for (int p = 0; p < Writer::kPasses; ++p) {
#pragma unroll
            for (int j = 0; j < Writer::kChunks; ++j) {
              const int row = writer.staged + p * Writer::kRowsPerPass;
              const int chunk = lane % Writer::kLanes * Writer::kChunks + j;
              load_shared_16(sums[b][p][j], to + b * Stage::kBytes + Stage::offset(row, chunk));
            }
          }
        }
#pragma unroll
        for (int b = 0; b < T::kBatch; ++b) {
          const int round = i + b;
          const typename Writer::Rows current = rows[round % kAhead];
          if (round + kAhead < T::kRounds) written.fetch(writer, rows[round % kAhead], round + kAhead);
          writer.write(current, sums[b]);
        }
      }
    } else {
      using Writer = TileWriter<E, kAlign, false, Acc, 64, Stage, T::kSplits>;
      const Writer writer(d, at.x, channel0, work.m, n, ldd, args, work.rank);
      wgmma_wait<0>();
      products.keep_all();
#pragma unroll
      for (int i = 0; i < T::kTokens / 2; ++i) pin(acc[i]);
      named_barrier_sync<T::kThreads>(kLeadBarrier);  // both groups have read all operands
      const uint32_t sums_at = base + group * (T::kRounds * Stage::kBytes);
#pragma unroll
      for (int i = 0; i < T::kRounds; ++i) stage_tokens<Stage>(&acc[8 * i], sums_at + i * Stage::kBytes, warp % 4);
      cluster_arrive();
      cluster_wait();
#pragma unroll
      for (int i = 0; i < T::kRounds; i += 4) {
        const int round = i + warp % 4;
        if (T::kRounds % 4 != 0 && round >= T::kRounds) break;
        typename Writer::Rows rows;
        typename Writer::Sums sums;
        writer.fetch(rows, round, staged_token);
        writer.load(sums, sums_at + round * Stage::kBytes);
        writer.write(rows, sums);
      }
    }
  }
}

// The kernel, of codebook weights or of others with a supply; Products has DecodedProducts' functions. kAlign is the
// alignment of D's rows in bytes, as in TileWriter. With ExpertRows, m counts the routes of all tiles, and row_scale is
// that of routes.
template <class T, class E, int kAlign, class Products, class Weights, class B, class Rows>
__device__ __forceinline__ void prompt_product(const char* x, const Weights& weights, typename E::Out* d, int m, int n,
                                               int units_k, int ldd, const B& book, const typename E::Args& args,
                                               const Rows& rows) {
  static_assert(!Rows::kOfExperts || T::kSplits == 1, "splits write rows of tokens");
  static_assert(!B::kPairs || T::kPairs, "a codebook of pairs needs the table");
  extern __shared__ __align__(1024) char shared[];
  launch_dependents();
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(base + T::kFull + 8 * i, 1);
      barrier_init(base + T::kEmpty + 8 * i, T::kWarps * T::kCluster);
      if constexpr (T::kSupplyBytes > 0) barrier_init(base + T::kSupplied + 8 * i, T::kSuppliers);
    }
    barrier_init_fence();
  }
  if constexpr (T::kPairs) fill_pair_table<T::kWarps + 4>(shared, book);
  if constexpr (T::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  if (threadIdx.x >= T::kThreads) {
    give_registers<T::kFetchRegisters>();
    if (threadIdx.x < T::kThreads + 32) {
      fetch_prompt(PromptWork<T, Rows>(m, n, units_k, rows), x, base);
    } else if constexpr (T::kSupplyBytes > 0) {
      weights.supply(PromptWork<T, Rows>(m, n, units_k, rows), book, base);
    }
    if constexpr (T::kSplits > 1) {  // matches the cluster's barrier before the sums are read
      cluster_arrive();
      cluster_wait();
    }
  } else {
    take_registers<T::kRegisters>();
    const PromptWork<T, Rows> work(m, n, units_k, rows);
    multiply_prompt<T, E, kAlign, Products>(work, weights, d, n, ldd, book, args, base);
  }
  // No CTA exits while other CTAs copy to its memory, arrive at its barriers or read its sums.
  if constexpr (T::kCtas > 1) {
    cluster_arrive();
    cluster_wait();
  }
}

template <class T, class E, int kAlign, class B, class Rows = AllRows>
__device__ __forceinline__ void codebook_wgmma(const char* x, const char* units, const char* norms, const float* fold,
                                               typename E::Out* d, int m, int n, int units_k, int ldd, const B& book,
                                               const typename E::Args& args, const Rows& rows = Rows()) {
  prompt_product<T, E, kAlign, DecodedProducts<T, CodebookRows, B>>(x, CodebookRows{units, norms, fold}, d, m, n, units_k,
                                                                    ldd, book, args, rows);
}

}  // namespace qcut
