// int16 tokens as a hi/lo split: 16 rows of int8 for each eight tokens, first their high bytes, then their low bytes.
// Rows of tokens past m are not written; columns past k are zero.
//
// Exactness: bitwise qcut.numerics.int16.in_blocks.
#pragma once

#include <qcut/core/integers.cuh>

namespace qcut {

// A thread splits 16 columns of a row. k_padded is a multiple of 16. With kAligned, k is too, and rows start at multiples
// of 16 bytes.
template <int kThreads, bool kAligned>
__device__ __forceinline__ void split_rows(const short* x, int8_t* q, long long x_stride, int m, int k, int k_padded) {
  launch_dependents();
  wait_for_dependencies();
  const int chunks = k_padded / 16;
  const long long chunk = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  const long long row = chunk / chunks;
  const int col = 16 * static_cast<int>(chunk % chunks);
  if (row >= m) return;
  const short* from = x + row * x_stride + col;
  uint32_t words[8];
  if constexpr (kAligned) {
    const uint4 a = *reinterpret_cast<const uint4*>(from), b = *reinterpret_cast<const uint4*>(from + 8);
    words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
    words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t first = col + 2 * i < k ? static_cast<unsigned short>(from[2 * i]) : 0u;
      const uint32_t second = col + 2 * i + 1 < k ? static_cast<unsigned short>(from[2 * i + 1]) : 0u;
      words[i] = first | second << 16;
    }
  }
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_halves(words[2 * i], words[2 * i + 1], high[i], low[i]);
  int8_t* const to = q + (row / 8 * 16 + row % 8) * k_padded + col;
  *reinterpret_cast<uint4*>(to) = make_uint4(high[0], high[1], high[2], high[3]);
  *reinterpret_cast<uint4*>(to + 8LL * k_padded) = make_uint4(low[0], low[1], low[2], low[3]);
}

}  // namespace qcut
