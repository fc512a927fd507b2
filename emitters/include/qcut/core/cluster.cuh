// Thread-block clusters (sm_90 and later): the cluster's barrier, and access to the shared memory of its other CTAs.
//
// The functions have no guard for older architectures: a kernel that calls one of them there does not compile.
// Source: PTX ISA 8.x, "barrier.cluster", "mapa", "ld.shared::cluster", "st.shared::cluster".
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// A barrier of all threads of the cluster: a thread arrives here and waits in cluster_wait. The memory accesses of a
// thread before its arrival are visible to every thread that has waited.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// Arrives without making this thread's memory accesses visible to others.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The cluster-wide address of the shared address `shared` of the CTA of rank `rank`.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t shared, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// Loads 16 bytes from the shared address `shared` of the CTA of rank `rank`.
__device__ __forceinline__ void load_cluster_16(uint32_t (&w)[4], uint32_t shared, int rank) {
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(map_to_rank(shared, rank))
               : "memory");
}

// Stores a word at the shared address `shared` of the CTA of rank `rank`.
__device__ __forceinline__ void store_cluster_4(uint32_t shared, int rank, uint32_t w) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(map_to_rank(shared, rank)), "r"(w) : "memory");
}

}  // namespace qcut
