// Prompts on codebook weights (sm_90a): D^T = W X^T, decoded weights as wgmma's register operand.
//
// A CTA has 128 rows of weights and kTokens tokens: two warpgroups of 64 rows each, and a third one, which
// leaves its registers to them. One of its warps fetches tokens, which the previous kernel left in memory as
// wgmma reads them, so that plain bulk copies do; a stage holds those of one unit of K, 128 columns. Indices,
// too small for bulk copies, go from global memory to the registers of the warp that decodes them, a unit ahead,
// and so do norms. For int8, the third warpgroup's other warps turn norms into the int8 codebook of each row.
// While the tensor core multiplies one half of a unit, a warp decodes the other, all of it at once: one product's
// weights alone are a chain of latencies that nothing hides.
//
// kCluster CTAs along N share their tokens: each fetches a part and multicasts it. CTAs are persistent, the
// fetching warp runs ahead into the next tile, and the first warpgroup is kLead units ahead of the second:
// each writes its part of D while the other has the tensor core to itself. kSplits CTAs, one cluster, share
// the units of one tile instead, and add their sums in order of rank.
//
// Accumulators have neighbouring tokens in a lane and D neighbouring channels: kBatch times 16 tokens go through
// shared memory at a time, staged as raw sums, and of each 16 the four warps of a group write four rows of 64
// channels each.
//
// Source: PTX ISA 8.x, "wgmma.mma_async", "cp.async.bulk" (.multicast::cluster), "mbarrier", "barrier".
#pragma once

#include <qcut/codebook.cuh>
#include <qcut/gemm.cuh>
#include <qcut/wgmma.cuh>

namespace qcut {

// A named barrier of kThreads threads; 0 is __syncthreads'.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Takes registers for the warpgroup, or gives them back.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// Where the CTA of that rank has what this one has at `shared`.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t shared, int rank) {
  uint32_t there = shared;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
#endif
  return there;
}
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t mapped) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
#endif
}

// copy_bulk to the same address in every CTA of the cluster that `ranks` has a bit for; each one's own
// barrier at that address counts the bytes.
__device__ __forceinline__ void copy_bulk_multicast(uint32_t shared, const void* global, int bytes, uint32_t barrier,
                                                    int ranks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(static_cast<unsigned short>(ranks))
      : "memory");
#endif
}

// A value that the compiler keeps in a register: it would else read the thread's index again in each loop.
__device__ __forceinline__ int keep(int v) { return __shfl_xor_sync(0xffffffffu, v, 0); }

// Shared memory: tokens and tables of all stages, staging, barriers (emitters/codebook_prompt.py).
template <class X_, int kBits_, int kSlots_, int kTokens_, int kStages_, int kLead_, int kCluster_, int kSplits_,
          int kBuffers_>
struct PromptTile {
  using X = X_;
  using Product = Wgmma<X, kTokens_>;
  using Acc = typename Product::Acc;
  using Stage = PaddedStage<64>;
  static constexpr int kBits = kBits_, kSlots = kSlots_, kTokens = kTokens_;
  static constexpr int kStages = kStages_, kLead = kLead_, kCluster = kCluster_, kSplits = kSplits_;
  static constexpr int kCtas = kCluster * kSplits;
  static constexpr int kBuffers = kBuffers_;                      // of 16 staged tokens, for each warpgroup
  static constexpr int kBatch = kBuffers > 1 ? kBuffers / 2 : 1;  // of them between two barriers
  static constexpr int kWarps = 8;                                // that multiply
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kBlocks = sizeof(X);  // of 128 bytes of a token, in a unit
  static constexpr int kRounds = kTokens / 16;

  static constexpr int kTokenBytes = 128 * kBlocks * kTokens;
  static constexpr int kTables = kStages * kTokenBytes;
  static constexpr bool kHasTables = sizeof(X) == 1;
  static constexpr int kTableBytes = kHasTables ? 16 * kRows * kSlots : 0;  // [slot][row][16 int8]
  static constexpr int kOperandBytes = kTables + kStages * kTableBytes;
  // Splits stage all sums, where the operands were.
  static constexpr int kSumBytes = kSplits > 1 ? 2 * kRounds * Stage::kBytes : 0;
  static constexpr int kStaging = kOperandBytes > kSumBytes ? kOperandBytes : kSumBytes;
  // Of each stage: filled, read, and tables built.
  static constexpr int kFull = kStaging + 2 * kBuffers * Stage::kBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kBuilt = kEmpty + 8 * kStages;
  static constexpr int kTableWarps = 3;
  // Of 168 a thread at launch, times three warpgroups.
  static constexpr int kFetchRegisters = !kHasTables ? 40 : kTokens == 256 && kSlots == 1 ? 56 : 72;
  static constexpr int kRegisters = (3 * 168 - kFetchRegisters) / 2;

  static_assert(kTokens == 64 || kTokens == 128 || kTokens == 256, "see emitters/codebook_prompt.py");
  static_assert(kCluster == 1 || kSplits == 1, "a cluster shares tokens or K");
};

// A warp's units of 16 rows, from global memory to registers, one ahead of their turn: they are too small for
// bulk copies, of which sixteen a unit took longer than the products.
template <class T>
struct UnitStream {
  static constexpr bool kHasNorms = !T::kHasTables;
  UnitWords<T::kBits> words, next;
  uint32_t norms[T::kSlots], next_norms[T::kSlots];
  const char* units;  // of what is loaded next
  const char* unit_norms;

  __device__ __forceinline__ UnitStream(const char* units, const char* norms) : units(units), unit_norms(norms) {}

  // Starts at a unit among all.
  __device__ __forceinline__ void begin(const char* all_units, const char* all_norms, long long index, int lane) {
    units = all_units + index * kUnitBytes<T::kBits>;
    unit_norms = all_norms + index * (32 * T::kSlots) + lane / 4 * 4;
    load(lane);
  }
  __device__ __forceinline__ void load(int lane) {
    next.load(units, lane);
    units += kUnitBytes<T::kBits>;
    if constexpr (kHasNorms) {
#pragma unroll
      for (int s = 0; s < T::kSlots; ++s) next_norms[s] = load_stream_4(unit_norms + 32 * s);
      unit_norms += 32 * T::kSlots;
    }
  }
  __device__ __forceinline__ void advance(bool more, int lane) {
    words = next;
    if constexpr (kHasNorms) {
#pragma unroll
      for (int s = 0; s < T::kSlots; ++s) norms[s] = next_norms[s];
    }
    if (more) load(lane);
  }
};

// Decodes a warp's unit, product by product. What `decode` of a step takes from shared memory, `fetch` of that step has
// read; it may run once the step before is decoded.
template <class T>
struct PromptDecoder {
  static constexpr int kSteps = 8;
  RegisterBook book;

  // The compiler would keep tables made of kernel arguments in uniform registers and copy them before each
  // PRMT; words that come from the lanes of a quad are not uniform to it.
  __device__ __forceinline__ PromptDecoder(const Book& values, uint32_t, int, int lane) : book(values) {
    const int t = lane % 4;
    uint32_t low = book.low[0], high = book.high[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      low = t == i ? book.low[i] : low;
      high = t == i ? book.high[i] : high;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      book.low[i] = __shfl_sync(0xffffffffu, low, i, 4);
      book.high[i] = __shfl_sync(0xffffffffu, high, i, 4);
    }
  }
  __device__ __forceinline__ void fetch(int, int) {}
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const UnitStream<T>& unit, int step) const {
    book.decode(a, unit.words.word(step));
    NormScale<typename T::X>(unit.norms[step * T::kSlots / kSteps]).apply(a);
  }
};

template <class T>
struct PromptTableDecoder {
  static constexpr int kSteps = 4;
  static constexpr int kSlotSteps = kSteps / T::kSlots;  // products of 32 columns that share a norm
  RowBook row, row8;
  uint32_t my_tables;

  __device__ __forceinline__ PromptTableDecoder(const Book&, uint32_t base, int warp, int lane)
      : my_tables(base + T::kTables + 16 * (kUnitRows * warp + lane / 4)) {}
  __device__ __forceinline__ void fetch(int step, int stage) {
    if (step % kSlotSteps == 0) {
      const uint32_t at = my_tables + stage * T::kTableBytes + step / kSlotSteps * (16 * T::kRows);
      load_shared_16(row.table, at);
      load_shared_16(row8.table, at + 16 * 8);
    }
  }
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const UnitStream<T>& unit, int step) const {
    decode_s8(a, unit.words.word(2 * step), unit.words.word(2 * step + 1), row, row8);
  }
};

// The tiles of D that a cluster has, in order, and this CTA's units of each.
template <class T>
struct PromptWork {
  int m, units_k, tiles_m, tiles_n, row_tiles, rank, first_unit, units;

  __device__ __forceinline__ PromptWork(int m, int n, int units_k)
      : m(m),
        units_k(units_k),
        tiles_m((m + T::kTokens - 1) / T::kTokens),
        tiles_n((n + T::kRows * T::kCluster - 1) / (T::kRows * T::kCluster)),
        row_tiles((n + 63) / 64 * 4),
        rank(blockIdx.x % T::kCtas) {
    const int part = (units_k + T::kSplits - 1) / T::kSplits;
    first_unit = T::kSplits > 1 ? min(rank * part, units_k) : 0;
    units = min(part, units_k - first_unit);
  }
  __device__ __forceinline__ int first() const { return blockIdx.x / T::kCtas; }
  __device__ __forceinline__ int step() const { return gridDim.x / T::kCtas; }
  __device__ __forceinline__ int count() const { return tiles_m * tiles_n; }
  // The first token (x) and the first row tile of 16 (y).
  __device__ __forceinline__ int2 tile(int i) const {
    const int2 at = tile_of_block(i, tiles_m, tiles_n);
    const int across = T::kCluster > 1 ? at.y * T::kCluster + rank : at.y;
    return make_int2(at.x * T::kTokens, across * T::kWarps);
  }
};

// Where a ring of stages is: `parity` is that of the current round's phase.
template <int kStages>
struct RingPlace {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The fetching warp.
template <class T>
__device__ __forceinline__ void fetch_prompt(const PromptWork<T>& work, const char* x, uint32_t base) {
  constexpr int kPart = T::kTokens / 8 / T::kCluster;  // this CTA's blocks of tokens, for all of the cluster
  const int lane = threadIdx.x % 32;
  const int token_blocks = (work.m + 7) / 8;
  const int begin = T::kCluster > 1 ? work.rank * kPart : 0;
  wait_for_dependencies();
  RingPlace<T::kStages> place;
  for (int i = work.first(); i < work.count(); i += work.step()) {
    const int2 at = work.tile(i);
    const int there = min(T::kTokens / 8, token_blocks - at.x / 8);
    const int blocks = min(kPart, there - begin);
    for (int u = 0; u < work.units; ++u) {
      const uint32_t full = base + T::kFull + 8 * place.stage;
      barrier_wait(base + T::kEmpty + 8 * place.stage, place.parity ^ 1);
      if (lane == 0) barrier_expect(full, 1024 * T::kBlocks * there);
      __syncwarp();
      if (lane < T::kBlocks && blocks > 0) {
        const long long block = static_cast<long long>((work.first_unit + u) * T::kBlocks + lane) * token_blocks;
        const char* from = x + 1024 * (block + at.x / 8 + begin);
        const uint32_t to = base + place.stage * T::kTokenBytes + lane * (128 * T::kTokens) + 1024 * begin;
        if constexpr (T::kCluster > 1) {
          copy_bulk_multicast(to, from, 1024 * blocks, full, (1 << T::kCluster) - 1);
        } else {
          copy_bulk(to, from, 1024 * blocks, full);
        }
      }
      place.advance();
    }
  }
}

// The warps that build, of each row and slot of a stage, the table of q = rne(value * (norm * fold)). Each has 32 rows,
// and in turn the last 32.
template <class T>
__device__ __forceinline__ void build_tables(const PromptWork<T>& work, const uint32_t* norms, const float* fold,
                                             const Book& book, uint32_t base) {
  const int lane = keep(threadIdx.x % 32);
  const int warp = keep(threadIdx.x / 32 - T::kWarps - 1);
  float values[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&book.w[i]));
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23, as RowBook::build adds it
  // Row g of a row tile is in the lower half of word g of its norms, row g + 8 in the upper one.
  const auto build = [&](int stage, int row, const uint32_t(&row_norms)[T::kSlots], float row_fold) {
    const uint32_t table = base + T::kTables + stage * T::kTableBytes + 16 * row;
#pragma unroll
    for (int s = 0; s < T::kSlots; ++s) {
      const float2 pair = norm_pair(row_norms[s]);
      const float factor = (row % 16 < 8 ? pair.x : pair.y) * row_fold;
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t q[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) q[j] = __float_as_uint(fmaf(values[4 * i + j], factor, kMagic));
        w[i] = permute_bytes(permute_bytes(q[0], q[1], 0x0040), permute_bytes(q[2], q[3], 0x0040), 0x5410);
      }
      store_shared_16(table + s * (16 * T::kRows), w);
    }
  };
  const int mine = 32 * warp + lane, last = 96 + lane;
  RingPlace<T::kStages> place;
  int turn = warp;
  for (int i = work.first(); i < work.count(); i += work.step()) {
    const int first_tile = work.tile(i).y;
    const auto norms_of = [&](int row) {
      const int tile = min(first_tile + row / 16, work.row_tiles - 1);
      return (tile * work.units_k + work.first_unit) * (8 * T::kSlots) + row % 8;
    };
    const auto fold_of = [&](int row) {
      return first_tile + row / 16 < work.row_tiles ? fold[16 * first_tile + row] : 0.0f;
    };
    int mine_at = norms_of(mine), last_at = norms_of(last);  // of the next unit
    const float mine_fold = fold_of(mine), last_fold = fold_of(last);
    uint32_t mine_norms[T::kSlots], last_norms[T::kSlots];
    const auto load = [&] {
#pragma unroll
      for (int s = 0; s < T::kSlots; ++s) {
        mine_norms[s] = load_stream_4(norms + mine_at + 8 * s);
        last_norms[s] = load_stream_4(norms + last_at + 8 * s);
      }
      mine_at += 8 * T::kSlots;
      last_at += 8 * T::kSlots;
    };
    if (work.units > 0) load();
    for (int u = 0; u < work.units; ++u) {
      barrier_wait(base + T::kEmpty + 8 * place.stage, place.parity ^ 1);
      build(place.stage, mine, mine_norms, mine_fold);
      if (turn == 0) build(place.stage, last, last_norms, last_fold);
      turn = turn == 0 ? T::kTableWarps - 1 : turn - 1;
      if (u + 1 < work.units) load();
      __syncwarp();
      if (lane == 0) barrier_arrive(base + T::kBuilt + 8 * place.stage);
      place.advance();
    }
  }
}

// Sixteen tokens of a warp's accumulators, in the staged order of CoreW8A16: even tokens, then odd ones.
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

__device__ __forceinline__ int staged_token(int staged) {
  return 2 * (staged % 4) + staged / 4 % 2 + staged / 8 * 8;
}

// Two warpgroups that multiply, each writing its 64 channels.
template <class T, class E, int kAlign>
__device__ __forceinline__ void multiply_prompt(const PromptWork<T>& work, const char* units, const char* norms,
                                                typename E::Out* d, int n, int ldd, const Book& book,
                                                const typename E::Args& args, uint32_t base) {
  using Acc = typename T::Acc;
  using Stage = typename T::Stage;
  using Decoder = typename Either<T::kHasTables, PromptTableDecoder<T>, PromptDecoder<T>>::Type;
  constexpr int kSteps = Decoder::kSteps;
  constexpr int kBatch = kSteps / 2;  // products whose weights are decoded together: one alone is a chain of latencies
  constexpr int kLeadBarrier = 1, kGroupBarrier = 2;
  const int lane = keep(threadIdx.x % 32);
  const int warp = keep(threadIdx.x / 32);
  const int group = warp / 4;
  const uint32_t staging = base + T::kStaging + group * (T::kBuffers * Stage::kBytes);
  const unsigned long long tokens0 = wgmma_descriptor(base);

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
    if constexpr (T::kHasTables) barrier_wait(base + T::kBuilt + 8 * place.stage, place.parity);
    barrier_wait(base + T::kFull + 8 * place.stage, place.parity);
  };

  Decoder decoder(book, base, warp, lane);
  UnitStream<T> stream(units, norms);
  const auto begin_tile = [&](int tile) {
    if (tile >= work.count() || work.units == 0) return;
    // Warps past the last rows read those that there are; nobody stores their sums.
    const long long row_tile = min(work.tile(tile).y + warp, work.row_tiles - 1);
    stream.begin(units, norms, row_tile * work.units_k + work.first_unit, lane);
  };
  begin_tile(work.first());
  wait_for_dependencies();
  uint32_t a[2][kBatch][4] = {};
  // Products in flight read these registers: they live until the wait that says they are done.
  const auto keep_operands = [](uint32_t(&batch)[kBatch][4]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) pin(batch[i]);
  };
  RingPlace<T::kStages> place;
  int lead = T::kSplits == 1 && work.first() < work.count() ? min(T::kLead, work.units) : 0;
  int buffer = 0;
  if (lead > 0 && group == 1) named_barrier_sync<T::kThreads>(kLeadBarrier);
  for (int tile = work.first(); tile < work.count(); tile += work.step()) {
    const int2 at = work.tile(tile);
    const int channel0 = 16 * at.y + 64 * group;
    Acc acc[T::kTokens / 2];
#pragma unroll
    for (int i = 0; i < T::kTokens / 2; ++i) acc[i] = 0;
#pragma unroll
    for (int i = 0; i < T::kTokens / 2; ++i) pin(acc[i]);

    int previous = 0;
    for (int u = 0; u < work.units; ++u) {
      const int stage = place.stage;
      stream.advance(u + 1 < work.units, lane);
      wait_stage(place);
      place.advance();
      const uint32_t tokens = static_cast<uint32_t>(tokens0) + stage * (T::kTokenBytes / 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wgmma_wait<1>();
        keep_operands(a[half]);
        if (half == 1 && u > 0) release(previous);  // the unit before has been multiplied
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          decoder.fetch(half * kBatch + i, stage);
          decoder.decode(a[half][i], stream, half * kBatch + i);
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int step = half * kBatch + i;
          // 16-bit tokens have two blocks of 128 bytes, four products each, int8 ones one.
          const uint32_t at = tokens + step / 4 * (8 * T::kTokens) + step % 4 * static_cast<uint32_t>(kWgmmaStep);
          T::Product::issue(acc, a[half][i], tokens0 >> 32 << 32 | at, 1);
        }
        wgmma_commit();
      }
      previous = stage;
      if (lead > 0 && group == 0 && --lead == 0) named_barrier_arrive<T::kThreads>(kLeadBarrier);
    }
    begin_tile(tile + work.step());

    if constexpr (T::kSplits == 1) {
      // A warp writes four of sixteen tokens, as a CTA of a cluster of four would.
      using Writer = TileWriter<E, kAlign, false, Acc, 64, Stage, 4>;
      constexpr int kAhead = (E::kHasResidual ? 2 : 4) / Writer::kPasses;  // rounds whose vectors are on their way
      const Writer writer(d, at.x, channel0, work.m, n, ldd, args, warp % 4);
      typename Writer::Rows rows[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) writer.fetch(rows[i], i, staged_token);
      wgmma_wait<0>();
      keep_operands(a[0]);
      keep_operands(a[1]);
      release(previous);
#pragma unroll
      for (int i = 0; i < T::kTokens / 2; ++i) pin(acc[i]);
      if (channel0 >= n) continue;
#pragma unroll
      for (int i = 0; i < T::kRounds; i += T::kBatch) {
        if (at.x + 16 * i >= work.m) break;
        const uint32_t to = staging + buffer * (T::kBatch * Stage::kBytes);
        // With two batches of buffers, the barrier of the batch in between says that all have read this one.
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
          if (round + kAhead < T::kRounds) writer.fetch(rows[round % kAhead], round + kAhead, staged_token);
          writer.write(current, sums[b]);
        }
      }
    } else {
      using Writer = TileWriter<E, kAlign, false, Acc, 64, Stage, T::kSplits>;
      const Writer writer(d, at.x, channel0, work.m, n, ldd, args, work.rank);
      wgmma_wait<0>();
      keep_operands(a[0]);
      keep_operands(a[1]);
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
        typename Writer::Rows rows;
        typename Writer::Sums sums;
        writer.fetch(rows, round, staged_token);
        writer.load(sums, sums_at + round * Stage::kBytes);
        writer.write(rows, sums);
      }
    }
  }
}

// `fold` is read for int8 tokens alone. kAlign bytes divide every row of D, see TileWriter.
template <class T, class E, int kAlign>
__device__ __forceinline__ void codebook_prompt(const typename T::X* x, const char* units, const __half* norms,
                                                const float* fold, typename E::Out* d, int m, int n, int units_k,
                                                int ldd, const Book& book, const typename E::Args& args) {
  extern __shared__ __align__(1024) char shared[];
  launch_dependents();
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(base + T::kFull + 8 * i, 1);
      barrier_init(base + T::kEmpty + 8 * i, T::kWarps * T::kCluster);
      if constexpr (T::kHasTables) barrier_init(base + T::kBuilt + 8 * i, T::kTableWarps);
    }
    barrier_init_fence();
  }
  if constexpr (T::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  if (threadIdx.x >= T::kThreads) {
    give_registers<T::kFetchRegisters>();
    if (threadIdx.x < T::kThreads + 32) {
      fetch_prompt<T>(PromptWork<T>(m, n, units_k), reinterpret_cast<const char*>(x), base);
    } else if constexpr (T::kHasTables) {
      build_tables<T>(PromptWork<T>(m, n, units_k), reinterpret_cast<const uint32_t*>(norms), fold, book, base);
    }
    if constexpr (T::kSplits > 1) {  // the barrier before the sums are read
      cluster_arrive();
      cluster_wait();
    }
  } else {
    take_registers<T::kRegisters>();
    multiply_prompt<T, E, kAlign>(PromptWork<T>(m, n, units_k), units, reinterpret_cast<const char*>(norms), d, n, ldd,
                                  book, args, base);
  }
  // No CTA leaves while others copy to it, arrive at its barriers or read its sums.
  if constexpr (T::kCtas > 1) {
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace qcut
