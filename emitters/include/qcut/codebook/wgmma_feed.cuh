// The supply of operands for codebook/wgmma.cuh: the tile and its shared memory, bulk copies of tokens, tables of int8
// values, and the loading and decoding of a warp's own indices.
#pragma once

#include <qcut/codebook/codebook.cuh>
#include <qcut/core/barrier.cuh>
#include <qcut/core/experts.cuh>
#include <qcut/core/wgmma.cuh>
#include <qcut/gemm/gemm.cuh>

namespace qcut {

// Keeps a value in a register; otherwise the compiler reads the thread's index again in each loop.
__device__ __forceinline__ int keep(int v) { return __shfl_xor_sync(0xffffffffu, v, 0); }

// The tile of emitters/codebook/wgmma.py and its shared memory: tokens and supplies of all stages, staging, barriers, and
// with ExpertRows the routes of tiles.
// Three warps supply a stage with tables of int8 values for each row, or with int8 weights.
template <class X_, int kBits_, int kSlots_, bool kOffsets_, int kTokens_, int kStages_, int kLead_, int kCluster_, int kSplits_,
          int kBuffers_, bool kPairs_, bool kFine_>
struct WgmmaTile {
  using X = X_;
  using Acc = typename Wgmma<X, kTokens_>::Acc;
  using Stage = PaddedStage<64>;
  static constexpr int kBits = kBits_, kSlots = kSlots_, kTokens = kTokens_;
  static constexpr bool kOffsets = kOffsets_;  // of weights
  static constexpr int kStages = kStages_, kLead = kLead_, kCluster = kCluster_, kSplits = kSplits_;
  static constexpr int kCtas = kCluster * kSplits;
  static constexpr int kBuffers = kBuffers_;                      // buffers of 16 staged tokens of each warpgroup
  static constexpr int kBatch = kBuffers > 1 ? kBuffers / 2 : 1;  // buffers filled between two barriers
  static constexpr int kWarps = 8;                                // warps that multiply
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kBlocks = sizeof(X);  // blocks of 128 bytes of a token in a unit
  static constexpr int kRounds = kTokens / 16;
  static constexpr int kShort = kTokens % 64 == 0 ? kTokens / 2 : kTokens;  // tokens of a short tile

  static constexpr int kTokenBytes = 128 * kBlocks * kTokens;
  static constexpr bool kFine = kFine_;    // whether each product follows the decoding of its weights
  static constexpr bool kPairs = kPairs_;  // whether a PairTable lies before the stages
  static constexpr int kFirstStage = kPairs ? PairTable::kBytes : 0;
  static constexpr int kSupply = kFirstStage + kStages * kTokenBytes;
  static constexpr bool kInt8Weights = kBits == 8;
  static constexpr bool kHasTables = sizeof(X) == 1 && !kPairs && !kInt8Weights;  // tables of int8 values, of each row
  // Tables are [slot][row][16 int8], weights [row][128 int8].
  static constexpr int kSupplyBytes = kInt8Weights ? 128 * kRows : kHasTables ? 16 * kRows * kSlots : 0;
  static constexpr int kOperandBytes = kSupply + kStages * kSupplyBytes;
  // Splits stage all sums in the place of the operands.
  static constexpr int kSumBytes = kSplits > 1 ? 2 * kRounds * Stage::kBytes : 0;
  static constexpr int kStaging = kOperandBytes > kSumBytes ? kOperandBytes : kSumBytes;
  // Three barriers of each stage: filled, read, and supplied.
  static constexpr int kFull = kStaging + 2 * kBuffers * Stage::kBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kSupplied = kEmpty + 8 * kStages;
  // TileVectors of each multiplying warpgroup.
  static constexpr int kVectors = (kSupplyBytes > 0 ? kSupplied : kEmpty) + 8 * kStages;
  static constexpr int kSupplyWarps = 3;
  // A warp arrives once its tables are built, a thread once its copies are done.
  static constexpr int kSuppliers = kInt8Weights ? 32 * kSupplyWarps : kSupplyWarps;
  // The registers of a thread after setmaxnreg. A launch gives each thread of the three warpgroups 168.
  static constexpr int kFetchRegisters = !kHasTables ? 40 : kTokens == 256 && kSlots == 1 ? 56 : 72;
  static constexpr int kRegisters = (3 * 168 - kFetchRegisters) / 2;

  static_assert(kTokens % 32 == 0, "see emitters/codebook/wgmma.py");
  static_assert(!(kOffsets && sizeof(X) == 1), "offsets are of 16-bit weights");
  static_assert(kCluster == 1 || kSplits == 1, "a cluster shares tokens or K");
};

struct Nothing {};

__device__ __forceinline__ const char* dynamic_shared() {
  extern __shared__ __align__(1024) char shared[];
  return shared;
}

// Loads a warp's units of 16 rows from global memory to registers, one unit ahead. The units are too small for bulk
// copies: sixteen copies for each unit of K took longer than the products.
template <class T>
struct UnitStream {
  static constexpr bool kHasNorms = !T::kHasTables;
  static constexpr bool kHasFolds = kHasNorms && sizeof(typename T::X) == 1;
  UnitWords<T::kBits> words, next;
  using Norms = SlotNorms<T::kOffsets>;
  Norms norms[T::kSlots], next_norms[T::kSlots];
  const char* units;  // the unit that is loaded next
  const char* unit_norms;
  typename Either<kHasFolds, float2, Nothing>::Type folds;  // of rows g and g + 8

  template <class Weights>
  __device__ __forceinline__ explicit UnitStream(const Weights& all) : units(all.units), unit_norms(all.norms) {}

  // Starts at a warp's rows of a tile of D. Warps past the last row read the last rows again; their sums are not stored.
  template <class Weights, class Work>
  __device__ __forceinline__ void begin(const Weights& all, const Work& work, int tile, int warp, int lane) {
    const long long row_tile = work.before(tile) + min(work.tile(tile).y + warp, work.row_tiles - 1);
    const long long index = row_tile * work.units_k + work.first_unit;
    units = all.units + index * kUnitBytes<T::kBits>;
    unit_norms = all.norms + index * (Norms::kBytes * T::kSlots) + lane / 4 * Norms::kLaneBytes;
    load(lane);
    if constexpr (kHasFolds) {
      const float* at = all.fold + kUnitRows * row_tile + lane / 4;
      folds = make_float2(at[0], at[8]);
    }
  }
  __device__ __forceinline__ void load(int lane) {
    next.load(units, lane);
    units += kUnitBytes<T::kBits>;
    if constexpr (kHasNorms) {
#pragma unroll
      for (int s = 0; s < T::kSlots; ++s) next_norms[s].load(unit_norms + Norms::kBytes * s);
      unit_norms += Norms::kBytes * T::kSlots;
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

// Decodes a warp's unit, product by product. `fetch` of a step reads from shared memory the values that `decode` of the
// step uses, and may run once the previous step is decoded.
template <class T>
struct PromptDecoder {
  static constexpr int kSteps = 8;
  using Book16 = RegisterBook<T::kBits>;
  Book16 book;

  // The compiler would keep tables made of kernel arguments in uniform registers and copy them before each
  // PRMT. Words that are exchanged between the lanes of a quad are not uniform to the compiler.
  __device__ __forceinline__ PromptDecoder(const Book& values, uint32_t, int, int lane) : book(values) {
    const int t = lane % 4;
    uint32_t low = book.low[0], high = book.high[0];
#pragma unroll
    for (int i = 1; i < Book16::kWords; ++i) {
      low = t == i ? book.low[i] : low;
      high = t == i ? book.high[i] : high;
    }
#pragma unroll
    for (int i = 0; i < Book16::kWords; ++i) {
      book.low[i] = __shfl_sync(0xffffffffu, low, i, 4);
      book.high[i] = __shfl_sync(0xffffffffu, high, i, 4);
    }
  }
  __device__ __forceinline__ void fetch(int, int) {}
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const UnitStream<T>& unit, int step) const {
    book.decode(a, unit.words.word(step));
    NormScale<typename T::X, T::kOffsets>(unit.norms[step * T::kSlots / kSteps]).apply(a);
  }
};

// Decodes by the table of pairs: half the instructions of PromptDecoder, and 64 KB of shared memory.
template <class T>
struct PromptPairDecoder {
  static constexpr int kSteps = 8;
  uint32_t lane4;

  template <class B>
  __device__ __forceinline__ PromptPairDecoder(const B&, uint32_t, int, int lane) : lane4(4 * lane) {}
  __device__ __forceinline__ void fetch(int, int) {}
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const UnitStream<T>& unit, int step) const {
    extern __shared__ __align__(1024) char shared[];
    PairTable::decode(a, unit.words.word(step), shared, lane4);
    NormScale<typename T::X, T::kOffsets>(unit.norms[step * T::kSlots / kSteps]).apply(a);
  }
};

// Decodes int8 values of a codebook of pairs.
template <class T>
struct PromptPairDecoderS8 {
  static constexpr int kSteps = 4;
  PairValues<PairTable> values;
  PairFactors factors[kStepSlots<T::kSlots>];  // of the slots decoded last

  __device__ __forceinline__ PromptPairDecoderS8(const PairBook& book, uint32_t, int, int)
      : values(book, dynamic_shared()) {}
  __device__ __forceinline__ void fetch(int, int) {}
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const UnitStream<T>& unit, int step) {
    if (step * T::kSlots % kSteps == 0) {
#pragma unroll
      for (int i = 0; i < kStepSlots<T::kSlots>; ++i) {
        const float2 norm = norm_pair(unit.norms[step * T::kSlots / kSteps + i].norms);
        factors[i].build(norm.x * unit.folds.x, norm.y * unit.folds.y);
      }
    }
    decode_pairs_s8(a, unit.words.word(2 * step), unit.words.word(2 * step + 1), values, factors);
  }
};

template <class T>
struct PromptTableDecoder {
  static constexpr int kSteps = 4;
  static constexpr int kCount = kStepSlots<T::kSlots>;            // norms of a product
  static constexpr int kSlotSteps = kSteps * kCount / T::kSlots;  // products that share them
  RowBook<T::kBits> row[kCount], row8[kCount];
  uint32_t my_tables;

  __device__ __forceinline__ PromptTableDecoder(const Book&, uint32_t base, int warp, int lane)
      : my_tables(base + T::kSupply + 16 * (kUnitRows * warp + lane / 4)) {}
  __device__ __forceinline__ void fetch(int step, int stage) {
    if (step % kSlotSteps == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint32_t at = my_tables + stage * T::kSupplyBytes + (step / kSlotSteps * kCount + i) * (16 * T::kRows);
        row[i].load_shared(at);
        row8[i].load_shared(at + 16 * 8);
      }
    }
  }
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const UnitStream<T>& unit, int step) const {
    decode_s8(a, unit.words.word(2 * step), unit.words.word(2 * step + 1), row, row8);
  }
};

// The tiles of D that a cluster computes, in order, and this CTA's units of each tile. With ExpertRows, tokens lie in
// the order of their routes in tiles, and tiles without an expert are left out.
template <class T, class Rows = AllRows>
struct PromptWork {
  Rows rows;
  int m, units_k, tiles_m, tiles_n, row_tiles, rank, first_unit, units;

  __device__ __forceinline__ PromptWork(int m, int n, int units_k, const Rows& rows)
      : rows(rows),
        m(m),
        units_k(units_k),
        tiles_m((m + T::kTokens - 1) / T::kTokens),
        tiles_n((n + T::kRows * T::kCluster - 1) / (T::kRows * T::kCluster)),
        row_tiles((n + 63) / 64 * 4),
        rank(blockIdx.x % T::kCtas) {
    const int part = (units_k + T::kSplits - 1) / T::kSplits;
    first_unit = T::kSplits > 1 ? min(rank * part, units_k) : 0;
    units = min(part, units_k - first_unit);
  }
  __device__ __forceinline__ int first() const { return there(blockIdx.x / T::kCtas); }
  __device__ __forceinline__ int next(int i) const { return there(i + gridDim.x / T::kCtas); }
  __device__ __forceinline__ int count() const { return tiles_m * tiles_n; }
  // The tiles of 16 rows of the experts before that of a tile of D.
  __device__ __forceinline__ long long before(int i) const {
    if constexpr (Rows::kOfExperts) {
      return static_cast<long long>(expert(i)) * row_tiles;
    } else {
      return 0;
    }
  }
  // Rows of D.
  __device__ __forceinline__ int total() const {
    if constexpr (Rows::kOfExperts) {
      return rows.rows * rows.per_row;
    } else {
      return m;
    }
  }
  __device__ __forceinline__ int expert(int i) const { return rows.expert(tile_of_block(i, tiles_m, tiles_n).x); }
  // The first token (x) and the first tile of 16 rows (y) of a tile of D.
  __device__ __forceinline__ int2 tile(int i) const {
    const int2 at = tile_of_block(i, tiles_m, tiles_n);
    const int across = T::kCluster > 1 ? at.y * T::kCluster + rank : at.y;
    return make_int2(at.x * T::kTokens, across * T::kWarps);
  }

  // Whether a tile's routes end before token kShort. Only the tokens before it are copied and multiplied then.
  static constexpr bool kMayBeShort = Rows::kOfExperts && T::kShort < T::kTokens;
  __device__ __forceinline__ bool is_short(int i) const {
    if constexpr (kMayBeShort) {
      return i < count() && rows.routes[tile(i).x + T::kShort] < 0;
    } else {
      return false;
    }
  }

 private:
  __device__ __forceinline__ int there(int i) const {
    if constexpr (Rows::kOfExperts) {
      while (i < count() && expert(i) < 0) i += gridDim.x / T::kCtas;
    }
    return i;
  }
};

// The position in a ring of stages. `parity` is the parity of the current round's phase.
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

// The work of the fetching warp: bulk copies of tokens into the stages.
template <class T, class Rows>
__device__ __forceinline__ void fetch_prompt(const PromptWork<T, Rows>& work, const char* x, uint32_t base) {
  constexpr int kPart = T::kTokens / 8 / T::kCluster;  // blocks of tokens that this CTA copies for the cluster
  const int lane = threadIdx.x % 32;
  const int token_blocks = (work.m + 7) / 8;
  const int begin = T::kCluster > 1 ? work.rank * kPart : 0;
  wait_for_dependencies();
  RingPlace<T::kStages> place;
  for (int i = work.first(); i < work.count(); i = work.next(i)) {
    const int2 at = work.tile(i);
    const int there = min((work.is_short(i) ? T::kShort : T::kTokens) / 8, token_blocks - at.x / 8);
    const int blocks = min(kPart, there - begin);
    for (int u = 0; u < work.units; ++u) {
      const uint32_t full = base + T::kFull + 8 * place.stage;
      barrier_wait(base + T::kEmpty + 8 * place.stage, place.parity ^ 1);
      if (lane == 0) barrier_expect(full, 1024 * T::kBlocks * there);
      __syncwarp();
      if (lane < T::kBlocks && blocks > 0) {
        const long long block = static_cast<long long>((work.first_unit + u) * T::kBlocks + lane) * token_blocks;
        const char* from = x + 1024 * (block + at.x / 8 + begin);
        const uint32_t to = base + T::kFirstStage + place.stage * T::kTokenBytes + lane * (128 * T::kTokens) + 1024 * begin;
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

// The work of the three warps that build the table of q = rne(value * (norm * fold)) for each row and slot of a stage.
// Each warp builds the tables of 32 rows; the warps take turns with the last 32 rows.
template <class T, class Rows>
__device__ __forceinline__ void build_tables(const PromptWork<T, Rows>& work, const uint32_t* norms, const float* fold,
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
  // The norm of row g of a row tile is the lower half of word g of the tile's norms, that of row g + 8 the upper half.
  const auto build = [&](int stage, int row, const uint32_t(&row_norms)[T::kSlots], float row_fold) {
    const uint32_t table = base + T::kSupply + stage * T::kSupplyBytes + 16 * row;
#pragma unroll
    for (int s = 0; s < T::kSlots; ++s) {
      const float2 pair = norm_pair(row_norms[s]);
      const float factor = (row % 16 < 8 ? pair.x : pair.y) * row_fold;
      uint32_t w[4] = {};
#pragma unroll
      for (int i = 0; i < kTableWords<T::kBits>; ++i) {
        uint32_t q[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) q[j] = __float_as_uint(fmaf(values[4 * i + j], factor, kRoundingBias));
        w[i] = permute_bytes(permute_bytes(q[0], q[1], 0x0040), permute_bytes(q[2], q[3], 0x0040), 0x5410);
      }
      store_shared_16(table + s * (16 * T::kRows), w);
    }
  };
  if constexpr (Rows::kOfExperts) wait_for_dependencies();
  const int mine = 32 * warp + lane, last = 96 + lane;
  RingPlace<T::kStages> place;
  int turn = warp;
  for (int i = work.first(); i < work.count(); i = work.next(i)) {
    const int first_tile = work.tile(i).y, before = static_cast<int>(work.before(i));
    const auto norms_of = [&](int row) {
      const int tile = before + min(first_tile + row / 16, work.row_tiles - 1);
      return (tile * work.units_k + work.first_unit) * (8 * T::kSlots) + row % 8;
    };
    const auto fold_of = [&](int row) {
      return first_tile + row / 16 < work.row_tiles ? fold[16 * (before + first_tile) + row] : 0.0f;
    };
    int mine_at = norms_of(mine), last_at = norms_of(last);  // offsets for the next unit
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
      turn = turn == 0 ? T::kSupplyWarps - 1 : turn - 1;
      if (u + 1 < work.units) load();
      __syncwarp();
      if (lane == 0) barrier_arrive(base + T::kSupplied + 8 * place.stage);
      place.advance();
    }
  }
}

// Codebook weights in memory; see emitters/codebook/problem.py. `fold` is read only for int8 tokens.
struct CodebookRows {
  const char* units;
  const char* norms;
  const float* fold;

  template <class T>
  using Stream = UnitStream<T>;
  template <class T>
  using HalfDecoder = typename Either<T::kPairs, PromptPairDecoder<T>, PromptDecoder<T>>::Type;
  template <class T>
  using ByteDecoder = typename Either<T::kPairs, PromptPairDecoderS8<T>, PromptTableDecoder<T>>::Type;
  template <class T>
  using Decoder = typename Either<sizeof(typename T::X) == 1, ByteDecoder<T>, HalfDecoder<T>>::Type;

  template <class T, class Rows>
  __device__ __forceinline__ void supply(const PromptWork<T, Rows>& work, const Book& book, uint32_t base) const {
    build_tables(work, reinterpret_cast<const uint32_t*>(norms), fold, book, base);
  }
};

}  // namespace qcut
