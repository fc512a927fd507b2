// Barriers in shared memory that count arrivals and bytes, and the bulk copies that they count (sm_90 and later).
//
// There is no guard for older architectures: a kernel that needs these there does not compile. An empty body in their
// place would leave other threads waiting for ever.
// Source: PTX ISA 8.x, "mbarrier", "cp.async.bulk", "st.async", "barrier".
#pragma once

#include <qcut/core/cluster.cuh>

namespace qcut {

// Makes a barrier in this CTA's shared memory. Its phases end after so many arrivals.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the last barrier_init, by the thread that made them, before the CTA's or cluster's barrier.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase also wait for so many bytes.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of that parity, 0 for the first, is complete.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tAGAIN:\n\t"
      "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n\t"
      "@p bra.uni DONE;\n\tbra.uni AGAIN;\n\tDONE:\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies a multiple of 16 bytes between 16-byte boundaries; the barrier counts them. One thread issues it.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Arrives at a barrier of any CTA of the cluster: `mapped` is the address that map_to_rank gave.
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// copy_bulk to the same address in every CTA of the cluster that `ranks` has a bit for; each one's own
// barrier at that address counts the bytes.
__device__ __forceinline__ void copy_bulk_multicast(uint32_t shared, const void* global, int bytes, uint32_t barrier,
                                                    int ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(static_cast<unsigned short>(ranks))
      : "memory");
}

// A named barrier of kThreads threads; 0 is __syncthreads'.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace qcut
