// The end of a step of speculative decoding: accepts drafted tokens and drafts the next ones from the text.
//
// A CTA has a sequence. Every warp finds the accepted tokens, so that only the text passes through memory. All threads
// compare n-grams with the text's last tokens; the largest key is the longest match and, of equal ones, the latest.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// The kernel: `qcut.ops.next_token.AcceptOp`. chosen is [sequences, read], tokens [width, sequences], text [sequences,
// capacity], host_copy null or [turns, sequences, width + 2] in pinned host memory. A warp holds width + 2 words;
// n-grams have up to kMost tokens.
template <int kThreads, int kMost, int kUnroll>
__device__ __forceinline__ void accept_tokens(const long long* chosen, long long* tokens, int* counts, int* positions,
                                              int* slots, int* text, int* ends, int read, int width, int capacity,
                                              int context, int least, int most, long long* host_copy, int* turn,
                                              int turns) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kWarps = kThreads / 32;
  __shared__ unsigned long long partial[kWarps];
  const unsigned at = blockIdx.x, sequences = gridDim.x;
  const int thread = threadIdx.x, lane = thread % 32;
  launch_dependents();
  wait_for_dependencies();
  const int now = host_copy != nullptr ? turn[at] : 0;
  const int slot = slots[at];
  const bool running = slot < context;
  int* row = text + static_cast<long long>(at) * capacity;
  int added = 0, end = ends[at];
  long long token = 0;
  if (running) {
    const int valid = min(min(counts[at], read), context - slot);
    if (lane < read) token = chosen[at * read + lane];
    const bool stops = lane + 1 >= valid || token != tokens[(lane + 1) * sequences + at];
    added = __ffs(__ballot_sync(kAll, stops));
    const int stored = min(added, capacity - end);
    if (thread < stored) row[end + thread] = static_cast<int>(token);
    end += stored;
  }
  __syncthreads();  // the text is whole, and all warps have read the tokens
  const int last = end - 1, room = min(width - 1, context - 1 - slot - added);
  unsigned long long key = 0;
  if (room > 0 && most > 0 && last >= least) {
    int tail[kMost];
#pragma unroll
    for (int g = 0; g < kMost; ++g) tail[g] = row[max(last - g, 0)];
    for (int first = thread; first < last; first += kThreads * kUnroll) {
      int found[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) found[u] = row[min(first + u * kThreads, last)];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int j = first + u * kThreads;
        if (j >= last || found[u] != tail[0]) continue;
        int length = 1;
#pragma unroll
        for (int g = 1; g < kMost; ++g) {
          if (length == g && g < most && g <= j && row[j - g] == tail[g]) ++length;
        }
        key = max(key, static_cast<unsigned long long>(length) << 32 | static_cast<uint32_t>(j));
      }
    }
  }
  key = warp_max(key);
  if (lane == 0) partial[thread / 32] = key;
  __syncthreads();
  if (thread >= 32) return;
  key = warp_max(lane < kWarps ? partial[lane] : 0);
  const bool matches = key != 0 && static_cast<int>(key >> 32) >= least;
  const int drafts = matches ? room : 0;
  if (running) {
    long long next = __shfl_sync(kAll, token, added - 1);
    if (lane > 0) {
      const int match = static_cast<int>(static_cast<uint32_t>(key));
      next = lane <= drafts ? row[match + 1 + (lane - 1) % (last - match)] : 0;
    }
    if (lane < width) tokens[lane * sequences + at] = next;
  }
  const long long earlier = __shfl_up_sync(kAll, token, 2);
  if (host_copy != nullptr && lane < width + 2) {
    const long long word = lane == 0 ? added : lane == 1 ? drafts : lane - 2 < added ? earlier : 0;
    host_copy[(static_cast<long long>(now) * sequences + at) * (width + 2) + lane] = word;
  }
  if (lane == 0) {
    counts[at] = 1 + drafts;
    if (running) {
      positions[at] = min(slot + added, context - 1);
      slots[at] = slot + added;
      ends[at] = end;
    }
    if (host_copy != nullptr) turn[at] = now + 1 < turns ? now + 1 : 0;
  }
}

}  // namespace qcut
