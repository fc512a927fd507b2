// The experts that a router chooses for each token, and their weights.
//
// A warp has a token, and a lane the experts lane, lane + 32, ..., as keys in registers: integers that order scores.
// Each choice takes two reductions of the warp: the largest key, and the lowest index among equal keys. Lane j keeps
// choice j. Exactness: choices are comparisons; scores are expf and divisions, and sums over experts are in the order of
// a lane's experts, then of `warp_sum`.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

enum class Scores { kSoftmax, kSigmoid, kLogits };

// A key that is larger for larger scores. -0 equals 0; NaN has the key 1, below all other scores; 0 is no score.
__device__ __forceinline__ uint32_t score_key(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
  return v != v ? 1u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The score of a key.
__device__ __forceinline__ float key_score(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// The sum of the first lanes' values, in the order of lanes.
__device__ __forceinline__ float sum_in_order(float v, int lanes) {
  float total = __shfl_sync(0xffffffffu, v, 0);
  for (int i = 1; i < lanes; ++i) total += __shfl_sync(0xffffffffu, v, i);
  return total;
}

// Removes the keys of groups that are not among the top_groups groups with the largest scores; of equal groups those
// with lower indices stay. A group is `size` neighbouring experts, with the largest key as score or, with top2, the sum
// of its two largest scores. Lane g ranks group g.
template <int kSlots>
__device__ __forceinline__ void limit_to_groups(uint32_t (&key)[kSlots], int count, int groups, int top_groups,
                                                bool top2) {
  const int lane = threadIdx.x % 32;
  const int size = count / groups;
  uint32_t mine = 0;
  for (int g = 0; g < groups; ++g) {
    uint32_t first = 0, second = 0;  // this lane's two largest keys of the group
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const uint32_t in_group = static_cast<unsigned>(32 * i + lane - g * size) < size ? key[i] : 0u;
      second = max(second, min(first, in_group));
      first = max(first, in_group);
    }
    const uint32_t largest = warp_max(first);
    uint32_t score = largest;
    if (top2) {
      const bool is_first = lane == __ffs(__ballot_sync(0xffffffffu, first == largest)) - 1;
      score = score_key(key_score(largest) + key_score(warp_max(is_first ? second : first)));
    }
    if (lane == g) mine = score;
  }
  int better = 0;
  for (int g = 0; g < groups; ++g) {
    const uint32_t other = __shfl_sync(0xffffffffu, mine, g);
    better += other > mine || (other == mine && g < lane);
  }
  const uint32_t allowed = __ballot_sync(0xffffffffu, lane < groups && better < top_groups);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int expert = 32 * i + lane;
    if (expert < count && !(allowed >> (expert / size) & 1)) key[i] = 0;
  }
}

// Chooses the experts of one token; the threads of a warp call it. `row` has `count` logits; weights and experts
// [m, top_k] are contiguous. With kByScore, choices compare score + bias (bias may be null); without, logits.
template <class T, Scores kScores, int kSlots, bool kByScore>
__device__ __forceinline__ void route_token(int token, const T* row, const float* bias, float* weights, int* experts,
                                            int count, int top_k, int groups, int top_groups, int top2,
                                            int renormalize, float eps, float min_sum, float scaling) {
  const int lane = threadIdx.x % 32;
  float x[kSlots], added[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int expert = 32 * i + lane;
    x[i] = expert < count ? to_float(row[expert]) : __int_as_float(0xff800000);  // -Inf adds nothing to softmax's sum
    if constexpr (kByScore) added[i] = bias != nullptr && expert < count ? bias[expert] : 0.0f;
  }
  uint32_t key[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) key[i] = 32 * i + lane < count ? score_key(x[i]) : 0u;
  float peak = 0.0f, total = 1.0f;
  if constexpr (kScores == Scores::kSoftmax) {
    uint32_t largest = key[0];
#pragma unroll
    for (int i = 1; i < kSlots; ++i) largest = max(largest, key[i]);
    peak = key_score(warp_max(largest));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) sum += expf(x[i] - peak);
    total = warp_sum(sum);
  }
  const auto score = [&](float logit) {
    if constexpr (kScores == Scores::kSoftmax) return expf(logit - peak) / total;
    if constexpr (kScores == Scores::kSigmoid) return 1.0f / (1.0f + expf(-logit));
    return logit;
  };
  if constexpr (kByScore) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (32 * i + lane < count) key[i] = score_key(score(x[i]) + added[i]);
    }
  }
  if (top_groups < groups) limit_to_groups(key, count, groups, top_groups, kByScore && top2);
  int chosen = 0;
  for (int j = 0; j < top_k; ++j) {
    uint32_t largest = 0;
    int at = lane;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (key[i] > largest) {
        largest = key[i];
        at = 32 * i + lane;
      }
    }
    const bool is_largest = largest == warp_max(largest);
    const int expert = static_cast<int>(~warp_max(is_largest ? ~static_cast<uint32_t>(at) : 0u));
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (32 * i + lane == expert) key[i] = 0;
    }
    if (lane == j) chosen = expert;
  }
  const bool has_choice = lane < top_k;
  const float logit = has_choice ? to_float(row[chosen]) : 0.0f;
  float weight = score(logit);
  if constexpr (kScores == Scores::kLogits) {
    const float largest = key_score(warp_max(has_choice ? score_key(logit) : 0u));
    const float power = has_choice ? expf(logit - largest) : 0.0f;
    weight = power / sum_in_order(power, top_k);
  }
  if (renormalize) {
    const float sum = sum_in_order(weight, top_k) + eps;
    weight /= sum < min_sum ? min_sum : sum;
  }
  if (has_choice) {
    const long long route = static_cast<long long>(token) * top_k + lane;
    weights[route] = weight * scaling;
    experts[route] = chosen;
  }
}

// The kernel. Rows of logits are `stride` elements apart; route_token describes what follows.
template <class T, Scores kScores, int kSlots, bool kByScore, int kThreads>
__device__ __forceinline__ void route_tokens(const T* logits, const float* bias, float* weights, int* experts,
                                             long long stride, int m, int count, int top_k, int groups, int top_groups,
                                             int top2, int renormalize, float eps, float min_sum, float scaling) {
  wait_for_dependencies();
  // Only after the wait: when the next kernel starts, the previous one has ended. A kernel two launches later may
  // therefore read these results before it waits.
  launch_dependents();
  const int token = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (token >= m) return;
  route_token<T, kScores, kSlots, kByScore>(token, logits + token * stride, bias, weights, experts, count, top_k,
                                            groups, top_groups, top2, renormalize, eps, min_sum, scaling);
}

}  // namespace qcut
