// A persistent kernel's exchange, alone: stage after stage, each CTA makes its part of a vector, and all CTAs get all of
// it. `bench_exchange.py` compiles and checks this, and says what the forms are.
//
// The vector's words of the next stage are functions of two words of this stage, so that a word that comes late or is
// lost spoils all results behind it. A CTA that has waited too long stops waiting and says so.
//
// Two buffers in memory and in shared memory suffice: a CTA publishes a stage when it has got all of the one before,
// which others have published when they were done with the one before that.
//
// Source: PTX ISA 8.x, "ld.acquire", "red.release", "st.async", "cp.async.bulk", "fence.proxy".
#pragma once

#include <qcut/core/barrier.cuh>

namespace qcut {

constexpr int kExchangeThreads = 512;
constexpr int kMostPolls = 1 << 17;

enum class Arrival {
  kNone,     // nothing is exchanged: the loop's own time
  kCounter,  // CTAs add to one counter
  kFlags,    // each CTA has a flag
  kPackets,  // each word has its stage beside it
};

__device__ __forceinline__ uint32_t first_word(int words, int part, int parts) {
  return static_cast<unsigned>(words) * part / parts;
}

__device__ __forceinline__ uint32_t next_word(const uint32_t* x, int words, int i, uint32_t stage) {
  const uint32_t other = x[(i + 1 + stage * 97) % words];
  return x[i] * 1664525u + (other << 7 | other >> 25) + stage;
}

// Memory of a launch. Tags of a launch begin behind `base`, those of all launches before.
struct Exchange {
  uint32_t* words;         // two vectors
  unsigned long long* packets;  // two vectors: a word below, its stage above
  uint32_t* arrived;       // the counter, or a flag of each CTA
  uint32_t* result;        // the last vector
  uint32_t* sums;          // of each CTA, of all that it got
  uint32_t* failed;        // CTAs that have waited too long
  int stages;
  uint32_t base;
};

// Polls until `ready` says so. False if that takes too long, or if this thread has given up before.
template <class Ready>
__device__ __forceinline__ bool poll(Ready ready, bool alive) {
  for (int i = 0; alive && i < kMostPolls; ++i) {
    if (ready()) return true;
  }
  return false;
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ bool barrier_is_past(uint32_t barrier, int parity) {
  uint32_t past;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(past)
      : "r"(barrier), "r"(parity)
      : "memory");
  return past;
}

// The kernel. Each CTA reads all of a vector from the L2; with kShares, only its share of its cluster, which gives it to
// all CTAs of the cluster: packets by remote stores, other words by multicast. With kChecked, all words that a CTA gets
// go into its sum.
template <Arrival kArrival, bool kShares, int kCluster, int kWords, bool kChecked>
__device__ __forceinline__ void exchange(const Exchange& e) {
  constexpr int kThreads = kExchangeThreads, kPairs = kWords / 2;
  static_assert(kWords % (4 * kCluster) == 0, "a share is whole pieces of 16 bytes");
  extern __shared__ __align__(16) uint32_t vectors[];  // two
  __shared__ __align__(8) unsigned long long barriers[2];
  const int t = threadIdx.x, ctas = gridDim.x, cta = blockIdx.x, rank = cta % kCluster;
  const int first = first_word(kWords, cta, ctas), last = first_word(kWords, cta + 1, ctas);
  constexpr int kShareWords = kWords / kCluster;
  const int share = rank * kShareWords;
  bool alive = true;
  uint32_t sum = 0;

  for (int i = t; i < kWords; i += kThreads) vectors[i] = i * 2654435761u;
  if (t == 0) {
    for (auto& barrier : barriers) barrier_init(shared_address(&barrier), 1);
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }

#pragma unroll 1
  for (int s = 0; s < e.stages; ++s) {
    const uint32_t* const x = vectors + s % 2 * kWords;
    uint32_t* const y = vectors + (s + 1) % 2 * kWords;
    const uint32_t tag = e.base + s + 1;
    const uint32_t barrier = shared_address(barriers + s % 2);
    uint32_t* const words = e.words + s % 2 * kWords;
    unsigned long long* const packets = e.packets + s % 2 * kWords;
    if (kShares && t == 0) barrier_expect(barrier, 4 * kWords);
    const int mine = first + t;
    if (mine < last) {
      const uint32_t word = next_word(x, kWords, mine, s);
      if constexpr (kArrival == Arrival::kPackets) {
        const unsigned long long packet = static_cast<unsigned long long>(tag) << 32 | word;
        asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(packets + mine), "l"(packet) : "memory");
      } else if constexpr (kArrival == Arrival::kNone) {
        y[mine] = word;
      } else {
        words[mine] = word;
      }
    }
    if constexpr (kArrival == Arrival::kCounter || kArrival == Arrival::kFlags) {
      __syncthreads();
      if (t == 0) {
        if constexpr (kArrival == Arrival::kCounter) {
          asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(e.arrived) : "memory");
        } else {
          asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(e.arrived + cta), "r"(tag) : "memory");
        }
      }
    }
    if constexpr (kArrival == Arrival::kCounter) {
      const auto all = [&] { return static_cast<int>(load_acquire(e.arrived) - tag * ctas) >= 0; };
      if (t == 0) alive = poll(all, alive);
    } else if constexpr (kArrival == Arrival::kFlags) {
      // With shares, the first warp waits for the CTAs that make its CTA's share, and no other thread has to.
      const int step = kShares ? 32 : kThreads;
      for (int other = t; other < ctas && t < step; other += step) {
        const int begin = first_word(kWords, other, ctas), end = first_word(kWords, other + 1, ctas);
        if (kShares && (end <= share || begin >= share + kShareWords)) continue;
        const auto there = [&] { return static_cast<int>(load_acquire(e.arrived + other) - tag) >= 0; };
        alive = poll(there, alive);
      }
    }
    if constexpr (kArrival == Arrival::kPackets) {
      constexpr int kMine = kShares ? kPairs / kCluster : kPairs, kEach = (kMine + kThreads - 1) / kThreads;
      unsigned long long pair[kEach][2] = {};
      const auto all = [&] {
        bool ready = true;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int at = t + i * kThreads;
          if (at >= kMine || (pair[i][0] >> 32 == tag && pair[i][1] >> 32 == tag)) continue;
          ready = false;
          asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                       : "=l"(pair[i][0]), "=l"(pair[i][1])
                       : "l"(packets + (kShares ? share : 0) + 2 * at)
                       : "memory");
        }
        return ready;
      };
      alive = poll(all, alive);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = t + i * kThreads;
        if (at >= kMine) continue;
        const uint32_t low = static_cast<uint32_t>(pair[i][0]), high = static_cast<uint32_t>(pair[i][1]);
        if constexpr (kShares) {
          const uint32_t place = shared_address(y + share + 2 * at);
#pragma unroll
          for (int to = 0; to < kCluster; ++to) {
            const int other = (rank + to) % kCluster;
            store_async(place, barrier, other, make_float2(__uint_as_float(low), __uint_as_float(high)));
          }
        } else {
          *reinterpret_cast<uint2*>(y + 2 * at) = make_uint2(low, high);
        }
      }
    } else if constexpr (kArrival != Arrival::kNone && kShares) {
      if (t < 32) {
        __syncwarp();
        if (t == 0) {
          asm volatile("fence.proxy.async.global;" ::: "memory");
          const uint32_t to = shared_address(y + share);
          if constexpr (kCluster == 1) {
            copy_bulk(to, words + share, 4 * kShareWords, barrier);
          } else {
            copy_bulk_multicast(to, words + share, 4 * kShareWords, barrier, (1 << kCluster) - 1);
          }
        }
      }
    } else if constexpr (kArrival != Arrival::kNone) {
      __syncthreads();  // the threads that wait have seen all
      constexpr int kPieces = kWords / 4, kEach = (kPieces + kThreads - 1) / kThreads;
      uint4 piece[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (t + i * kThreads < kPieces) piece[i] = __ldcg(reinterpret_cast<const uint4*>(words) + t + i * kThreads);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (t + i * kThreads < kPieces) reinterpret_cast<uint4*>(y)[t + i * kThreads] = piece[i];
      }
    }
    if constexpr (kShares) {
      const auto full = [&] { return barrier_is_past(barrier, s / 2 % 2); };
      alive = poll(full, alive);
    } else {
      __syncthreads();
    }
    if constexpr (kChecked) {
      for (int i = t; i < kWords; i += kThreads) sum += y[i] * (2 * i + 1);
    }
    if constexpr (kShares) __syncthreads();  // no thread falls two phases behind
  }
  if constexpr (kChecked) atomicAdd(e.sums + cta, sum);
  if (!alive) atomicAdd(e.failed, 1);
  if (first + t < last) e.result[first + t] = vectors[e.stages % 2 * kWords + first + t];
  if constexpr (kCluster > 1) {  // until nobody writes to this CTA any more
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace qcut
