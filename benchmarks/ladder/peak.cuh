// The peak rate of a multiprocessor's products: kernels that do nothing but independent products from registers.
//
// Each thread (dp4a) or warp (mma.sync) keeps kChains independent sums, so that no product waits for the previous
// one. The kernels write the sums, so that the compiler cannot remove a product. A multiprocessor runs one CTA,
// which counts the cycles between two barriers.
//
// Source: PTX ISA "dp4a", "mma.sync.m16n8k32"; CUDA C++ Programming Guide, "Arithmetic Instructions".
#include <qcut/core/mma.cuh>

namespace qcut {

// `multiply` continues all chains by one product each.
template <class Multiply>
__device__ __forceinline__ void measure_cycles(long long* cycles, int rounds, const Multiply& multiply) {
  __syncthreads();
  const long long start = clock64();
#pragma unroll 8
  for (int i = 0; i < rounds; ++i) multiply();
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
}

// The dp4a kernel. x and y hold four int8 factors each; sums[t] adds up all chains of thread t, modulo 2**32.
template <int kChains>
__device__ __forceinline__ void dp4a_peak(int* sums, long long* cycles, int rounds, int x, int y) {
  int chains[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) chains[i] = threadIdx.x + i;
  measure_cycles(cycles, rounds, [&] {
#pragma unroll
    for (int i = 0; i < kChains; ++i) chains[i] = __dp4a(x, y, chains[i]);
  });
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += chains[i];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// The mma.sync kernel. All words of the fragments are x or y, so that an element of a product is eight times their dot
// product.
template <int kChains>
__device__ __forceinline__ void mma_peak(int* sums, long long* cycles, int rounds, int x, int y) {
  const uint32_t a[4] = {bits(x), bits(x), bits(x), bits(x)};
  int chains[kChains][4];
#pragma unroll
  for (int i = 0; i < 4 * kChains; ++i) chains[i / 4][i % 4] = threadIdx.x + i;
  measure_cycles(cycles, rounds, [&] {
#pragma unroll
    for (int i = 0; i < kChains; ++i) mma_s8(chains[i], a, bits(y), bits(y));
  });
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4 * kChains; ++i) sum += chains[i / 4][i % 4];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

}  // namespace qcut
