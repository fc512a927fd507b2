// Barriers in shared memory that count arrivals and bytes, and the bulk copies that they count (sm_90 and later).
//
// The functions have no guard for older architectures: a kernel that calls one of them there does not compile. An empty
// body would leave other threads waiting for ever.
// Source: PTX ISA 8.x, "mbarrier", "cp.async.bulk", "cp.async.mbarrier.arrive", "st.async", "fence.proxy",
// "barrier".
#pragma once

#include <qcut/core/cluster.cuh>

namespace qcut {

// Makes a barrier in this CTA's shared memory. Each phase of the barrier ends after `arrivals` arrivals.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the barriers that this thread initialized visible to the cluster. __syncthreads or the cluster's barrier must
// follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once all copies that this thread has issued with cp.async are done.
__device__ __forceinline__ void barrier_arrive_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes what other threads stored in shared memory, and this thread has waited for, visible to wgmma and bulk copies.
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and makes the current phase wait for `bytes` more bytes.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of the given parity is complete. The first phase has parity 0.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tAGAIN:\n\t"
      "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n\t"
      "@p bra.uni DONE;\n\tbra.uni AGAIN;\n\tDONE:\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies `bytes`, a multiple of 16, from global to shared memory; both addresses are multiples of 16. The barrier
// counts the bytes. One thread issues the copy.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Arrives at a barrier of any CTA of the cluster. `mapped` is the barrier's address as map_to_rank returns it.
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// Copies as copy_bulk does, to the address `shared` of every CTA of the cluster with a bit in `ranks`. In
// each of these CTAs the barrier at the address `barrier` counts the bytes.
__device__ __forceinline__ void copy_bulk_multicast(uint32_t shared, const void* global, int bytes, uint32_t barrier,
                                                    int ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(static_cast<unsigned short>(ranks))
      : "memory");
}

// Stores `v` at the shared address `shared` of the CTA of rank `rank`, whose barrier at the address `barrier` counts
// the bytes.
__device__ __forceinline__ void store_async(uint32_t shared, uint32_t barrier, int rank, const float4& v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          map_to_rank(shared, rank)),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(map_to_rank(barrier, rank))
      : "memory");
}

__device__ __forceinline__ void store_async(uint32_t shared, uint32_t barrier, int rank, const float2& v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          map_to_rank(shared, rank)),
      "f"(v.x), "f"(v.y), "r"(map_to_rank(barrier, rank))
      : "memory");
}

__device__ __forceinline__ void store_async(uint32_t shared, uint32_t barrier, int rank, float v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   map_to_rank(shared, rank)),
               "f"(v), "r"(map_to_rank(barrier, rank))
               : "memory");
}

// Waits until the first phase is complete. The bytes that the phase counts may come from any CTA of the cluster.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tAGAIN:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n\t"
      "@p bra.uni DONE;\n\tbra.uni AGAIN;\n\tDONE:\n\t}" ::"r"(barrier)
      : "memory");
}

// A named barrier of kThreads threads. __syncthreads uses the barrier of number 0.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace qcut
