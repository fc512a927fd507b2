// The tokens, the tile and the layout of shared memory of stream/codebook.cuh and stream/codebook_rounds.cuh.
//
// BlockTokens are tokens that an earlier kernel has rotated. RowToken is one token that the product's kernel rotates
// itself, QuantizedToken one that it also quantizes. Tokens are staged in shared memory: each warp stages the
// columns of its own units. TokenFragments holds a warp's staged tokens in registers, as second operands of mma.sync.
//
// Exactness: staging copies bits; the rotation of RowToken equals that of codebook/rotate.cuh bitwise.
#pragma once

#include <qcut/codebook/codebook.cuh>
#include <qcut/codebook/rotate.cuh>
#include <qcut/core/cluster.cuh>

namespace qcut {

template <int kTokens_, int kRowTiles_, int kWarps_, int kUnits_, int kSplits_, int kPrefetch_, bool kMirrored_ = false>
struct StreamTile {
  static constexpr bool kMirrored = kMirrored_;  // whether int8 products take two passes of a mirrored codebook
  static constexpr int kTokens = kTokens_;  // at most; m of a launch may be less
  static constexpr int kTokenTiles = (kTokens + 7) / 8;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kRows = kUnitRows * kRowTiles;
  static constexpr int kWarps = kWarps_;
  static constexpr int kUnits = kUnits_;
  static constexpr int kSplits = kSplits_;
  static constexpr int kPrefetch = kPrefetch_;
};

template <class T>
constexpr bool kIsInt8 = sizeof(T) == 1;

// Byte offsets in shared memory, which starts with the table of pairs if there is one.
template <class T, class Tile, bool kTable = !kIsInt8<T>, class Table = PairTable>
struct StreamShared {
  static constexpr int kBlocks = sizeof(T);  // blocks of 128 bytes of each token, in a unit
  static constexpr int kStagedRows = Tile::kTokens < 8 ? Tile::kTokens : 8;
  static constexpr int kBlockBytes = 128 * kStagedRows;
  static constexpr int kStagedBytes = Tile::kUnits * kBlocks * Tile::kTokenTiles * kBlockBytes;
  // The words between the sums of two tokens, [token][row]. The padding brings the stores of a warp, 8 rows of 4
  // tokens, to 32 different banks.
  static constexpr int kPitch = Tile::kRows + 4;
  static constexpr int kSumBytes = 4 * Tile::kTokens * kPitch;
  static constexpr int kRegionBytes = kStagedBytes > kSumBytes ? kStagedBytes : kSumBytes;
  // Pieces of 16 rows of a token are dealt out to the CTAs of a cluster.
  static constexpr int kShare = (Tile::kRowTiles * Tile::kTokens + Tile::kSplits - 1) / Tile::kSplits;

  static constexpr int kRegions = kTable ? Table::kBytes : 0;
  static constexpr int kInbox = kRegions + Tile::kWarps * kRegionBytes;
  static constexpr int kColScale = kInbox + (Tile::kSplits > 1 ? 4 * kUnitRows * Tile::kSplits * kShare : 0);
  static constexpr int kBias = kColScale + 4 * Tile::kRows;
  static constexpr int kRowScale = kBias + 4 * Tile::kRows;
  static constexpr int kBytes = kRowScale + 4 * Tile::kTokens;
};

// If `wanted`, copies kSize bytes, or with `zero` writes zeros and reads nothing. The copy is predicated instead of
// branched over: after a divergent branch the compiler no longer keeps shared addresses in uniform registers, and
// decoding takes one more addition for every two weights.
template <int kSize>
__device__ __forceinline__ void copy_async_if(uint32_t shared, const void* global, bool wanted, bool zero) {
  const int copied = wanted;
  const int bytes = zero ? 0 : kSize;
  if constexpr (kSize == 16) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t"
        "@p cp.async.cg.shared.global [%0], [%1], 16, %3;\n\t}" ::"r"(shared),
        "l"(global), "r"(copied), "r"(bytes)
        : "memory");
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t"
        "@p cp.async.ca.shared.global [%0], [%1], %4, %3;\n\t}" ::"r"(shared),
        "l"(global), "r"(copied), "r"(bytes), "n"(kSize)
        : "memory");
  }
}

// Stages a warp's columns of the tokens of a tile's routes; lane i has the row of the token of route i. Chunk c of token
// t lies at c ^ (t % 8) of its 128 bytes, in memory as in the region. Units past the last one are zero.
template <class T, class Tile>
__device__ __forceinline__ void stage_routes(const char* x, uint32_t region, int source, int m, int rows, int first,
                                             int units_k) {
  using Shared = StreamShared<T, Tile>;
  constexpr int kRows = Shared::kStagedRows;
  constexpr int kPieces = Shared::kStagedBytes / 16;
  const int lane = threadIdx.x % 32;
  const int blocks = (rows + 7) / 8;
#pragma unroll
  for (int from = 0; from < kPieces; from += 32) {
    const int i = from + lane;
    const int row = i / 8 % kRows;
    const int j = i / (8 * kRows) % Tile::kTokenTiles;
    const int block = i / (8 * kRows * Tile::kTokenTiles);
    const int token = __shfl_sync(0xffffffffu, source, 8 * j + row);
    const long long at = static_cast<long long>(first * Shared::kBlocks + block) * blocks + token / 8;
    const int chunk = i % 8 ^ row ^ token % 8;
    copy_async_if<16>(region + 16 * i, x + 1024 * at + 128 * (token % 8) + 16 * chunk,
                      i < kPieces && 8 * j + row < m, first + block / Shared::kBlocks >= units_k);
  }
}

// Tokens in blocks, as the rotation kernel stored them. Each warp stages the columns of its own units in its
// region of shared memory; the CTA's first unit is cta_first.
template <class T, class Tile>
struct BlockTokens {
  using Shared = StreamShared<T, Tile>;
  static constexpr bool kHasScale = false;
  const char* x;

  __device__ __forceinline__ void begin(int, int) {}
  // Units past the last one are zero. Tokens past m are not loaded, because their columns of the products are not used.
  __device__ __forceinline__ void request(uint32_t regions, int m, int cta_first, int units_k) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const uint32_t region = regions + warp * Shared::kRegionBytes;
    const int first = cta_first + warp * Tile::kUnits;
    const int m8 = (m + 7) / 8;
    constexpr int kRows = Shared::kStagedRows;
    constexpr int kPieces = Shared::kStagedBytes / 16;
#pragma unroll
    for (int from = 0; from < kPieces; from += 32) {
      const int i = from + lane;
      const int chunk = i % 8;
      const int row = i / 8 % kRows;
      const int j = i / (8 * kRows) % Tile::kTokenTiles;
      const int block = i / (8 * kRows * Tile::kTokenTiles);
      const bool there = i < kPieces && 8 * j + row < m;
      const long long at = static_cast<long long>(first * Shared::kBlocks + block) * m8 + j;
      copy_async_if<16>(region + 16 * i, x + 1024 * at + 128 * row + 16 * chunk, there,
                        first + block / Shared::kBlocks >= units_k);
    }
  }
  __device__ __forceinline__ void finish(uint32_t, float*) const {}
};

// Columns of one token as the model stores it, 16 to a thread: those of kHere units from unit `first` on. Each piece is
// rotated in groups of kGroup columns, bitwise as codebook/rotate.cuh does. Units past the last one are zero.
template <class X, class Tile, int kGroup, int kHere>
struct TokenPieces {
  static_assert(Tile::kTokens == 1 && kGroup >= kLaneColumns && kGroup <= kUnitColumns);
  static constexpr int kThreadsPerUnit = kUnitColumns / kLaneColumns;
  static constexpr int kRounds = (kHere * kThreadsPerUnit + 32 * Tile::kWarps - 1) / (32 * Tile::kWarps);
  const X* x;
  const uint32_t* signs;
  int k, units_pass;  // columns of the token, units of a pass
  float factor;       // 1 / sqrt(kGroup)
  uint32_t flips[kRounds];
  uint4 raw[kRounds][2];

  __device__ __forceinline__ TokenPieces(const X* x, const uint32_t* signs, int k, int units_pass, float factor)
      : x(x), signs(signs), k(k), units_pass(units_pass), factor(factor) {}

  // The unit of a thread's piece, counted from `first`; the next function gives the piece's column within the unit.
  static __device__ __forceinline__ int unit(int round) {
    return (round * 32 * Tile::kWarps + static_cast<int>(threadIdx.x)) / kThreadsPerUnit;
  }
  static __device__ __forceinline__ int column() { return threadIdx.x % kThreadsPerUnit * kLaneColumns; }
  // Whether the threads of a warp have pieces in a round.
  static __device__ __forceinline__ bool has(int round) { return __shfl_sync(0xffffffffu, unit(round), 0) < kHere; }

  __device__ __forceinline__ void load_signs(int first, int units_k) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int at = kUnitColumns * min(first + unit(i), units_k - 1) + column();
      flips[i] = signs[at / 32] >> at % 32;
    }
  }
  __device__ __forceinline__ void load(int first, int units_k) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int of_all = first + unit(i);
      const int at = kUnitColumns * (of_all < units_pass ? of_all : of_all - units_pass) + column();
      const bool there = unit(i) < kHere && of_all < units_k && at < k;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        raw[i][h] = make_uint4(0, 0, 0, 0);
        if (there) raw[i][h] = *reinterpret_cast<const uint4*>(x + at + 8 * h);
      }
    }
  }
  __device__ __forceinline__ void rotate(float (&r)[kLaneColumns], int round) const {
    const X* loaded = reinterpret_cast<const X*>(raw[round]);
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      r[j] = __uint_as_float(__float_as_uint(to_float(loaded[j])) ^ (flips[round] << (31 - j) & 0x80000000u));
    }
    butterflies<kGroup, 1>(r, kGroup, threadIdx.x, nullptr);
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) r[j] *= factor;
  }
};

// One token as the model stores it. The CTA rotates the token's columns that its warps multiply and stages them.
// Rotating here takes less time than a kernel of its own. A norm or a gate computed here would take more time, since
// its latency exceeds that of a dependent launch. A thread rotates 16 columns, which keeps a quarter of the warps busy.
template <class T, class Tile, int kGroup>
struct RowToken {
  static_assert(!kIsInt8<T>);
  static constexpr int kCtaUnits = Tile::kWarps * Tile::kUnits;
  using Pieces = TokenPieces<T, Tile, kGroup, kCtaUnits>;
  static constexpr bool kHasScale = false;
  Pieces pieces;

  __device__ __forceinline__ RowToken(const T* x, const uint32_t* signs, int k, int units_pass, float factor)
      : pieces(x, signs, k, units_pass, factor) {}
  __device__ __forceinline__ void begin(int cta_first, int units_k) { pieces.load_signs(cta_first, units_k); }
  __device__ __forceinline__ void request(uint32_t, int, int cta_first, int units_k) {
    pieces.load(cta_first, units_k);
  }
  __device__ __forceinline__ void finish(uint32_t regions, float*) const {
#pragma unroll
    for (int i = 0; i < Pieces::kRounds; ++i) {
      if (!Pieces::has(i)) break;
      const int unit = Pieces::unit(i);
      float r[kLaneColumns];
      pieces.rotate(r, i);
      const uint32_t at = regions + unit / Tile::kUnits * StreamShared<T, Tile>::kRegionBytes +
                          256 * (unit % Tile::kUnits) + 2 * Pieces::column();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = pack_pair<T>(r[8 * h + 2 * j], r[8 * h + 2 * j + 1]);
        if (unit < kCtaUnits) store_shared_16(at + 16 * h, w);
      }
    }
  }
};

// One token as the model stores it, to be multiplied as int8. A CTA rotates the columns that its warps multiply, learns
// the largest magnitude of all from the other CTAs of its cluster, and quantizes and stages its columns, bitwise as
// codebook/rotate.cuh does. The kernel has arrived at the cluster's barrier before, and waits for it after.
template <class X, class Tile, int kGroup>
struct QuantizedToken {
  static constexpr int kCtaUnits = Tile::kWarps * Tile::kUnits;
  using Pieces = TokenPieces<X, Tile, kGroup, kCtaUnits>;
  static constexpr bool kHasScale = true;
  Pieces pieces;

  __device__ __forceinline__ QuantizedToken(const X* x, const uint32_t* signs, int k, int units_pass, float factor)
      : pieces(x, signs, k, units_pass, factor) {}
  __device__ __forceinline__ void begin(int cta_first, int units_k) { pieces.load_signs(cta_first, units_k); }
  __device__ __forceinline__ void request(uint32_t, int, int cta_first, int units_k) {
    pieces.load(cta_first, units_k);
  }
  // Writes the token's scale for the epilogue.
  __device__ __forceinline__ void finish(uint32_t regions, float* scale) const {
    __shared__ uint32_t peaks[Tile::kWarps];
    __shared__ uint32_t cluster_peaks[Tile::kSplits];
    float r[Pieces::kRounds][kLaneColumns];
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < Pieces::kRounds; ++i) {
      if (!Pieces::has(i)) break;
      pieces.rotate(r[i], i);
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) peak = max(peak, __float_as_uint(r[i][j]) & 0x7fffffffu);
    }
    peak = warp_max(peak);
    const int lane = threadIdx.x % 32;
    if (lane == 0) peaks[threadIdx.x / 32] = peak;
    __syncthreads();
    peak = warp_max(lane < Tile::kWarps ? peaks[lane] : 0u);
    if constexpr (Tile::kSplits > 1) {
      cluster_wait();  // all CTAs of the cluster have started
      if (threadIdx.x < Tile::kSplits) {
        store_cluster_4(shared_address(cluster_peaks + blockIdx.x % Tile::kSplits), threadIdx.x, peak);
      }
      cluster_arrive();
      cluster_wait();
      peak = warp_max(lane < Tile::kSplits ? cluster_peaks[lane] : 0u);
      cluster_arrive_relaxed();
    }
    const QuantizedRow quantized(peak);
    if (threadIdx.x == 0) *scale = quantized.scale();
#pragma unroll
    for (int i = 0; i < Pieces::kRounds; ++i) {
      if (!Pieces::has(i)) break;
      const int unit = Pieces::unit(i);
      uint32_t w[4];
#pragma unroll
      for (int h = 0; h < 4; h += 2) {  // words as rotate.cuh stores them
        const float f[8] = {r[i][2 * h],     r[i][2 * h + 1], r[i][2 * h + 8],  r[i][2 * h + 9],
                            r[i][2 * h + 2], r[i][2 * h + 3], r[i][2 * h + 10], r[i][2 * h + 11]};
        uint32_t words[2];
        quantized.quantize(f, words);
        w[h] = words[0];
        w[h + 1] = words[1];
      }
      const uint32_t at = regions + unit / Tile::kUnits * StreamShared<int8_t, Tile>::kRegionBytes +
                          128 * (unit % Tile::kUnits) + Pieces::column();
      if (unit < kCtaUnits) store_shared_16(at, w);
    }
  }
};

// A warp's tokens as second operands of mma.sync, loaded from the warp's region of shared memory.
template <class T, class Tile>
struct TokenFragments {
  using Shared = StreamShared<T, Tile>;
  static constexpr int kChunks = 8 * Shared::kBlocks;  // chunks of 16 bytes of a token in a unit
  static constexpr int kRows = Shared::kStagedRows;
  uint32_t b[Tile::kUnits][Tile::kTokenTiles][kChunks];

  __device__ __forceinline__ void load(uint32_t region) {
    const int lane = threadIdx.x % 32;
    const int row = lane % kRows;  // rows past the staged tokens repeat them
    const uint32_t at = region + 128 * row;
    const int chunk = lane / 8 ^ row;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) {
#pragma unroll
      for (int j = 0; j < Tile::kTokenTiles; ++j) {
#pragma unroll
        for (int q = 0; q < kChunks; q += 4) {
          const int block = ((u * Shared::kBlocks + q / 8) * Tile::kTokenTiles + j) * Shared::kBlockBytes;
          uint32_t matrices[4];
          load_matrices(matrices, at + block + 16 * (chunk ^ q % 8));
#pragma unroll
          for (int i = 0; i < 4; ++i) b[u][j][q + i] = matrices[i];
        }
      }
    }
  }
};

}  // namespace qcut
