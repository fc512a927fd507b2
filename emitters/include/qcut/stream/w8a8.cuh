// W8A8 for few tokens, on the skeleton of stream/int8.cuh: int8 tokens, or rows of floats that are quantized as they
// are loaded, int8 weights, int32 sums.
//
// Dynamic quantization needs the largest magnitude of a row before the row's first product. The kernel that writes the
// row knows this magnitude and raises one word per token by an atomic maximum. The kernel here reads the word and
// quantizes the elements that it loads: no kernel stands between the two, and no CTA reads a row twice. Where nobody
// knows the magnitude, every CTA reads the rows whole and finds it.
//
// Exactness: integer sums are exact, and so is the maximum, in any order; the quantization equals that of
// decoder/quantize.cuh bitwise.
//
// Source: PTX ISA "Matrix Fragments for mma.m16n8k32".
#pragma once

#include <qcut/core/quantize.cuh>
#include <qcut/core/rotation.cuh>
#include <qcut/stream/int8.cuh>

namespace qcut {

// The form of the tokens. kNone, kGiven: int8 with a scale for each token; with kNone the previous kernel may also have
// written the weights. kRows: rows of a floating type, with their largest magnitudes. kFloats: only rows.
enum class Tokens { kNone, kGiven, kRows, kFloats };

// W8A8Tile in emitters/stream/w8a8.py describes the sizes. T is the tokens' type for kRows and kFloats.
template <class T_, Tokens kFrom, bool kCommonSums_, int kRowTiles, int kWarps, int kUnits, int kPrefetch, int kTokens,
          int kSplits>
struct W8A8Tile : Int8StreamTile<kRowTiles, kWarps, kUnits, kPrefetch, kTokens, kSplits> {
  using T = T_;
  static constexpr bool kWaitsFirst = kFrom == Tokens::kNone;
  static constexpr bool kPrefetchesL2 = false;
  static constexpr bool kFinds = kFrom == Tokens::kFloats;
  static constexpr bool kQuantizes = kFinds || kFrom == Tokens::kRows;
  static constexpr bool kCommonSums = kCommonSums_;
  // Byte offsets in shared memory: sums of rows of weights; scales and zero points of tokens; largest magnitudes of
  // results; largest magnitudes that each warp finds in a part of the tokens; sums of warps.
  static constexpr int kColSums = W8A8Tile::kVectorBytes;
  static constexpr int kTokenScales = kColSums + 4 * W8A8Tile::kRows;
  static constexpr int kZeroPoints = kTokenScales + 32 * W8A8Tile::kTokenTiles;
  static constexpr int kPeaks = kZeroPoints + 32 * W8A8Tile::kTokenTiles;
  static constexpr int kFound = kPeaks + 32 * W8A8Tile::kTokenTiles;
  static constexpr int kSums = kFound + (kTokens <= 8 ? (kWarps * kTokens + 3) / 4 * 16 : 0);
  static_assert(!kQuantizes || kTokens <= 8, "rows are quantized in one tile of the second operand");
};

// Adds the products of a unit of weights with tiles of eight tokens. x(tile) is lane 4g + t's part of token g of a tile:
// [64 columns][16 bytes].
template <int kTiles, class Part>
__device__ __forceinline__ void multiply_int8(int (&acc)[kTiles][4], const Int8Unit& unit, const Part& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t(&rows)[2][4] = unit[i / 2];
    const int j = i % 2 * 2;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint32_t(&part)[4] = x(tile)[i / 2];
      mma_s8(acc[tile], {rows[0][j], rows[1][j], rows[0][j + 1], rows[1][j + 1]}, part[j], part[j + 1]);
    }
  }
}

// Tokens as int8 rows, lda elements apart. k is a multiple of 16. Columns past k are zero.
template <class Tile, class Rows = AllRows>
struct Int8Rows {
  using Acc = int;
  uint32_t x[Tile::kTokenTiles][Tile::kUnits][2][4];
  const int8_t* a;
  int m, k, lda;
  Rows rows;

  __device__ __forceinline__ Int8Rows(const void* a, int m, int k, int lda, const Rows& rows = Rows())
      : a(static_cast<const int8_t*>(a)), m(m), k(k), lda(lda), rows(rows) {}
  __device__ __forceinline__ void next(int column) {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; ++j) {
      const int8_t* row = a + static_cast<long long>(row_of(8 * j + g)) * lda;
      const int columns = 8 * j + g < m ? k : 0;
#pragma unroll
      for (int i = 0; i < 2 * Tile::kUnits; ++i) {
        const int col = column + 64 * i + 16 * t;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (col < columns) raw = *reinterpret_cast<const uint4*>(row + col);
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) x[j][i / 2][i % 2][w] = words[w];
      }
    }
  }
  __device__ __forceinline__ void multiply(int (&acc)[Tile::kTokenTiles][4], const Int8Unit& unit, int u) const {
    multiply_int8(acc, unit, [&](int tile) -> const uint32_t(&)[2][4] { return x[tile][u]; });
  }
  __device__ __forceinline__ int row_of(int token) const {
    if constexpr (Rows::kOfExperts) return token < m ? rows.source(token) : 0;
    return token;
  }
};

// The same with scales and zero points of tokens, which the epilogue E reads: they wait in shared memory for the end.
template <class Tile, class E, class Rows = AllRows>
struct Int8Tokens : Int8Rows<Tile, Rows> {
  typename E::Args& args;
  float* scales;
  int* zero_points;
  typename E::Row mine;

  __device__ __forceinline__ Int8Tokens(const void* a, int m, int k, int lda, typename E::Args& args, char* shared,
                                        const Rows& rows = Rows())
      : Int8Rows<Tile, Rows>(a, m, k, lda, rows), args(args),
        scales(reinterpret_cast<float*>(shared + Tile::kTokenScales)),
        zero_points(reinterpret_cast<int*>(shared + Tile::kZeroPoints)), mine{0, 0.0f} {
    static_assert(Tile::kTokens <= Tile::kThreads, "a thread for each token");
  }
  __device__ __forceinline__ void begin(int column) {
    if constexpr (Rows::kOfExperts) {
      if (threadIdx.x < this->m) mine = E::row(args, this->rows.source(threadIdx.x), this->rows.rows);
    } else {
      mine = E::row(args, threadIdx.x, this->m);
    }
    this->next(column);
  }
  __device__ __forceinline__ void settle() {
    if (threadIdx.x < Tile::kTokens) {
      scales[threadIdx.x] = mine.scale;
      zero_points[threadIdx.x] = mine.zero_point;
    }
    args.row_scale = scales;
    args.zero_point_per_token = zero_points;
  }
};

// What rows of floats become: int8, in one part. int16x8.cuh has a form of two parts.
struct WholeRows {
  using Acc = int;
  using Quantized = QuantizedRow;
  static constexpr int kParts = 1;
  template <int kSize>
  static __device__ __forceinline__ void quantize(const Quantized& quantized, const float (&f)[kSize],
                                                  uint32_t (&packed)[1][kSize / 4]) {
    quantized.quantize(f, packed[0]);
  }
  template <int kUnits>
  static __device__ __forceinline__ void multiply(int (&acc)[1][4], const Int8Unit& unit,
                                                  const uint32_t (&x)[1][kUnits][2][4], int u) {
    multiply_int8(acc, unit, [&](int) -> const uint32_t(&)[2][4] { return x[0][u]; });
  }
};

// Tokens as rows of T, lda elements apart, which are quantized as they are loaded. Columns past k are zero. A fragment
// holds eight tokens: with fewer tokens, all lanes whose g is a token's number modulo kTokens share the quantization
// of the token's words and then exchange them. `absmax` holds the rows' largest magnitudes, unless the CTA's warps find
// them, each in its part of the rows, and leave them in `found` [warp][token]; `scales` receives the tokens' scales.
// With kAligned, rows start at multiples of 16 bytes. A rotation, that of stream/w8a8_rotated.cuh, is of one aligned
// token, whose largest magnitude then is that of its rotated columns.
template <class Tile, bool kAligned, class Form = WholeRows, class Rows = AllRows, class Rotation = NotRotated>
struct RowTokens {
  using Acc = typename Form::Acc;
  using Quantized = typename Form::Quantized;
  using T = typename Tile::T;
  static constexpr int kTokens = Tile::kTokens, kUnits = Tile::kUnits;
  static constexpr int kSize = Vector<T>::kSize < 4 * kTokens ? Vector<T>::kSize : 4 * kTokens;  // columns of a load
  static constexpr int kLoads = 4 * kTokens / kSize;                                             // of a unit
  uint32_t x[Form::kParts][kUnits][2][4];
  Vector<T> raw[kUnits][kLoads];
  const T* row;
  const float* absmax;
  float* scales;
  uint32_t* found;
  int m, k, lda, g, t, token, source, columns;
  Quantized quantized;
  Rotation rotation;
  uint32_t flips[Rotation::kRotates ? kUnits : 1];

  __device__ __forceinline__ RowTokens(const void* a, const float* absmax, float* scales, uint32_t* found, int m, int k,
                                       int lda, const Rows& rows = Rows(), const Rotation& rotation = Rotation())
      : absmax(absmax), scales(scales), found(found), m(m), k(k), lda(lda), g(threadIdx.x % 32 / 4),
        t(threadIdx.x % 4), token(g % kTokens), source(token), columns(token < m ? k : 0), quantized(0),
        rotation(rotation) {
    static_assert(!Rotation::kRotates || (Tile::kFinds && kTokens == 1 && kAligned && sizeof(T) == 2));
    static_assert(!Rows::kOfExperts || !Tile::kFinds, "rows lie one behind another");
    if constexpr (Rows::kOfExperts) source = token < m ? rows.source(token) : 0;
    row = static_cast<const T*>(a) + static_cast<long long>(source) * lda;
  }
  __device__ __forceinline__ void begin(int column) {
    load(column);
    if constexpr (Tile::kFinds) {
      find();
    } else {
      quantized = Quantized(columns > 0 ? __float_as_uint(absmax[source]) : 0);
    }
  }
  __device__ __forceinline__ void settle() {
    if constexpr (Tile::kFinds) {
      __syncthreads();
      const int lane = threadIdx.x % 32;
      uint32_t peak = 0;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const uint32_t of_row = warp_max(lane < Tile::kWarps ? found[lane * kTokens + i] : 0u);
        if (i == token) peak = of_row;
      }
      quantized = Quantized(peak);
    }
    if (threadIdx.x % 4 == 0 && threadIdx.x < 4 * m) scales[token] = quantized.scale();
    quantize();
  }
  __device__ __forceinline__ void next(int column) {
    load(column);
    quantize();
  }
  __device__ __forceinline__ void multiply(Acc (&acc)[1][4], const Int8Unit& unit, int u) const {
    Form::multiply(acc, unit, x, u);
  }

  __device__ __forceinline__ void find() {
    constexpr int kStep = Tile::kThreads * Vector<T>::kSize;
    const T* const rows = row - static_cast<long long>(token) * lda;
    uint32_t peaks[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      peaks[i] = 0;
      if constexpr (Rotation::kRotates) {
        for (int begin = 0; begin < k; begin += kStep) {  // all lanes take part in each
          const int col = begin + threadIdx.x * Vector<T>::kSize;
          Vector<T> v[1];
          load_vectors<T, 1, kAligned>(v, rows, col, 0, k);
          float r[Vector<T>::kSize];
          v[0].to_float(r);
          rotation.rotate(r, rotation.flips(col, k));
#pragma unroll
          for (int j = 0; j < Vector<T>::kSize; ++j) peaks[i] = max(peaks[i], __float_as_uint(r[j]) & 0x7fffffffu);
        }
        continue;
      }
      for (int col = threadIdx.x * Vector<T>::kSize; col < (i < m ? k : 0); col += kStep) {
        Vector<T> v[1];
        load_vectors<T, 1, kAligned>(v, rows + static_cast<long long>(i) * lda, col, 0, k);
        peaks[i] = max(peaks[i], v[0].abs_max());
      }
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      peaks[i] = warp_max(peaks[i]);
      if (threadIdx.x % 32 == 0) found[threadIdx.x / 32 * kTokens + i] = peaks[i];
    }
  }
  // Loads the lane's columns of its row; those past the row's are zeros.
  __device__ __forceinline__ void load(int column) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const int word = g / kTokens * kTokens + l * kSize / 4;
        const int col = column + Tile::kUnitColumns * u + 64 * (word / 4) + 16 * t + 4 * (word % 4);
        raw[u][l] = Vector<T>{};
        if constexpr (Rotation::kRotates) flips[u] = rotation.flips(col, columns);
        if (kAligned && col + kSize <= columns) {
          if constexpr (kSize * sizeof(T) == 16) {
            const uint4 v = *reinterpret_cast<const uint4*>(row + col);
            raw[u][l] = Vector<T>{v.x, v.y, v.z, v.w};
          } else {
            const uint2 v = *reinterpret_cast<const uint2*>(row + col);
            raw[u][l] = Vector<T>{v.x, v.y, 0, 0};
          }
        } else if (col < columns) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) {
            if (col + j < columns) raw[u][l].set(j, row[col + j]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void quantize() {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      uint32_t words[Form::kParts][kTokens];
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        float f[Vector<T>::kSize], used[kSize];
        uint32_t packed[Form::kParts][kSize / 4];
        raw[u][l].to_float(f);
#pragma unroll
        for (int j = 0; j < kSize; ++j) used[j] = f[j];
        if constexpr (Rotation::kRotates) rotation.rotate_words(used, flips[u]);
        Form::quantize(quantized, used, packed);
#pragma unroll
        for (int j = 0; j < kSize / 4; ++j) {
#pragma unroll
          for (int p = 0; p < Form::kParts; ++p) words[p][l * kSize / 4 + j] = packed[p][j];
        }
      }
#pragma unroll
      for (int w = 0; w < 8; ++w) {
#pragma unroll
        for (int p = 0; p < Form::kParts; ++p) {
          uint32_t& to = x[p][u][w / 4][w % 4];
          to = words[p][w % kTokens];
          if constexpr (kTokens < 8) to = __shfl_sync(0xffffffffu, to, 4 * (w / kTokens * kTokens + token) + t);
        }
      }
    }
  }
};

// The kernel: D [m, n] = epilogue(A B^T), A [m, k], B [n, k] of int8. `a` holds the tokens as int8 or T, lda elements
// apart; `a_absmax` holds the largest magnitudes of rows of T. With kAligned, rows of T start at multiples of 16 bytes.
// With kAbsmax, `absmax` [m] is raised to the largest magnitude of each row of D. With ExpertRows, B is [experts, n, k],
// m counts the routes of all tiles, and rows of D are routes. A rotation is of one token of T.
template <class Tile, bool kAligned, bool kAbsmax, class E, class Rows = AllRows, class Rotation = NotRotated>
__device__ __forceinline__ void int8_stream(const void* a, const float* a_absmax, const int8_t* b, typename E::Out* d,
                                            float* absmax, int m, int n, int k, int lda, int ldb, int ldd,
                                            typename E::Args args, Rows rows = Rows(),
                                            Rotation rotation = Rotation()) {
  extern __shared__ __align__(16) char shared[];
  if (!begin_expert<Tile>(rows, b, args, m, n, k, ldb)) return;
  if constexpr (Tile::kQuantizes) {
    float* const scales = reinterpret_cast<float*>(shared + Tile::kTokenScales);
    args.row_scale = scales;
    uint32_t* const found = reinterpret_cast<uint32_t*>(shared + Tile::kFound);
    const RowTokens<Tile, kAligned, WholeRows, Rows, Rotation> tokens(a, a_absmax, scales, found, m, k, lda, rows,
                                                                      rotation);
    stream_int8<Tile, kAbsmax, E>(tokens, b, d, absmax, m, n, k, ldb, ldd, args, rows);
  } else {
    const Int8Tokens<Tile, E, Rows> tokens(a, m, k, lda, args, shared, rows);
    stream_int8<Tile, kAbsmax, E>(tokens, b, d, absmax, m, n, k, ldb, ldd, args, rows);
  }
}

}  // namespace qcut
