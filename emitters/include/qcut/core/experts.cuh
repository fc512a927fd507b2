// Routes of tokens to experts: what a CTA of a product reads on the device to know its rows.
//
// A route is a token's way to one of its experts: route r is the (r % k)th of token r / k. The routes of an expert lie
// in tiles. A grid is made for as many tiles as there may be; those with routes come first, and the others have no
// expert. The weights of experts lie one after the other, so that an expert is an offset.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// Rows of D are the tokens.
struct AllRows {
  static constexpr bool kOfExperts = false;
  __device__ __forceinline__ int of(int token) const { return token; }
  __device__ __forceinline__ int source(int token) const { return token; }
};

// Rows of D are routes.
struct ExpertRows {
  static constexpr bool kOfExperts = true;
  const int* experts;  // of each tile; outside 0 .. count - 1: none
  const int* routes;   // of each tile, -1 after the last; null: every route is a tile of its own
  int count;           // experts
  int per_row;         // routes of a row of tokens
  int rows;            // of tokens

  // Numbers beyond the experts and the routes, which a caller may have left in memory, count as none.

  // The expert of a tile; negative for none.
  __device__ __forceinline__ int expert(int tile) const {
    const int expert = experts[tile];
    return expert < count ? expert : -1;
  }
  // Tiles of `bound` up to the last one that may have an expert. All kThreads threads of the CTA call.
  template <int kThreads>
  __device__ __forceinline__ int used(int bound) const {
    if (routes == nullptr) return bound;
    int used = 0;
    for (int i = 0; i < bound; i += kThreads) {
      const int tile = i + static_cast<int>(threadIdx.x);
      used += __syncthreads_count(tile < bound && expert(tile) >= 0);
    }
    return used;
  }
  // Route i of a tile of kTokens; -1 for none, and of a tile without an expert.
  template <int kTokens>
  __device__ __forceinline__ int route(int tile, int i) const {
    if (routes == nullptr) return i == 0 && expert(tile) >= 0 ? tile : -1;
    return i < kTokens ? known(routes[tile * kTokens + i]) : -1;
  }
  __device__ __forceinline__ int known(int route) const {
    return static_cast<unsigned>(route) < static_cast<unsigned>(rows * per_row) ? route : -1;
  }
};

// Rows of D of a CTA that computes one tile of kTokens routes.
template <int kTokens>
struct TileRows : ExpertRows {
  static_assert(kTokens <= 32, "a lane for each route");
  int tile = 0;

  // Goes to a tile, returns its expert, or -1, and sets m to the number of its routes. All lanes of a warp call. Expert
  // and routes are loaded at the same time.
  __device__ __forceinline__ int begin(int which, int& m) {
    tile = which;
    const int found = experts[tile];
    m = 1;
    if (routes != nullptr) {
      const int lane = threadIdx.x % 32;
      m = __popc(__ballot_sync(0xffffffffu, lane < kTokens && known(routes[tile * kTokens + lane % kTokens]) >= 0));
    }
    return found < count && m > 0 ? found : -1;
  }
  // The route that is the token of a tile, a row of D.
  __device__ __forceinline__ int of(int token) const {
    return routes == nullptr ? tile : max(known(routes[tile * kTokens + token]), 0);
  }
  // The row of tokens of this route.
  __device__ __forceinline__ int source(int token) const { return of(token) / per_row; }
};

}  // namespace qcut
