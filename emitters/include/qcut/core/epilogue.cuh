// The GEMM epilogue of emitters/core/epilogue.py, and TileWriter, which writes a warp's tile of D.
//
// Exactness: every product and sum is one float32 operation, in the order that emitters/core/epilogue.py states
// (kernels are compiled with --fmad=false). With the activations none and relu, results agree bitwise with the CPU
// reference. Raw accumulators stay int32 up to D.
// Source: schemes.md sections 1 and 2; Hendrycks & Gimpel 2016 (GELU).
#pragma once

#include <qcut/core/activation.cuh>
#include <qcut/core/cluster.cuh>
#include <qcut/core/mma.cuh>

namespace qcut {

enum class ZeroPoint { kNone, kPerTensor, kPerToken };
enum class ColScale { kNone, kPerTensor, kPerChannel, kPerUnit };  // kPerUnit: the product has been scaled
enum class Activation { kNone, kRelu, kGeluErf, kGeluTanh, kSilu, kAny };  // kAny: EpilogueArgs::activation names it

template <Activation kActivation>
__device__ __forceinline__ float activate(float v) {
  if constexpr (kActivation == Activation::kRelu) {
    return relu(v);
  } else if constexpr (kActivation == Activation::kGeluErf) {
    return gelu_erf(v);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    return gelu_tanh(v);
  } else if constexpr (kActivation == Activation::kSilu) {
    return silu(v);
  } else {
    return v;
  }
}

// The function that a launch names, the same for all threads.
__device__ __forceinline__ float activate(float v, int activation) {
  if (activation == static_cast<int>(Activation::kNone)) return v;
  if (activation == static_cast<int>(Activation::kRelu)) return relu(v);
  if (activation == static_cast<int>(Activation::kGeluErf)) return gelu_erf(v);
  return activation == static_cast<int>(Activation::kGeluTanh) ? gelu_tanh(v) : silu(v);
}

// The epilogue's arguments. A kernel sets the fields that its template arguments name.
template <class Out>
struct EpilogueArgs {
  int zero_point;                      // ZeroPoint::kPerTensor
  const int32_t* zero_point_per_token;  // [M]
  const int32_t* colsum;                // [N]
  const float* row_scale;               // [M]
  float col_scale;                      // ColScale::kPerTensor
  const float* col_scale_per_channel;   // [N]
  const float* col_scale_per_unit;      // [N / 16, K / 128], rounded up; ColScale::kPerUnit
  const float* bias;                    // [N]
  const Out* residual;                  // [M, N], D's layout and leading dimension
  float out_inv_scale;                  // int8 output
  float out_zero_point;
  int activation;  // Activation::kAny
};

template <bool kFirst, class First, class Second>
struct Either {
  using Type = First;
};
template <class First, class Second>
struct Either<false, First, Second> {
  using Type = Second;
};

template <class T>
constexpr bool kIsInt32 = false;
template <>
constexpr bool kIsInt32<int32_t> = true;

template <class OutType, ZeroPoint kZeroPoint = ZeroPoint::kNone, bool kRowScale = false,
          ColScale kColScale = ColScale::kNone, bool kBias = false, Activation kActivation = Activation::kNone,
          bool kResidual = false, bool kWrap = false>
struct Epilogue {
  using Out = OutType;
  using Args = EpilogueArgs<Out>;
  static constexpr bool kHasResidual = kResidual;
  static constexpr bool kUnitScales = kColScale == ColScale::kPerUnit;
  static constexpr bool kRaw = kWrap || kIsInt32<Out>;
  // The type of an element between the accumulator and D: float32, or int where D takes the accumulator's bits.
  using Value = typename Either<kRaw, int, float>::Type;

  // The elements of the epilogue's vectors for one column and for one row of D.
  struct Column {
    int colsum;
    float scale, bias;
  };
  struct Row {
    int zero_point;
    float scale;
  };

  static __device__ __forceinline__ Column column(const Args& args, int col, int n) {
    Column c{0, args.col_scale, 0.0f};
    if (col >= n) return c;
    if constexpr (kZeroPoint != ZeroPoint::kNone) c.colsum = args.colsum[col];
    if constexpr (kColScale == ColScale::kPerChannel) c.scale = args.col_scale_per_channel[col];
    if constexpr (kBias) c.bias = args.bias[col];
    return c;
  }

  static __device__ __forceinline__ Row row(const Args& args, int row, int m) {
    Row r{args.zero_point, 0.0f};
    if (row >= m) return r;
    if constexpr (kZeroPoint == ZeroPoint::kPerToken) r.zero_point = args.zero_point_per_token[row];
    if constexpr (kRowScale) r.scale = args.row_scale[row];
    return r;
  }

  template <class Acc>
  static __device__ __forceinline__ Value apply(Acc acc, const Row& r, const Column& c) {
    if constexpr (kRaw) {
      return acc;
    } else {
      if constexpr (kZeroPoint != ZeroPoint::kNone) acc -= r.zero_point * c.colsum;
      float v = static_cast<float>(acc);
      if constexpr (kRowScale) v = v * r.scale;
      if constexpr (kColScale != ColScale::kNone && !kUnitScales) v = v * c.scale;
      if constexpr (kBias) v = v + c.bias;
      return activate<kActivation>(v);
    }
  }

  // Completes the value of an element of D; `convert` then rounds the value.
  static __device__ __forceinline__ Value finish(Value v, float residual, const Args& args) {
    if constexpr (kActivation == Activation::kAny) v = activate(v, args.activation);
    if constexpr (kResidual) v = v + residual;
    if constexpr (!kRaw && sizeof(Out) == 1) v = requantize(v, args.out_inv_scale, args.out_zero_point);
    return v;
  }

  // Converts to D's type. A raw int8 is the accumulator's low byte; other values are rounded, and saturate as int8.
  static __device__ __forceinline__ Out convert(Value v) {
    if constexpr (kRaw) {
      return static_cast<Out>(v);
    } else {
      return from_float<Out>(v);
    }
  }

  // Converts kCount neighbouring elements of D and packs them into words, in order.
  template <int kCount>
  static __device__ __forceinline__ void pack(uint32_t (&w)[kCount * sizeof(Out) / 4], const Value (&v)[kCount]) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(kCount * sizeof(Out) / 4); ++i) {
      if constexpr (sizeof(Out) == 4) {
        w[i] = bits(v[i]);
      } else if constexpr (sizeof(Out) == 2) {
        w[i] = pack_pair<Out>(v[2 * i], v[2 * i + 1]);
      } else {
        w[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) w[i] |= (static_cast<uint32_t>(convert(v[4 * i + j])) & 0xffu) << (8 * j);
      }
    }
  }
};

// The columns of D that a lane owns: up to 16 bytes, and at most half a row of the warp's tile.
template <class Out, int kWidth>
struct LaneColumns {
  static constexpr int kColumns = 16 / sizeof(Out) < kWidth / 2 ? 16 / sizeof(Out) : kWidth / 2;
  static constexpr int kChunks = kColumns / 4;  // of 16 bytes of accumulators
  static constexpr int kLanes = kWidth / kColumns;
};

// The layout in shared memory of sixteen staged rows of a warp's tile, in chunks of 16 bytes. Within a row,
// the j-th chunks of all lanes lie together, so that the lanes of a 16-byte load read neighbours. The XORs
// bring the 8-byte stores of 4 rows of 2 chunks, the 16-byte stores of 2 rows of 4 chunks, and the loads to
// 8 different bank groups each. Every term is linear in the bits of row and chunk:
// offset(r, c) ^ offset(0, c') is offset(r, c ^ c').
template <class Out, int kWidth>
struct SwizzledStage {
  static_assert(kWidth == 16 || kWidth == 32 || kWidth == 64, "widths that offset() knows");
  static constexpr int kBytes = 16 * 4 * kWidth;
  static __device__ __forceinline__ int offset(int row, int chunk) {
    constexpr int kChunks = LaneColumns<Out, kWidth>::kChunks;
    const int lane = chunk / kChunks;
    const int j = chunk % kChunks;
    int place;
    if constexpr (kWidth == 16) {  // two rows share 128 bytes
      place = (lane | j << 1) ^ (row & 2 ? 3 : 0);
    } else {
      place = lane ^ (j & 1) << 2 ^ (j & 2) ^ (row & 1) * 7 ^ (row >> 1 & 1) * 5;
      if constexpr (kWidth == 64) place ^= (kChunks == 2 ? j : j >> 1) << 3;
    }
    return 4 * kWidth * row + 16 * place;
  }
};

// The layout of staged rows one after the other, for stores that take a pitch.
template <int kWidth>
struct PaddedStage {
  static constexpr int kPitch = kWidth + 8;
  static constexpr int kBytes = 16 * 4 * kPitch;
  static __device__ __forceinline__ int offset(int row, int chunk) { return 4 * kPitch * row + 16 * chunk; }
};

template <int kBytes, int kWords>
__device__ __forceinline__ void store_piece(char* p, const uint32_t (&w)[kWords], int at) {
  if constexpr (kBytes == 16) {
    *reinterpret_cast<uint4*>(p) = make_uint4(w[at / 4], w[at / 4 + 1], w[at / 4 + 2], w[at / 4 + 3]);
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(p) = make_uint2(w[at / 4], w[at / 4 + 1]);
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<uint32_t*>(p) = w[at / 4];
  } else if constexpr (kBytes == 2) {
    *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(w[at / 4] >> (8 * (at % 4)));
  } else {
    *p = static_cast<char>(w[at / 4] >> (8 * (at % 4)));
  }
}

template <int kBytes>
__device__ __forceinline__ void load_piece(uint32_t (&w)[4], const char* p, int at) {
  if constexpr (kBytes == 16) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    w[0] = raw.x, w[1] = raw.y, w[2] = raw.z, w[3] = raw.w;
  } else if constexpr (kBytes == 8) {
    const uint2 raw = *reinterpret_cast<const uint2*>(p);
    w[at / 4] = raw.x, w[at / 4 + 1] = raw.y;
  } else if constexpr (kBytes == 4) {
    w[at / 4] = *reinterpret_cast<const uint32_t*>(p);
  } else {
    w[at / 4] |= static_cast<uint32_t>(*reinterpret_cast<const unsigned short*>(p)) << (8 * (at % 4));
  }
}

// Sums accumulators over the CTAs of a cluster, in the order of their ranks. Each CTA has its accumulators at `shared`.
template <class Acc, int kCtas>
__device__ __forceinline__ void load_sum_16(uint32_t (&w)[4], uint32_t shared) {
  if constexpr (kCtas == 1) {
    load_shared_16(w, shared);
  } else {
    uint32_t part[kCtas][4];
#pragma unroll
    for (int i = 0; i < kCtas; ++i) load_cluster_16(part[i], shared, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Acc sum = from_bits<Acc>(part[0][j]);
#pragma unroll
      for (int i = 1; i < kCtas; ++i) sum += from_bits<Acc>(part[i][j]);
      w[j] = bits(sum);
    }
  }
}

// Writes a warp's tile of D, kWidth columns from col0 on, from accumulators that are staged in shared memory
// sixteen rows at a time. Each lane owns up to 16 bytes of neighbouring columns, the same columns in every
// row. The lane reads these columns' elements of the epilogue's vectors once, and moves residual and D in
// pieces of up to 16 bytes, so that a warp touches whole sectors.
//
// kAlign divides the address, the length and the leading dimension of D's rows, in bytes. With kSwapped the
// rows here are D's columns, which are contiguous in column-major D. Each CTA of a cluster of kCtas writes
// 16 / kCtas of the sixteen rows, chosen by the CTA's rank.
template <class E, int kAlign, bool kSwapped, class Acc, int kWidth, class Stage, int kCtas>
struct TileWriter {
  using Out = typename E::Out;
  static constexpr int kSize = sizeof(Out);
  static constexpr int kColumns = LaneColumns<Out, kWidth>::kColumns;
  static constexpr int kChunks = LaneColumns<Out, kWidth>::kChunks;
  static constexpr int kLanes = LaneColumns<Out, kWidth>::kLanes;
  static constexpr int kRows = 16 / kCtas;
  static constexpr int kRowsPerPass = 32 / kLanes;
  static constexpr int kPasses = kRows > kRowsPerPass ? kRows / kRowsPerPass : 1;
  static constexpr int kPiece = kAlign < kColumns * kSize ? kAlign : kColumns * kSize;
  static constexpr int kPieces = kColumns * kSize / kPiece;
  static_assert(32 % kLanes == 0 && kPiece >= kSize, "a warp's lanes cover whole rows, a piece whole elements");

  // Along: the elements of the epilogue's vectors that vary along a lane's columns. Across: those that vary by row.
  using Along = typename Either<kSwapped, typename E::Row, typename E::Column>::Type;
  using Across = typename Either<kSwapped, typename E::Column, typename E::Row>::Type;

  const typename E::Args& args;
  Out* d;
  int row0, col, m, n, ldd, staged;
  Along along[kColumns];

  __device__ __forceinline__ TileWriter(Out* d, int row0, int col0, int m, int n, int ldd, const typename E::Args& args,
                                        int rank)
      : args(args), d(d), row0(row0), m(m), n(n), ldd(ldd) {
    const int lane = threadIdx.x % 32;
    col = col0 + kColumns * (lane % kLanes);
    staged = rank * kRows + lane / kLanes % kRows;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if constexpr (kSwapped) {
        along[i] = E::row(args, col + i, n);
      } else {
        along[i] = E::column(args, col + i, n);
      }
    }
  }

  // The accumulators of the staged rows that this lane writes, and these rows' residuals and vector elements.
  using Sums = uint32_t[kPasses][kChunks][4];
  struct Rows {
    int at[kPasses];
    Across across[kPasses];
    uint32_t residual[kPasses][4];
  };

  // Reads the accumulators staged at `shared` and sums them over the cluster.
  __device__ __forceinline__ void load(Sums& sums, uint32_t shared) const {
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const int chunk = threadIdx.x % kLanes * kChunks + j;
        load_sum_16<Acc, kCtas>(sums[p][j], shared + Stage::offset(staged + p * kRowsPerPass, chunk));
      }
    }
  }

  // Handles the rows from 16 * group on of the warp's tile; `row_of` maps a staged row to its row of the tile.
  template <class RowOf>
  __device__ __forceinline__ void fetch(Rows& rows, int group, const RowOf& row_of) const {
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      const int row = row0 + 16 * group + row_of(staged + p * kRowsPerPass);
      rows.at[p] = row;
      if constexpr (kSwapped) {
        rows.across[p] = E::column(args, row, m);
      } else {
        rows.across[p] = E::row(args, row, m);
      }
      fetch_residual(rows, p);
    }
  }
  // Reads the residual of row rows.at[p].
  __device__ __forceinline__ void fetch_residual(Rows& rows, int p) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) rows.residual[p][i] = 0;
    if constexpr (E::kHasResidual) {
      const int row = rows.at[p];
      const char* source = reinterpret_cast<const char*>(args.residual + static_cast<long long>(row) * ldd + col);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (row < m && col + i * (kPiece / kSize) < n) {
          load_piece<kPiece>(rows.residual[p], source + i * kPiece, i * kPiece);
        }
      }
    }
  }

  __device__ __forceinline__ void write(const Rows& rows, const Sums& sums) const {
    const bool idle = kRows < kRowsPerPass && threadIdx.x % 32 / kLanes >= kRows;
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      float added[kColumns] = {};
      if constexpr (E::kHasResidual) {
        const uint32_t(&r)[4] = rows.residual[p];
        Vector<Out>{r[0], r[1], r[2], r[3]}.to_float(added);
      }
      typename E::Value v[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const Acc acc = from_bits<Acc>(sums[p][i / 4][i % 4]);
        if constexpr (kSwapped) {
          v[i] = E::finish(E::apply(acc, along[i], rows.across[p]), added[i], args);
        } else {
          v[i] = E::finish(E::apply(acc, rows.across[p], along[i]), added[i], args);
        }
      }
      if (rows.at[p] >= m || idle) continue;
      uint32_t packed[kColumns * kSize / 4];
      E::template pack<kColumns>(packed, v);
      char* target = reinterpret_cast<char*>(d + static_cast<long long>(rows.at[p]) * ldd + col);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (col + i * (kPiece / kSize) < n) store_piece<kPiece>(target + i * kPiece, packed, i * kPiece);
      }
    }
  }
};

}  // namespace qcut
