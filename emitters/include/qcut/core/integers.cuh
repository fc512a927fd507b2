// The epilogue of integer-only layers: 64-bit sums and biases, rescaled by a multiplier and a shift of each column.
//
// Exactness: every integer equals qcut.numerics.integers bitwise. No step overflows 64 bits where a sum and its bias
// are at most 2^38 each, and a multiplier is below 2^24: their product is then below 2^63.
#pragma once

#include <qcut/core/epilogue.cuh>
#include <qcut/core/int16.cuh>

namespace qcut {

// rne(v * multiplier / 2^shift), halves to even: the quotient rounded down, and one more where twice the rest is above
// 2^shift, or equal to it and the quotient odd. 0 <= shift <= 62.
__device__ __forceinline__ long long rescale(long long v, int multiplier, int shift) {
  const long long product = v * multiplier;
  const long long floor = product >> shift;
  const unsigned long long one = 1ull << shift;
  const unsigned long long twice = 2 * (static_cast<unsigned long long>(product) & (one - 1));
  return floor + (twice > one || (twice == one && (floor & 1) != 0));
}

// The hi/lo split of four int16: from two words of two elements each, a word of high bytes and one of low bytes.
__device__ __forceinline__ void split_halves(uint32_t ab, uint32_t cd, uint32_t& high, uint32_t& low) {
  low = __byte_perm(ab, cd, 0x6420);
  // (q + 128) / 256 rounded down, for each 16 bits; the topmost bits, left out, carry nothing over.
  const auto carried = [](uint32_t w) { return ((w & 0x7fff7fffu) + 0x00800080u) ^ (w & 0x80008000u); };
  high = __byte_perm(carried(ab), carried(cd), 0x7531);
}

template <class OutType>
struct IntegerEpilogue {
  using Out = OutType;
  using Value = int;
  static constexpr bool kHasResidual = false, kUnitScales = false;
  static constexpr bool kHasZeroPoint = sizeof(Out) == 1;  // int16 has none
  static constexpr int kMost = sizeof(Out) == 1 ? 127 : 32639;
  static constexpr int kLeast = sizeof(Out) == 1 ? -128 : -kMost;

  struct Args {
    const long long* bias;    // [N]
    const int* multiplier;    // [N]
    const int* shift;         // [N]
    const int* zero_point;    // [1]
    int relu;
  };
  struct Column {
    long long bias;
    int multiplier, shift;
  };
  struct Row {
    int zero_point, least;
  };

  static __device__ __forceinline__ Column column(const Args& args, int col, int n) {
    if (col >= n) return Column{0, 0, 0};
    return Column{args.bias[col], args.multiplier[col], args.shift[col]};
  }
  static __device__ __forceinline__ Row row(const Args& args, int row, int m) {
    const int zero_point = kHasZeroPoint ? *args.zero_point : 0;
    return Row{zero_point, args.relu ? zero_point : kLeast};
  }
  template <class Acc>
  static __device__ __forceinline__ int apply(Acc acc, const Row& r, const Column& c) {
    const long long v = rescale(static_cast<long long>(acc) + c.bias, c.multiplier, c.shift & 63) + r.zero_point;
    return static_cast<int>(min(max(v, static_cast<long long>(r.least)), static_cast<long long>(kMost)));
  }
  static __device__ __forceinline__ int finish(int v, float, const Args&) { return v; }
  static __device__ __forceinline__ Out convert(int v) { return static_cast<Out>(v); }
  template <int kCount>
  static __device__ __forceinline__ void pack(uint32_t (&w)[kCount * sizeof(Out) / 4], const int (&v)[kCount]) {
    constexpr int kEach = 4 / sizeof(Out);
    constexpr uint32_t kMask = sizeof(Out) == 1 ? 0xffu : 0xffffu;
#pragma unroll
    for (int i = 0; i < kCount / kEach; ++i) {
      w[i] = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) w[i] |= (static_cast<uint32_t>(v[kEach * i + j]) & kMask) << (32 / kEach * j);
    }
  }
};

// The epilogue of sums that are already rescaled.
template <class Out>
struct RescaledEpilogue : IntegerEpilogue<Out> {
  using Base = IntegerEpilogue<Out>;
  static __device__ __forceinline__ int apply(int v, const typename Base::Row&, const typename Base::Column&) {
    return v;
  }
};

}  // namespace qcut
