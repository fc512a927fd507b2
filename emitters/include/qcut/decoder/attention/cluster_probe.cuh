// Whether a cluster exchanges data as the last step of attention does: each CTA sends a part to every CTA's shared
// memory, whose barriers count the bytes. Every wait is bounded by clocks, so that the kernel ends whatever happens.
//
// CTAs first meet in global memory, where waiting can be given up. Only if all of them run do they use the cluster's own
// barrier, which cannot be left.
//
// Source: PTX ISA 8.x, "mbarrier.test_wait", "%globaltimer".
#pragma once

#include <qcut/core/barrier.cuh>

namespace qcut {

// What a CTA of the probe writes. 0 is never written.
enum ClusterOutcome : int { kExchanged = 1, kNeverMet = 2, kNothingArrived = 3, kWrongValues = 4 };

// Ends `limit_ns` after its start, or after as many cycles of 4 GHz if the timer stands still.
struct Deadline {
  unsigned long long started_ns;
  long long started;
  long long limit_ns;

  static __device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  __device__ __forceinline__ explicit Deadline(long long limit)
      : started_ns(now_ns()), started(clock64()), limit_ns(limit) {}
  __device__ __forceinline__ bool is_over() const {
    return now_ns() - started_ns > static_cast<unsigned long long>(limit_ns) || clock64() - started > 4 * limit_ns;
  }
};

__device__ __forceinline__ bool is_first_phase_complete(uint32_t barrier) {
  uint32_t complete;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(complete)
      : "r"(barrier)
      : "memory");
  return complete != 0;
}

// The kernel, of one cluster of 32 threads a CTA. `meeting` holds two zeros: how many CTAs have come, and 1 once all
// have, 2 once one has given up. Each CTA writes its outcome to `outcomes`. The CTA of rank `silent` sends nothing.
template <int kCluster>
__device__ __forceinline__ void probe_cluster(int* outcomes, unsigned* meeting, long long limit_ns, int silent) {
  __shared__ alignas(16) float4 received[kCluster][32];
  __shared__ alignas(8) float2 parts[kCluster];
  __shared__ alignas(8) unsigned long long counting;
  __shared__ unsigned met;
  const int rank = blockIdx.x, lane = threadIdx.x;
  const uint32_t barrier = shared_address(&counting);
  const Deadline deadline(limit_ns);
  if (lane == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, kCluster * (32 * 16 + 8));
    volatile unsigned* const verdict = meeting + 1;
    if (atomicAdd(meeting, 1u) == kCluster - 1) atomicCAS(meeting + 1, 0u, 1u);
    while (*verdict == 0) {
      if (deadline.is_over()) atomicCAS(meeting + 1, 0u, 2u);
    }
    met = *verdict;
  }
  __syncthreads();
  if (met != 1) {
    if (lane == 0) outcomes[rank] = kNeverMet;
    return;
  }
  cluster_arrive_relaxed();
  cluster_wait();
  if (rank != silent) {
    for (int to = 0; to < kCluster; ++to) {
      const float value = static_cast<float>(1024 * rank + 32 * to + lane);
      store_async(shared_address(&received[rank][lane]), barrier, to, make_float4(value, -value, 0.5f * value, 1.0f));
      if (lane == 0) store_async(shared_address(&parts[rank]), barrier, to, make_float2(value, 2.0f * value));
    }
  }
  while (!is_first_phase_complete(barrier)) {
    if (deadline.is_over()) {
      if (lane == 0) outcomes[rank] = kNothingArrived;
      return;
    }
  }
  bool right = true;
  for (int from = 0; from < kCluster; ++from) {
    const float first = static_cast<float>(1024 * from + 32 * rank), value = first + static_cast<float>(lane);
    const float4 got = received[from][lane];
    right = right && got.x == value && got.y == -value && got.z == 0.5f * value && got.w == 1.0f;
    right = right && parts[from].x == first && parts[from].y == 2.0f * first;
  }
  const bool all = __all_sync(0xffffffffu, right);
  if (lane == 0) outcomes[rank] = all ? kExchanged : kWrongValues;
}

}  // namespace qcut
