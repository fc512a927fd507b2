// Declarations of device names for a host compiler that reads CUTLASS's headers only for their types.
//
// A launcher needs a kernel's parameter block and not its code. nvcc's host pass takes 20 s to read CUTLASS's headers.
// g++ takes 4 s, but lacks the few device names that the headers use outside of templates: they are declared here.
#pragma once

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

extern uint3 const threadIdx, blockIdx;
extern dim3 const blockDim, gridDim;
int __dp4a(int, int, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
void __syncthreads();
int __syncthreads_and(int);
int __syncthreads_or(int);
void __syncwarp(unsigned = 0);
int __float_as_int(float);
float __int_as_float(int);

namespace nvcuda::wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };
namespace experimental::precision { struct u4; struct s4; struct b1; }
namespace experimental { enum bmmaBitOp { bmmaBitOpXOR, bmmaBitOpAND }; enum bmmaAccumulateOp { bmmaAccumulateOpPOPC }; }
template <class, int, int, int, class, class = void> struct fragment {};
template <class... T> void mma_sync(T&&...);
template <class... T> void bmma_sync(T&&...);
template <class... T> void fill_fragment(T&&...);
template <class... T> void load_matrix_sync(T&&...);
template <class... T> void store_matrix_sync(T&&...);
}  // namespace nvcuda::wmma

namespace cutlass::arch {
int LaneId();
int SmId();
}  // namespace cutlass::arch
