// D = sum over a token's routes of weight * epilogue(W_e x), e the route's expert, x the route's token: the product of
// codebook.cuh whose K is that of all routes, one after the other. For a token or two, whose routes have an expert each.
//
// A warp has units of one route only. The sums of a route's warps are finished as an expert's result is, and rounded to
// D's type; results are multiplied by the routes' weights and added in float32 in the order of routes.
//
// Exactness: bitwise `qcut.numerics.routing.sum_routes` of the results of codebook.cuh, whose sums over K may have
// another order.
//
// Shared memory, beyond codebook.cuh's: vectors of the epilogue and a scale for each route of a CTA; for all routes of a
// token, in the first CTA of a cluster, weights, experts and results.
#pragma once

#include <qcut/stream/codebook.cuh>

namespace qcut {

template <class T, class Tile, bool kTable>
struct SumsShared : StreamShared<T, Tile, kTable> {
  using Base = StreamShared<T, Tile, kTable>;
  static constexpr int kHere = Tile::kWarps;                // routes of a CTA, at most
  static constexpr int kRoutes = kHere * Tile::kSplits;     // of a token
  static constexpr int kColScale = Base::kInbox;
  static constexpr int kBias = kColScale + 4 * kHere * Tile::kRows;
  static constexpr int kRowScale = kBias + 4 * kHere * Tile::kRows;
  static constexpr int kWeights = kRowScale + 4 * kHere;
  static constexpr int kExperts = kWeights + 4 * kRoutes;
  static constexpr int kResults = kExperts + 4 * kRoutes;  // [route][row]
  static constexpr int kBytes = kResults + 4 * kRoutes * Tile::kRows;
};

// The routes of a token, and the one whose units a warp has.
template <bool kEarly>
struct SummedRoutes {
  static constexpr bool kSummed = true;
  template <class T, class Tile, bool kTable>
  using Shared = SumsShared<T, Tile, kTable>;

  const int* experts;  // [tokens, per_token]
  const float* weights;  // [tokens, per_token]
  int count;  // experts
  int per_token;
  int rows = 0;  // of x: all routes
  int token = 0, route = 0, expert = 0;
  bool there = false;

  // Goes to the token of a cluster, of so many tokens, and returns the cluster's number among those of the token.
  __device__ __forceinline__ int begin(int cluster, int clusters, int tokens) {
    if constexpr (!kEarly) wait_for_dependencies();
    rows = tokens * per_token;
    token = cluster / clusters;
    return cluster - token * clusters;
  }
  // Finds the route and expert of unit `first` of all routes, and returns the unit of this expert.
  __device__ __forceinline__ int find(int first, int units_k) {
    route = first / units_k;
    if (route < per_token) expert = experts[token * per_token + route];
    there = route < per_token && static_cast<unsigned>(expert) < static_cast<unsigned>(count);
    if (!there) expert = 0;
    return first - route * units_k;
  }
  // Copies the vectors of the epilogue for the rows from col0 on, and what routes weigh.
  template <class Shared, class Tile, class Args>
  __device__ __forceinline__ void request(char* shared, const Args& args, int warp, int lane, int col0, int n,
                                          int units_k, int rank) const {
    const int warps = units_k / Tile::kUnits;  // of a route
    if (warp % warps == 0) {
      const int here = warp / warps;
      const long long at = static_cast<long long>(expert) * n + col0;
      float* const col_scale = reinterpret_cast<float*>(shared + Shared::kColScale) + here * Tile::kRows;
      float* const bias = reinterpret_cast<float*>(shared + Shared::kBias) + here * Tile::kRows;
      for (int i = lane; i < Tile::kRows; i += 32) {
        const bool inside = there && col0 + i < n;
        copy_async_if<4>(shared_address(col_scale + i), args.col_scale_per_channel + at + i, inside, false);
        copy_async_if<4>(shared_address(bias + i), args.bias + at + i, inside && args.bias != nullptr, false);
      }
      if (lane == 0) {
        const float* const scale = args.row_scale + token * per_token + route;
        copy_async_if<4>(shared_address(shared + Shared::kRowScale) + 4 * here, scale,
                         there && args.row_scale != nullptr, false);
      }
    }
    if (rank == 0) {
      for (int i = threadIdx.x; i < per_token; i += 32 * Tile::kWarps) {
        copy_async_if<4>(shared_address(shared + Shared::kWeights) + 4 * i, weights + token * per_token + i, true, false);
        copy_async_if<4>(shared_address(shared + Shared::kExperts) + 4 * i, experts + token * per_token + i, true, false);
      }
    }
  }
  // Finishes the results of the CTA's routes, and in the first CTA of a cluster, adds them.
  template <class Acc, class Shared, class Tile, class E>
  __device__ __forceinline__ void finish(char* shared, const typename E::Args& args, typename E::Out* d, int col0, int n,
                                         int units_k, int ldd, int cta_first, int rank) const {
    constexpr int kThreads = 32 * Tile::kWarps;
    const int warps = units_k / Tile::kUnits, first = cta_first / units_k;
    const int here = min(Tile::kWarps / warps, per_token - first);
    const float* const row_scale = reinterpret_cast<const float*>(shared + Shared::kRowScale);
    const uint32_t results = shared_address(shared) + Shared::kResults;
    if constexpr (Tile::kSplits > 1) cluster_wait();  // all CTAs of the cluster have started
    for (int i = threadIdx.x; i < here * Tile::kRows; i += kThreads) {
      const int mine = i / Tile::kRows, row = i % Tile::kRows;
      const Acc* at = reinterpret_cast<const Acc*>(shared + Shared::kRegions) + row;
      Acc sum = 0;
#pragma unroll 4
      for (int w = mine * warps; w < (mine + 1) * warps; ++w) sum += at[w * (Shared::kRegionBytes / 4)];
      const auto column = E::column(args, i, i + (col0 + row < n));
      const auto value = E::finish(E::apply(sum, E::row(args, mine, mine + 1), column), 0.0f, args);
      const uint32_t to = results + 4 * ((first + mine) * Tile::kRows + row);
      const uint32_t result = bits(to_float(E::convert(value)));
      if constexpr (Tile::kSplits > 1) {
        store_cluster_4(to, 0, result);
      } else {
        store_shared_4(to, result);
      }
    }
    if constexpr (Tile::kSplits > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
    if (rank != 0) return;
    const float* const weight = reinterpret_cast<const float*>(shared + Shared::kWeights);
    const int* const chosen = reinterpret_cast<const int*>(shared + Shared::kExperts);
    const float* const result = reinterpret_cast<const float*>(shared + Shared::kResults);
    for (int row = threadIdx.x; row < Tile::kRows && col0 + row < n; row += kThreads) {
      float total = 0.0f;
      for (int j = 0; j < per_token; ++j) {
        const float next = total + weight[j] * result[j * Tile::kRows + row];
        if (static_cast<unsigned>(chosen[j]) < static_cast<unsigned>(count)) total = next;
      }
      d[static_cast<long long>(token) * ldd + col0 + row] = E::convert(total);
    }
  }
};

// The token of a warp's route, in blocks of all routes.
template <class T, class Tile>
struct RouteToken {
  static_assert(Tile::kTokens == 1);
  static constexpr bool kHasScale = false;
  const char* x;

  __device__ __forceinline__ void begin(int, int) {}
  template <class Routes>
  __device__ __forceinline__ void request(uint32_t region, const Routes& routes, int first, int units_k) const {
    const int row = routes.token * routes.per_token + min(routes.route, routes.per_token - 1);
    stage_routes<T, Tile>(x, region, row, 1, routes.rows, first, units_k);
  }
  __device__ __forceinline__ void finish(uint32_t, float*) const {}
};

}  // namespace qcut
