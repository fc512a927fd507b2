// Routes to experts with int8 weights [experts, n, ldb] in row-major order, on the skeleton of stream.cuh: int8 tokens,
// or tokens of 16 bits, for which weights are converted in registers. Products are those of stream/w8a8.cuh and
// stream/w8a16.cuh, as is their exactness.
//
// Tokens are rows, lda elements apart, which start at multiples of 16 bytes; k columns are a multiple of 16 bytes. Columns
// of weights past k repeat the last 16 and are multiplied by zero tokens.
#pragma once

#include <qcut/experts/stream.cuh>
#include <qcut/stream/w8a16.cuh>
#include <qcut/stream/w8a8.cuh>

namespace qcut {

// Weights that have a scale of their own.
struct ScaledUnit {
  Int8Unit weights;
  float scale;
};

// A warp's tokens: lane 4g + t has columns 16t .. 16t + 15 of each 64 of token g, as it has of rows of weights.
template <class T, class B, class Tile>
struct Int8ExpertTokens {
  using Shared = StreamShared<T, Tile, false>;
  static constexpr int kParts = sizeof(T);  // of 16 bytes, of a lane's 16 columns
  uint32_t x[Tile::kUnits][Tile::kTokenTiles][2 * kParts][4];

  // Where chunk c of 16 bytes of a token's 128 lies: a quarter of a warp reads those of two tokens, in different banks.
  static __device__ __forceinline__ int place(int chunk, int row) { return chunk ^ (kIsInt8<T> ? 4 : 1) * (row % 2); }

  __device__ __forceinline__ void load(uint32_t region) {
    const int lane = threadIdx.x % 32;
    const int row = lane / 4 % Shared::kStagedRows;  // rows past the staged tokens repeat them
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) {
#pragma unroll
      for (int j = 0; j < Tile::kTokenTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2 * kParts; ++i) {
          const int before = 4 * kParts * (i / kParts);  // chunks of the unit before these 64 columns
          const int block = ((u * Shared::kBlocks + before / 8) * Tile::kTokenTiles + j) * Shared::kBlockBytes;
          const int chunk = before % 8 + kParts * (lane % 4) + i % kParts;
          load_shared_16(x[u][j][i], region + block + 128 * row + 16 * place(chunk, row));
        }
      }
    }
  }
  __device__ __forceinline__ void settle() {}
  template <class Product, class Acc, class Fold>
  __device__ __forceinline__ void multiply(const Product& product, Acc (&sum)[Tile::kTokenTiles][4],
                                           const ScaledUnit& unit, const Fold& fold, int u) const {
    Acc of_unit[Tile::kTokenTiles][4] = {};
    multiply(product, of_unit, unit.weights, fold, u);
#pragma unroll
    for (int c = 0; c < 4 * Tile::kTokenTiles; ++c) {
      sum[c / 4][c % 4] = fmaf(unit.scale, of_unit[c / 4][c % 4], sum[c / 4][c % 4]);
    }
  }
  template <class Product, class Acc, class Fold>
  __device__ __forceinline__ void multiply(const Product&, Acc (&sum)[Tile::kTokenTiles][4], const Int8Unit& unit,
                                           const Fold&, int u) const {
    if constexpr (kIsInt8<T>) {
      multiply_int8(sum, unit, [&](int j) -> const uint32_t(&)[2][4] { return x[u][j]; });
    } else {
      multiply_halves<T, B>(sum, unit, [&](int j, int i) -> const uint32_t(&)[4] { return x[u][j][i]; });
    }
  }
};

template <class T_, class B, class Tile, bool kUnitScales>
struct Int8Form {
  using T = T_;
  static constexpr bool kTable = false;
  using Unit = typename Either<kUnitScales, ScaledUnit, Int8Unit>::Type;
  using Tokens = Int8ExpertTokens<T, B, Tile>;
  struct Fold {};
  struct Product {
    using Acc = typename Either<kIsInt8<T>, int, float>::Type;
  };
  const T* a;
  const int8_t* b;
  int k, lda, ldb;
  const float* unit_scales;  // [experts, row tiles, units_k]

  struct Walk {
    const int8_t* b;
    int n, ldb, column, last_column, row = 0;
    long long before = 0;  // rows of the experts before
    const int8_t* rows[2];
    const float* all_scales;
    const float* scales = nullptr;  // of the units of these rows
    int units_k, first;

    __device__ __forceinline__ Walk(const Int8Form& form, int n, int units_k, int k0)
        : b(form.b), n(n), ldb(form.ldb), column(128 * k0 + 16 * (threadIdx.x % 4)), last_column((form.k - 1) / 16 * 16),
          rows{form.b, form.b}, all_scales(form.unit_scales), units_k(units_k), first(k0) {}
    // Rows past n repeat the last row and are not stored.
    __device__ __forceinline__ void go(int expert, int tile) {
      before = static_cast<long long>(expert) * n;
      row = 16 * tile + static_cast<int>(threadIdx.x) % 32 / 4;
      if constexpr (kUnitScales) {
        const long long rows_before = static_cast<long long>(expert) * ((n + 15) / 16) + tile;
        scales = all_scales + rows_before * units_k + first;
      }
      find();
    }
    __device__ __forceinline__ void load(ScaledUnit& unit, int u, bool wanted) const {
      load(unit.weights, u, wanted);
      if (wanted) unit.scale = scales[u];
    }
    __device__ __forceinline__ void load(Int8Unit& unit, int u, bool wanted) const {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int at = min(column + 128 * u + 64 * p, last_column);
#pragma unroll
        for (int i = 0; i < 2; ++i) load_stream_16_if(unit[p][i], rows[i] + at, wanted);
      }
    }
    __device__ __forceinline__ void next(Fold&, bool) {
      row += 16;
      if constexpr (kUnitScales) scales += units_k;
      find();
    }
    __device__ __forceinline__ void find() {
#pragma unroll
      for (int i = 0; i < 2; ++i) rows[i] = b + (before + min(row + 8 * i, n - 1)) * ldb;
    }
  };

  __device__ __forceinline__ void fill(char*) const {}
  __device__ __forceinline__ Product product(const char*) const { return {}; }
  __device__ __forceinline__ void stage(uint32_t region, int source, int there, int, int first, int) const {
    using Shared = StreamShared<T, Tile, false>;
    constexpr int kRows = Shared::kStagedRows, kPieces = Shared::kStagedBytes / 16, kColumns = 16 / sizeof(T);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int from = 0; from < kPieces; from += 32) {
      const int i = from + lane;
      const int row = i / 8 % kRows;
      const int j = i / (8 * kRows) % Tile::kTokenTiles;
      const int block = i / (8 * kRows * Tile::kTokenTiles);
      const int token = __shfl_sync(0xffffffffu, source, 8 * j + row);
      const int column = 128 * first + kColumns * (8 * block + i % 8);
      const T* from_row = a + static_cast<long long>(token) * lda;
      const uint32_t to = region + 16 * (i - i % 8 + Tokens::place(i % 8, row));
      copy_async_if<16>(to, from_row + column, i < kPieces && 8 * j + row < there, column >= k);
    }
  }
};

template <class T, class Tile, class E, class B>
__device__ __forceinline__ void int8_experts(const T* a, const B* b, typename E::Out* d, int m, int n, int k, int lda,
                                             int ldb, int ldd, const typename E::Args& args, const ExpertRows& rows) {
  using Form = Int8Form<T, B, Tile, E::kUnitScales>;
  const Form form{a, reinterpret_cast<const int8_t*>(b), k, lda, ldb, args.col_scale_per_unit};
  multiply_experts<Form, Tile, E, false>(form, d, m, n, (k + 127) / 128, ldd, args, rows);
}

}  // namespace qcut
