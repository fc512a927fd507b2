// The GEMM epilogue of emitters/epilogue.py, for accumulators in mma.sync fragments.
//
// Every operation is one float32 operation in the order of that file (compiled with --fmad=false), so
// that none and relu agree bitwise with the CPU reference.
// Source: schemes.md section 2; PTX ISA "mma.m16n8k32" (C fragment); Hendrycks & Gimpel 2016 (GELU).
#pragma once

#include <qcut/activation.cuh>
#include <qcut/mma.cuh>

namespace qcut {

enum class ZeroPoint { kNone, kPerTensor, kPerToken };
enum class ColScale { kNone, kPerTensor, kPerChannel };
enum class Activation { kNone, kRelu, kGeluErf, kGeluTanh, kSilu };

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

// Eight neighbouring elements of D's type in one row, to and from float32.
template <class T>
struct Group8 {
  static __device__ __forceinline__ void load(const T* p, float (&f)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    Vector<T>{raw.x, raw.y, raw.z, raw.w}.to_float(f);
  }
  static __device__ __forceinline__ void store(T* p, const float (&f)[8]) {
    Vector<T> v{};
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = pack_pair<T>(f[2 * i], f[2 * i + 1]);
    *reinterpret_cast<uint4*>(p) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
  }
};

template <>
struct Group8<float> {
  static __device__ __forceinline__ void load(const float* p, float (&f)[8]) {
    const float4 low = *reinterpret_cast<const float4*>(p);
    const float4 high = *reinterpret_cast<const float4*>(p + 4);
    f[0] = low.x, f[1] = low.y, f[2] = low.z, f[3] = low.w;
    f[4] = high.x, f[5] = high.y, f[6] = high.z, f[7] = high.w;
  }
  static __device__ __forceinline__ void store(float* p, const float (&f)[8]) {
    *reinterpret_cast<float4*>(p) = make_float4(f[0], f[1], f[2], f[3]);
    *reinterpret_cast<float4*>(p + 4) = make_float4(f[4], f[5], f[6], f[7]);
  }
};

template <>
struct Group8<int8_t> {
  static __device__ __forceinline__ void store(int8_t* p, const float (&f)[8]) {
    uint32_t w[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i / 4] |= (static_cast<uint32_t>(from_float<int8_t>(f[i])) & 0xffu) << (8 * (i % 4));
    *reinterpret_cast<uint2*>(p) = make_uint2(w[0], w[1]);
  }
};

// What the epilogue reads; a kernel sets the fields its template arguments name.
template <class Out>
struct EpilogueArgs {
  int zero_point;                      // ZeroPoint::kPerTensor
  const int32_t* zero_point_per_token;  // [M]
  const int32_t* colsum;                // [N]
  const float* row_scale;               // [M]
  float col_scale;                      // ColScale::kPerTensor
  const float* col_scale_per_channel;   // [N]
  const float* bias;                    // [N]
  const Out* residual;                  // [M, N], leading dimension ldd
  float out_inv_scale;                  // int8 output
  float out_zero_point;
};

template <class OutType, ZeroPoint kZeroPoint, bool kRowScale, ColScale kColScale, bool kBias, Activation kActivation,
          bool kResidual>
struct Epilogue {
  using Out = OutType;
  using Args = EpilogueArgs<Out>;

  // The vectors of one column and of one row, fetched once per thread (column) or per 16 rows.
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
  static __device__ __forceinline__ float apply(Acc acc, const Row& r, const Column& c) {
    if constexpr (kZeroPoint != ZeroPoint::kNone) acc -= r.zero_point * c.colsum;
    float v = static_cast<float>(acc);
    if constexpr (kRowScale) v = v * r.scale;
    if constexpr (kColScale != ColScale::kNone) v = v * c.scale;
    if constexpr (kBias) v = v + c.bias;
    return activate<kActivation>(v);
  }

  // The value D takes, still in float32 where the conversion is the store's.
  static __device__ __forceinline__ float finish(float v, float residual, const Args& args) {
    if constexpr (kResidual) v = v + residual;
    if constexpr (sizeof(Out) == 1) v = requantize(v, args.out_inv_scale, args.out_zero_point);
    return v;
  }

  static constexpr bool kHasResidual = kResidual;
};

// Writes a warp's tile of D, 16 * kGroups rows of kWidth columns whose corner is (row0, col0).
//
// Sixteen rows at a time pass through shared memory (the warp's own 16 * kPitch words, written by
// `stage(group, shared)`), to turn fragments into rows: each lane then owns 8 neighbouring columns,
// the same ones in every row, reads the column vectors once, and moves residual and D in 16-byte
// pieces. kVector promises n, ldd multiples of 8 and d, residual at multiples of 16 bytes.
template <class E, bool kVector, class Acc, int kGroups, int kWidth, int kPitch, class Stage>
__device__ __forceinline__ void write_tile(const Stage& stage, uint32_t shared, int row0, int col0, int m, int n,
                                           int ldd, typename E::Out* d, const typename E::Args& args) {
  using Out = typename E::Out;
  constexpr int kLanes = kWidth / 8;  // per row
  constexpr int kRowsPerPass = 32 / kLanes;
  constexpr int kPasses = 16 / kRowsPerPass;
  static_assert(32 % kLanes == 0 && kLanes >= 2, "a warp's lanes must cover whole rows");
  const int lane = threadIdx.x % 32;
  const int col = col0 + 8 * (lane % kLanes);
  const int first_row = lane / kLanes;

  typename E::Column columns[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) columns[i] = E::column(args, col + i, n);

  // Lanes 4..7 of a row read their upper half first, so that eight 16-byte reads use eight bank groups.
  const uint32_t flip = (lane % kLanes) / 4;
  const uint32_t read_at = shared + 4 * (first_row * kPitch + 8 * (lane % kLanes));

#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int group_row = row0 + 16 * i + first_row;
    typename E::Row rows[kPasses];
    float residual[kPasses][8];
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      const int row = group_row + p * kRowsPerPass;
      rows[p] = E::row(args, row, m);
#pragma unroll
      for (int j = 0; j < 8; ++j) residual[p][j] = 0.0f;
      if constexpr (E::kHasResidual) {
        const Out* source = args.residual + static_cast<long long>(row) * ldd + col;
        if constexpr (kVector) {
          if (row < m && col < n) Group8<Out>::load(source, residual[p]);
        } else {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            if (row < m && col + j < n) residual[p][j] = to_float<Out>(source[j]);
          }
        }
      }
    }
    __syncwarp();  // the reads of the previous 16 rows are done
    stage(i, shared);
    __syncwarp();
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      const int row = group_row + p * kRowsPerPass;
      uint32_t first[4];
      uint32_t second[4];
      load_shared_16(first, read_at + 4 * p * kRowsPerPass * kPitch + 16 * flip);
      load_shared_16(second, read_at + 4 * p * kRowsPerPass * kPitch + 16 * (flip ^ 1u));
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t word = (j < 4) == (flip == 0) ? first[j % 4] : second[j % 4];
        v[j] = E::finish(E::apply(from_bits<Acc>(word), rows[p], columns[j]), residual[p][j], args);
      }
      if (row >= m) continue;
      Out* target = d + static_cast<long long>(row) * ldd + col;
      if constexpr (kVector) {
        if (col < n) Group8<Out>::store(target, v);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (col + j < n) target[j] = from_float<Out>(v[j]);
        }
      }
    }
  }
}

}  // namespace qcut
