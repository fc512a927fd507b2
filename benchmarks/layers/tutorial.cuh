// Three short int8 GEMMs, from one thread per element to tiles in registers. Each removes the bottleneck of the previous
// one.
//
// D = epilogue(A B^T) with A [m, k], B [n, k], D [m, n], all row-major. To stay short, the kernels take only whole
// tiles: m, n and k are multiples of a CTA's tile. blockIdx.x counts tiles of n, blockIdx.y tiles of m.
//
// Exactness: integer sums are exact; all kernels give the same bits.
//
// Source: CUDA C++ Programming Guide, "Shared Memory"; schemes.md section 1.
#include <qcut/core/epilogue.cuh>

namespace qcut {
namespace tutorial {

// Writes kCount neighbouring elements of a row of D from their sums, in pieces of up to 8 bytes.
template <class E, int kCount>
__device__ __forceinline__ void store_run(typename E::Out* d, const int (&sums)[kCount], int row, int col, int m, int n,
                                          int ldd, const typename E::Args& args) {
  typename E::Value v[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = E::finish(E::apply(sums[i], E::row(args, row, m), E::column(args, col + i, n)), 0.0f, args);
  }
  typename E::Out* target = d + static_cast<long long>(row) * ldd + col;
  if constexpr (kCount == 1) {
    *target = E::convert(v[0]);
  } else {
    constexpr int kBytes = kCount * sizeof(typename E::Out);
    uint32_t words[kBytes / 4];
    E::template pack<kCount>(words, v);
#pragma unroll
    for (int i = 0; i < kBytes; i += 8) store_piece<8>(reinterpret_cast<char*>(target) + i, words, i);
  }
}

// One product of two bytes, in assembly: the compiler would merge four products into a dp4a, which a later kernel
// introduces.
__device__ __forceinline__ int multiply_add(int8_t x, int8_t y, int sum) {
  int out;
  asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(static_cast<int>(x)), "r"(static_cast<int>(y)), "r"(sum));
  return out;
}

// One thread computes one element of D and loads two bytes from global memory for every product. Neighbouring
// threads share a row of A, but each has its own row of B, so that a warp's load of B touches as many cache lines
// as the warp has columns.
template <class E>
__device__ __forceinline__ void naive_gemm(const int8_t* a, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                           int lda, int ldb, int ldd, const typename E::Args& args) {
  const int col = blockIdx.x * 16 + threadIdx.x % 16;
  const int row = blockIdx.y * 16 + threadIdx.x / 16;
  const int8_t* a_row = a + static_cast<long long>(row) * lda;
  const int8_t* b_row = b + static_cast<long long>(col) * ldb;
  int sum[1] = {0};
  for (int i = 0; i < k; ++i) sum[0] = multiply_add(a_row[i], b_row[i], sum[0]);
  store_run<E>(d, sum, row, col, m, n, ldd, args);
}

// The CTA's 32 rows of A and of B pass through shared memory, 32 columns of K at a time: the CTA reads each byte
// once from global memory and 32 times from shared memory. B is transposed on the way, so that a warp reads 32
// neighbouring bytes. The rows of the transposed tile are 36 bytes apart, so that the stores, which go down a
// column, go to 32 different banks.
template <class E>
__device__ __forceinline__ void shared_gemm(const int8_t* a, const int8_t* b, typename E::Out* d, int m, int n, int k,
                                            int lda, int ldb, int ldd, const typename E::Args& args) {
  __shared__ int8_t a_tile[32][32];      // [m][k]
  __shared__ int8_t b_tile[32][32 + 4];  // [k][n]
  const int x = threadIdx.x % 32;
  const int y = threadIdx.x / 32;
  const int row = blockIdx.y * 32 + y;
  const int col = blockIdx.x * 32 + x;
  const int8_t* a_from = a + static_cast<long long>(row) * lda + x;
  const int8_t* b_from = b + static_cast<long long>(blockIdx.x * 32 + y) * ldb + x;
  int sum[1] = {0};
  for (int k0 = 0; k0 < k; k0 += 32) {
    a_tile[y][x] = a_from[k0];
    b_tile[x][y] = b_from[k0];
    __syncthreads();  // the tile is complete
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[0] = multiply_add(a_tile[y][i], b_tile[i][x], sum[0]);
    __syncthreads();  // all threads have read the tile
  }
  store_run<E>(d, sum, row, col, m, n, ldd, args);
}

// Each of 256 threads computes 8 x 8 elements of a tile of 128 x 128: 16 bytes from shared memory serve 64
// products, whereas the previous kernel reads two bytes for one product. Both tiles are transposed, so that a
// thread's 8 rows, or columns, are neighbours, which one load of 8 bytes reads. A thread copies 32 bytes of one
// row, a whole sector.
template <class E>
__device__ __forceinline__ void registers_gemm(const int8_t* a, const int8_t* b, typename E::Out* d, int m, int n,
                                               int k, int lda, int ldb, int ldd, const typename E::Args& args) {
  struct alignas(8) Eight {
    int8_t v[8];
  };
  __shared__ __align__(8) int8_t tiles[2][32][128];  // A and B, [k][row]
  const int x = 8 * (threadIdx.x % 16);
  const int y = 8 * (threadIdx.x / 16);
  const int m0 = blockIdx.y * 128;
  const int n0 = blockIdx.x * 128;
  const int operand = threadIdx.x / 128;
  const int copied = threadIdx.x % 128;
  const int8_t* from = operand == 0 ? a + static_cast<long long>(m0 + copied) * lda
                                    : b + static_cast<long long>(n0 + copied) * ldb;
  int sums[8][8] = {};
  for (int k0 = 0; k0 < k; k0 += 32) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
      load_piece<16>(words, reinterpret_cast<const char*>(from) + k0 + 16 * half, 0);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        tiles[operand][16 * half + i][copied] = static_cast<int8_t>(words[i / 4] >> 8 * (i % 4));
      }
    }
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
      const Eight rows = *reinterpret_cast<const Eight*>(&tiles[0][i][y]);
      const Eight columns = *reinterpret_cast<const Eight*>(&tiles[1][i][x]);
#pragma unroll
      for (int p = 0; p < 64; ++p) {
        sums[p / 8][p % 8] = multiply_add(rows.v[p / 8], columns.v[p % 8], sums[p / 8][p % 8]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) store_run<E>(d, sums[i], m0 + y + i, n0 + x, m, n, ldd, args);
}

}  // namespace tutorial
}  // namespace qcut
