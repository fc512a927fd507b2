// Routes of the same expert in tiles: experts in ascending order, and the routes of each in ascending order. An expert's
// last tile is short if it has no more than short_tile routes; short tiles lie evenly among the others, near those of
// their expert.
//
// Both kernels count instead of sorting: a route's position is the number of routes and tiles before it. Pads, and the
// expert of tiles that no route fills, are -1. Exactness: integers; no result depends on the order of atomics.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// Where tile i of those that are long (x) or short (y) lies among `tiles` of both.
__device__ __forceinline__ int long_tile_at(int i, int2 tiles) {
  return i + (tiles.y == 0 ? 0 : static_cast<int>(static_cast<long long>(i) * tiles.y / tiles.x));
}
__device__ __forceinline__ int short_tile_at(int i, int2 tiles) {
  return i + static_cast<int>((static_cast<long long>(i + 1) * tiles.x + tiles.y - 1) / tiles.y);
}

// Up to kThreads routes in one CTA, a route for each thread. tile_experts is [tiles], tile_routes [tiles, tile].
template <int kThreads>
__device__ __forceinline__ void sort_few_routes(const int* experts, int* tile_experts, int* tile_routes, int routes,
                                                int count, int tile, int tiles, int short_tile) {
  constexpr int kNone = 0x7fffffff, kShort = 1 << 30;
  // Of each route its expert, and if the route begins a tile, that expert again: plus kShort, of a short tile.
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
  int rank = 0, size = 0;
  for (int i = 0; i < routes; i += 4) {
    const int4 v = *reinterpret_cast<const int4*>(expert_of + i);
    rank += (v.x == expert && i < route) + (v.y == expert && i + 1 < route) + (v.z == expert && i + 2 < route) +
            (v.w == expert && i + 3 < route);
    size += (v.x == expert) + (v.y == expert) + (v.z == expert) + (v.w == expert);
  }
  const int within = rank / tile;  // the expert's tile that has the route
  const bool begins = expert != kNone && rank % tile == 0;
  const bool is_short = size - within * tile <= short_tile;
  const int key = expert + (is_short ? kShort : 0);
  begun[route] = begins ? key : kNone;
  __syncthreads();
  if (expert == kNone) return;
  int2 all = make_int2(0, 0);  // tiles that are long (x) and short (y)
  int before = is_short ? 0 : within;  // tiles of the same kind before the route's
  const int least = is_short ? kShort : 0;
  for (int i = 0; i < routes; i += 4) {
    const int4 v = *reinterpret_cast<const int4*>(begun + i);
    const auto count_tile = [&](int begun_key) {
      all.x += begun_key < kShort;
      all.y += begun_key >= kShort && begun_key != kNone;
      before += begun_key >= least && begun_key < key;
    };
    count_tile(v.x), count_tile(v.y), count_tile(v.z), count_tile(v.w);
  }
  const int at = is_short ? short_tile_at(before, all) : long_tile_at(before, all);
  tile_routes[at * tile + rank % tile] = route;
  if (begins) tile_experts[at] = expert;
}

// Any number of routes: CTA e writes the tiles of expert e of gridDim.x experts. Every CTA counts the routes of all
// experts, for the tiles of lower experts. A warp has a share of consecutive routes, so that votes give their ranks.
template <int kThreads, int kMostExperts>
__device__ __forceinline__ void sort_many_routes(const int* experts, int* tile_experts, int* tile_routes, int routes,
                                                 int count, int tile, int tiles, int short_tile) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kUnroll = 8;
  __shared__ int sizes[kMostExperts];
  __shared__ int own[kWarps];
  __shared__ int2 below[kWarps], all[kWarps];  // tiles that are long (x) and short (y): of lower experts, of all
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
  const auto tiles_of = [&](int e) {
    const int rest = sizes[e] % tile, is_short = rest > 0 && rest <= short_tile;
    return make_int2((sizes[e] + tile - 1) / tile - is_short, is_short);
  };
  const auto sum = [](int2 v) { return make_int2(warp_sum(v.x), warp_sum(v.y)); };
  int2 lower = make_int2(0, 0), used = lower;
  for (int e = threadIdx.x; e < count; e += kThreads) {
    const int2 filled = tiles_of(e);
    used = make_int2(used.x + filled.x, used.y + filled.y);
    if (e < mine) lower = make_int2(lower.x + filled.x, lower.y + filled.y);
  }
  lower = sum(lower);
  used = sum(used);
  if (lane == 0) below[warp] = lower, all[warp] = used;
  __syncthreads();
  lower = sum(lane < kWarps ? below[lane] : make_int2(0, 0));
  used = sum(lane < kWarps ? all[lane] : make_int2(0, 0));
  const int2 filled = tiles_of(mine);
  const int long_places = filled.x * tile;
  const int last_tile = filled.y > 0 ? short_tile_at(lower.y, used) : 0;
  const auto place = [&](int rank) {
    const int i = rank / tile;
    return tile_routes + (i < filled.x ? long_tile_at(lower.x + i, used) : last_tile) * tile + rank % tile;
  };
  if (votes > 0) {
    int at = warp_sum(lane < warp ? own[lane] : 0);
    for (int first = begin; first < end; first += 32 * kUnroll) {
      load(found, first);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint32_t same = __ballot_sync(0xffffffffu, found[u] == mine);
        if (found[u] == mine) *place(at + __popc(same & ((1u << lane) - 1))) = first + 32 * u + lane;
        at += __popc(same);
      }
    }
  }
  for (int i = sizes[mine] + threadIdx.x; i < long_places + filled.y * tile; i += kThreads) *place(i) = -1;
  for (int i = threadIdx.x; i < filled.x; i += kThreads) tile_experts[long_tile_at(lower.x + i, used)] = mine;
  if (filled.y > 0 && threadIdx.x == 0) tile_experts[last_tile] = mine;
  const int thread = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads, last = used.x + used.y;
  for (int i = last * tile + thread; i < tiles * tile; i += step) tile_routes[i] = -1;
  for (int i = last + thread; i < tiles; i += step) tile_experts[i] = -1;
}

}  // namespace qcut
