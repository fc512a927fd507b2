// All blocks of a decoder's step for one token, in one kernel that stays on every multiprocessor: RMSNorm, products with
// codebook weights, attention over the cache, and a gated MLP.
//
// A CTA has the same rows of each weight in every step. Their units come by bulk copies, in the order of use, into a ring
// in shared memory, as far ahead as the ring has room, whatever the CTA waits for. A piece of the ring is up to 16 units
// of a tile of 16 rows, of which each warp multiplies one. A warp copies the next piece to where one was that all have read.
//
// Between products the CTAs exchange vectors through packets: two values of T, or a float, with a tag beside them that
// no other exchange of this launch or an earlier one has. A CTA that needs a vector reads its packets until their tags are
// right. Each CTA normalizes and rotates the whole vector for itself. Memory of an exchange is written again a block
// later: by then all CTAs have sent what they make of this one's.
//
// Attention: each head of keys has kParts CTAs, which divide the places of the sequence. Each merges the parts' results for
// its share of the heads' columns.
//
// All CTAs are resident at once, as cooperative launches are. A CTA that waits in vain for seconds traps. The code of a
// block is small enough for the instruction cache: it is one loop over four products.
//
// Exactness: results are rounded to T where kernels of the single operators round them. Sums are float32, in an order
// that the sizes and the number of CTAs fix.
//
// Source: PTX ISA 8.x, "cp.async.bulk", "mbarrier", "ld.relaxed", "st.relaxed"; mma.sync as in stream/codebook.cuh.
#pragma once

#include <qcut/core/activation.cuh>
#include <qcut/core/barrier.cuh>
#include <qcut/decoder/attention/softmax.cuh>
#include <qcut/decoder/rope.cuh>
#include <qcut/stream/codebook.cuh>

namespace qcut {

// A product with codebook weights of 4 bits: units and their norms as stream/codebook.cuh reads them.
struct BlockProduct {
  const char* units;
  const char* norms;
  const float* col_scale;
  const uint32_t* signs;
};

// A block's weights. The products' rows are those of queries, keys and values; the output's; those of gate and up; the
// projection's down.
template <class T>
struct DecodeBlock {
  BlockProduct products[4];
  const T *attention_norm, *mlp_norm;
};

// A PairTable from shared address 64 KB on: a PRMT builds an entry's whole address.
constexpr uint32_t kTableAt = PairTable::kBytes;

// Adds the product of a unit's 16 rows and a token, whose columns are in the first of eight columns of b, to sums of rows
// g (x) and g + 8 (y).
template <class T>
__device__ __forceinline__ void add_unit(float2& sum, const WeightUnit<4, 1, false>& unit, const uint32_t (&b)[16]) {
  const uint32_t entry = kTableAt + 4 * (threadIdx.x % 32);
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t a[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t at = __byte_perm(entry, unit.words.word(i), 0x3240 | k << 4);
      asm("ld.shared.u32 %0, [%1];" : "=r"(a[k / 2 + k % 2 * 2]) : "r"(at));
    }
    Float16<T>::mma(i % 2 ? odd : even, a, {b[2 * i], b[2 * i + 1]});
  }
  const float2 norm = norm_pair(unit.norms[0].norms);
  sum.x = fmaf(norm.x, even[0] + odd[0], sum.x);
  sum.y = fmaf(norm.y, even[2] + odd[2], sum.y);
}

using Packet = unsigned long long;

// Reads until `ready` says that all is there.
template <class Ready>
__device__ __forceinline__ void await(Ready ready) {
#pragma unroll 1
  for (int i = 0; i < 1 << 25; ++i) {
    if (ready()) return;
  }
  asm volatile("trap;");
}

__device__ __forceinline__ void send(Packet* to, uint32_t word, uint32_t tag) {
  const Packet packet = static_cast<Packet>(tag) << 32 | word;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(packet) : "memory");
}

// Loads two packets, unless both are there already. Whether they were.
__device__ __forceinline__ bool received(Packet (&pair)[2], const Packet* from, uint32_t tag) {
  if (pair[0] >> 32 == tag && pair[1] >> 32 == tag) return true;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(pair[0]), "=l"(pair[1]) : "l"(from) : "memory");
  return false;
}

// The sizes of a model and of a launch.
template <class T_, int kHidden_, int kInner_, int kKeys_, int kGroup_, int kHead_, int kCtas_, int kRing_>
struct BlocksShape {
  using T = T_;
  static constexpr int kHidden = kHidden_, kInner = kInner_;
  static constexpr int kKeys = kKeys_, kGroup = kGroup_, kHead = kHead_;  // heads of keys, queries of each, columns
  static constexpr int kCtas = kCtas_, kRing = kRing_;                    // of the launch, pieces of the ring
  static constexpr int kWarps = 16, kThreads = 32 * kWarps;
  static constexpr int kQueries = kKeys * kGroup * kHead;  // columns of all queries
  static constexpr int kQkv = kQueries + 2 * kKeys * kHead;
  static constexpr int kParts = kCtas / kKeys < 16 ? kCtas / kKeys : 16;  // of a sequence
  static constexpr int kPieceUnits = 16, kUnitSize = kUnitBytes<4>, kNormSize = 32;
  static constexpr int kPieceBytes = kPieceUnits * (kUnitSize + kNormSize);

  static __host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
  static __host__ __device__ constexpr int rows(int n) { return 16 * ((n / 16 + kCtas - 1) / kCtas); }
  static constexpr int kMostRows = larger(larger(rows(kQkv), rows(kHidden)), 2 * rows(kInner));
  static constexpr int kMostResults = larger(rows(kQkv), larger(rows(kHidden), rows(kInner)));
  static constexpr int kPasses = (4 * kMostResults + kThreads - 1) / kThreads;  // four threads have a row
  static constexpr int kPitch = kMostRows + 2;  // brings eight rows of four warps, four apart, to all banks
  static constexpr int kStatePitch = kHead + 4;

  // Shared addresses; the first KB is the system's. Some of the ring's pieces are before the table, the others behind it.
  // The table of pairs leaves 128 of each 256 bytes, which have the token.
  static constexpr int kX = 1024;
  static constexpr int kHeads = kX + sizeof(T) * kHidden;
  static constexpr int kBlocks = kHeads + sizeof(T) * (kGroup + 2) * kHead;
  static constexpr int kTotals = kBlocks + 4 * sizeof(DecodeBlock<T>);
  static constexpr int kBarriers = kTotals + 4 * kWarps;
  static constexpr int kSums = kBarriers + 16 * kRing;
  static constexpr int kPieces = (kSums + 4 * kWarps * larger(kPitch, kStatePitch) + 127) / 128 * 128;
  static constexpr int kBefore = (static_cast<int>(kTableAt) - kPieces) / kPieceBytes;
  static constexpr int kBehind = kTableAt + PairTable::kBytes;
  static constexpr int kBytes = kBehind + (kRing - kBefore) * kPieceBytes - 1024;
  static __device__ __forceinline__ uint32_t piece_at(int place) {
    return place < kBefore ? kPieces + place * kPieceBytes : kBehind + (place - kBefore) * kPieceBytes;
  }
  static_assert(kPieces <= static_cast<int>(kTableAt) && kRing > kBefore, "the table is among the pieces");

  // Packets in memory.
  static constexpr int kState = kHead + 2;
  static constexpr int kQkvPackets = 0;
  static constexpr int kStatePackets = kQkvPackets + kQkv / 2;
  static constexpr int kMixedPackets = kStatePackets + kKeys * kParts * kGroup * kState;
  static constexpr int kOutputPackets = kMixedPackets + kQueries / 2;
  static constexpr int kInnerPackets = kOutputPackets + kHidden / 2;
  static constexpr int kDownPackets = kInnerPackets + kInner / 2;
  static constexpr int kPackets = kDownPackets + kHidden / 2;
  static_assert(kParts > 0, "each head of keys has a CTA");
  static_assert(kGroup <= kWarps && (kGroup + 2) * kHead / 2 <= kThreads, "a CTA attends for a head of keys");
  static_assert(kHidden % 128 == 0 && kInner % 128 == 0 && kQueries % 128 == 0 && kQkv % 16 == 0, "whole units");
  static_assert(larger(larger(kHidden, kInner), kQueries) <= 64 * 256, "a token has room beside the table of pairs");
  static_assert(larger(kHidden, kQueries) <= 16 * kThreads, "a thread has 16 columns of a norm");
  static_assert(kHidden / 16 >= kCtas && kInner / 16 >= kCtas && kRing <= 8, "addresses of two blocks ahead suffice");
};

// What a launch is given beside its sizes.
template <class T>
struct DecodeStep {
  const T* x;                    // [hidden]
  const DecodeBlock<T>* blocks;  // [layers]
  const T *cos, *sin;            // [positions, head]
  const int *position, *slot;
  T *keys, *values;  // of the sequence, in the first layer
  Packet* packets;
  uint32_t* epoch;  // launches so far
  T *sum, *last;    // results [hidden]: the last residual, and what the last product adds to it
  long long layer_stride, head_stride;
  int layers, places;
  float scale, eps;  // scale * log2(e)
};

template <class Shape>
struct DecodeBlocks {
  using S = Shape;
  using T = typename S::T;
  using Unit = WeightUnit<4, 1, false>;
  static constexpr int kThreads = S::kThreads;
  enum Exchange { kQkv, kOutput, kInner, kDown, kState, kMixed, kExchanges };  // of products first, in their order

  const DecodeStep<T>& step;
  char* const shared;  // at shared address 0
  const int thread, warp, lane, cta;
  uint32_t base, position;
  float2 cos, sin;  // of a thread's pair of columns of a head
  int slot;
  int at = 0, phase = 0;     // the next piece's place in the ring, and the round of the ring
  int layer = 0, index = 0;  // the next piece's number in its block
  int turn, owed = -1;    // pieces until this warp has to replace one, and the number of the one that it has to
  uint32_t from, norms;  // of the next piece: this lane's part of the warp's unit, and from there the unit's norms

  __device__ __forceinline__ DecodeBlocks(const DecodeStep<T>& step, char* shared)
      : step(step),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        cta(blockIdx.x) {}

  __device__ __forceinline__ T* x() const { return reinterpret_cast<T*>(shared + S::kX); }
  __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(shared + S::kSums); }
  __device__ __forceinline__ DecodeBlock<T>& block(int layer_) const {
    return reinterpret_cast<DecodeBlock<T>*>(shared + S::kBlocks)[layer_ % 4];
  }
  __device__ __forceinline__ uint32_t full(int place) const {
    return S::kBarriers + 8 * place;
  }
  __device__ __forceinline__ uint32_t empty(int place) const { return full(place) + 8 * S::kRing; }
  __device__ __forceinline__ uint32_t tag(int layer_, int kind) const { return base + layer_ * kExchanges + kind; }

  // ── sizes of products ──────────────────────────────────────────────────────────────────────────

  static __device__ __forceinline__ int rows_of(int p) {  // of the gate alone
    return p == kQkv ? S::kQkv : p == kInner ? S::kInner : S::kHidden;
  }
  static __device__ __forceinline__ int columns_of(int p) {
    return p == kOutput ? S::kQueries : p == kDown ? S::kInner : S::kHidden;
  }
  static __device__ __forceinline__ int packets_of(int p) {
    return p == kQkv ? S::kQkvPackets : p == kOutput ? S::kOutputPackets : p == kInner ? S::kInnerPackets : S::kDownPackets;
  }
  // This CTA's first tile of 16 rows, or the next CTA's.
  __device__ __forceinline__ int first_tile(int p, int next = 0) const { return rows_of(p) / 16 * (cta + next) / S::kCtas; }
  __device__ __forceinline__ int tiles_of(int p) const {
    return (first_tile(p, 1) - first_tile(p)) * (p == kInner ? 2 : 1);
  }

  // ── the ring ───────────────────────────────────────────────────────────────────────────────────

  // Copies piece `number` of a block, or of the one after it, to a place of the ring. One thread calls.
  __device__ __forceinline__ void copy_piece(int of, int number, int place) const {
#pragma unroll 1
    for (; of < step.layers; ++of) {
#pragma unroll 1
      for (int p = 0; p < 4; ++p) {
        const int tiles = tiles_of(p), units = columns_of(p) / 128, count = tiles * ((units + 15) / 16);
        if (number >= count) {
          number -= count;
          continue;
        }
        const int tile = number % tiles, first = number / tiles * 16;
        const int row_tile = p == kInner ? first_tile(p) + tile / 2 + tile % 2 * (S::kInner / 16) : first_tile(p) + tile;
        const int here = min(16, units - first);
        const BlockProduct& from = block(of).products[p];
        const long long unit = static_cast<long long>(row_tile) * units + first;
        const uint32_t to = S::piece_at(place);
        barrier_expect(full(place), here * (S::kUnitSize + S::kNormSize));
        copy_bulk(to, from.units + unit * S::kUnitSize, here * S::kUnitSize, full(place));
        copy_bulk(to + 16 * S::kUnitSize, from.norms + unit * S::kNormSize, here * S::kNormSize, full(place));
        return;
      }
    }
  }

  // ── products ───────────────────────────────────────────────────────────────────────────────────

  __device__ __forceinline__ uint32_t first_from() const { return S::piece_at(0) + S::kUnitSize * warp + 16 * lane; }
  __device__ __forceinline__ void begin() {
    turn = warp;
    from = first_from();
    norms = 16 * S::kUnitSize + S::kNormSize * warp + 4 * (lane / 4) - S::kUnitSize * warp - 16 * lane;
  }

  // If this warp has to replace the piece before the next one: copies what comes to its place, when all warps have read it.
  __device__ __forceinline__ void replace() {
    if (owed < 0) return;
    const int place = at > 0 ? at - 1 : S::kRing - 1, round = at > 0 ? phase : phase ^ 1;
    if (lane == 0) {
      barrier_wait(empty(place), round);
      copy_piece(layer, owed + S::kRing, place);
    }
    owed = -1;
  }

  // A warp's part of the next piece, in registers.
  __device__ __forceinline__ void take(Unit& weights) {
    barrier_wait(full(at), phase);
    weights.words.load_shared(from, 0);
    weights.norms[0].norms = load_shared_4(from + norms);
    __syncwarp();
    if (lane == 0) barrier_arrive(empty(at));
    replace();
    if (turn == 0) owed = index;
    turn = turn > 0 ? turn - 1 : S::kWarps - 1;
    ++index;
    from += S::kPieceBytes;
    ++at;
    if (at == S::kBefore) from += S::kBehind - S::kPieces - S::kBefore * S::kPieceBytes;
    if (at == S::kRing) at = 0, phase ^= 1, from = first_from();
  }

  // The sums of each warp of product p of the staged token, rows of gate and up in tiles that take turns. Pieces come 16
  // units of all tiles after another, so that a warp keeps its part of the token.
  __device__ __forceinline__ void multiply(int p) {
    const int tiles = tiles_of(p), units = columns_of(p) / 128;
#pragma unroll 1
    for (int unit = warp; unit - warp < units; unit += 16) {
      uint32_t b[16] = {};
      if (unit < units) {
#pragma unroll
        for (int q = 0; q < 16; q += 4) {
          const int chunk = q + lane / 8;
          uint32_t matrices[4];
          load_matrices(matrices, kTableAt + 512 * unit + 128 + 256 * (chunk / 8) + 16 * (chunk % 8));
#pragma unroll
          for (int i = 0; i < 4; ++i) b[q + i] = matrices[i];
        }
      }
      float* to = sums() + warp * S::kPitch + lane / 4;
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile, to += 16) {
        Unit weights;
        take(weights);
        float2 sum = make_float2(0.0f, 0.0f);
        if (unit >= 16) sum = make_float2(to[0], to[8]);
        if (unit < units) add_unit<T>(sum, weights, b);
        if (lane % 4 == 0) to[0] = sum.x, to[8] = sum.y;
      }
    }
    replace();  // what comes is wanted before this warp takes a piece again
    __syncthreads();
  }

  // The scales of a thread's row of product p: of its rows of gate and up.
  __device__ __forceinline__ float2 scale_of(int p, int row) const {
    if (row >= 16 * (first_tile(p, 1) - first_tile(p))) return make_float2(0.0f, 0.0f);
    const float* const scale = block(layer).products[p].col_scale + 16 * first_tile(p) + row;
    return make_float2(*scale, p == kInner ? scale[S::kInner] : 0.0f);
  }

  // A quarter of the warps' sums of a row are a thread's.
  __device__ __forceinline__ float sum_of_warps(int row) const {
    const float* const from_ = sums() + thread % 4 * (S::kWarps / 4) * S::kPitch + row;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < S::kWarps / 4; ++w) sum += from_[w * S::kPitch];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }

  // Sends the product's results, or the gated ones; those of the last product become a result.
  __device__ __forceinline__ void finish(int p, const float2 (&scales)[S::kPasses]) const {
    const int count = 16 * (first_tile(p, 1) - first_tile(p));
    const bool ends = p == kDown && layer + 1 == step.layers;
#pragma unroll
    for (int pass = 0; pass < S::kPasses; ++pass) {
      const int row = thread / 4 + pass * kThreads / 4;
      if (row - lane / 4 >= count) break;  // for all of the warp
      float y;
      if (p == kInner) {
        const int gate = row / 16 * 32 + row % 16;
        const float up = rounded<T>(sum_of_warps(gate + 16) * scales[pass].y);
        y = rounded<T>(silu(rounded<T>(sum_of_warps(gate) * scales[pass].x))) * up;
      } else {
        y = sum_of_warps(row) * scales[pass].x;
      }
      const float next = __shfl_down_sync(0xffffffffu, y, 4);
      if (row >= count || thread % 8 != 0) continue;
      const uint32_t word = pack_pair<T>(y, next);
      const int place = 8 * first_tile(p) + row / 2;
      if (ends) {
        reinterpret_cast<uint32_t*>(step.last)[place] = word;
      } else {
        send(step.packets + packets_of(p) + place, word, tag(layer, p));
      }
    }
  }

  // ── the token of a product ─────────────────────────────────────────────────────────────────────

  // Stages the token of product p, rotated: a vector of packets, or, before attention and MLP, the norm of x, to which the
  // packets are added. The first block's x is as it is. A thread has kEach columns, and as many further ones.
  template <int kEach, int kRounds>
  __device__ __forceinline__ void stage(int p) {
    constexpr int kPairs = kEach / 4;
    const bool norm = p == kQkv || p == kInner, first = p == kQkv && layer == 0;
    const DecodeBlock<T>& of = block(layer);
    const Packet* const from =
        step.packets + (p == kQkv ? S::kDownPackets : p == kOutput ? S::kMixedPackets : packets_of(p - 1));
    const uint32_t wanted = p == kQkv ? tag(layer - 1, kDown) : p == kOutput ? tag(layer, kMixed) : tag(layer, p - 1);
    uint32_t signs[kRounds];
    uint4 gains[kEach / 8];
    Packet pairs[kRounds][kPairs][2] = {};
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int column = kEach * (thread + r * kThreads);
      signs[r] = column < columns_of(p) ? of.products[p].signs[column / 32] : 0u;
    }
#pragma unroll
    for (int h = 0; h < kEach / 8; ++h) {
      gains[h] = make_uint4(0, 0, 0, 0);
      const int column = kEach * thread + 8 * h;
      const T* const gain = p == kQkv ? of.attention_norm : of.mlp_norm;
      if (norm && column < S::kHidden) gains[h] = *reinterpret_cast<const uint4*>(gain + column);
    }
    if (!first) {
      await([&] {
        bool ready = true;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          const int column = kEach * (thread + r * kThreads);
          if (column >= columns_of(p)) continue;
#pragma unroll
          for (int i = 0; i < kPairs; ++i) ready &= received(pairs[r][i], from + column / 2 + 2 * i, wanted);
        }
        return ready;
      });
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int column = kEach * (thread + r * kThreads);
      const bool there = column < columns_of(p);
      float f[kEach], squares = 0.0f;
#pragma unroll
      for (int h = 0; h < kEach / 8; ++h) {
        float part[8];
        Vector<T>{static_cast<uint32_t>(pairs[r][2 * h][0]), static_cast<uint32_t>(pairs[r][2 * h][1]),
                  static_cast<uint32_t>(pairs[r][2 * h + 1][0]), static_cast<uint32_t>(pairs[r][2 * h + 1][1])}
            .to_float(part);
        if (norm && there) {
          uint4* const mine = reinterpret_cast<uint4*>(x() + column + 8 * h);
          const uint4 raw = *mine;
          float old[8];
          Vector<T>{raw.x, raw.y, raw.z, raw.w}.to_float(old);
#pragma unroll
          for (int i = 0; i < 8; ++i) part[i] = first ? old[i] : rounded<T>(old[i] + part[i]);
          *mine = make_uint4(pack_pair<T>(part[0], part[1]), pack_pair<T>(part[2], part[3]),
                             pack_pair<T>(part[4], part[5]), pack_pair<T>(part[6], part[7]));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          f[8 * h + i] = part[i];
          squares = fmaf(part[i], part[i], squares);
        }
      }
      if (kRounds == 1 && norm) {
        float* const totals = reinterpret_cast<float*>(shared + S::kTotals);
        const float total = warp_sum(squares);
        if (lane == 0) totals[warp] = total;
        __syncthreads();
        const float inv = inverse_root(chunk_total<S::kWarps>(totals), static_cast<float>(S::kHidden), step.eps);
#pragma unroll
        for (int h = 0; h < kEach / 8; ++h) {
          float g[8];
          Vector<T>{gains[h].x, gains[h].y, gains[h].z, gains[h].w}.to_float(g);
#pragma unroll
          for (int i = 0; i < 8; ++i) f[8 * h + i] = normalized<T, false>(f[8 * h + i], 0.0f, inv, g[i], 0.0f);
        }
      }
      const uint32_t flips = signs[r] >> column % 32;
#pragma unroll
      for (int j = 0; j < kEach; ++j) f[j] = __uint_as_float(__float_as_uint(f[j]) ^ (flips << (31 - j) & 0x80000000u));
      butterflies<128, 1>(f, 128, threadIdx.x, nullptr);
      constexpr float kFactor = 0.08838834764831845f;  // 1 / sqrt(128)
#pragma unroll
      for (int h = 0; h < kEach / 8; ++h) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i] = pack_pair<T>(f[8 * h + 2 * i] * kFactor, f[8 * h + 2 * i + 1] * kFactor);
        }
        const int byte = 2 * column + 16 * h;
        if (there) store_shared_16(kTableAt + 256 * (byte / 128) + 128 + byte % 128, w);
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ void stage(int p) {
    constexpr int kFew = S::larger(S::kHidden, S::kQueries) <= 8 * kThreads ? 8 : 16;
    if (p == kDown) {
      stage<16, (S::kInner + 16 * kThreads - 1) / (16 * kThreads)>(p);
    } else {
      stage<kFew, 1>(p);
    }
  }

  // ── attention ──────────────────────────────────────────────────────────────────────────────────

  static __device__ __forceinline__ float weight_of(float m, float most) {
    return m == kNoScore ? 0.0f : power(m - most);
  }

  // The places of this CTA's part of the sequence.
  struct Places {
    int begin, end, owner;  // the part that has the new place
  };
  __device__ __forceinline__ Places places() const {
    const int count = position + 1, each = (count + S::kParts - 1) / S::kParts, begin = min(cta % S::kParts * each, count);
    return {begin, min(begin + each, count), slot < count ? slot / each : 0};
  }
  __device__ __forceinline__ long long cache_offset() const {
    return layer * step.layer_stride + cta / S::kParts * step.head_stride;
  }

  __device__ __forceinline__ void attend() {
    constexpr int kHead = S::kHead, kGroup = S::kGroup, kHalf = kHead / 2;
    constexpr int kLanes = kHead / 8, kRowsAtOnce = 32 / kLanes, kWarpsOfHead = S::kWarps / kGroup, kAhead = 4;
    const int head = cta / S::kParts, part = cta % S::kParts;
    if (head >= S::kKeys) return;
    const Places mine = places();
    const int begin = mine.begin, end = mine.end;
    T* const keys = step.keys + cache_offset();
    T* const values = step.values + cache_offset();
    T* const heads = reinterpret_cast<T*>(shared + S::kHeads);
    const int query = warp % kGroup, column = lane % kLanes * 8;
    const bool works = warp < kGroup * kWarpsOfHead;
    const int first = begin + warp / kGroup * kRowsAtOnce + lane / kLanes;
    constexpr int kStride = kWarpsOfHead * kRowsAtOnce;
    uint4 k[kAhead], v[kAhead];
    const auto load = [&](int from) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int place = from + i * kStride;
        k[i] = v[i] = make_uint4(0, 0, 0, 0);
        if (works && place < end && place != slot) {
          k[i] = *reinterpret_cast<const uint4*>(keys + static_cast<long long>(place) * kHead + column);
          v[i] = *reinterpret_cast<const uint4*>(values + static_cast<long long>(place) * kHead + column);
        }
      }
    };
    load(first);
    // Queries, the new key and the new value, heads one after the other.
    const int which = thread / kHalf, pair = thread % kHalf;
    if (which < kGroup + 2) {
      const int row = which < kGroup ? head * kGroup + which : S::kKeys * which + head;
      const Packet* const from = step.packets + S::kQkvPackets + row * kHalf + pair;
      const uint32_t wanted = tag(layer, kQkv);
      Packet packet = 0;
      await([&] {
        asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(packet) : "l"(from) : "memory");
        return packet >> 32 == wanted;
      });
      reinterpret_cast<uint32_t*>(heads)[thread] = static_cast<uint32_t>(packet);
    }
    __syncthreads();
    if (which <= kGroup) {
      T* const to = heads + which * kHead + pair;
      float low = to_float(to[0]), high = to_float(to[kHalf]);
      qcut::turn<T>(low, high, cos.x, sin.x, cos.y, sin.y);
      to[0] = from_float<T>(low), to[kHalf] = from_float<T>(high);
    }
    __syncthreads();
    if (part == mine.owner && slot >= 0 && slot < step.places && thread < kHead) {
      keys[static_cast<long long>(slot) * kHead + thread] = heads[kGroup * kHead + thread];
      values[static_cast<long long>(slot) * kHead + thread] = heads[(kGroup + 1) * kHead + thread];
    }
    float q[8], o[8] = {}, most = kNoScore, total = 0.0f;
    const auto floats = [](const uint4& raw, float(&f)[8]) { Vector<T>{raw.x, raw.y, raw.z, raw.w}.to_float(f); };
    floats(*reinterpret_cast<const uint4*>(heads + query * kHead + column), q);
#pragma unroll 1
    for (int from = first; from - lane / kLanes < end; from += kAhead * kStride) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int place = from + i * kStride;
        if (place == slot) {
          k[i] = *reinterpret_cast<const uint4*>(heads + kGroup * kHead + column);
          v[i] = *reinterpret_cast<const uint4*>(heads + (kGroup + 1) * kHead + column);
        }
        float f[8], dot = 0.0f;
        floats(k[i], f);
#pragma unroll
        for (int j = 0; j < 8; ++j) dot = fmaf(q[j], f[j], dot);
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        const float score = works && place < end ? dot * step.scale : kNoScore;
        const float larger = fmaxf(most, score), old = weight_of(most, larger), now = weight_of(score, larger);
        floats(v[i], f);
        total = fmaf(total, old, now);
#pragma unroll
        for (int j = 0; j < 8; ++j) o[j] = fmaf(o[j], old, now * f[j]);
        most = larger;
      }
      load(from + kAhead * kStride);
    }
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, most, offset), larger = fmaxf(most, other);
      const float ours = weight_of(most, larger), theirs = weight_of(other, larger);
      total = total * ours + __shfl_xor_sync(0xffffffffu, total, offset) * theirs;
#pragma unroll
      for (int j = 0; j < 8; ++j) o[j] = o[j] * ours + __shfl_xor_sync(0xffffffffu, o[j], offset) * theirs;
      most = larger;
    }
    // Of each warp: the largest score, the sum of weights, and columns from the fourth number on.
    float* const state = sums() + warp * S::kStatePitch;
    if (lane == 0) state[0] = most, state[1] = total;
    if (lane < kLanes) {
      *reinterpret_cast<float4*>(state + 4 + 8 * lane) = make_float4(o[0], o[1], o[2], o[3]);
      *reinterpret_cast<float4*>(state + 8 + 8 * lane) = make_float4(o[4], o[5], o[6], o[7]);
    }
    __syncthreads();
    Packet* const states = step.packets + S::kStatePackets;
    const auto states_of = [&](int part_, int query_) {
      return states + static_cast<long long>((head * S::kParts + part_) * kGroup + query_) * S::kState;
    };
    const uint32_t sent = tag(layer, kState);
#pragma unroll 1
    for (int i = thread; i < kGroup * kHead; i += kThreads) {
      const int of = i / kHead, c = i % kHead;
      float largest = kNoScore, weights = 0.0f, value = 0.0f;
#pragma unroll
      for (int j = 0; j < kWarpsOfHead; ++j) largest = fmaxf(largest, sums()[(j * kGroup + of) * S::kStatePitch]);
#pragma unroll
      for (int j = 0; j < kWarpsOfHead; ++j) {
        const float* const from = sums() + (j * kGroup + of) * S::kStatePitch;
        const float w = weight_of(from[0], largest);
        weights = fmaf(from[1], w, weights);
        value = fmaf(from[4 + c], w, value);
      }
      Packet* const to = states_of(part, of);
      send(to + 2 + c, __float_as_uint(value), sent);
      if (c < 2) send(to + c, __float_as_uint(c ? weights : largest), sent);
    }
    // This CTA's share of the columns, in pairs; a pair's parts are in 16 lanes.
    constexpr int kPairs = kGroup * kHalf, kAtOnce = kThreads / 16;
    const int first_pair = kPairs * part / S::kParts, last_pair = kPairs * (part + 1) / S::kParts;
    const int other = thread % 16;
#pragma unroll 1
    for (int from = first_pair; from < last_pair; from += kAtOnce) {
      const int of = from + thread / 16;
      if (of - lane / 16 >= last_pair) break;  // for all of the warp
      float largest = kNoScore, weights = 0.0f, low = 0.0f, high = 0.0f;
      if (of < last_pair && other < S::kParts) {
        const Packet* const source = states_of(other, of / kHalf);
        Packet head_of[2] = {}, columns[2] = {};
        await([&] {
          const bool one = received(head_of, source, sent), two = received(columns, source + 2 + of % kHalf * 2, sent);
          return one && two;
        });
        const auto number = [](Packet p) { return __uint_as_float(static_cast<uint32_t>(p)); };
        largest = number(head_of[0]), weights = number(head_of[1]), low = number(columns[0]), high = number(columns[1]);
      }
      __syncwarp();
      float all = largest;
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, offset));
      const float w = weight_of(largest, all);
      weights *= w, low *= w, high *= w;
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) {
        weights += __shfl_xor_sync(0xffffffffu, weights, offset);
        low += __shfl_xor_sync(0xffffffffu, low, offset);
        high += __shfl_xor_sync(0xffffffffu, high, offset);
      }
      if (of < last_pair && other == 0) {
        const uint32_t word = pack_pair<T>(__fdiv_rn(low, weights), __fdiv_rn(high, weights));
        send(step.packets + S::kMixedPackets + head * kPairs + of, word, tag(layer, kMixed));
      }
    }
  }

  // ── the step ───────────────────────────────────────────────────────────────────────────────────

  __device__ __forceinline__ void load_block(int of) const {
    constexpr int kWords = sizeof(DecodeBlock<T>) / 8;
    const int word = thread - (kThreads - 32);
    if (word >= 0 && word < kWords && of < step.layers) {
      reinterpret_cast<unsigned long long*>(&block(of))[word] =
          reinterpret_cast<const unsigned long long*>(step.blocks + of)[word];
    }
  }

  // Asks the L2 for what the next products and this block's attention read beside weights.
  __device__ __forceinline__ void ask_ahead() const {
    if (cta / S::kParts < S::kKeys) {
      const Places mine = places();
      const int bytes = (mine.end - mine.begin) * S::kHead * static_cast<int>(sizeof(T));
      const int line = 128 * (thread % (kThreads / 2));
      const T* const of = thread < kThreads / 2 ? step.keys : step.values;
      const T* const from = of + cache_offset() + static_cast<long long>(mine.begin) * S::kHead;
      if (line < bytes) prefetch_l2(reinterpret_cast<const char*>(from) + line);
    }
    if (layer + 1 >= step.layers) return;
    const DecodeBlock<T>& next = block(layer + 1);
    const int column = 64 * cta;
    if (thread < 2 && column < S::kHidden) prefetch_l2((thread ? next.mlp_norm : next.attention_norm) + column);
    if (thread >= 32 && thread < 32 + 4 * 16) {
      const int p = thread / 16 - 2, line = thread % 16 * 32;
      const int rows = 16 * (first_tile(p, 1) - first_tile(p));
      if (line < rows) prefetch_l2(next.products[p].col_scale + 16 * first_tile(p) + line);
      if (line < rows && p == kInner) prefetch_l2(next.products[p].col_scale + S::kInner + 16 * first_tile(p) + line);
    }
  }

  __device__ __forceinline__ void run() {
    {
      const int pair = thread % (S::kHead / 2);
      const T* const c = step.cos + static_cast<long long>(position) * S::kHead + pair;
      const T* const s = step.sin + static_cast<long long>(position) * S::kHead + pair;
      cos = make_float2(to_float(c[0]), to_float(c[S::kHead / 2]));
      sin = make_float2(to_float(s[0]), to_float(s[S::kHead / 2]));
    }
    for (int i = thread; i < S::kHidden / 8; i += kThreads) {
      reinterpret_cast<uint4*>(x())[i] = reinterpret_cast<const uint4*>(step.x)[i];
    }
    __syncthreads();
#pragma unroll 1
    for (; layer < step.layers; ++layer) {
      index = 0;
      ask_ahead();
      load_block(layer + 3);
#pragma unroll 1
      for (int p = 0; p < 4; ++p) {
        float2 scales[S::kPasses];
#pragma unroll
        for (int pass = 0; pass < S::kPasses; ++pass) scales[pass] = scale_of(p, thread / 4 + pass * kThreads / 4);
        stage(p);
        multiply(p);
        finish(p, scales);
        if (p == kQkv) attend();
      }
    }
    if (cta == 0) {
      for (int i = thread; i < S::kHidden / 8; i += kThreads) {
        reinterpret_cast<uint4*>(step.sum)[i] = reinterpret_cast<const uint4*>(x())[i];
      }
      if (thread == 0) *step.epoch += 1;
    }
  }
};

// The kernel, of one CTA for each multiprocessor.
template <class S>
__device__ __forceinline__ void decode_blocks(const DecodeStep<typename S::T>& step, const Book& book) {
  extern __shared__ __align__(128) char dynamic[];
  char* const shared = dynamic - 1024;
  if (shared_address(dynamic) != 1024) asm volatile("trap;");
  DecodeBlocks<S> blocks(step, shared);
  blocks.base = 1 + *static_cast<volatile const uint32_t*>(step.epoch) * step.layers * DecodeBlocks<S>::kExchanges;
  blocks.position = *step.position;
  blocks.slot = *step.slot;
#pragma unroll 1
  for (int layer = 0; layer < 3; ++layer) blocks.load_block(layer);
  blocks.begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kRing; ++i) {
      barrier_init(blocks.full(i), 1);
      barrier_init(blocks.empty(i), S::kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < S::kRing; ++i) blocks.copy_piece(0, i, i);
  }
  fill_pair_table<S::kWarps>(shared + kTableAt, book);
  __syncthreads();
  blocks.run();
}

}  // namespace qcut
