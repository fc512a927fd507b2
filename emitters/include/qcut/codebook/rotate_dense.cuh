// Tokens times a dense rotation of each group, on mma.sync.m16n8k16: r[m, j] = sum_i x[m, i] * q[j, i]. Results are
// blocks of 16-bit tokens or rows of float32.
//
// A CTA computes kM tokens x kN columns of one group; padding in memory counts as columns. Both operands pass
// through two stages of shared memory in pieces of 64 columns. A staged row has 128 bytes; its 16-byte chunk c lies
// at c ^ (row % 8), so that ldmatrix reads the rows without bank conflicts. Results are staged in shared memory, too.
//
// Exactness: products are exact in float32; the tensor core adds them in a fixed order.
//
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async".
#pragma once

#include <qcut/codebook/codebook.cuh>

namespace qcut {

constexpr int kDenseColumns = 64;  // columns of a stage
constexpr int kDenseRowBytes = 2 * kDenseColumns;

__device__ __forceinline__ int dense_offset(int row, int chunk) {
  return kDenseRowBytes * row + 16 * (chunk ^ (row % 8));
}

// The kernel. The matrices q are [passes][groups][kSide][kSide] with kSide = kGroup rounded up to 16; elements beyond a
// group's columns are zero. blockIdx is (tile of tokens, tile of columns, pass). With kAligned, rows of x and their
// groups start at multiples of 16 bytes.
template <class T, class Out, int kGroup, int kPaddedGroup, int kM, int kN, bool kAligned>
__device__ __forceinline__ void rotate_dense(const T* x, void* y, const T* q, long long x_stride, int m, int k,
                                             int k_padded) {
  constexpr int kSide = (kGroup + 15) / 16 * 16;
  constexpr int kWarpsM = kM / 16;
  constexpr int kWarpsN = kN / 16 < 4 / kWarpsM ? kN / 16 : 4 / kWarpsM;
  constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  constexpr int kWarpN = kN / kWarpsN;
  constexpr int kStageBytes = (kM + kN) * kDenseRowBytes;
  static_assert(kPaddedGroup % kN == 0 && kWarpN % 16 == 0, "a tile lies in one group");
  __shared__ __align__(128) char stages[2 * kStageBytes];
  launch_dependents();

  const int first_token = blockIdx.x * kM;
  const int first_place = blockIdx.y * kN;
  const int group = first_place / kPaddedGroup;
  const int first_row = first_place % kPaddedGroup;  // row of q
  const int size = min(kGroup, k - group * kGroup);
  const int pieces = first_row < size ? (size + kDenseColumns - 1) / kDenseColumns : 0;  // none for padding
  const int groups = (k + kGroup - 1) / kGroup;
  const T* matrix = q + (static_cast<long long>(blockIdx.z) * groups + group) * kSide * kSide;
  const T* x_group = x + group * kGroup;
  const uint32_t shared = shared_address(stages);

  const auto load_q = [&](int piece) {
    const uint32_t stage = shared + piece % 2 * kStageBytes + kM * kDenseRowBytes;
    for (int i = threadIdx.x; i < kN * 8; i += kThreads) {
      const int row = first_row + i / 8;
      const int column = piece * kDenseColumns + i % 8 * 8;
      const bool exists = row < kSide && column < kSide;
      const T* from = exists ? matrix + row * kSide + column : matrix;
      copy_async<16>(stage + dense_offset(i / 8, i % 8), from, !exists);
    }
  };
  const auto load_x = [&](int piece) {
    const uint32_t stage = shared + piece % 2 * kStageBytes;
    for (int i = threadIdx.x; i < kM * 8; i += kThreads) {
      const int token = first_token + i / 8;
      const int column = piece * kDenseColumns + i % 8 * 8;
      const int count = token < m ? min(max(size - column, 0), 8) : 0;
      const T* from = count ? x_group + token * x_stride + column : x;
      const uint32_t to = stage + dense_offset(i / 8, i % 8);
      if (kAligned && count % 8 == 0) {
        copy_async<16>(to, from, count == 0);
      } else {
        Vector<T> v[1];
        load_vectors<T, 1, false>(v, from, 0, 8, count);
        store_shared_16(to, v[0].w);
      }
    }
  };

  // The matrices are constant: two stages of them are copied before the wait for the previous kernel.
  if (pieces > 0) load_q(0);
  if (pieces > 1) load_q(1);
  wait_for_dependencies();
  if (pieces > 0) load_x(0);
  copy_async_commit();

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 % kWarpsM * 16;
  const int warp_column = threadIdx.x / 32 / kWarpsM * kWarpN;
  float acc[kWarpN / 8][4] = {};
  for (int piece = 0; piece < pieces; ++piece) {
    if (piece + 1 < pieces) {
      if (piece > 0) load_q(piece + 1);
      load_x(piece + 1);
    }
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    const uint32_t x_stage = shared + piece % 2 * kStageBytes;
    const uint32_t q_stage = x_stage + kM * kDenseRowBytes;
#pragma unroll
    for (int step = 0; step < kDenseColumns / 16; ++step) {
      uint32_t a[4];
      load_matrices(a, x_stage + dense_offset(warp_row + lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int n = 0; n < kWarpN; n += 16) {
        uint32_t b[4];
        const int row = warp_column + n + lane % 8 + lane / 16 * 8;
        load_matrices(b, q_stage + dense_offset(row, 2 * step + lane / 8 % 2));
        const uint32_t low[2] = {b[0], b[1]};
        const uint32_t high[2] = {b[2], b[3]};
        Float16<T>::mma(acc[n / 8], a, low);
        Float16<T>::mma(acc[n / 8 + 1], a, high);
      }
    }
    __syncthreads();
  }

  // Lane 4g + t has columns 2t and 2t + 1 of rows g and g + 8. Padding is 0 even if the token holds NaN or Inf.
#pragma unroll
  for (int n = 0; n < kWarpN / 8; ++n) {
    const int column = warp_column + 8 * n + lane % 4 * 2;
    const bool keep[2] = {first_row + column < size, first_row + column + 1 < size};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = keep[0] ? acc[n][2 * i] : 0.0f;
      const float high = keep[1] ? acc[n][2 * i + 1] : 0.0f;
      const int row = warp_row + lane / 4 + 8 * i;
      if constexpr (sizeof(Out) == 4) {
        const int token = first_token + row;
        const long long to = (static_cast<long long>(token) * gridDim.z + blockIdx.z) * k_padded + first_place + column;
        if (token < m) *reinterpret_cast<float2*>(static_cast<float*>(y) + to) = make_float2(low, high);
      } else {
        store_shared_4(shared + dense_offset(row, column / 8) + column % 8 * 2, pack_pair<Out>(low, high));
      }
    }
  }
  if constexpr (sizeof(Out) == 2) {
    __syncthreads();
    const int m8 = (m + 7) / 8;
    for (int i = threadIdx.x; i < kM * (kN / 8); i += kThreads) {
      const int row = i / (kN / 8);
      const int chunk = i % (kN / 8);
      const int token = first_token + row;
      if (token >= m) break;
      uint32_t w[4];
      load_shared_16(w, shared + dense_offset(row, chunk));
      const int column_bytes = 2 * (static_cast<int>(blockIdx.z) * k_padded + first_place) + 16 * chunk;
      const long long block = static_cast<long long>(column_bytes / 128) * m8 + token / 8;
      *reinterpret_cast<uint4*>(static_cast<char*>(y) + block * 1024 +
                                token_chunk_offset(token, column_bytes % 128 / 16)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

}  // namespace qcut
