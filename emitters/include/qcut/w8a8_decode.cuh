// W8A8 for few tokens, from what stands before a projection to its epilogue in one kernel: a norm, a gated activation or
// nothing, then quantization, then D = epilogue(A B^T).
//
// The product is that of weight_only_decode.cuh with integers: a CTA takes 16 kRowTiles rows of weights, its warps
// divide K among them, and lane 4g + t reads 16 bytes each of rows g and g + 8. The first of a layer's weights are
// asked for before the wait for the previous kernel. Where tokens are made here, every CTA makes all of them for itself:
// few are sooner read than another kernel is started.
//
// A warp takes chunks of a token, 16 bytes for each lane. What a norm sums are the chunks' sums, as norm.cuh does, and
// integers do not care: results are bitwise those of the kernels one after the other.
//
// Source: PTX ISA "Matrix Fragments for mma.m16n8k32", "griddepcontrol", "barrier.cluster".
#pragma once

#include <qcut/codebook.cuh>
#include <qcut/epilogue.cuh>
#include <qcut/token_source.cuh>

namespace qcut {

// See W8A8Tile in emitters/w8a8_decode.py. A unit is 16 rows x 128 columns; tokens have up to kColumns.
template <class T_, Prologue kPrologue_, int kRowTiles_, int kWarps_, int kUnits_, int kPrefetch_, int kTokens_,
          int kColumns_, int kSplits_>
struct W8A8Tile {
  using T = T_;
  static constexpr Prologue kPrologue = kPrologue_;
  static constexpr int kRowTiles = kRowTiles_, kWarps = kWarps_, kUnits = kUnits_, kPrefetch = kPrefetch_;
  static constexpr int kTokens = kTokens_, kColumns = kColumns_, kSplits = kSplits_;
  static constexpr bool kNorm = kIsNorm<kPrologue>;
  static constexpr bool kMakes = kPrologue != Prologue::kNone && kPrologue != Prologue::kGiven;
  static constexpr int kUnitColumns = 128;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kSpan = kUnitColumns * kUnits;  // columns of a warp
  static constexpr int kThreads = 32 * kWarps;
  // Of a token's sums: four more words than rows make its stores miss those of the other tokens.
  static constexpr int kPitch = kRows + 4;
  // Of a token in int8: 64 bytes more than a multiple of 128 put the words of two tokens in different banks.
  static constexpr int kTokenPitch = kColumns + 64;
  static constexpr int kChunk = 32 * Vector<T>::kSize;
  static constexpr int kChunks = kColumns / kChunk;
  // Shared memory, in bytes: scales and biases of rows, scales of tokens, tokens; then the warps' sums, where at first
  // the tokens lie in T, a norm's parameters, and what is known of chunks: sums, squares or peaks.
  static constexpr int kTokenScales = 8 * kRows;
  static constexpr int kQuantized = kTokenScales + 32;
  static constexpr int kSums = kQuantized + (kMakes ? kTokens * kTokenPitch : 0);
  static constexpr int kParameters = kSums + static_cast<int>(sizeof(T)) * kTokens * kColumns;
  static constexpr int kPartial = kParameters + (kNorm ? 2 * static_cast<int>(sizeof(T)) * kColumns : 0);
  static_assert(kColumns % kChunk == 0 && kTokens <= 8, "see emitters/w8a8_decode.py");
};

// Makes m tokens of k columns: int8, zero beyond k to the last chunk's end, and their scales.
template <class Tile, bool kAligned>
struct TokenMaker {
  using T = typename Tile::T;
  static constexpr int kSize = Vector<T>::kSize;
  static constexpr bool kLayer = Tile::kPrologue == Prologue::kLayer;
  static constexpr bool kTwo = Tile::kNorm || Tile::kPrologue == Prologue::kGate;
  static constexpr int kBatch = 2;  // chunks of a warp on their way

  char* shared;
  TokenSource<T> source;
  int m, k, lane, warp, chunks;

  __device__ __forceinline__ TokenMaker(char* shared, const TokenSource<T>& source, int m, int k)
      : shared(shared), source(source), m(m), k(k), lane(threadIdx.x % 32), warp(threadIdx.x / 32),
        chunks((k + Tile::kChunk - 1) / Tile::kChunk) {}

  __device__ __forceinline__ T* staged() const { return reinterpret_cast<T*>(shared + Tile::kSums); }
  __device__ __forceinline__ T* parameters() const { return reinterpret_cast<T*>(shared + Tile::kParameters); }
  // Of stage i, for each chunk of each token.
  __device__ __forceinline__ float* partial(int i) const {
    return reinterpret_cast<float*>(shared + Tile::kPartial) + i * Tile::kTokens * Tile::kChunks;
  }

  // A norm's parameters, which no kernel before this one writes.
  __device__ __forceinline__ void before_wait() const {
    if constexpr (Tile::kNorm) {
      for (int col = threadIdx.x * kSize; col < Tile::kColumns; col += Tile::kThreads * kSize) {
        Vector<T> v[1], b[1]{};
        load_vectors<T, 1, kAligned>(v, source.weight, col, 0, k);
        if (kLayer && source.bias != nullptr) load_vectors<T, 1, kAligned>(b, source.bias, col, 0, k);
        *reinterpret_cast<Vector<T>*>(parameters() + col) = v[0];
        *reinterpret_cast<Vector<T>*>(parameters() + Tile::kColumns + col) = b[0];
      }
    }
  }

  // Calls of(token, col, chunk's index among all) for this warp's chunks.
  template <class Of>
  __device__ __forceinline__ void each_chunk(const Of& of) const {
    for (int item = warp; item < m * chunks; item += Tile::kWarps) {
      of(item / chunks, item % chunks * Tile::kChunk + lane * kSize, item);
    }
  }
  __device__ __forceinline__ Vector<T>& vector(int token, int col) const {
    return *reinterpret_cast<Vector<T>*>(staged() + token * Tile::kColumns + col);
  }
  __device__ __forceinline__ void note_peak(const Vector<T>& v, int item) const {
    const uint32_t peak = warp_max(v.abs_max());
    if (lane == 0) partial(2)[item] = __uint_as_float(peak);
  }
  static __device__ __forceinline__ Vector<T> rounded(const float (&f)[kSize]) {
    Vector<T> v{};
#pragma unroll
    for (int i = 0; i < kSize; ++i) v.set(i, from_float<T>(f[i]));
    return v;
  }

  __device__ __forceinline__ void read() const {
    for (int first = warp; first < m * chunks; first += kBatch * Tile::kWarps) {
      Vector<T> x[kBatch][1], other[kBatch][1]{};
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int item = first + b * Tile::kWarps;
        const int token = item / chunks;
        const int col = item % chunks * Tile::kChunk + lane * kSize;
        const int columns = item < m * chunks ? k : 0;
        load_vectors<T, 1, kAligned>(x[b], source.x + token * source.x_stride, col, 0, columns);
        if (kTwo && source.other != nullptr) {
          load_vectors<T, 1, kAligned>(other[b], source.other + token * source.other_stride, col, 0, columns);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int item = first + b * Tile::kWarps;
        if (item >= m * chunks) break;
        const int token = item / chunks;
        const int col = item % chunks * Tile::kChunk + lane * kSize;
        if constexpr (kTwo) {
          float f[kSize], g[kSize];
          x[b][0].to_float(f);
          other[b][0].to_float(g);
          if (!Tile::kNorm || source.other != nullptr) {
#pragma unroll
            for (int i = 0; i < kSize; ++i) f[i] = joined<T, Tile::kPrologue>(f[i], g[i]);
            x[b][0] = rounded(f);
            if (Tile::kNorm && blockIdx.x == 0) {
              store_vector<T, kAligned>(source.sum + token * static_cast<long long>(k), col, k, f);
            }
          }
          if constexpr (Tile::kNorm) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kSize; ++i) sum = kLayer ? sum + f[i] : fmaf(f[i], f[i], sum);
            sum = warp_total(sum);
            if (lane == 0) partial(kLayer ? 0 : 1)[item] = sum;
          }
        }
        vector(token, col) = x[b][0];
        if constexpr (!Tile::kNorm) note_peak(x[b][0], item);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void normalize() const {
    const float columns = static_cast<float>(k);
    const auto mean_of = [&](int token) {
      return kLayer ? __fdiv_rn(chunk_total(partial(0) + token * chunks, chunks), columns) : 0.0f;
    };
    if constexpr (kLayer) {
      each_chunk([&](int token, int col, int item) {
        const float mean = mean_of(token);
        float f[kSize], squares = 0.0f;
        vector(token, col).to_float(f);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const float centered = col + i < k ? f[i] - mean : 0.0f;
          squares = fmaf(centered, centered, squares);
        }
        squares = warp_total(squares);
        if (lane == 0) partial(1)[item] = squares;
      });
      __syncthreads();
    }
    each_chunk([&](int token, int col, int item) {
      const float mean = mean_of(token);
      const float inv = inverse_root(chunk_total(partial(1) + token * chunks, chunks), columns, source.eps);
      float f[kSize], w[kSize], b[kSize];
      vector(token, col).to_float(f);
      reinterpret_cast<const Vector<T>*>(parameters() + col)->to_float(w);
      reinterpret_cast<const Vector<T>*>(parameters() + Tile::kColumns + col)->to_float(b);
#pragma unroll
      for (int i = 0; i < kSize; ++i) f[i] = col + i < k ? normalized<T, kLayer>(f[i], mean, inv, w[i], b[i]) : 0.0f;
      const Vector<T> v = rounded(f);
      vector(token, col) = v;
      note_peak(v, item);
    });
    __syncthreads();
  }

  __device__ __forceinline__ void quantize() const {
    float* const scales = reinterpret_cast<float*>(shared + Tile::kTokenScales);
    each_chunk([&](int token, int col, int) {
      uint32_t peak = 0;
      for (int i = lane; i < chunks; i += 32) peak = max(peak, __float_as_uint(partial(2)[token * chunks + i]));
      const QuantizedRow row(warp_max(peak));
      if (col == 0) scales[token] = row.scale();
      float f[kSize];
      vector(token, col).to_float(f);
      uint32_t packed[kSize / 4];
      row.quantize(f, packed);
#pragma unroll
      for (int i = 0; i < kSize / 4; ++i) {
        *reinterpret_cast<uint32_t*>(shared + Tile::kQuantized + token * Tile::kTokenPitch + col + 4 * i) = packed[i];
      }
    });
    __syncthreads();
  }

  __device__ __forceinline__ void make() const {
    read();
    if constexpr (Tile::kNorm) normalize();
    quantize();
  }
};

// a: int8 tokens, lda elements apart, where it makes none; k of them are multiples of 16. kAligned: rows of T are multiples of 16
// bytes.
template <class Tile, bool kAligned, class E>
__device__ __forceinline__ void w8a8_decode(const int8_t* a, int lda, const TokenSource<typename Tile::T>& source,
                                            const int8_t* b, typename E::Out* d, int m, int n, int k, int ldb, int ldd,
                                            typename E::Args args) {
  extern __shared__ __align__(16) char shared[];
  float* const row_scales = reinterpret_cast<float*>(shared);
  float* const biases = row_scales + Tile::kRows;
  int* const sums = reinterpret_cast<int*>(shared + Tile::kSums);  // [warp][token][row]

  const int warp = threadIdx.x / 32;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  const int rank = blockIdx.x % Tile::kSplits;
  const int n0 = blockIdx.x / Tile::kSplits * Tile::kRows;
  const int tiles = min(Tile::kRowTiles, (n - n0 + 15) / 16);

  // Where K is longer than all warps together, they come round for more: kStride columns further on.
  constexpr int kStride = Tile::kSplits * Tile::kWarps * Tile::kSpan;
  const int rank_first = rank * Tile::kWarps * Tile::kSpan;
  const int first = rank_first + warp * Tile::kSpan;
  const int rounds = first < k ? (k - first + kStride - 1) / kStride : 0;

  // A unit of weights: [64 columns][row g, g + 8][16 bytes]. Rows past n repeat the last one and are not stored;
  // columns past k meet zero tokens, and repeat the last 16.
  uint32_t w[Tile::kPrefetch][Tile::kUnits][2][2][4];
  const int last_column = (k - 1) / 16 * 16;
  const auto load = [&](uint32_t (&unit)[2][2][4], int tile, int column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int8_t* row = b + static_cast<long long>(min(n0 + 16 * tile + g + 8 * i, n - 1)) * ldb;
#pragma unroll
      for (int p = 0; p < 2; ++p) load_stream_16(unit[p][i], row + min(column + 64 * p + 16 * t, last_column));
    }
  };
  // A GEMM's b, too, may be what the kernel before wrote.
  if constexpr (Tile::kPrologue == Prologue::kNone) wait_for_dependencies();
#pragma unroll
  for (int s = 0; s < Tile::kPrefetch; ++s) {
    if (s >= tiles || rounds == 0) break;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) load(w[s][u], s, first + Tile::kUnitColumns * u);
  }
  launch_dependents();
  for (int row = threadIdx.x; row < Tile::kRows; row += Tile::kThreads) {
    const typename E::Column column = E::column(args, n0 + row, n);
    row_scales[row] = column.scale;
    biases[row] = column.bias;
  }
  const TokenMaker<Tile, kAligned> maker(shared, source, m, k);
  if constexpr (Tile::kMakes) {
    maker.before_wait();
    wait_for_dependencies();
    maker.make();
    args.row_scale = reinterpret_cast<const float*>(shared + Tile::kTokenScales);
  } else if constexpr (Tile::kPrologue == Prologue::kGiven) {
    wait_for_dependencies();
  }

  uint32_t x[Tile::kUnits][2][4];  // of token g: [unit][64 columns][16 bytes]
  const int columns = !Tile::kMakes ? k : maker.chunks * Tile::kChunk;
  const auto load_tokens = [&](int column) {
#pragma unroll
    for (int i = 0; i < 2 * Tile::kUnits; ++i) {
      const int col = column + 64 * i + 16 * t;
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (g < m && col < columns) {
        const char* row = shared + Tile::kQuantized + g * Tile::kTokenPitch;
        if constexpr (!Tile::kMakes) row = reinterpret_cast<const char*>(a) + static_cast<long long>(g) * lda;
        raw = *reinterpret_cast<const uint4*>(row + col);
      }
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i / 2][i % 2][j] = words[j];
    }
  };
  load_tokens(first);

  // Accumulators hold rows g and g + 8 of tokens 2t and 2t + 1.
  int* const own = sums + warp * Tile::kTokens * Tile::kPitch + g;
  const auto place = [&](int c) { return (2 * t + c % 2) * Tile::kPitch + c / 2 * 8; };
  const auto counts = [&](int c) { return 2 * t + c % 2 < Tile::kTokens; };
  for (int round = 0; round < rounds; ++round) {
    const int column = first + round * kStride;
#pragma unroll 1
    for (int tile0 = 0; tile0 < tiles; tile0 += Tile::kPrefetch) {
#pragma unroll
      for (int s = 0; s < Tile::kPrefetch; ++s) {
        const int tile = tile0 + s;
        if (tile >= tiles) break;
        // Registers s take the tile kPrefetch further down or, below the last one, tile s of the next round.
        const bool down = tile + Tile::kPrefetch < tiles;
        const int next_tile = down ? tile + Tile::kPrefetch : s;
        const int next_column = down ? column : column + kStride;
        int* const mine = own + 16 * tile;
        int acc[4] = {};
        if (round > 0) {
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[c] = counts(c) ? mine[place(c)] : 0;
        }
#pragma unroll
        for (int u = 0; u < Tile::kUnits; ++u) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t(&rows)[2][4] = w[s][u][i / 2];
            const int j = i % 2 * 2;
            mma_s8(acc, {rows[0][j], rows[1][j], rows[0][j + 1], rows[1][j + 1]}, x[u][i / 2][j], x[u][i / 2][j + 1]);
          }
          if (down || round + 1 < rounds) load(w[s][u], next_tile, next_column + Tile::kUnitColumns * u);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (counts(c)) mine[place(c)] = acc[c];
        }
      }
    }
    if (round + 1 < rounds) load_tokens(column + kStride);
  }
  __syncthreads();

  const int warps = min(Tile::kWarps, max(0, k - rank_first + Tile::kSpan - 1) / Tile::kSpan);  // those with columns
  const auto sum_warps = [&](int token, int row) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < Tile::kWarps; ++i) {
      if (i < warps) sum += sums[(i * Tile::kTokens + token) * Tile::kPitch + row];
    }
    return sum;
  };
  const auto write = [&](int token, int row, int sum) {
    if (n0 + row >= n) return;
    const typename E::Column column{0, row_scales[row], biases[row]};
    d[static_cast<long long>(token) * ldd + n0 + row] =
        E::convert(E::finish(E::apply(sum, E::row(args, token, m), column), 0.0f, args));
  };
  if constexpr (Tile::kSplits == 1) {
    for (int i = threadIdx.x; i < Tile::kRows * m; i += Tile::kThreads) {
      write(i / Tile::kRows, i % Tile::kRows, sum_warps(i / Tile::kRows, i % Tile::kRows));
    }
  } else {
    // A CTA's own sums take the place of its first warp's; four rows at a time are then summed over the cluster.
    for (int i = threadIdx.x; i < Tile::kRows * m; i += Tile::kThreads) {
      const int token = i / Tile::kRows;
      const int row = i % Tile::kRows;
      sums[token * Tile::kPitch + row] = sum_warps(token, row);
    }
    cluster_arrive();
    cluster_wait();
    constexpr int kQuads = Tile::kRows / 4;
    for (int i = rank * Tile::kThreads + threadIdx.x; i < kQuads * m; i += Tile::kSplits * Tile::kThreads) {
      const int token = i / kQuads;
      const int row = i % kQuads * 4;
      uint32_t total[4];
      load_sum_16<int, Tile::kSplits>(total, shared_address(sums + token * Tile::kPitch + row));
#pragma unroll
      for (int j = 0; j < 4; ++j) write(token, row + j, from_bits<int>(total[j]));
    }
    // No CTA leaves while others read its sums.
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace qcut
