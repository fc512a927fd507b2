// Gathers token embeddings, dequantizes int8 rows, and adds position embeddings.
//
// A thread computes 16 bytes of the result. Exactness: as eager modules do, a row is rounded to T before a position's
// row is added, and the sum is rounded.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// Loads kSize elements from column col on, of a row of k elements, as float32. With kAligned, all kSize elements exist
// and start at a multiple of their size in bytes.
template <class T, int kSize, bool kAligned>
__device__ __forceinline__ void load_floats(float (&f)[kSize], const T* row, int col, int k) {
  if constexpr (!kAligned) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) f[i] = col + i < k ? to_float(row[col + i]) : 0.0f;
  } else if constexpr (sizeof(T) > 1) {
    static_assert(kSize == Vector<T>::kSize, "sixteen bytes");
    const uint4 raw = *reinterpret_cast<const uint4*>(row + col);
    Vector<T>{raw.x, raw.y, raw.z, raw.w}.to_float(f);
  } else {
    uint32_t raw[kSize / 4];
    if constexpr (kSize == 8) {
      const uint2 pair = *reinterpret_cast<const uint2*>(row + col);
      raw[0] = pair.x, raw[kSize / 4 - 1] = pair.y;
    } else {
      raw[0] = *reinterpret_cast<const uint32_t*>(row + col);
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) f[i] = static_cast<float>(static_cast<int8_t>(raw[i / 4] >> (8 * (i % 4))));
  }
}

// The kernel: y [rows, k] = T(table[ids]), times scale[ids] if Q is int8, plus place_table[places] with kPlaces. The
// tables have `count` and `place_count` rows, `stride` and `place_stride` elements apart; an index beyond a table reads
// the table's nearest row. With kAligned, rows of y and of the tables start at multiples of as many elements as 16
// bytes of y hold.
template <class T, class Q, bool kPlaces, int kThreads, bool kAligned>
__device__ __forceinline__ void embed_rows(const long long* ids, const Q* table, const float* scale, const int* places,
                                           const T* place_table, T* y, long long stride, long long place_stride,
                                           int count, int place_count, int rows, int k) {
  constexpr int kSize = Vector<T>::kSize;
  const unsigned vectors = (k + kSize - 1) / kSize;
  const unsigned item = blockIdx.x * kThreads + threadIdx.x;
  const int row = item / vectors, col = item % vectors * kSize;
  launch_dependents();
  wait_for_dependencies();
  if (row >= rows) return;

  const long long last = count - 1, id = ids[row];
  const long long at = id < 0 ? 0 : id > last ? last : id;
  float f[kSize];
  load_floats<Q, kSize, kAligned>(f, table + at * stride, col, k);
  if constexpr (sizeof(Q) == 1) {
    const float s = scale[at];
#pragma unroll
    for (int i = 0; i < kSize; ++i) f[i] = to_float(from_float<T>(f[i] * s));
  }
  if constexpr (kPlaces) {
    const int place = min(max(places[row], 0), place_count - 1);
    float added[kSize];
    load_floats<T, kSize, kAligned>(added, place_table + place * place_stride, col, k);
#pragma unroll
    for (int i = 0; i < kSize; ++i) f[i] += added[i];
  }
  const int end = kAligned ? col + kSize : k;  // end of the columns that are stored
  store_vector<T, kAligned>(y + static_cast<long long>(row) * k, col, end, f);
}

// Writes zeros with all threads of the grid, after the predecessor's end.
template <int kThreads>
__device__ __forceinline__ void write_zeros(float* zeroed, int count) {
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) zeroed[i] = 0.0f;
}

}  // namespace qcut
