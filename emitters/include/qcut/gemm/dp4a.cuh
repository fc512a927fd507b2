// D = epilogue(A B) with int8 operands and int32 sums on dp4a, for GPUs or calls without tensor cores; any m, n and k,
// every layout.
//
// A CTA's tile of D is cut into warp tiles, a warp tile into subtiles, and a subtile into kTm x kTn elements
// for each lane, whose sums stay in registers. Shared memory holds words of four int8 along K, an operand of
// dp4a each; word k / 4 of row i lies at [k / 4][i], so that a lane's rows are neighbours, which the lane loads
// 16 bytes at a time. Two buffers alternate: the next tile is loaded to registers while the current one is
// multiplied.
//
// Exactness: integer sums are exact. One thread computes each element.
// Source: PTX ISA "dp4a", "prmt"; schemes.md section 1.
#pragma once

#include <qcut/gemm/gemm.cuh>

namespace qcut {

template <int kBlockM_, int kBlockN_, int kBlockK_, int kWarpM_, int kWarpN_, int kWnIter_, int kTm_, int kTn_>
struct Dp4aTile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_;
  static constexpr int kWarpM = kWarpM_, kWarpN = kWarpN_, kTm = kTm_, kTn = kTn_;
  static constexpr int kWnIter = kWnIter_;
  static constexpr int kWmIter = kWarpM * kWarpN / (32 * kTm * kTn * kWnIter);
  static constexpr int kSubM = kWarpM / kWmIter, kSubN = kWarpN / kWnIter;
  static constexpr int kLanesN = kSubN / kTn;
  static constexpr int kWarpsN = kBlockN / kWarpN;
  static constexpr int kThreads = 32 * (kBlockM / kWarpM) * kWarpsN;
  static constexpr int kRows = kWmIter * kTm, kColumns = kWnIter * kTn;  // of a lane
  static_assert((kSubM / kTm) * kLanesN == 32 && kTm % 4 == 0 && kTn % 4 == 0, "see emitters/gemm/dp4a.py");
};

// kCount words that are loaded or stored together.
template <int kCount>
struct alignas(kCount > 4 ? 16 : 4 * kCount) Words {
  uint32_t w[kCount];
};

// Copies the tiles of an operand that is contiguous along K, in pieces of up to 16 bytes of one row.
//
// Where a row of the tile has 32 bytes, two neighbouring lanes copy them. The two pieces lie four words of K
// apart in shared memory; the padding of 4 words brings their stores to the two halves of the banks.
template <int kRows, int kBlockK, int kThreads, int kAlign>
struct AlongK {
  static constexpr int kWordsK = kBlockK / 4;
  static constexpr int kWords = kWordsK < 4 ? kWordsK : 4;  // words of a piece
  static constexpr int kPair = kWordsK > 4 ? 2 : 1;
  static constexpr int kPitch = kRows + (kPair == 2 ? 4 : 0);
  static constexpr int kPieces = kRows * kWordsK / kWords;

  const int8_t* source;
  int row, word, ld, rows_left, k_left;

  __device__ __forceinline__ AlongK(const int8_t* base, int first_row, int rows, int ld, int k) : ld(ld) {
    const int thread = threadIdx.x;
    row = thread / kPair % kRows;
    word = kWords * (thread % kPair + thread / (kPair * kRows) * kPair);
    source = base + static_cast<long long>(first_row + row) * ld + 4 * word;
    rows_left = rows - first_row - row;
    k_left = k - 4 * word;
  }

  // The distance in rows, and in words of K, from a thread's first piece to the thread's piece of a step.
  static __device__ __forceinline__ constexpr int row_of(int step) { return step * kThreads / kPair % kRows; }
  static __device__ __forceinline__ constexpr int word_of(int step) {
    return step * kThreads / (kPair * kRows) * kPair * kWords;
  }

  __device__ __forceinline__ void load(uint32_t (&w)[kWords], int step) const {
    const int8_t* from = source + static_cast<long long>(ld) * row_of(step) + 4 * word_of(step);
    const int left = row_of(step) < rows_left ? k_left - 4 * word_of(step) : 0;
    constexpr int kVector = kAlign / 4 < kWords ? kAlign / 4 : kWords;
#pragma unroll
    for (int i = 0; i < kWords; ++i) w[i] = 0;
    if constexpr (kAlign < 4) {
#pragma unroll
      for (int i = 0; i < 4 * kWords; ++i) {
        if (i < left) w[i / 4] |= (static_cast<uint32_t>(from[i]) & 0xffu) << (8 * (i % 4));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += kVector) {
        if (4 * i >= left) continue;
        const auto v = reinterpret_cast<const Words<kVector>*>(from)[i / kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) w[i + j] = v.w[j];
      }
    }
  }

  __device__ __forceinline__ void next() {
    source += kBlockK;
    k_left -= kBlockK;
  }

  __device__ __forceinline__ void store(uint32_t* shared, const uint32_t (&w)[kWords], int step) const {
    uint32_t* to = shared + (word + word_of(step)) * kPitch + row + row_of(step);
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[i * kPitch] = w[i];
  }
};

// Copies the tiles of an operand that is contiguous along its rows' index, in pieces of 4 rows x 4 columns of K.
// A piece is a word from each of four runs and is transposed in registers. Neighbouring lanes store neighbouring
// 16 bytes.
template <int kRows, int kBlockK, int kThreads, int kAlign>
struct AlongRows {
  static constexpr int kWords = 4;
  static constexpr int kPitch = kRows;
  static constexpr int kAcross = kRows / 4;
  static constexpr int kPieces = kAcross * kBlockK / 4;

  const int8_t* base;
  long long first;  // offset of the thread's first element
  int row, word, ld, rows_left, k_left;

  __device__ __forceinline__ AlongRows(const int8_t* base, int first_row, int rows, int ld, int k)
      : base(base), ld(ld) {
    row = 4 * (static_cast<int>(threadIdx.x) % kAcross);
    word = static_cast<int>(threadIdx.x) / kAcross;
    first = static_cast<long long>(4 * word) * ld + first_row + row;
    rows_left = rows - first_row - row;
    k_left = k - 4 * word;
  }

  static __device__ __forceinline__ constexpr int row_of(int step) { return 4 * (step * kThreads % kAcross); }
  static __device__ __forceinline__ constexpr int word_of(int step) { return step * kThreads / kAcross; }

  __device__ __forceinline__ void load(uint32_t (&w)[4], int step) const {
    const int left = rows_left - row_of(step);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 4 * word_of(step) + i;
      const int8_t* from = base + first + static_cast<long long>(ld) * k + row_of(step);
      w[i] = 0;
      if (k >= k_left) continue;
      if constexpr (kAlign >= 4) {
        if (left > 0) w[i] = *reinterpret_cast<const uint32_t*>(from);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j < left) w[i] |= (static_cast<uint32_t>(from[j]) & 0xffu) << (8 * j);
        }
      }
    }
  }

  __device__ __forceinline__ void next() {
    first += static_cast<long long>(kBlockK) * ld;
    asm("" : "+l"(first));  // keeps the compiler from giving each load a pointer of its own
    k_left -= kBlockK;
  }

  __device__ __forceinline__ void store(uint32_t* shared, const uint32_t (&w)[4], int step) const {
    const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), high01 = __byte_perm(w[0], w[1], 0x7362);
    const uint32_t low23 = __byte_perm(w[2], w[3], 0x5140), high23 = __byte_perm(w[2], w[3], 0x7362);
    uint32_t* to = shared + (word + word_of(step)) * kPitch + row + row_of(step);
    *reinterpret_cast<Words<4>*>(to) = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                                        __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
  }
};

// The copy of one operand to shared memory: `fetch` starts the loads of the next tile to registers, `store` writes them
// to shared memory. The loads of threads past the last piece are predicated off, as past the last row: with a branch
// around loads and stores, the compiler would move them together.
template <class P, int kThreads>
struct StagedCopy {
  static constexpr int kSteps = (P::kPieces + kThreads - 1) / kThreads;
  P pieces;
  uint32_t words[kSteps][P::kWords];

  static __device__ __forceinline__ bool is_idle() {
    return P::kPieces < kThreads && static_cast<int>(threadIdx.x) >= P::kPieces;
  }
  __device__ __forceinline__ StagedCopy(const int8_t* base, int first_row, int rows, int ld, int k)
      : pieces(base, first_row, is_idle() ? 0 : rows, ld, k) {}

  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) pieces.load(words[s], s);
    pieces.next();
  }
  __device__ __forceinline__ void store(uint32_t* shared) const {
    if (is_idle()) return;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) pieces.store(shared, words[s], s);
  }
};

// kCount neighbouring elements of D, which are loaded and stored as words.
template <class E, int kCount>
struct Neighbours {
  using Out = typename E::Out;
  using Packed = Words<kCount * static_cast<int>(sizeof(Out)) / 4>;

  static __device__ __forceinline__ void load(const Out* p, float (&f)[kCount]) {
    const Packed packed = *reinterpret_cast<const Packed*>(p);
#pragma unroll
    for (int i = 0; i < kCount; ++i) f[i] = to_float<Out>(reinterpret_cast<const Out*>(packed.w)[i]);
  }
  static __device__ __forceinline__ void store(Out* p, const typename E::Value (&v)[kCount]) {
    Packed packed;
    E::template pack<kCount>(packed.w, v);
    *reinterpret_cast<Packed*>(p) = packed;
  }
};

// Writes the kTm x kTn sums of one lane, from (i0, j0) of `acc` on, to D from (row0, col0) on. With kAlignD 4 or 8, as
// many neighbours along D's contiguous side are written at once, and the size of this side, ldd and the addresses of D
// and residual are multiples of as many elements; otherwise elements are written one by one.
template <class E, int kAlignD, bool kColumnD, int kTm, int kTn, int kRows, int kColumns>
__device__ __forceinline__ void write_lane(const int (&acc)[kRows][kColumns], int i0, int j0, int row0, int col0,
                                           int m, int n, int ldd, typename E::Out* d, const typename E::Args& args) {
  constexpr int kAlong = kColumnD ? kTm : kTn;
  constexpr int kAcross = kColumnD ? kTn : kTm;
  constexpr bool kVector = kAlignD >= 4;
  constexpr int kCount = kAlong == 4 || kAlignD == 4 || sizeof(typename E::Out) == 4 ? 4 : 8;
  const int along_end = kColumnD ? m : n;
  const int across_end = kColumnD ? n : m;
#pragma unroll
  for (int g = 0; g < kAlong; g += kCount) {
    const int first = (kColumnD ? row0 : col0) + g;
    typename Either<kColumnD, typename E::Row, typename E::Column>::Type vectors[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if constexpr (kColumnD) {
        vectors[j] = E::row(args, first + j, m);
      } else {
        vectors[j] = E::column(args, first + j, n);
      }
    }
#pragma unroll
    for (int i = 0; i < kAcross; ++i) {
      const int run = (kColumnD ? col0 : row0) + i;
      if (run >= across_end || first >= along_end) continue;
      const long long at = static_cast<long long>(run) * ldd + first;
      float residual[kCount] = {};
      if constexpr (E::kHasResidual) {
        if constexpr (kVector) {
          Neighbours<E, kCount>::load(args.residual + at, residual);
        } else {
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            if (first + j < along_end) residual[j] = to_float<typename E::Out>(args.residual[at + j]);
          }
        }
      }
      typename E::Value v[kCount];
      if constexpr (kColumnD) {
        const typename E::Column column = E::column(args, run, n);
#pragma unroll
        for (int j = 0; j < kCount; ++j) v[j] = E::apply(acc[i0 + g + j][j0 + i], vectors[j], column);
      } else {
        const typename E::Row row = E::row(args, run, m);
#pragma unroll
        for (int j = 0; j < kCount; ++j) v[j] = E::apply(acc[i0 + i][j0 + g + j], row, vectors[j]);
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) v[j] = E::finish(v[j], residual[j], args);
      if constexpr (kVector) {
        Neighbours<E, kCount>::store(d + at, v);
      } else {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (first + j < along_end) d[at + j] = E::convert(v[j]);
        }
      }
    }
  }
}

// The copy for an Op of gemm.cuh.
template <class Op, int kRows, int kBlockK, int kThreads>
using Pieces = typename Either<Op::kMajor == Major::kK, AlongK<kRows, kBlockK, kThreads, Op::kAlign>,
                               AlongRows<kRows, kBlockK, kThreads, Op::kAlign>>::Type;

template <class T, class OperandA, class OperandB, class E, int kAlignD, bool kColumnD>
__device__ __forceinline__ void dp4a_gemm(const int8_t* a, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                          int lda, int ldb, int ldd, const typename E::Args& args) {
  constexpr int kThreads = T::kThreads;
  using PiecesA = Pieces<OperandA, T::kBlockM, T::kBlockK, kThreads>;
  using PiecesB = Pieces<OperandB, T::kBlockN, T::kBlockK, kThreads>;
  constexpr int kWordsK = T::kBlockK / 4;
  constexpr int kUnroll = kWordsK > 2 ? 2 : 1;
  constexpr int kWordsA = kWordsK * PiecesA::kPitch;
  constexpr int kBuffer = kWordsA + kWordsK * PiecesB::kPitch;
  extern __shared__ __align__(128) uint32_t words[];
  launch_dependents();
  wait_for_dependencies();

  const int tiles_m = (m + T::kBlockM - 1) / T::kBlockM;
  const int tiles_n = (n + T::kBlockN - 1) / T::kBlockN;
  const int2 tile = tile_of_block(blockIdx.x, tiles_m, tiles_n);
  const int m0 = tile.x * T::kBlockM;
  const int n0 = tile.y * T::kBlockN;
  const int k_tiles = (k + T::kBlockK - 1) / T::kBlockK;

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int lane_m = (warp / T::kWarpsN) * T::kWarpM + lane / T::kLanesN * T::kTm;
  const int lane_n = (warp % T::kWarpsN) * T::kWarpN + lane % T::kLanesN * T::kTn;

  StagedCopy<PiecesA, kThreads> copy_a(a, m0, m, lda, k);
  StagedCopy<PiecesB, kThreads> copy_b(b, n0, n, ldb, k);
  int acc[T::kRows][T::kColumns] = {};

  copy_a.fetch();
  copy_b.fetch();
  copy_a.store(words);
  copy_b.store(words + kWordsA);
  __syncthreads();
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    // Past the last tile the call loads nothing, but avoids a branch: see StagedCopy.
    copy_a.fetch();
    copy_b.fetch();
    const uint32_t* shared_a = words + k_tile % 2 * kBuffer + lane_m;
    const uint32_t* shared_b = words + k_tile % 2 * kBuffer + kWordsA + lane_n;
    // The loop is kept in rounds of few words: within one basic block the compiler would move the loads above down to
    // their use, or the transposition below up to the loads.
#pragma unroll 1
    for (int round = 0; round < kWordsK / kUnroll; ++round) {
#pragma unroll
      for (int w = 0; w < kUnroll; ++w) {
        Words<4> fa[T::kRows / 4], fb[T::kColumns / 4];
#pragma unroll
        for (int i = 0; i < T::kRows / 4; ++i) {
          const int row = 4 * i / T::kTm * T::kSubM + 4 * i % T::kTm;
          fa[i] = *reinterpret_cast<const Words<4>*>(shared_a + w * PiecesA::kPitch + row);
        }
#pragma unroll
        for (int j = 0; j < T::kColumns / 4; ++j) {
          const int column = 4 * j / T::kTn * T::kSubN + 4 * j % T::kTn;
          fb[j] = *reinterpret_cast<const Words<4>*>(shared_b + w * PiecesB::kPitch + column);
        }
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) {
#pragma unroll
          for (int j = 0; j < T::kColumns; ++j) {
            const int x = static_cast<int>(fa[i / 4].w[i % 4]);
            acc[i][j] = __dp4a(x, static_cast<int>(fb[j / 4].w[j % 4]), acc[i][j]);
          }
        }
      }
      shared_a += kUnroll * PiecesA::kPitch;
      shared_b += kUnroll * PiecesB::kPitch;
    }
    // All reads of the other buffer ended before the previous barrier.
    uint32_t* other = words + (k_tile + 1) % 2 * kBuffer;
    copy_a.store(other);
    copy_b.store(other + kWordsA);
    __syncthreads();
  }

#pragma unroll
  for (int u = 0; u < T::kWmIter; ++u) {
#pragma unroll
    for (int v = 0; v < T::kWnIter; ++v) {
      write_lane<E, kAlignD, kColumnD, T::kTm, T::kTn>(acc, u * T::kTm, v * T::kTn, m0 + lane_m + u * T::kSubM,
                                                        n0 + lane_n + v * T::kSubN, m, n, ldd, d, args);
    }
  }
}

}  // namespace qcut
