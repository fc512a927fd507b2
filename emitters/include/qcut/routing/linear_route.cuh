// A router of few tokens: the logits of all experts, and the experts that each token chooses by them.
//
// A cluster of kRouteCtas CTAs has a few tokens, and each of its CTAs has a share of the experts. A thread has the same
// columns of every expert's weight, in registers; sums of threads are added in a warp, then over warps in order. Each
// CTA sends its logits to the shared memory of the CTAs that choose, one for each token.
//
// Exactness: logits are float32 sums, in an order that depends on the weight's shape and type only, rounded to L.
// Choices are those of `route_token`.
#pragma once

#include <qcut/core/barrier.cuh>
#include <qcut/routing/route.cuh>

namespace qcut {

constexpr int kRouteCtas = 8;  // the largest portable cluster

// Loads 16 bytes of weights, which no other CTA of the cluster reads, if `wanted`; else zeros. The load is not one of
// streaming.cuh, since the compiler may move an ld.global.nc below the wait for the previous kernel.
__device__ __forceinline__ void load_weights(uint32_t (&w)[4], const void* p, bool wanted) {
  const int loaded = wanted;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&r"(w[0]), "=&r"(w[1]), "=&r"(w[2]), "=&r"(w[3])
      : "l"(p), "r"(loaded)
      : "memory");
}

// The elements 2 * i and 2 * i + 1 of a vector's words.
template <class T>
__device__ __forceinline__ float2 pair_of(const uint32_t* w, int i);
template <>
__device__ __forceinline__ float2 pair_of<float>(const uint32_t* w, int i) {
  return make_float2(__uint_as_float(w[2 * i]), __uint_as_float(w[2 * i + 1]));
}
template <>
__device__ __forceinline__ float2 pair_of<__half>(const uint32_t* w, int i) {
  return __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
}
template <>
__device__ __forceinline__ float2 pair_of<__nv_bfloat16>(const uint32_t* w, int i) {
  return make_float2(__uint_as_float(w[i] << 16), __uint_as_float(w[i] & 0xffff0000u));
}

// Adds kCount values over the lanes of a warp, each in the order of `warp_sum`, and leaves value
// lane / (32 / kCount) in v[0]: while a lane has several values, it gives half of them away in each step.
template <int kCount, int kOffset = 16, int kHeld>
__device__ __forceinline__ void warp_sums(float (&v)[kHeld]) {
  static_assert(kCount <= 2 * kOffset, "a lane is left with one value");
  constexpr int kHalf = kCount / 2;
  const bool upper = threadIdx.x & kOffset;
  if constexpr (kCount == 1) v[0] += __shfl_xor_sync(0xffffffffu, v[0], kOffset);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float given = upper ? v[i] : v[i + kHalf], kept = upper ? v[i + kHalf] : v[i];
    v[i] = kept + __shfl_xor_sync(0xffffffffu, given, kOffset);
  }
  if constexpr (kOffset > 1) warp_sums<kCount == 1 ? 1 : kHalf, kOffset / 2>(v);
}

template <class B>
constexpr bool kHasBias = true;
template <>
constexpr bool kHasBias<void> = false;

// The kernel, of a grid (kRouteCtas, clusters). Rows of x are `stride` elements apart, weight [kCount, kColumns] is
// contiguous, and rows of both start at multiples of 16 bytes. A cluster has kTokens tokens; a CTA computes the logits
// of kExperts experts at once, whose weights its threads hold in kPasses vectors each. With kEarly, weights are loaded
// before the previous kernel has ended. If B is a type, logits_bias [kCount] is added to logits before they are rounded.
// route_token describes all other arguments.
template <class T, class W, class L, Scores kScores, bool kByScore, int kCount, int kColumns, int kTokens, int kExperts,
          int kPasses, int kThreads, bool kEarly, class B = void>
__device__ __forceinline__ void linear_route(const T* x, const W* weight, const float* bias, float* weights,
                                             int* experts, long long stride, int m, int top_k, int groups,
                                             int top_groups, int top2, int renormalize, float eps, float min_sum,
                                             float scaling, [[maybe_unused]] const B* logits_bias = nullptr) {
  constexpr int kSize = Vector<W>::kSize;
  constexpr int kShare = (kCount + kRouteCtas - 1) / kRouteCtas;
  constexpr int kHeld = kShare < kExperts ? kShare : kExperts;
  constexpr int kGroups = (kShare + kHeld - 1) / kHeld;
  constexpr bool kBiased = kHasBias<B>;
  constexpr bool kWhole = kPasses * kThreads * kSize == kColumns;  // every thread has columns
  constexpr int kWarps = kThreads / 32;
  constexpr int kSums = kTokens * kExperts;
  constexpr int kSlots = kCount <= 64 ? 2 : kCount <= 128 ? 4 : kCount <= 256 ? 8 : kCount <= 512 ? 16 : 32;
  constexpr int kAdded = kByScore ? (kCount + kThreads - 1) / kThreads : 0;  // biases of a thread
  __shared__ float partial[kWarps][kSums];
  __shared__ float logits[kCount];
  __shared__ float added[kByScore ? kCount : 1];
  __shared__ alignas(8) unsigned long long arrivals;  // counts the bytes of logits
  const int rank = blockIdx.x, first = rank * kShare, end = min(first + kShare, kCount);
  const int first_token = blockIdx.y * kTokens;
  const uint32_t barrier = shared_address(&arrivals);
  if (rank < kTokens && threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, kCount * sizeof(float));
  }
  cluster_arrive_relaxed();  // no CTA sends before all have started

  uint32_t w[kPasses][kHeld][4];
  const auto load = [&](int begin) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int column = (pass * kThreads + threadIdx.x) * kSize;
#pragma unroll
      for (int e = 0; e < kHeld; ++e) {
        // Past the last expert there are others' weights, whose logits nobody reads.
        const W* from = weight + min(begin + e, kCount - 1) * static_cast<long long>(kColumns) + column;
        load_weights(w[pass][e], from, kWhole || column < kColumns);
      }
    }
  };
  if constexpr (!kEarly) wait_for_dependencies();
  load(first);
  cluster_wait();
  if constexpr (kEarly) wait_for_dependencies();
  launch_dependents();  // only after the wait, so that a kernel two launches later may read these results early

  float mine[kAdded > 0 ? kAdded : 1];
  if constexpr (kByScore) {
#pragma unroll
    for (int i = 0; i < kAdded; ++i) {
      const int expert = i * kThreads + threadIdx.x;
      mine[i] = bias != nullptr && expert < kCount ? bias[expert] : 0.0f;
    }
  }
  for (int group = 0;; ++group) {
    const int begin = first + group * kHeld;
    const bool last = group == kGroups - 1;
    [[maybe_unused]] float to_add = 0.0f;
    if constexpr (kBiased) {
      if (threadIdx.x < kSums) to_add = to_float(logits_bias[min(begin + static_cast<int>(threadIdx.x) / kTokens, kCount - 1)]);
    }
    float sum[kSums] = {};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int column = (pass * kThreads + threadIdx.x) * kSize;
      uint32_t words[kTokens][kSize / 2];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const T* from = x + (first_token + t) * stride + column;
        const bool wanted = (kWhole || column < kColumns) && first_token + t < m;
        if constexpr (kSize == 8) {
          const uint4 raw = wanted ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
          words[t][0] = raw.x, words[t][1] = raw.y, words[t][2] = raw.z, words[t][3] = raw.w;
        } else {
          const uint2 raw = wanted ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
          words[t][0] = raw.x, words[t][1] = raw.y;
        }
      }
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) {
        float2 a[kTokens];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) a[t] = pair_of<T>(words[t], i);
#pragma unroll
        for (int e = 0; e < kHeld; ++e) {
          const float2 b = pair_of<W>(w[pass][e], i);
#pragma unroll
          for (int t = 0; t < kTokens; ++t) {
            float& s = sum[e * kTokens + t];
            s = fmaf(a[t].y, b.y, fmaf(a[t].x, b.x, s));
          }
        }
      }
    }
    if (!last) load(begin + kHeld);
    warp_sums<kSums>(sum);
    constexpr int kLanes = 32 / kSums;  // that have the same sum
    if (threadIdx.x % kLanes == 0) partial[threadIdx.x / 32][threadIdx.x % 32 / kLanes] = sum[0];
    if (kByScore && group == 0) {
#pragma unroll
      for (int i = 0; i < kAdded; ++i) {
        const int expert = i * kThreads + threadIdx.x;
        if (expert < kCount) added[expert] = mine[i];
      }
    }
    __syncthreads();
    if (threadIdx.x < kSums) {
      float total = partial[0][threadIdx.x];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) total += partial[i][threadIdx.x];
      const int e = threadIdx.x / kTokens;
      if constexpr (kBiased) total += to_add;
      const float logit = to_float(from_float<L>(total));
      const uint32_t to = shared_address(&logits[begin + e]);
      if (e < kHeld && begin + e < end) store_async(to, barrier, threadIdx.x % kTokens, logit);
    }
    if (last) break;
    __syncthreads();  // the sums have been read
  }
  if (rank >= kTokens || threadIdx.x >= 32) return;
  barrier_wait_cluster(barrier);  // also where there is no token: others write to this CTA's memory
  const int token = first_token + rank;
  if (token >= m) return;
  route_token<float, kScores, kSlots, kByScore>(token, logits, kByScore ? added : nullptr, weights, experts, kCount,
                                                top_k, groups, top_groups, top2, renormalize, eps, min_sum, scaling);
}

}  // namespace qcut
