// D = epilogue(X W^T) of up to 32 rotated tokens X and codebook weights W. Indices of weights go from memory to
// registers, where they are decoded into the first operand of mma.sync.
//
// A CTA computes kRowTiles tiles of 16 rows of W. The CTAs of a cluster (kSplits) divide K among their warps: each warp
// has kUnits units of 128 columns of every tile. A warp reads the tokens of its columns once and keeps them in
// registers as the second operand, while it walks down the tiles of weights. The units of kPrefetch tiles are in
// flight; the first loads come before the wait for the previous kernel. A CTA's weights are contiguous in memory. Many
// warps with few loads in flight each hide latency better than few warps with many loads, and keep the load-store unit
// busy, through which decoding reads the table.
//
// Int8 products with a mirrored codebook (kMirrored) take two passes: one PRMT decodes the values of each sign, and the
// sums with the negative values' magnitudes are subtracted.
//
// Exactness: int8 products are added in int32. 16-bit products of a slot are added by the tensor core, in two chains
// where one chain would make the tensor core wait; sums of slots, warps and CTAs are added in float32 in a fixed order.
// Weights with offsets in slots of 16 columns are multiplied by their norms, and rounded, before the product.
//
// Shared memory: the table of pairs; a region for each warp, which stages the warp's tokens and later its sums; the
// sums that other CTAs of the cluster send; the vectors of the epilogue.
//
// int8.cuh walks down the rows in another way, for which decoding leaves no issue slots. On sm_90a a warp's unit takes
// 99 instructions here (f16, one token): 32 PRMT, 32 LDS and 8 HMMA decode and multiply, 3 LDG and 2 STS move data, 22
// walk. The walk of int8.cuh, with rounds over K and rows past the last one, takes 63 (W8A8, eight tokens). int8.cuh
// also adds the warps' sums in another order, which would change float32 results.
#pragma once

#include <qcut/stream/codebook_tokens.cuh>
#include <qcut/core/epilogue.cuh>

namespace qcut {

__device__ __forceinline__ void store_shared_4_if(uint32_t shared, uint32_t w, bool wanted) {
  const int stored = wanted;
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p st.shared.u32 [%0], %1;\n\t}" ::"r"(shared), "r"(w),
               "r"(stored)
               : "memory");
}

// Copies `count` floats, at most kMost, into shared memory. All kThreads threads of the CTA take part.
template <int kThreads, int kMost>
__device__ __forceinline__ void copy_floats(float* shared, const float* global, int count) {
#pragma unroll
  for (int first = 0; first < kMost; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    copy_async_if<4>(shared_address(shared + i), global + i, i < count, false);
  }
}

__device__ __forceinline__ void pin(UnitWords<4>& w) {
  pin(w.low);
  pin(w.high);
}
__device__ __forceinline__ void pin(UnitWords<3>& w) {
  pin(w.packed);
  pin(w.planes);
}
__device__ __forceinline__ void pin(UnitWords<2>& w) { pin(w.packed); }

// The part of a unit and of the unit's norms that lane 4g + t holds: rows g and g + 8.
template <int kBits, int kSlots, bool kOffsets>
struct WeightUnit {
  using Norms = SlotNorms<kOffsets>;
  static constexpr int kNormBytes = Norms::kBytes * kSlots;
  UnitWords<kBits> words;
  Norms norms[kSlots];

  // Loads from the addresses of a unit and of the unit's norms.
  __device__ __forceinline__ void load(const char* unit, const char* unit_norms) {
    const int lane = threadIdx.x % 32;
    words.load(unit, lane);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) norms[s].load(unit_norms + Norms::kBytes * s + lane / 4 * Norms::kLaneBytes);
  }
  // Loads from the addresses of the lane's part of a unit and of the unit's norms.
  __device__ __forceinline__ void load_if(const char* mine, const char* my_norms, bool wanted) {
    words.load_if(mine, threadIdx.x % 32, wanted);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) norms[s].load_if(my_norms + Norms::kBytes * s, wanted);
  }
};

// The factors by which the weights of rows g and g + 8 become int8; empty for 16-bit products.
template <class T>
struct RowFold {
  __device__ __forceinline__ void load(const float*, int) {}
  __device__ __forceinline__ void load_if(const float*, int, bool) {}
};

template <>
struct RowFold<int8_t> {
  float row, row8;
  // `tile` counts tiles of 16 rows of W.
  __device__ __forceinline__ void load(const float* fold, int tile) {
    const float* at = fold + kUnitRows * tile + threadIdx.x % 32 / 4;
    row = __uint_as_float(load_stream_4(at));
    row8 = __uint_as_float(load_stream_4(at + 8));
  }
  __device__ __forceinline__ void load_if(const float* fold, int tile, bool wanted) {
    if (wanted) load(fold, tile);
  }
};

// Decodes a word of indices by a PairTable in shared memory.
struct TableBook {
  const char* table;
  uint32_t lane4;

  __device__ __forceinline__ TableBook(const Book&, const char* table)
      : table(table), lane4(4 * (threadIdx.x % 32)) {}
  __device__ __forceinline__ void decode(uint32_t (&a)[4], uint32_t word) const {
    PairTable::decode(a, word, table, lane4);
  }
};

// Two ones of a 16-bit type.
template <class T>
constexpr uint32_t kOnes = 0x3c003c00u;
template <>
constexpr uint32_t kOnes<__nv_bfloat16> = 0x3f803f80u;

// Whether sums of tokens are multiplied by offsets. In slots of 16 columns, sums would be as many products as the weights
// are: offsets are added to the weights there.
template <int kSlots, bool kOffsets>
constexpr bool kSumsTokens = kOffsets && kSlots < 8;

// Sums of eight tokens' columns, for weights with offsets: lane 4g + t has those of tokens 2t and 2t + 1 of each tile.
template <class T, int kSlots, int kTokenTiles, bool kSummed>
struct TokenSums {
  template <int kWords>
  __device__ __forceinline__ void load(const uint32_t (&)[kTokenTiles][kWords]) {}
};

template <class T, int kSlots, int kTokenTiles>
struct TokenSums<T, kSlots, kTokenTiles, true> {
  float of[kSlots][kTokenTiles][2];

  // Multiplies the tokens of a unit by ones.
  __device__ __forceinline__ void load(const uint32_t (&b)[kTokenTiles][16]) {
    constexpr int kSteps = 8 / kSlots;  // of 16 columns
    constexpr uint32_t ones = kOnes<T>;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        float sum[4] = {};
#pragma unroll
        for (int i = s * kSteps; i < (s + 1) * kSteps; ++i) {
          Float16<T>::mma(sum, {ones, ones, ones, ones}, {b[j][2 * i], b[j][2 * i + 1]});
        }
        of[s][j][0] = sum[0];
        of[s][j][1] = sum[1];
      }
    }
  }
};

// Adds the products of a unit's 16 rows with the warp's tokens. b holds chunks of 16 bytes of eight tokens; each chunk
// is one 8 x 8 matrix of the second operand. Values, a TableBook or a RegisterBook, decodes 16-bit weights.
template <class T, int kBits, class Values>
struct UnitProduct {
  using Acc = float;
  Values values;

  template <class... Args>
  __device__ __forceinline__ explicit UnitProduct(const Args&... args) : values(args...) {}

  template <int kSlots, bool kOffsets, int kTokenTiles>
  __device__ __forceinline__ void add(Acc (&sum)[kTokenTiles][4], const WeightUnit<kBits, kSlots, kOffsets>& unit,
                                      const RowFold<T>&, const uint32_t (&b)[kTokenTiles][16],
                                      const TokenSums<T, kSlots, kTokenTiles, kSumsTokens<kSlots, kOffsets>>& sums)
      const {
    if constexpr (kOffsets && !kSumsTokens<kSlots, kOffsets>) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t a[4];
        values.decode(a, unit.words.word(i));
        NormScale<T, kOffsets>(unit.norms[i * kSlots / 8]).apply(a);
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) Float16<T>::mma(sum[j], a, {b[j][2 * i], b[j][2 * i + 1]});
      }
      return;
    }
    constexpr int kSteps = 8 / kSlots;  // of 16 columns
    constexpr bool kTwoChains = kTokenTiles == 1 && kSteps > 2;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      float even[kTokenTiles][4] = {}, second[kTokenTiles][4] = {};
      auto& odd = kTwoChains ? second : even;
#pragma unroll
      for (int i = s * kSteps; i < (s + 1) * kSteps; i += 2) {
        uint32_t a0[4], a1[4];
        values.decode(a0, unit.words.word(i));
        if constexpr (kSteps > 1) values.decode(a1, unit.words.word(i + 1));
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
          Float16<T>::mma(even[j], a0, {b[j][2 * i], b[j][2 * i + 1]});
          if constexpr (kSteps > 1) Float16<T>::mma(odd[j], a1, {b[j][2 * i + 2], b[j][2 * i + 3]});
        }
      }
      const float2 norm = norm_pair(unit.norms[s].norms);
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float part = kTwoChains ? even[j][e] + odd[j][e] : even[j][e];
          if constexpr (kSumsTokens<kSlots, kOffsets>) {
            const float2 offset = norm_pair(unit.norms[s].offsets);
            part = fmaf(e < 2 ? offset.x : offset.y, sums.of[s][j][e % 2], part);
          }
          sum[j][e] = fmaf(e < 2 ? norm.x : norm.y, part, sum[j][e]);
        }
      }
    }
  }
};

template <int kBits, class Table>
struct UnitProduct<int8_t, kBits, PairValues<Table>> {
  using Acc = int;
  PairValues<Table> values;

  __device__ __forceinline__ UnitProduct(const PairBook& book, const char* table) : values(book, table) {}

  template <int kSlots, int kTokenTiles>
  __device__ __forceinline__ void add(Acc (&sum)[kTokenTiles][4], const WeightUnit<kBits, kSlots, false>& unit,
                                      const RowFold<int8_t>& fold, const uint32_t (&b)[kTokenTiles][8],
                                      const TokenSums<int8_t, kSlots, kTokenTiles, false>&) const {
    constexpr int kCount = kStepSlots<kSlots>, kSteps = 4 * kCount / kSlots;  // of 32 columns
#pragma unroll
    for (int s = 0; s < kSlots / kCount; ++s) {
      PairFactors factors[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float2 norm = norm_pair(unit.norms[s * kCount + i].norms);
        factors[i].build(norm.x * fold.row, norm.y * fold.row8);
      }
#pragma unroll
      for (int i = s * kSteps; i < (s + 1) * kSteps; ++i) {
        uint32_t a[4];
        decode_pairs_s8(a, unit.words.word(2 * i), unit.words.word(2 * i + 1), values, factors);
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) mma_s8(sum[j], a, b[j][2 * i], b[j][2 * i + 1]);
      }
    }
  }
};

// Int8 values of a mirrored codebook of 16 values, by the magnitudes of values 0 to 7.
struct MirroredBytes {};

template <class Values>
constexpr bool kIsMirrored = false;
template <>
constexpr bool kIsMirrored<MirroredBytes> = true;

template <int kBits, class Values>
struct UnitProduct<int8_t, kBits, Values> {
  using Acc = int;
  static constexpr bool kMirrored = kIsMirrored<Values>;
  static constexpr int kTableBits = kMirrored ? 3 : kBits;
  QuarterBook<kTableBits> quarter;

  template <class... Args>
  __device__ __forceinline__ explicit UnitProduct(const Book& book, const Args&...) : quarter(book) {
    if constexpr (kMirrored) {
#pragma unroll
      for (int i = 0; i < 4; ++i) quarter.value[i] = fabsf(quarter.value[i]);
    }
  }

  template <int kSlots, int kTokenTiles>
  __device__ __forceinline__ void add(Acc (&sum)[kTokenTiles][4], const WeightUnit<kBits, kSlots, false>& unit,
                                      const RowFold<int8_t>& fold, const uint32_t (&b)[kTokenTiles][8],
                                      const TokenSums<int8_t, kSlots, kTokenTiles, false>&) const {
    constexpr int kCount = kStepSlots<kSlots>, kSteps = 4 * kCount / kSlots;  // of 32 columns
    Acc negative[kTokenTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kSlots / kCount; ++s) {
      RowBook<kTableBits> row[kCount], row8[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float2 norm = norm_pair(unit.norms[s * kCount + i].norms);
        row[i].build(quarter, norm.x * fold.row);
        row8[i].build(quarter, norm.y * fold.row8);
      }
#pragma unroll
      for (int i = s * kSteps; i < (s + 1) * kSteps; ++i) {
        uint32_t a[4], minus[4];
        if constexpr (kMirrored) {
          decode_mirrored_s8(minus, a, unit.words.word(2 * i), unit.words.word(2 * i + 1), row, row8);
        } else {
          decode_s8(a, unit.words.word(2 * i), unit.words.word(2 * i + 1), row, row8);
        }
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) {
          mma_s8(sum[j], a, b[j][2 * i], b[j][2 * i + 1]);
          if constexpr (kMirrored) mma_s8(negative[j], minus, b[j][2 * i], b[j][2 * i + 1]);
        }
      }
    }
    if constexpr (kMirrored) {
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[j][e] -= negative[j][e];
      }
    }
  }
};

// Writes one element of D. The epilogue's vectors are in shared memory; the vectors of columns start at column col0.
template <class E, class Acc>
__device__ __forceinline__ void finish_element(Acc sum, int token, int row, int col0, typename E::Out* d, int m, int n,
                                               int ldd, const typename E::Args& args) {
  const auto column = E::column(args, row, n - col0);
  const long long at = static_cast<long long>(token) * ldd + col0 + row;
  float added = 0.0f;
  if constexpr (E::kHasResidual) added = to_float(args.residual[at]);
  d[at] = E::convert(E::finish(E::apply(sum, E::row(args, token, m), column), added, args));
}

// D is the product of all tokens with one weight.
struct NoRoutes {
  static constexpr bool kSummed = false;
  template <class T, class Tile, bool kTable>
  using Shared = StreamShared<T, Tile, kTable>;
};

// The kernel. units_k <= kSplits * kWarps * kUnits, m <= kTokens. The grid has a cluster for every kRowTiles tiles. x
// is a BlockTokens, a RowToken or a QuantizedToken.
//
// With SummedRoutes (codebook_sums.cuh), x is a RouteToken, and units of K of all routes of a token follow one another:
// units_k is a multiple of kUnits, and where kSplits > 1, kWarps * kUnits one of units_k. The grid has as many clusters
// for every token.
template <class T, int kBits, int kSlots, bool kOffsets, class Tile, class E, class X, class B, class Routes = NoRoutes>
__device__ __forceinline__ void codebook_stream(X x, const char* units, const char* norms, const float* fold,
                                                typename E::Out* d, int m, int n, int units_k, int ldd,
                                                const B& book, typename E::Args args, Routes routes = Routes()) {
  constexpr bool kTable = !kIsInt8<T> || B::kPairs;
  using Shared = typename Routes::template Shared<T, Tile, kTable>;
  using Values = typename Either<Tile::kMirrored, MirroredBytes, TableBook>::Type;
  using Product = UnitProduct<T, kBits, typename Either<B::kPairs, PairValues<PairTable>, Values>::Type>;
  using Acc = typename Product::Acc;
  constexpr int kThreads = 32 * Tile::kWarps;
  constexpr int kUnits = Tile::kUnits;
  constexpr int kPitch = Shared::kPitch;
  extern __shared__ __align__(16) char shared[];

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % Tile::kSplits;
  int cluster = static_cast<int>(blockIdx.x) / Tile::kSplits;
  if constexpr (Routes::kSummed) {
    cluster = routes.begin(cluster, (n + Tile::kRows - 1) / Tile::kRows, m);
    m = 1;  // a route's
  }
  const int tile0 = cluster * Tile::kRowTiles;
  const int tiles = min(Tile::kRowTiles, (n + kUnitRows - 1) / kUnitRows - tile0);
  const int col0 = kUnitRows * tile0;
  const int cta_first = rank * Tile::kWarps * kUnits;
  const int first = cta_first + warp * kUnits;

  // Units past the last one stay zero, and so do their tokens. All warps take the same branches: the table's address
  // then stays in a uniform register, which saves an addition for every two weights.
  using Unit = WeightUnit<kBits, kSlots, kOffsets>;
  Unit weights[Tile::kPrefetch][kUnits] = {};
  RowFold<T> folds[Tile::kPrefetch];
  // The address of this lane's part of unit k0 of the next tile, computed before the tile's registers are free.
  int k0 = min(first, units_k - 1), row_tile0 = tile0;
  if constexpr (Routes::kSummed) {
    k0 = routes.find(first, units_k);
    row_tile0 += routes.expert * ((n + 63) / 64 * 4);
  }
  const long long unit0 = static_cast<long long>(row_tile0) * units_k + k0;
  const char* next_unit = units + unit0 * kUnitBytes<kBits> + 16 * lane;
  const char* next_norms = norms + unit0 * Unit::kNormBytes + lane / 4 * Unit::Norms::kLaneBytes;
  const auto load_unit = [&](Unit& unit, int u, bool wanted) {
    bool inside = first + u < units_k;
    if constexpr (Routes::kSummed) inside = routes.there;
    unit.load_if(next_unit + u * kUnitBytes<kBits>, next_norms + u * Unit::kNormBytes, wanted && inside);
  };
  const auto next_tile = [&] {
    next_unit += units_k * kUnitBytes<kBits>;
    next_norms += units_k * Unit::kNormBytes;
  };
#pragma unroll
  for (int s = 0; s < Tile::kPrefetch; ++s) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) load_unit(weights[s][u], u, s == 0 || s < tiles);
    folds[s].load_if(fold, row_tile0 + s, s == 0 || s < tiles);
    next_tile();
  }
  // No register is free for the tile after the kPrefetch tiles in flight, but the L2 has room: this tile is prefetched
  // while the table is filled and the tokens arrive. Prefetching more tiles, one in every later round, or the last of
  // two tiles would only delay the tiles in flight.
  if (!kIsInt8<T> && !Routes::kSummed && Tile::kPrefetch + 1 < tiles) {
    constexpr int kLines = kUnitBytes<kBits> / 128;
    const int lines = min(kUnits, units_k - k0) * kLines;
#pragma unroll
    for (int i = 0; i < kUnits * kLines; i += 32) {
      // next_unit points 16 * lane bytes past the unit's start.
      if (i + lane < lines) prefetch_l2(next_unit + (128 * i + 112 * lane));
    }
    if (lane == 31) prefetch_l2(next_norms);
  }
  x.begin(cta_first, units_k);
  launch_dependents();
  if constexpr (Tile::kSplits > 1) cluster_arrive_relaxed();
  if constexpr (kTable) fill_pair_table<Tile::kWarps>(shared, book);

  const uint32_t regions = shared_address(shared) + Shared::kRegions;
  const uint32_t region = regions + warp * Shared::kRegionBytes;
  float* col_scale = reinterpret_cast<float*>(shared + Shared::kColScale);
  float* bias = reinterpret_cast<float*>(shared + Shared::kBias);
  float* row_scale = reinterpret_cast<float*>(shared + Shared::kRowScale);
  wait_for_dependencies();
  if constexpr (Routes::kSummed) {
    x.request(region, routes, k0, units_k);
    copy_async_commit();
    routes.template request<Shared, Tile>(shared, args, warp, lane, col0, n, units_k, rank);
  } else {
    x.request(regions, m, cta_first, units_k);
    copy_async_commit();
    const int columns = min(Tile::kRows, n - col0);
    copy_floats<kThreads, Tile::kRows>(col_scale, args.col_scale_per_channel + col0, columns);
    copy_floats<kThreads, Tile::kRows>(bias, args.bias + col0, args.bias != nullptr ? columns : 0);
    if constexpr (kIsInt8<T> && !X::kHasScale) copy_floats<kThreads, Tile::kTokens>(row_scale, args.row_scale, m);
  }
  copy_async_commit();
  args.col_scale_per_channel = col_scale;
  args.bias = bias;
  args.row_scale = row_scale;
  x.finish(regions, row_scale);
  __syncthreads();  // the table is complete
  copy_async_wait<1>();
  __syncwarp();

  TokenFragments<T, Tile> tokens;
  tokens.load(region);
  __syncwarp();  // the sums will take the place of the tokens
#pragma unroll
  for (int s = 0; s < Tile::kPrefetch; ++s) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) pin(weights[s][u].words);
  }
  const Product product(book, shared);
  TokenSums<T, kSlots, Tile::kTokenTiles, kSumsTokens<kSlots, kOffsets>> sums[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) sums[u].load(tokens.b[u]);
  uint32_t mine = region + 4 * (2 * (lane % 4) * kPitch + lane / 4);
  asm volatile("" : "+r"(mine));  // keeps the compiler from computing the address anew for every tile
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile += Tile::kPrefetch) {
#pragma unroll
    for (int s = 0; s < Tile::kPrefetch; ++s) {
      if (s > 0 && tile + s >= tiles) break;
      Acc sum[Tile::kTokenTiles][4] = {};
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        product.add(sum, weights[s][u], folds[s], tokens.b[u], sums[u]);
        load_unit(weights[s][u], u, tile + s + Tile::kPrefetch < tiles);
      }
      folds[s].load_if(fold, row_tile0 + tile + s + Tile::kPrefetch, tile + s + Tile::kPrefetch < tiles);
      next_tile();
      const uint32_t place = mine + 64 * (tile + s);
#pragma unroll
      for (int j = 0; j < Tile::kTokenTiles; ++j) {
#pragma unroll
        for (int e = 0; e < (Tile::kTokens > 1 ? 2 : 1); ++e) {
          const bool there = 8 * j + 2 * (lane % 4) + e < m;
          store_shared_4_if(place + 4 * (8 * j + e) * kPitch, bits(sum[j][e]), there);
          store_shared_4_if(place + 4 * ((8 * j + e) * kPitch + 8), bits(sum[j][2 + e]), there);
        }
      }
    }
  }

  copy_async_wait<0>();
  __syncthreads();
  if constexpr (Routes::kSummed) {
    routes.template finish<Acc, Shared, Tile, E>(shared, args, d, col0, n, units_k, ldd, cta_first, rank);
    return;
  }
  const auto sum_of_warps = [&](int token, int row) {
    const Acc* at = reinterpret_cast<const Acc*>(shared + Shared::kRegions) + token * kPitch + row;
    constexpr int kChains = 4;  // one chain of additions would take as long as the loads
    Acc sum[kChains] = {};
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) sum[w % kChains] += at[w * (Shared::kRegionBytes / 4)];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  };
  if constexpr (Tile::kSplits == 1) {
    for (int i = threadIdx.x; i < Tile::kRows * m; i += kThreads) {
      const int token = i / Tile::kRows;
      const int row = i % Tile::kRows;
      if (col0 + row < n) finish_element<E>(sum_of_warps(token, row), token, row, col0, d, m, n, ldd, args);
    }
  } else {
    // Each CTA sends its sums to the CTA that writes their elements of D. The receiver adds them in the order of ranks.
    const uint32_t inbox = shared_address(shared) + Shared::kInbox;
    cluster_wait();  // all CTAs of the cluster have started
    for (int i = threadIdx.x; i < Tile::kRows * m; i += kThreads) {
      const int token = i / Tile::kRows;
      const int row = i % Tile::kRows;
      if (col0 + row >= n) continue;
      const int piece = i / kUnitRows;
      const int slot = rank * Shared::kShare + piece / Tile::kSplits;
      store_cluster_4(inbox + 4 * (kUnitRows * slot + row % kUnitRows), piece % Tile::kSplits,
                      bits(sum_of_warps(token, row)));
    }
    cluster_arrive();
    cluster_wait();
    for (int i = threadIdx.x; i < kUnitRows * Shared::kShare; i += kThreads) {
      const int piece = i / kUnitRows * Tile::kSplits + rank;
      const int token = piece / Tile::kRowTiles;
      const int row = piece % Tile::kRowTiles * kUnitRows + i % kUnitRows;
      if (token >= m || col0 + row >= n) continue;
      const Acc* sent = reinterpret_cast<const Acc*>(shared + Shared::kInbox) + i;
      Acc sum = sent[0];
#pragma unroll
      for (int r = 1; r < Tile::kSplits; ++r) sum += sent[r * kUnitRows * Shared::kShare];
      finish_element<E>(sum, token, row, col0, d, m, n, ldd, args);
    }
  }
}

}  // namespace qcut
