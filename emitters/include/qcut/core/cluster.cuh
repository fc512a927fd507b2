// Thread-block clusters (sm_90 and later): their barrier, and each other's shared memory.
//
// There is no guard for older architectures: a kernel that needs a cluster there does not compile.
// Source: PTX ISA 8.x, "barrier.cluster", "mapa", "ld.shared::cluster", "st.shared::cluster".
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// A barrier of all threads of the cluster. Everything that a thread did before it arrived is done for the threads that
// waited.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// Arrives for a thread whose memory accesses no other thread waits for.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The address in the cluster at which the CTA of that rank has what this CTA has at `shared`.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t shared, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// Sixteen bytes at this CTA's shared address `shared`, but in the CTA of that rank.
__device__ __forceinline__ void load_cluster_16(uint32_t (&w)[4], uint32_t shared, int rank) {
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(map_to_rank(shared, rank))
               : "memory");
}

// A word to this CTA's shared address `shared`, but in the CTA of that rank.
__device__ __forceinline__ void store_cluster_4(uint32_t shared, int rank, uint32_t w) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(map_to_rank(shared, rank)), "r"(w) : "memory");
}

}  // namespace qcut
