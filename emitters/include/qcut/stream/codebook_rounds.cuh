// D = epilogue(X W^T) of up to 16 rotated tokens X and codebook weights W, for any K and little shared memory.
//
// codebook.cuh keeps the tokens of all K in the registers of its warps, and a table of 64 KB. Here the warps of a
// CTA go along K in rounds: in each round a warp multiplies one unit of 128 columns of kRowTiles tiles of 16 rows.
// Values are chosen by PRMT from a book in registers (those of a codebook of pairs from a dense table), and sums stay
// in registers until the last round, so that shared memory only holds the tokens of one round, and later the sums. The
// weights of the next round take the place of a tile's weights as soon as these are multiplied, and the tokens of the
// next round are copied meanwhile. The first weights are loaded before the wait for the previous kernel.
//
// Exactness: as codebook.cuh, but sums of a warp's rounds are added in the order of the rounds before sums of warps.
//
// Shared memory: the table of a codebook of pairs; a region for each warp, which stages the tokens of a round and later
// the warp's sums; the vectors of the epilogue.
#pragma once

#include <qcut/stream/codebook.cuh>

namespace qcut {

// The kernel. m <= kTokens; the grid has a CTA for every kRowTiles tiles.
template <class T, int kBits, int kSlots, bool kOffsets, class Tile, class E, class B>
__device__ __forceinline__ void codebook_stream_rounds(const BlockTokens<T, Tile>& x, const char* units,
                                                       const char* norms, const float* fold, typename E::Out* d, int m,
                                                       int n, int units_k, int ldd, const B& book,
                                                       typename E::Args args) {
  static_assert(Tile::kUnits == 1 && Tile::kSplits == 1 && Tile::kPrefetch == Tile::kRowTiles);
  using Shared = StreamShared<T, Tile, B::kPairs, DensePairTable>;
  using Values = typename Either<B::kPairs, PairValues<DensePairTable>, RegisterBook<kBits>>::Type;
  using Product = UnitProduct<T, kBits, Values>;
  using Acc = typename Product::Acc;
  constexpr int kThreads = 32 * Tile::kWarps;
  constexpr int kTiles = Tile::kRowTiles;
  constexpr int kPitch = Shared::kPitch;
  extern __shared__ __align__(16) char shared[];

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int tile0 = static_cast<int>(blockIdx.x) * kTiles;
  const int last_tile = (n + kUnitRows - 1) / kUnitRows - 1;
  const int col0 = kUnitRows * tile0;

  // Tiles past the last one repeat it, and their sums are not stored. Units past the last one are not loaded: what the
  // registers hold is multiplied by zero tokens.
  using Unit = WeightUnit<kBits, kSlots, kOffsets>;
  Unit weights[kTiles] = {};
  RowFold<T> folds[kTiles];
  const auto load = [&](int r, int unit) {
    const long long at = static_cast<long long>(min(tile0 + r, last_tile)) * units_k + unit;
    weights[r].load_if(units + at * kUnitBytes<kBits> + 16 * lane,
                       norms + at * Unit::kNormBytes + lane / 4 * Unit::Norms::kLaneBytes, unit < units_k);
  };
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    load(r, warp);
    folds[r].load(fold, min(tile0 + r, last_tile));
  }
  launch_dependents();
  if constexpr (B::kPairs) fill_pair_table<Tile::kWarps, DensePairTable>(shared, book);

  const uint32_t regions = shared_address(shared) + Shared::kRegions;
  const uint32_t region = regions + warp * Shared::kRegionBytes;
  float* col_scale = reinterpret_cast<float*>(shared + Shared::kColScale);
  float* bias = reinterpret_cast<float*>(shared + Shared::kBias);
  float* row_scale = reinterpret_cast<float*>(shared + Shared::kRowScale);
  wait_for_dependencies();
  x.request(regions, m, 0, units_k);
  const int columns = min(Tile::kRows, n - col0);
  copy_floats<kThreads, Tile::kRows>(col_scale, args.col_scale_per_channel + col0, columns);
  copy_floats<kThreads, Tile::kRows>(bias, args.bias + col0, args.bias != nullptr ? columns : 0);
  if constexpr (kIsInt8<T>) copy_floats<kThreads, Tile::kTokens>(row_scale, args.row_scale, m);
  copy_async_commit();
  args.col_scale_per_channel = col_scale;
  args.bias = bias;
  args.row_scale = row_scale;

  if constexpr (B::kPairs) __syncthreads();  // the table is complete
  const auto product = [&] {
    if constexpr (B::kPairs) {
      return Product(book, shared);
    } else {
      return Product(book);
    }
  }();
  Acc sums[kTiles][Tile::kTokenTiles][4] = {};
#pragma unroll 1
  for (int first = 0; first < units_k; first += Tile::kWarps) {
    copy_async_wait<0>();
    __syncwarp();
    TokenFragments<T, Tile> tokens;
    tokens.load(region);
    __syncwarp();  // the next tokens, or the sums, take the place of these
    const int next = first + Tile::kWarps;
    if (next < units_k) x.request(regions, m, next, units_k);
    copy_async_commit();
    TokenSums<T, kSlots, Tile::kTokenTiles, kSumsTokens<kSlots, kOffsets>> token_sums;
    token_sums.load(tokens.b[0]);
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      product.add(sums[r], weights[r], folds[r], tokens.b[0], token_sums);
      load(r, next + warp);
    }
  }

  const uint32_t mine = region + 4 * (2 * (lane % 4) * kPitch + lane / 4);
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; ++j) {
#pragma unroll
      for (int e = 0; e < (Tile::kTokens > 1 ? 2 : 1); ++e) {
        const bool there = 8 * j + 2 * (lane % 4) + e < m;
        const uint32_t place = mine + 64 * r + 4 * (8 * j + e) * kPitch;
        store_shared_4_if(place, bits(sums[r][j][e]), there);
        store_shared_4_if(place + 32, bits(sums[r][j][2 + e]), there);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < Tile::kRows * m; i += kThreads) {
    const int token = i / Tile::kRows;
    const int row = i % Tile::kRows;
    if (col0 + row >= n) continue;
    const Acc* at = reinterpret_cast<const Acc*>(shared + Shared::kRegions) + token * kPitch + row;
    Acc sum{};
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) sum += at[w * (Shared::kRegionBytes / 4)];
    finish_element<E>(sum, token, row, col0, d, m, n, ldd, args);
  }
}

}  // namespace qcut
