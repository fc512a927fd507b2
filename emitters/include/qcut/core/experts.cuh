// The rows that a CTA of a product computes: all tokens of a launch, or a tile of routes to one expert.
//
// A route is a token's way to one of its experts: route r is the (r % k)th of token r / k. The routes of an expert lie
// in tiles, whose expert is read on the device: a grid has as many tiles as there may be, and CTAs of tiles without an
// expert end at once. The weights of experts lie one after the other, so that an expert is an offset.
#pragma once

#include <qcut/core/common.cuh>

namespace qcut {

// Rows of D are the tokens.
struct AllRows {
  static constexpr bool kOfExperts = false;
  __device__ __forceinline__ int of(int token) const { return token; }
  __device__ __forceinline__ int source(int token) const { return token; }
};

// Rows of D are routes. kTokens is the most routes of a tile; without `routes`, every route is a tile of its own.
template <int kTokens>
struct ExpertRows {
  static_assert(kTokens <= 32, "a lane for each route");
  static constexpr bool kOfExperts = true;
  const int* experts;  // of each tile; outside 0 .. count - 1: none
  const int* routes;   // [tiles][kTokens], -1 after the last; or null
  int count;           // experts
  int per_row;         // routes of a row of tokens
  int rows;            // of tokens
  int tile = 0;

  // Goes to a tile, returns its expert, or -1, and sets m to the number of its routes. All lanes of a warp call. Expert
  // and routes are loaded at the same time.
  __device__ __forceinline__ int begin(int which, int& m) {
    tile = which;
    const int expert = experts[tile];
    m = 1;
    if (routes != nullptr) {
      const int lane = threadIdx.x % 32;
      m = __popc(__ballot_sync(0xffffffffu, lane < kTokens && routes[tile * kTokens + lane % kTokens] >= 0));
    }
    return expert < count && m > 0 ? expert : -1;
  }
  // The route that is the token of a tile, a row of D.
  __device__ __forceinline__ int of(int token) const {
    return routes == nullptr ? tile : routes[tile * kTokens + token];
  }
  // The row of tokens of this route.
  __device__ __forceinline__ int source(int token) const { return of(token) / per_row; }
};

}  // namespace qcut
