// D = epilogue(X W^T) of few rotated tokens X and codebook weights W. Decoded weights are the operand of wgmma that
// lies in registers.
//
// A warpgroup computes 64 rows of W, a CTA kGroups of them, with kTokens tokens. CTAs of the same rows and of other
// tokens are neighbours in the grid, so that the L2 reads their weights once. The CTAs of a cluster (kSplits) divide K
// into contiguous parts. Each warp loads the indices of its 16 rows to registers, kPrefetch units of 128 columns ahead,
// decodes them and multiplies the values by their norms. Tokens lie in memory as wgmma reads them: one bulk copy brings
// the tokens of a unit into a stage of shared memory. A stage is filled again once all warps have read it, unless there
// are as many stages as units.
//
// Exactness: int8 products are added in int32. 16-bit weights times their norms are rounded once (bfloat16: the norms,
// too); the tensor core adds the products of a CTA's part of K in float32, and the CTAs of a cluster add each other's
// sums in the order of their ranks.
//
// Shared memory: the table of pairs and the stages, later the sums in their place; barriers; the epilogue's vectors.
#pragma once

#include <qcut/stream/codebook.cuh>
#include <qcut/core/barrier.cuh>
#include <qcut/core/quad.cuh>
#include <qcut/core/wgmma.cuh>

namespace qcut {

template <int kTokens_, int kGroups_, int kSplits_, int kStages_, int kPrefetch_>
struct StreamWgmmaTile {
  static constexpr int kTokens = kTokens_;  // of a CTA
  static constexpr int kGroups = kGroups_;  // warpgroups
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kWarps = 4 * kGroups;
  static constexpr int kSplits = kSplits_;
  static constexpr int kStages = kStages_;
  static constexpr int kPrefetch = kPrefetch_;
};

// Byte offsets in shared memory.
template <class T, class Tile, bool kTable = !kIsInt8<T>>
struct StreamWgmmaShared {
  static constexpr int kBlocks = sizeof(T);  // blocks of 128 bytes of each token, in a unit
  static constexpr int kStageBytes = 128 * kBlocks * Tile::kTokens;
  static constexpr int kPitch = Tile::kRows + 4;  // words between the sums of two tokens, [token][row]
  static constexpr int kSumBytes = 4 * Tile::kTokens * kPitch;
  static constexpr int kStaged = kTable ? PairTable::kBytes : 0;
  static constexpr int kStagedEnd = kStaged + Tile::kStages * kStageBytes;
  static constexpr int kFull = kStagedEnd > kSumBytes ? kStagedEnd : kSumBytes;
  static constexpr int kEmpty = kFull + 8 * Tile::kStages;
  static constexpr int kColScale = kEmpty + 8 * Tile::kStages;
  static constexpr int kBias = kColScale + 4 * Tile::kRows;
  static constexpr int kRowScale = kBias + 4 * Tile::kRows;
  static constexpr int kBytes = kRowScale + 4 * Tile::kTokens;
};

// Decodes units to the first operands of products: kUnitSteps for a unit.
template <class T, int kBits, int kSlots, bool kPairs>
struct UnitDecoder {
  static constexpr int kUnitSteps = 8;
  const char* table;
  uint32_t lane4;

  template <class B>
  __device__ __forceinline__ UnitDecoder(const B&, const char* table, const RowFold<T>&)
      : table(table), lane4(4 * (threadIdx.x % 32)) {}

  // Decodes the weights of a product. `step` is a constant after unrolling; steps come in order.
  template <bool kOffsets>
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const WeightUnit<kBits, kSlots, kOffsets>& unit, int step) {
    PairTable::decode(a, unit.words.word(step), table, lane4);
    NormScale<T, kOffsets>(unit.norms[step * kSlots / 8]).apply(a);
  }
};

template <int kBits, int kSlots>
struct UnitDecoder<int8_t, kBits, kSlots, true> {
  static constexpr int kUnitSteps = 4, kStepSlots = qcut::kStepSlots<kSlots>;
  PairValues<PairTable> values;
  RowFold<int8_t> fold;
  PairFactors factors[kStepSlots];  // of the slots decoded last

  __device__ __forceinline__ UnitDecoder(const PairBook& book, const char* table, const RowFold<int8_t>& fold)
      : values(book, table), fold(fold) {}

  __device__ __forceinline__ void decode(uint32_t (&a)[4], const WeightUnit<kBits, kSlots, false>& unit, int step) {
    if (step * kSlots % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kStepSlots; ++i) {
        const float2 norm = norm_pair(unit.norms[step * kSlots / 4 + i].norms);
        factors[i].build(norm.x * fold.row, norm.y * fold.row8);
      }
    }
    decode_pairs_s8(a, unit.words.word(2 * step), unit.words.word(2 * step + 1), values, factors);
  }
};

template <int kBits, int kSlots>
struct UnitDecoder<int8_t, kBits, kSlots, false> {
  static constexpr int kUnitSteps = 4, kStepSlots = qcut::kStepSlots<kSlots>;
  QuarterBook<kBits> quarter;
  RowFold<int8_t> fold;
  RowBook<kBits> row[kStepSlots], row8[kStepSlots];  // the books of rows g and g + 8 for the slots decoded last

  __device__ __forceinline__ UnitDecoder(const Book& book, const char*, const RowFold<int8_t>& fold)
      : quarter(book), fold(fold) {}

  __device__ __forceinline__ void decode(uint32_t (&a)[4], const WeightUnit<kBits, kSlots, false>& unit, int step) {
    if (step * kSlots % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kStepSlots; ++i) {
        const float2 norm = norm_pair(unit.norms[step * kSlots / 4 + i].norms);
        row[i].build(quarter, norm.x * fold.row);
        row8[i].build(quarter, norm.y * fold.row8);
      }
    }
    decode_s8(a, unit.words.word(2 * step), unit.words.word(2 * step + 1), row, row8);
  }
};

// The kernel. The grid has a cluster for every kRows rows and kTokens tokens.
template <class T, int kBits, int kSlots, bool kOffsets, class Tile, class E, int kAlign, class B>
__device__ __forceinline__ void codebook_stream_wgmma(const char* x, const char* units, const char* norms,
                                                      const float* fold, typename E::Out* d, int m, int n,
                                                      int units_k, int ldd, const B& book, typename E::Args args) {
  constexpr bool kTable = !kIsInt8<T> || B::kPairs;
  using Shared = StreamWgmmaShared<T, Tile, kTable>;
  using Product = Wgmma<T, Tile::kTokens>;
  using Acc = typename Product::Acc;
  using Decoder = UnitDecoder<T, kBits, kSlots, B::kPairs>;
  constexpr int kBatch = Decoder::kUnitSteps / 2;  // half a unit is multiplied while the other half is decoded
  constexpr int kThreads = 32 * Tile::kWarps;
  constexpr int kStages = Tile::kStages;
  constexpr int kPitch = Shared::kPitch;
  extern __shared__ __align__(1024) char stages[];

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % Tile::kSplits;
  int row_group = static_cast<int>(blockIdx.x) / Tile::kSplits;
  int token0 = 0;
  const int all8 = (m + 7) / 8;  // blocks of eight tokens
  if (m > Tile::kTokens) {
    const int tiles = (m + Tile::kTokens - 1) / Tile::kTokens;
    token0 = row_group % tiles * Tile::kTokens;
    row_group /= tiles;
    m = min(m - token0, Tile::kTokens);
    d += static_cast<long long>(token0) * ldd;
    if constexpr (E::kHasResidual) args.residual += static_cast<long long>(token0) * ldd;
    if constexpr (kIsInt8<T>) args.row_scale += token0;
  }
  const int col0 = row_group * Tile::kRows;
  // Warpgroups past the last row read the last rows again; their sums are not stored.
  const int tile = min(col0 / kUnitRows + warp, (n + 63) / 64 * 4 - 1);
  const int part = (units_k + Tile::kSplits - 1) / Tile::kSplits;
  const int first = rank * part;
  const int count = max(0, min(part, units_k - first));

  using Unit = WeightUnit<kBits, kSlots, kOffsets>;
  Unit weights[Tile::kPrefetch];
  RowFold<T> row_fold;
  const int index = tile * units_k + first;  // the first unit's index, which takes fewer registers than its address
  const auto load_unit = [&](Unit& unit, int u) {
    const long long at = index + u;
    unit.load(units + at * kUnitBytes<kBits>, norms + at * Unit::kNormBytes);
  };
#pragma unroll
  for (int s = 0; s < Tile::kPrefetch; ++s) {
    if (s < count) load_unit(weights[s], s);
  }
  row_fold.load(fold, tile);
  launch_dependents();

  const uint32_t base = shared_address(stages);
  const uint32_t full = base + Shared::kFull;
  const uint32_t empty = base + Shared::kEmpty;
  const int m8 = (m + 7) / 8;
  const auto copy_tokens = [&](int unit, int stage) {
    const int bytes = 1024 * Shared::kBlocks * m8;
    const char* from = x + (static_cast<long long>(first + unit) * Shared::kBlocks * all8 + token0 / 8) * 1024;
    const uint32_t to = base + Shared::kStaged + stage * Shared::kStageBytes;
    barrier_expect(full + 8 * stage, bytes);
    if (Shared::kBlocks == 1 || m8 == all8) {  // blocks of K follow one another
      copy_bulk(to, from, bytes, full + 8 * stage);
    } else {
      copy_bulk(to, from, 1024 * m8, full + 8 * stage);
      copy_bulk(to + 1024 * m8, from + 1024 * all8, 1024 * m8, full + 8 * stage);
    }
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, Tile::kWarps);
    }
    barrier_init_fence();
  }
  if constexpr (kTable) fill_pair_table<Tile::kWarps>(stages, book);
  wait_for_dependencies();
  if (threadIdx.x == 0) {
    for (int i = 0; i < min(kStages, count); ++i) copy_tokens(i, i);
  }
  float* col_scale = reinterpret_cast<float*>(stages + Shared::kColScale);
  float* bias = reinterpret_cast<float*>(stages + Shared::kBias);
  float* row_scale = reinterpret_cast<float*>(stages + Shared::kRowScale);
  const int columns = min(Tile::kRows, n - col0);
  copy_floats<kThreads, Tile::kRows>(col_scale, args.col_scale_per_channel + col0, columns);
  copy_floats<kThreads, Tile::kRows>(bias, args.bias + col0, args.bias != nullptr ? columns : 0);
  if constexpr (kIsInt8<T>) copy_floats<kThreads, Tile::kTokens>(row_scale, args.row_scale, m);
  copy_async_commit();
  args.col_scale_per_channel = col_scale;
  args.bias = bias;
  args.row_scale = row_scale;
  __syncthreads();  // the table is complete and the barriers are initialized

#pragma unroll
  for (int s = 0; s < Tile::kPrefetch; ++s) pin(weights[s].words);
  Decoder decoder(book, stages, row_fold);
  Acc sum[Tile::kTokens / 2] = {};
  uint32_t a[2][kBatch][4] = {};
  // Products in flight read the registers of their first operand. A use of the operand after the wait for these
  // products keeps the compiler from giving the registers to other values earlier.
  const auto keep = [&](uint32_t(&batch)[kBatch][4]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) pin(batch[i]);
  };
  const bool ring = count > kStages;
  int stage = 0;
  int parity = 0;
#pragma unroll 1
  for (int u0 = 0; u0 < count; u0 += Tile::kPrefetch) {
#pragma unroll
    for (int s = 0; s < Tile::kPrefetch; ++s) {
      const int u = u0 + s;
      if (s > 0 && u >= count) break;
      // This thread has finished unit u - 1. The other warps are close behind and need only have finished unit u - 2:
      // the wait is short.
      if (threadIdx.x == 0 && u >= 2 && u - 2 + kStages < count) {
        const int free = stage >= 2 ? stage - 2 : stage - 2 + kStages;
        barrier_wait(empty + 8 * free, stage >= 2 ? parity : parity ^ 1);
        copy_tokens(u - 2 + kStages, free);
      }
      barrier_wait(full + 8 * stage, parity);
      const uint32_t staged = __shfl_sync(0xffffffffu, base + Shared::kStaged + stage * Shared::kStageBytes, 0);
      const unsigned long long b = wgmma_descriptor(staged);
      // The second half's columns, which lie in a block of their own for 16-bit tokens.
      const unsigned long long b_high = kIsInt8<T> ? b + 2 * kWgmmaStep : b + 64 * m8;

#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t(&batch)[kBatch][4] = a[half];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) decoder.decode(batch[i], weights[s], half * kBatch + i);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          Product::issue(sum, batch[i], (half ? b_high : b) + i * kWgmmaStep, 1);
        }
        wgmma_commit();
        if (half && u + Tile::kPrefetch < count) load_unit(weights[s], u + Tile::kPrefetch);
        wgmma_wait<1>();  // the half before
        keep(a[1 - half]);
        if (!half && ring && u > 0 && lane == 0) barrier_arrive(empty + 8 * (stage > 0 ? stage - 1 : kStages - 1));
      }
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int half = 0; half < 2; ++half) keep(a[half]);
#pragma unroll
  for (int i = 0; i < Tile::kTokens / 2; ++i) pin(sum[i]);  // no sum is read before the wait
  copy_async_wait<0>();
  __syncthreads();  // table and stages have been read

  const int row0 = kUnitRows * warp + lane / 4;
#pragma unroll
  for (int j = 0; j < Tile::kTokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = 8 * j + 2 * (lane % 4) + e;
      const uint32_t at = base + 4 * (token * kPitch + row0);
      store_shared_4_if(at, bits(sum[4 * j + e]), token < m);
      store_shared_4_if(at + 32, bits(sum[4 * j + 2 + e]), token < m);
    }
  }
  if constexpr (Tile::kSplits > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  constexpr int kQuads = Tile::kRows / 4;
  const int share = (m * kQuads + Tile::kSplits - 1) / Tile::kSplits;
  const int end = min((rank + 1) * share, m * kQuads);
#pragma unroll 2
  for (int i = rank * share + threadIdx.x; i < end; i += kThreads) {
    const int token = i / kQuads;
    const int row = i % kQuads * 4;
    if (col0 + row >= n) continue;
    uint32_t sums[4];
    load_sum_16<Acc, Tile::kSplits>(sums, base + 4 * (token * kPitch + row));
    finish_quad<E, kAlign, Acc>(sums, token, row, col0, d, m, n, ldd, args);
  }
  if constexpr (Tile::kSplits > 1) {
    // No CTA exits while other CTAs read its sums.
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace qcut
