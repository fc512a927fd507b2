// D = epilogue(W_e x) of routes to experts, in tiles of up to 32 routes of one expert e, at the speed of memory.
//
// A cluster of kSplits CTAs, which divide K, computes an equal part of the rows of all tiles, whatever their number: it
// goes from the rows of one tile to those of the next. The weights of kPrefetch tiles of 16 rows are in flight all the
// time, also while sums are added up and where one expert's rows end and the next one's begin. So are the tokens of the
// next tile of routes.
//
// With kEarly, an earlier kernel than the last one has written which routes there are: weights are then loaded before
// the wait for the last one, which has written the tokens.
//
// What weights and tokens are is a Form (codebook.cuh, int8.cuh), with the types and functions:
//   T, kTable                      type of tokens; whether shared memory begins with a PairTable
//   fill(shared)                   fills what all warps read
//   Unit, Fold                     a lane's part of 16 rows x 128 columns; what all units of the rows have in common
//   Walk: go(expert, row), load(unit, u, wanted), next(fold, wanted)
//                                  the rows that are loaded next: goes to a tile of 16 rows of an expert; loads unit u;
//                                  loads what is common and goes to the next 16 rows
//   stage(region, source, ...)     copies a warp's columns of the tokens of a tile to shared memory; lane i has the row of
//                                  the token of route i
//   Tokens: load(region), settle(), multiply(product, sum, unit, fold, u)
//   product(shared), Product::Acc  what decodes and multiplies; the type of sums
//
// Exactness: that of the form's products; sums of warps and CTAs are added in a fixed order.
//
// Shared memory: the table; staged tokens of each warp; sums of each warp, of up to kRowTiles tiles of rows; the sums that
// other CTAs of the cluster send; the vectors of the epilogue; scales of tokens, and routes.
#pragma once

#include <qcut/stream/codebook.cuh>
#include <qcut/core/experts.cuh>

namespace qcut {

template <class T, class Tile, bool kTable>
struct ExpertShared : StreamShared<T, Tile, kTable> {
  using Base = StreamShared<T, Tile, kTable>;
  static constexpr int kTokens = Base::kRegions;
  static constexpr int kSums = kTokens + Tile::kWarps * Base::kStagedBytes;
  static constexpr int kInbox = kSums + Tile::kWarps * Base::kSumBytes;
  // Rows whose sums have been sent, and the next ones.
  static constexpr int kParts = Tile::kSplits > 1 ? 2 : 1;
  static constexpr int kInboxBytes = Tile::kSplits > 1 ? 4 * kUnitRows * Tile::kSplits * Base::kShare : 0;
  static constexpr int kColScale = kInbox + kParts * kInboxBytes;
  static constexpr int kBias = kColScale + kParts * 4 * Tile::kRows;
  static constexpr int kRowScale = kBias + kParts * 4 * Tile::kRows;
  static constexpr int kRoutes = kRowScale + kParts * 4 * Tile::kTokens;
  static constexpr int kSent = kRoutes + kParts * 4 * Tile::kTokens;
  static constexpr int kBytes = kSent + (kParts > 1 ? kParts * 16 : 0);
};

// The kernel. units_k <= kSplits * kWarps * kUnits; m counts the places of all tiles of routes, kTokens each. kRowTiles is
// a multiple of kPrefetch.
template <class Form, class Tile, class E, bool kEarly>
__device__ __forceinline__ void multiply_experts(const Form& form, typename E::Out* d, int m, int n, int units_k, int ldd,
                                                 const typename E::Args& args, const ExpertRows& rows) {
  using T = typename Form::T;
  using Shared = ExpertShared<T, Tile, Form::kTable>;
  using Acc = typename Form::Product::Acc;
  constexpr int kThreads = 32 * Tile::kWarps;
  constexpr int kUnits = Tile::kUnits, kPrefetch = Tile::kPrefetch, kTokens = Tile::kTokens;
  constexpr int kPitch = Shared::kPitch, kParts = Shared::kParts;
  static_assert(Tile::kRowTiles % kPrefetch == 0 && kTokens <= 32, "see emitters/stream/codebook_experts.py");
  extern __shared__ __align__(16) char shared[];

  form.fill(shared);
  if constexpr (!kEarly) wait_for_dependencies();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int rank = blockIdx.x % Tile::kSplits;
  const int first = (rank * Tile::kWarps + warp) * kUnits;
  const int k0 = min(first, units_k - 1);

  // Rows go in groups of kPrefetch tiles of 16; the last group of an expert may have tiles past its rows.
  const int row_tiles = (n + kUnitRows - 1) / kUnitRows;
  const int groups = (row_tiles + kPrefetch - 1) / kPrefetch;
  const int bound = m / kTokens;
  const int used = rows.template used<kThreads>(bound);
  const int clusters = gridDim.x / Tile::kSplits, cluster = blockIdx.x / Tile::kSplits;
  const long long all = static_cast<long long>(used) * groups;
  int group = static_cast<int>(all * cluster / clusters);
  const int end = static_cast<int>(all * (cluster + 1) / clusters);
  if (group == end) {
    wait_for_dependencies();  // a kernel that ends before its predecessor lets its successors begin too early
    return;
  }
  int tile = group / groups, row = group % groups * kPrefetch;
  const int last_tile = (end - 1) / groups;

  // The tile of rows that is loaded next, kPrefetch tiles before it is multiplied.
  typename Form::Unit weights[kPrefetch][kUnits] = {};
  typename Form::Fold folds[kPrefetch];
  typename Form::Walk walk(form, n, units_k, k0);
  int to_load = (end - group) * kPrefetch, load_row = row, load_tile = tile;
  const auto expert_of = [&](int which) { return max(rows.expert(min(which, bound - 1)), 0); };
  walk.go(expert_of(tile), load_row);
  int next_expert = expert_of(tile + 1);
  const auto load_unit = [&](typename Form::Unit& unit, int u) {
    walk.load(unit, u, to_load > 0 && load_row < row_tiles && first + u < units_k);
  };
  const auto next_rows = [&](typename Form::Fold& of_rows) {
    walk.next(of_rows, to_load > 0 && load_row < row_tiles);
    --to_load;
    ++load_row;
    if (load_row == groups * kPrefetch) {
      load_row = 0;
      ++load_tile;
      walk.go(next_expert, 0);
      next_expert = expert_of(load_tile + 1);
    }
  };
#pragma unroll
  for (int s = 0; s < kPrefetch; ++s) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) load_unit(weights[s][u], u);
    next_rows(folds[s]);
  }

  const uint32_t base = shared_address(shared);
  const uint32_t region = base + Shared::kTokens + warp * Shared::kStagedBytes;
  float* const col_scale = reinterpret_cast<float*>(shared + Shared::kColScale);
  float* const bias = reinterpret_cast<float*>(shared + Shared::kBias);
  float* const row_scale = reinterpret_cast<float*>(shared + Shared::kRowScale);
  int* const routes = reinterpret_cast<int*>(shared + Shared::kRoutes);
  typename E::Args local = args;
  local.col_scale_per_channel = col_scale;
  local.bias = bias;
  local.row_scale = row_scale;
  if constexpr (kEarly) wait_for_dependencies();
  launch_dependents();
  if constexpr (Tile::kSplits > 1) cluster_arrive_relaxed();

  // Routes of this tile, of the next and of the one after that, a lane's each; and how many this tile has.
  const auto route_of = [&](int which) { return which <= last_tile ? rows.template route<kTokens>(which, lane) : -1; };
  int route = route_of(tile), next_route = route_of(tile + 1), count = 0;
  int expert = 0, expert_after = expert_of(tile);
  typename Form::Tokens tokens;
  const auto stage = [&](int of_lane) {
    const int there = __popc(__ballot_sync(0xffffffffu, of_lane >= 0));
    form.stage(region, max(of_lane, 0) / rows.per_row, there, rows.rows, first, units_k);
    copy_async_commit();
  };
  // Takes the staged tokens of this tile, and stages those of the next.
  int places = 0;  // which routes and scales of tokens of kParts this tile has
  const auto take_tokens = [&] {
    places = (places + 1) % kParts;
    count = __popc(__ballot_sync(0xffffffffu, route >= 0));
    expert = expert_after;
    expert_after = expert_of(tile + 1);
    copy_async_wait<0>();
    __syncwarp();
    if (warp == 0 && lane < kTokens) {
      routes[places * kTokens + lane] = route;
      if constexpr (kIsInt8<T>) {
        copy_async_if<4>(shared_address(row_scale + places * kTokens + lane), args.row_scale + max(route, 0) / rows.per_row, true, false);
      }
    }
    tokens.load(region);
    __syncwarp();
    tokens.settle();
    stage(next_route);
    route = next_route;
    next_route = route_of(tile + 2);
  };
  // Rows of D: what is known of them where their sums are finished. Of those that are sent it is in shared memory, as
  // registers are few.
  struct Rows {
    int col0, end, count, places;
  };
  Rows* const sent = reinterpret_cast<Rows*>(shared + Shared::kSent);
  if (Tile::kSplits > 1 && threadIdx.x == 0) sent[0] = {};
  int col0 = 0, part = 0;
  // Starts the copy of the vectors of the rows that are computed next.
  const auto begin_rows = [&] {
    col0 = kUnitRows * row;
    part = (part + 1) % kParts;
    const int columns = min(Tile::kRows, n - col0);
    const long long at = static_cast<long long>(expert) * n + col0;
    if constexpr (!E::kUnitScales) {
      copy_floats<kThreads, Tile::kRows>(col_scale + part * Tile::kRows, args.col_scale_per_channel + at, columns);
    }
    copy_floats<kThreads, Tile::kRows>(bias + part * Tile::kRows, args.bias + at, args.bias != nullptr ? columns : 0);
    copy_async_commit();
  };
  stage(route);
  take_tokens();
  begin_rows();
  __syncthreads();  // the table is complete
  const auto product = form.product(shared);
  uint32_t mine = base + Shared::kSums + warp * Shared::kSumBytes + 4 * (2 * (lane % 4) * kPitch + lane / 4);
  asm volatile("" : "+r"(mine));  // keeps the compiler from computing the address anew for every tile

  const auto sum_of_warps = [&](int token, int row) {
    const Acc* at = reinterpret_cast<const Acc*>(shared + Shared::kSums) + token * kPitch + row;
    constexpr int kChains = 4;  // one chain of additions would take as long as the loads
    Acc sum[kChains] = {};
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) sum[w % kChains] += at[w * (Shared::kSumBytes / 4)];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  };
  // `part`: which of kParts vectors and inboxes the rows have.
  const auto finish = [&](const Rows& of, int part, Acc sum, int token, int row) {
    local.col_scale_per_channel = col_scale + part * Tile::kRows;
    local.bias = bias + part * Tile::kRows;
    local.row_scale = row_scale + of.places * kTokens;
    const auto column = E::column(local, row, n - of.col0);
    const int route = routes[of.places * kTokens + token];
    if (route < 0) return;
    d[static_cast<long long>(route) * ldd + of.col0 + row] =
        E::convert(E::finish(E::apply(sum, E::row(local, token, of.count), column), 0.0f, local));
  };
  const auto computed = [&](const Rows& of, int at) { return of.end > of.col0 + at && of.col0 + at < n; };
  // Adds up the sums that the CTAs of the cluster have sent, in the order of ranks, and writes their elements of D.
  const auto receive = [&](int part) {
    const Rows of = sent[part];
    for (int i = threadIdx.x; i < kUnitRows * Shared::kShare; i += kThreads) {
      const int piece = i / kUnitRows * Tile::kSplits + rank;
      const int token = piece / Tile::kRowTiles;
      const int at = piece % Tile::kRowTiles * kUnitRows + i % kUnitRows;
      if (token >= of.count || !computed(of, at)) continue;
      const Acc* from = reinterpret_cast<const Acc*>(shared + Shared::kInbox + part * Shared::kInboxBytes) + i;
      Acc sum = from[0];
#pragma unroll
      for (int r = 1; r < Tile::kSplits; ++r) sum += from[r * kUnitRows * Shared::kShare];
      finish(of, part, sum, token, at);
    }
  };
  // Adds up the sums of all warps and writes their elements of D. A CTA of a cluster sends them to the CTA that writes
  // these elements, and writes those of the rows before: while others send, the next rows are computed.
  const auto write_rows = [&] {
    const Rows of{col0, kUnitRows * row, count, places};
    copy_async_wait<0>();
    if (Tile::kSplits > 1 && threadIdx.x == 0) sent[part] = of;
    __syncthreads();
    if constexpr (Tile::kSplits > 1) {
      cluster_wait();  // all have started, or have sent the rows before and read those before them
      receive(1 - part);
    }
    for (int i = threadIdx.x; i < Tile::kRows * count; i += kThreads) {
      const int token = i / Tile::kRows, at = i % Tile::kRows;
      if (!computed(of, at)) continue;
      const Acc sum = sum_of_warps(token, at);
      if constexpr (Tile::kSplits == 1) {
        finish(of, part, sum, token, at);
      } else {
        const int piece = i / kUnitRows;
        const int slot = rank * Shared::kShare + piece / Tile::kSplits;
        store_cluster_4(base + Shared::kInbox + part * Shared::kInboxBytes + 4 * (kUnitRows * slot + at % kUnitRows),
                        piece % Tile::kSplits, bits(sum));
      }
    }
    if constexpr (Tile::kSplits > 1) cluster_arrive();
    __syncthreads();
  };

  int held = 0;  // tiles of rows whose sums are in shared memory
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int s = 0; s < kPrefetch; ++s) {
      Acc sum[Tile::kTokenTiles][4] = {};
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        tokens.multiply(product, sum, weights[s][u], folds[s], u);
        load_unit(weights[s][u], u);
      }
      next_rows(folds[s]);
      const uint32_t place = mine + 64 * (held + s);
#pragma unroll
      for (int j = 0; j < Tile::kTokenTiles; ++j) {
#pragma unroll
        for (int e = 0; e < (kTokens > 1 ? 2 : 1); ++e) {
          const bool there = 8 * j + 2 * (lane % 4) + e < count;
          store_shared_4_if(place + 4 * (8 * j + e) * kPitch, bits(sum[j][e]), there);
          store_shared_4_if(place + 4 * ((8 * j + e) * kPitch + 8), bits(sum[j][2 + e]), there);
        }
      }
    }
    held += kPrefetch;
    row += kPrefetch;
    ++group;
    const bool expert_ends = row == groups * kPrefetch;
    if (!expert_ends && held < Tile::kRowTiles && group < end) continue;
    write_rows();
    if (group == end) break;
    held = 0;
    if (expert_ends) {
      row = 0;
      ++tile;
      take_tokens();
    }
    begin_rows();
  }
  if constexpr (Tile::kSplits > 1) {  // no CTA exits while others send to it
    cluster_wait();
    receive(part);
  }
}

}  // namespace qcut
