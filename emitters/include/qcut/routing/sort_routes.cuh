// Routes of the same expert in tiles: experts in ascending order, and the routes of each in ascending order.
//
// Both kernels count instead of sorting: a route's position is the number of routes and tiles before it. Pads, and the
// expert of tiles that no route fills, are -1. Exactness: integers; no result depends on the order of atomics.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// Up to kThreads routes in one CTA, a route for each thread. tile_experts is [tiles], tile_routes [tiles, tile].
template <int kThreads>
__device__ __forceinline__ void sort_few_routes(const int* experts, int* tile_experts, int* tile_routes, int routes,
                                                int count, int tile, int tiles) {
  constexpr int kNone = 0x7fffffff;
  // Of each route its expert, and that expert again if the route begins a tile.
  __shared__ __align__(16) int expert_of[kThreads], begun[kThreads];
  wait_for_dependencies();
  launch_dependents();  // only after the wait, so that a kernel two launches later may read these results early
  const int route = threadIdx.x;
  const int given = route < routes ? experts[route] : -1;
  const int expert = static_cast<unsigned>(given) < count ? given : kNone;
  expert_of[route] = expert;
  for (int i = route; i < tiles * tile; i += kThreads) tile_routes[i] = -1;
  for (int i = route; i < tiles; i += kThreads) tile_experts[i] = -1;
  __syncthreads();
  int rank = 0;
  for (int i = 0; i < routes; i += 4) {
    const int4 v = *reinterpret_cast<const int4*>(expert_of + i);
    rank += (v.x == expert && i < route) + (v.y == expert && i + 1 < route) + (v.z == expert && i + 2 < route) +
            (v.w == expert && i + 3 < route);
  }
  const bool begins = expert != kNone && rank % tile == 0;
  begun[route] = begins ? expert : kNone;
  __syncthreads();
  if (expert == kNone) return;
  int first = 0;  // tiles of lower experts
  for (int i = 0; i < routes; i += 4) {
    const int4 v = *reinterpret_cast<const int4*>(begun + i);
    first += (v.x < expert) + (v.y < expert) + (v.z < expert) + (v.w < expert);
  }
  tile_routes[first * tile + rank] = route;
  if (begins) tile_experts[first + rank / tile] = expert;
}

// Any number of routes: CTA e writes the tiles of expert e of gridDim.x experts. Every CTA counts the routes of all
// experts, for the tiles of lower experts. A warp has a share of consecutive routes, so that votes give their ranks.
template <int kThreads, int kMostExperts>
__device__ __forceinline__ void sort_many_routes(const int* experts, int* tile_experts, int* tile_routes, int routes,
                                                 int count, int tile, int tiles) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kUnroll = 8;
  __shared__ int sizes[kMostExperts];
  __shared__ int own[kWarps], below[kWarps], all[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int mine = blockIdx.x;
  for (int e = threadIdx.x; e < count; e += kThreads) sizes[e] = 0;
  __syncthreads();
  wait_for_dependencies();
  launch_dependents();  // only after the wait, so that a kernel two launches later may read these results early
  const int share = (routes + kThreads - 1) / kThreads * 32;
  const int begin = min(warp * share, routes), end = min(begin + share, routes);
  const auto load = [&](int (&found)[kUnroll], int first) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int route = first + 32 * u + lane;
      found[u] = route < end ? experts[route] : -1;
    }
  };
  int found[kUnroll];
  int votes = 0;
  for (int first = begin; first < end; first += 32 * kUnroll) {
    load(found, first);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (static_cast<unsigned>(found[u]) < count) atomicAdd(&sizes[found[u]], 1);
      votes += __popc(__ballot_sync(0xffffffffu, found[u] == mine));
    }
  }
  if (lane == 0) own[warp] = votes;
  __syncthreads();
  int lower = 0, used = 0;
  for (int e = threadIdx.x; e < count; e += kThreads) {
    const int filled = (sizes[e] + tile - 1) / tile;
    used += filled;
    lower += e < mine ? filled : 0;
  }
  lower = warp_sum(lower);
  used = warp_sum(used);
  if (lane == 0) below[warp] = lower, all[warp] = used;
  __syncthreads();
  const int first_tile = warp_sum(lane < kWarps ? below[lane] : 0);
  used = warp_sum(lane < kWarps ? all[lane] : 0);
  int* const positions = tile_routes + first_tile * tile;
  if (votes > 0) {
    int at = warp_sum(lane < warp ? own[lane] : 0);
    for (int first = begin; first < end; first += 32 * kUnroll) {
      load(found, first);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint32_t same = __ballot_sync(0xffffffffu, found[u] == mine);
        if (found[u] == mine) positions[at + __popc(same & ((1u << lane) - 1))] = first + 32 * u + lane;
        at += __popc(same);
      }
    }
  }
  const int filled = (sizes[mine] + tile - 1) / tile;
  for (int i = sizes[mine] + threadIdx.x; i < filled * tile; i += kThreads) positions[i] = -1;
  for (int i = threadIdx.x; i < filled; i += kThreads) tile_experts[first_tile + i] = mine;
  const int thread = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  for (int i = used * tile + thread; i < tiles * tile; i += step) tile_routes[i] = -1;
  for (int i = used + thread; i < tiles; i += step) tile_experts[i] = -1;
}

}  // namespace qcut
