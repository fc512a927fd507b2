// D = epilogue(X W^T) of any number of rotated tokens X and codebook weights W on mma.sync, for every architecture.
//
// A CTA computes a tile of D. A cp.async pipeline copies blocks of tokens and units of weights, 128 columns
// at a time, to shared memory without reordering: tokens are swizzled for ldmatrix in global memory already,
// and a lane's part of a unit is contiguous. Weights are the product's first operand (16 rows of N) and
// tokens the second (8 rows of M). Indices become the first operand's registers only by PRMT, those of a
// codebook of pairs by a dense table in shared memory, before the pipeline. A warp's tile
// should be tall in M, because each warp decodes the weights that it multiplies.
//
// Exactness: 16-bit weights times their norms are rounded once (bfloat16: the norms, too), and float32 sums are
// added in a fixed order. The norms are fused into int8 weights (RowBook); their products are added in int32.
//
// Source: PTX ISA "cp.async", "ldmatrix", "Matrix Fragments for mma.m16n8k16 / mma.m16n8k32".
#pragma once

#include <qcut/codebook/codebook.cuh>
#include <qcut/gemm/gemm.cuh>

namespace qcut {

// Sixteen rows of a unit as a warp multiplies them: kSteps steps of the product's depth, each with the norms of kStepSlots
// slots.
template <class T, int kBits, int kSlots, bool kOffsets, bool kPairs>
struct UnitDecoder {
  using Acc = float;
  using Table = typename Either<kPairs, PairValues<DensePairTable>, RegisterBook<kBits>>::Type;
  static constexpr int kSteps = 8, kStepSlots = 1;
  UnitWords<kBits> words;
  SlotNorms<kOffsets> norms;

  __device__ __forceinline__ void init(const float*) {}
  __device__ __forceinline__ void begin_slot(const Table&, const SlotNorms<kOffsets>& slot, int) { norms = slot; }
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const Table& table, int step) const {
    table.decode(a, words.word(step));
    NormScale<T, kOffsets>(norms).apply(a);
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Float16<T>::mma(c, a, {b0, b1});
  }
};

template <int kBits, int kSlots>
struct UnitDecoder<int8_t, kBits, kSlots, false, true> {
  using Acc = int;
  using Table = PairValues<DensePairTable>;
  static constexpr int kSteps = 4, kStepSlots = qcut::kStepSlots<kSlots>;
  UnitWords<kBits> words;
  PairFactors factors[kStepSlots];
  float fold, fold8;

  // `fold_g` is the address of row g's fold.
  __device__ __forceinline__ void init(const float* fold_g) {
    fold = fold_g[0];
    fold8 = fold_g[8];
  }
  __device__ __forceinline__ void begin_slot(const Table&, const SlotNorms<false>& slot, int i) {
    const float2 norm = norm_pair(slot.norms);
    factors[i].build(norm.x * fold, norm.y * fold8);
  }
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const Table& table, int step) const {
    decode_pairs_s8(a, words.word(2 * step), words.word(2 * step + 1), table, factors);
  }
  static __device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_s8(c, a, b0, b1);
  }
};

template <int kBits, int kSlots>
struct UnitDecoder<int8_t, kBits, kSlots, false, false> {
  using Acc = int;
  using Table = QuarterBook<kBits>;
  static constexpr int kSteps = 4, kStepSlots = qcut::kStepSlots<kSlots>;
  UnitWords<kBits> words;
  RowBook<kBits> row[kStepSlots], row8[kStepSlots];
  float fold, fold8;

  // `fold_g` is the address of row g's fold.
  __device__ __forceinline__ void init(const float* fold_g) {
    fold = fold_g[0];
    fold8 = fold_g[8];
  }
  __device__ __forceinline__ void begin_slot(const Table& table, const SlotNorms<false>& slot, int i) {
    const float2 norm = norm_pair(slot.norms);
    row[i].build(table, norm.x * fold);
    row8[i].build(table, norm.y * fold8);
  }
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const Table&, int step) const {
    decode_s8<kBits == 4>(a, words.word(2 * step), words.word(2 * step + 1), row, row8);
  }
  static __device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_s8(c, a, b0, b1);
  }
};

// Calls f(0) .. f(kCount - 1), divided among the CTA's threads.
template <int kCount, int kThreads, class F>
__device__ __forceinline__ void for_each_chunk(const F& f) {
#pragma unroll
  for (int i = 0; i < (kCount + kThreads - 1) / kThreads; ++i) {
    const int chunk = threadIdx.x + i * kThreads;
    if (kCount % kThreads == 0 || chunk < kCount) f(chunk);
  }
}

// A stage of the pipeline: blocks of tokens, units of weights and norms of one unit of K.
template <class Tile, class T, int kBits, int kSlots, bool kOffsets>
struct CodebookStage {
  static constexpr int kKBlocks = sizeof(T);  // blocks of 128 bytes in 128 columns of a token
  static constexpr int kKBlockBytes = 128 * Tile::kBlockM;
  static constexpr int kRowTiles = Tile::kBlockN / kUnitRows;
  static constexpr int kNormBytes = SlotNorms<kOffsets>::kBytes * kSlots;
  static constexpr int kUnits = kKBlocks * kKBlockBytes;  // offsets of units and norms
  static constexpr int kNorms = kUnits + kRowTiles * kUnitBytes<kBits>;
  static constexpr int kBytes = kNorms + kRowTiles * kNormBytes;

  const char *x, *units, *norms;
  int m_blocks, m_block0, units_k, tiles_left;

  __device__ __forceinline__ CodebookStage(const char* x, const char* units, const char* norms, int m, int n,
                                           int units_k, int m0, int n0)
      : x(x), m_blocks((m + 7) / 8), m_block0(m0 / 8), units_k(units_k) {
    const int tile0 = n0 / kUnitRows;
    this->units = units + static_cast<long long>(tile0) * units_k * kUnitBytes<kBits>;
    this->norms = norms + static_cast<long long>(tile0) * units_k * kNormBytes;
    tiles_left = (n + 63) / 64 * 4 - tile0;  // memory holds a multiple of 64 rows
  }

  __device__ __forceinline__ void fetch_tokens(uint32_t stage, int unit) const {
    constexpr int kChunks = kKBlockBytes / 16;
    for_each_chunk<kKBlocks * kChunks, Tile::kThreads>([&](int i) {
      const long long block = static_cast<long long>(unit * kKBlocks + i / kChunks) * m_blocks + m_block0;
      const bool outside = m_block0 + i % kChunks / 64 >= m_blocks;
      copy_async<16>(stage + 16 * i, x + 1024 * block + i % kChunks * 16, outside);
    });
  }

  __device__ __forceinline__ void fetch_weights(uint32_t stage, int unit) const {
    fetch_rows<kUnitBytes<kBits>>(stage + kUnits, units, unit);
    fetch_rows<kNormBytes>(stage + kNorms, norms, unit);
  }

  // Copies kSize bytes of each row tile.
  template <int kSize>
  __device__ __forceinline__ void fetch_rows(uint32_t to, const char* from, int unit) const {
    constexpr int kChunks = kSize / 16;
    for_each_chunk<kRowTiles * kChunks, Tile::kThreads>([&](int i) {
      const int tile = i / kChunks;
      const long long place = static_cast<long long>(tile) * units_k + unit;
      copy_async<16>(to + 16 * i, from + kSize * place + i % kChunks * 16, tile >= tiles_left);
    });
  }
};

// The kernel. kAlignD is the alignment of D's rows in bytes (kAlign of TileWriter). `fold` is read only for
// int8 tokens.
template <class Tile, class T, int kBits, int kSlots, bool kOffsets, class E, int kAlignD, class B>
__device__ __forceinline__ void codebook_mma(const char* x, const char* units, const char* norms, const float* fold,
                                             typename E::Out* d, int m, int n, int units_k, int ldd, const B& book,
                                             const typename E::Args& args) {
  using Decoder = UnitDecoder<T, kBits, kSlots, kOffsets, B::kPairs>;
  using Norms = SlotNorms<kOffsets>;
  using Acc = typename Decoder::Acc;
  using Fetch = CodebookStage<Tile, T, kBits, kSlots, kOffsets>;
  constexpr int kStages = Tile::kStages;
  constexpr int kSteps = Decoder::kSteps;
  constexpr int kTokenTiles = Tile::kWarpM / 8;
  constexpr int kRowTiles = Tile::kWarpN / kUnitRows;
  static_assert(Tile::kBlockK == kUnitColumns && Tile::kSplits == 1, "a tile of one unit, and no splits");
  extern __shared__ __align__(128) char whole[];
  char* shared = whole;
  if constexpr (B::kPairs) {
    fill_pair_table<Tile::kThreads / 32, DensePairTable>(whole, book);  // complete at the first barrier
    shared += DensePairTable::kBytes;
  }
  const uint32_t base = shared_address(shared);

  const int tiles_m = (m + Tile::kBlockM - 1) / Tile::kBlockM;
  const int tiles_n = (n + Tile::kBlockN - 1) / Tile::kBlockN;
  const int2 tile = tile_of_block(blockIdx.x, tiles_m, tiles_n);
  const int m0 = tile.x * Tile::kBlockM;
  const int n0 = tile.y * Tile::kBlockN;
  const Fetch fetch(x, units, norms, m, n, units_k, m0, n0);

  // Weights do not depend on the previous kernel. The copies of all stages' weights belong to the first group.
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < units_k) fetch.fetch_weights(base + s * Fetch::kBytes, s);
  }
  launch_dependents();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_m = warp / Tile::kWarpsN * Tile::kWarpM;
  const int warp_n = warp % Tile::kWarpsN * Tile::kWarpN;
  const auto table = [&] {
    if constexpr (B::kPairs) {
      return typename Decoder::Table(book, whole);
    } else {
      return typename Decoder::Table(book);
    }
  }();
  Decoder rows[kRowTiles];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    // Rows past the rows in memory repeat the last ones.
    rows[j].init(fold + min(n0 + warp_n + kUnitRows * j, (n + 63) / 64 * 64 - kUnitRows) + lane / 4);
  }
  wait_for_dependencies();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < units_k) fetch.fetch_tokens(base + s * Fetch::kBytes, s);
    copy_async_commit();
  }

  Acc acc[kRowTiles][kTokenTiles][4];
#pragma unroll
  for (int i = 0; i < kRowTiles * kTokenTiles * 4; ++i) acc[i / (4 * kTokenTiles)][i / 4 % kTokenTiles][i % 4] = 0;
  // For ldmatrix, lanes 0-7 and 8-15 address the rows of two neighbouring chunks of 8 tokens, lanes 16-31 those of the
  // next 8 tokens. A step moves on by two chunks, by an XOR, because the swizzle is an XOR.
  const uint32_t token_offset = 128 * (warp_m + lane / 16 * 8) + token_chunk_offset(lane % 8, lane / 8 % 2);
  int empty = kStages - 1;
  int full = 0;
#pragma unroll 1
  for (int unit = 0; unit < units_k; ++unit) {
    // All but the newest kStages - 2 groups of copies are complete: this unit has arrived. The barrier makes every
    // thread's part of the unit visible to all, and ends the reads of the stage that is filled now.
    copy_async_wait<kStages - 2>();
    __syncthreads();
    if (unit + kStages - 1 < units_k) {
      fetch.fetch_weights(base + empty * Fetch::kBytes, unit + kStages - 1);
      fetch.fetch_tokens(base + empty * Fetch::kBytes, unit + kStages - 1);
    }
    copy_async_commit();
    const uint32_t stage = base + full * Fetch::kBytes;
    const char* slot_norms = shared + full * Fetch::kBytes + Fetch::kNorms + lane / 4 * Norms::kLaneBytes;
    empty = empty + 1 == kStages ? 0 : empty + 1;
    full = full + 1 == kStages ? 0 : full + 1;

    uint32_t tokens[kTokenTiles / 2][4];
    const auto load_pair = [&](int i, int step) {
      const uint32_t block = stage + step / 4 * Fetch::kKBlockBytes + 2048 * i;
      load_matrices(tokens[i], block + (token_offset ^ 32 * (step % 4)));
    };
#pragma unroll
    for (int i = 0; i < kTokenTiles / 2; ++i) load_pair(i, 0);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      rows[j].words.load_shared(stage + Fetch::kUnits + (warp_n / kUnitRows + j) * kUnitBytes<kBits>, lane);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        if (step * kSlots % kSteps == 0) {
#pragma unroll
          for (int i = 0; i < Decoder::kStepSlots; ++i) {
            const int slot = (warp_n / kUnitRows + j) * kSlots + step * kSlots / kSteps + i;
            Norms norms_here;
            norms_here.load_shared(slot_norms + Norms::kBytes * slot);
            rows[j].begin_slot(table, norms_here, i);
          }
        }
        uint32_t weights[4];
        rows[j].decode(weights, table, step);
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) {
          const uint32_t(&pair)[4] = tokens[i / 2];
          Decoder::mma(acc[j][i], weights, pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
          // As soon as the last row tile has used these tokens, the next step's tokens take their registers.
          if (j == kRowTiles - 1 && i % 2 == 1 && step + 1 < kSteps) load_pair(i / 2, step + 1);
        }
      }
    }
  }
  copy_async_wait<0>();
  __syncthreads();

  // The epilogue reuses the pipeline's memory.
  using Stage = SwizzledStage<typename E::Out, Tile::kWarpN>;
  using Writer = TileWriter<E, kAlignD, false, Acc, Tile::kWarpN, Stage, 1>;
  const Writer writer(d, m0 + warp_m, n0 + warp_n, m, n, ldd, args, 0);
  typename Writer::Rows written;
  const uint32_t staged = base + warp * Stage::kBytes;
#pragma unroll
  for (int i = 0; i < kTokenTiles / 2; ++i) {
    typename Writer::Sums sums;
    writer.fetch(written, i, [](int row) { return 2 * (row % 4) + row / 4 % 2 + row / 8 * 8; });
    __syncwarp();  // the reads of the previous 16 tokens are done
    stage_transposed<Stage>(acc, i, staged);
    __syncwarp();
    writer.load(sums, staged);
    writer.write(written, sums);
  }
}

}  // namespace qcut
