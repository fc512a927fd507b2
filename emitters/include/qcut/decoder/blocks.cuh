// All blocks of a decoder's step for one token, in one kernel that stays on every multiprocessor: norms, int8 products of
// tokens that are quantized in the kernel, attention over the cache, and an MLP.
//
// A CTA has the same rows of each weight in every step. They come by bulk copies, in the order of use, into a ring in
// shared memory, as far ahead as the ring has room, whatever the CTA waits for. A piece of the ring is up to 1,024 columns
// of a tile of 16 rows, of which each warp multiplies 64. A warp copies the next piece to where one was that all have
// read.
//
// Between products the CTAs exchange vectors through packets: two values of T, or a float, with a tag beside them that
// no other exchange of this launch or an earlier one has. A CTA that needs a vector reads its packets until their tags are
// right. Each CTA normalizes and quantizes the whole vector for itself. Memory of an exchange is written again a block
// later: by then all CTAs have sent what they make of this one's.
//
// Attention: each head of keys has kParts CTAs, which divide the places of the sequence. Each merges the parts' results for
// its share of the heads' columns.
//
// All CTAs are resident at once, as cooperative launches are. A CTA that waits in vain for seconds traps.
//
// Exactness: products are exact in int32; results are rounded to T where kernels of the single operators round them. Sums
// of norms and of attention are float32, in an order that the sizes and the number of CTAs fix.
//
// Source: PTX ISA 8.x, "cp.async.bulk", "mbarrier", "ld.relaxed", "st.relaxed", "Matrix Fragments for mma.m16n8k32".
#pragma once

#include <qcut/core/activation.cuh>
#include <qcut/core/barrier.cuh>
#include <qcut/core/mma.cuh>
#include <qcut/core/quantize.cuh>
#include <qcut/core/streaming.cuh>
#include <qcut/decoder/attention/softmax.cuh>
#include <qcut/decoder/rope.cuh>

namespace qcut {

// A product with int8 weights [n, k]; bias may be null.
struct BlockProduct {
  const int8_t* weight;
  const float *scale, *bias;
};

// A block's weights. The products' rows are those of queries, keys and values; the output's; those of gate and up, or of up;
// the projection's down. Biases of norms may be null.
template <class T>
struct DecodeBlock {
  BlockProduct products[4];
  const T *attention_norm, *attention_bias, *mlp_norm, *mlp_bias;
};

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

// How a block computes.
template <bool kLayerNorm_, bool kGated_, bool kRotary_>
struct BlocksForm {
  static constexpr bool kLayerNorm = kLayerNorm_;  // else RMSNorms
  static constexpr bool kGated = kGated_;          // by SiLU; else GELU
  static constexpr bool kRotary = kRotary_;
};

// The sizes of a model and of a launch.
template <class T_, class Form_, int kHidden_, int kInner_, int kKeys_, int kGroup_, int kHead_, int kCtas_, int kRing_>
struct BlocksShape {
  using T = T_;
  using Form = Form_;
  static constexpr int kHidden = kHidden_, kInner = kInner_;
  static constexpr int kKeys = kKeys_, kGroup = kGroup_, kHead = kHead_;  // heads of keys, queries of each, columns
  static constexpr int kCtas = kCtas_, kRing = kRing_;                    // of the launch, pieces of the ring
  static constexpr int kWarps = 16, kThreads = 32 * kWarps;
  static constexpr int kQueries = kKeys * kGroup * kHead;  // columns of all queries
  static constexpr int kQkv = kQueries + 2 * kKeys * kHead;
  static constexpr int kParts = kCtas / kKeys < 16 ? kCtas / kKeys : 16;  // of a sequence
  static constexpr int kUps = Form::kGated ? 2 : 1;                       // rows of the inner product for each result
  // Eight lanes read 16 bytes each of two rows from all banks.
  static constexpr int kPieceColumns = 64 * kWarps, kPiecePitch = kPieceColumns + 64, kPieceBytes = 16 * kPiecePitch;

  static __host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
  static __host__ __device__ constexpr int rows(int n) { return 16 * ((n / 16 + kCtas - 1) / kCtas); }
  static __host__ __device__ constexpr int parts(int k) { return (k + kPieceColumns - 1) / kPieceColumns; }
  // The fewest pieces that a CTA has of a product.
  static __host__ __device__ constexpr int fewest(int n, int k) { return n / 16 / kCtas * parts(k); }
  static constexpr int kMostRows = larger(larger(rows(kQkv), rows(kHidden)), kUps * rows(kInner));
  static constexpr int kMostResults = larger(rows(kQkv), larger(rows(kHidden), rows(kInner)));
  static constexpr int kPasses = (4 * kMostResults + kThreads - 1) / kThreads;  // four threads have a row
  static constexpr int kPitch = kMostRows + 2;  // brings eight rows of four warps, four apart, to all banks
  static constexpr int kStatePitch = kHead + 4;
  static constexpr int kMostColumns = larger(larger(kHidden, kInner), kQueries);

  // Bytes of shared memory.
  static constexpr int kX = 0;
  static constexpr int kToken = kX + sizeof(T) * kHidden;
  static constexpr int kHeads = kToken + kMostColumns;
  static constexpr int kBlocks = kHeads + sizeof(T) * (kGroup + 2) * kHead;
  static constexpr int kTotals = kBlocks + 4 * sizeof(DecodeBlock<T>);
  static constexpr int kBarriers = kTotals + 3 * 4 * kWarps;
  static constexpr int kSums = kBarriers + 16 * kRing;
  static constexpr int kPieces = (kSums + 4 * kWarps * larger(kPitch, kStatePitch) + 127) / 128 * 128;
  static constexpr int kBytes = kPieces + kRing * kPieceBytes;

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
  static_assert(kHidden % 64 == 0 && kInner % 64 == 0 && kQueries % 64 == 0 && kQkv % 16 == 0, "whole tiles");
  static_assert(kRing <= 2 * (fewest(kQkv, kHidden) + fewest(kHidden, kQueries) + kUps * fewest(kInner, kHidden) +
                              fewest(kHidden, kInner)),
                "addresses of two blocks ahead suffice");
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
  static constexpr int kThreads = S::kThreads;
  enum Exchange { kQkv, kOutput, kInner, kDown, kState, kMixed, kExchanges };  // of products first, in their order

  const DecodeStep<T>& step;
  char* const shared;
  const int thread, warp, lane, cta;
  uint32_t base, position;
  float2 cos, sin;  // of a thread's pair of columns of a head
  int slot;
  int at = 0, phase = 0;     // the next piece's place in the ring, and the round of the ring
  int layer = 0, index = 0;  // the next piece's number in its block
  int turn, owed = -1;    // pieces until this warp has to replace one, and the number of the one that it has to
  uint32_t from;         // this lane's part of the next piece
  float x_scale = 0.0f;  // of the staged token

  __device__ __forceinline__ DecodeBlocks(const DecodeStep<T>& step, char* shared)
      : step(step),
        shared(shared),
        thread(threadIdx.x),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        cta(blockIdx.x) {}

  __device__ __forceinline__ T* x() const { return reinterpret_cast<T*>(shared + S::kX); }
  __device__ __forceinline__ int* sums() const { return reinterpret_cast<int*>(shared + S::kSums); }
  __device__ __forceinline__ float* states() const { return reinterpret_cast<float*>(shared + S::kSums); }
  __device__ __forceinline__ DecodeBlock<T>& block(int layer_) const {
    return reinterpret_cast<DecodeBlock<T>*>(shared + S::kBlocks)[layer_ % 4];
  }
  __device__ __forceinline__ uint32_t full(int place) const {
    return shared_address(shared + S::kBarriers) + 8 * place;
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
  // Columns of a product's pieces, 64 for each warp that takes part.
  static __device__ __forceinline__ int piece_columns(int p) {
    return p == kDown ? pieced(S::kInner) : p == kOutput ? pieced(S::kQueries) : pieced(S::kHidden);
  }
  static __device__ __forceinline__ constexpr int pieced(int columns) {
    return (columns / 64 + S::parts(columns) - 1) / S::parts(columns) * 64;
  }
  // This CTA's first tile of 16 rows, or the next CTA's.
  __device__ __forceinline__ int first_tile(int p, int next = 0) const { return rows_of(p) / 16 * (cta + next) / S::kCtas; }
  __device__ __forceinline__ int tiles_of(int p) const {
    return (first_tile(p, 1) - first_tile(p)) * (p == kInner ? S::kUps : 1);
  }

  // ── the ring ───────────────────────────────────────────────────────────────────────────────────

  // Copies piece `number` of a block, or of the one after it, to a place of the ring. A warp calls.
  __device__ __forceinline__ void copy_piece(int of, int number, int place) const {
#pragma unroll 1
    for (; of < step.layers; ++of) {
#pragma unroll 1
      for (int p = 0; p < 4; ++p) {
        const int columns = columns_of(p), each = piece_columns(p), parts = S::parts(columns), count = tiles_of(p) * parts;
        if (number >= count) {
          number -= count;
          continue;
        }
        const int tile = number / parts, first = number % parts * each, here = min(each, columns - first);
        const bool gated = p == kInner && S::kUps == 2;
        const int row_tile = gated ? first_tile(p) + tile / 2 + tile % 2 * (S::kInner / 16) : first_tile(p) + tile;
        if (lane == 0) barrier_expect(full(place), 16 * here);
        __syncwarp();
        if (lane < 16) {
          const int8_t* const source =
              block(of).products[p].weight + static_cast<long long>(16 * row_tile + lane) * columns + first;
          copy_bulk(shared_address(shared + S::kPieces) + place * S::kPieceBytes + lane * S::kPiecePitch, source, here,
                    full(place));
        }
        return;
      }
    }
  }

  // ── products ───────────────────────────────────────────────────────────────────────────────────

  // This lane's part of the ring's first piece: lane 4 g + t has columns 16 t to 16 t + 15 of its warp's, of rows g and g + 8.
  __device__ __forceinline__ uint32_t first_from() const {
    return shared_address(shared + S::kPieces) + lane / 4 * S::kPiecePitch + 64 * warp + lane % 4 * 16;
  }
  __device__ __forceinline__ void begin() {
    turn = warp;
    from = first_from();
  }

  // If this warp has to replace the piece before the next one: copies what comes to its place, when all warps have read it.
  __device__ __forceinline__ void replace() {
    if (owed < 0) return;
    const int place = at > 0 ? at - 1 : S::kRing - 1, round = at > 0 ? phase : phase ^ 1;
    barrier_wait(empty(place), round);
    copy_piece(layer, owed + S::kRing, place);
    owed = -1;
  }

  // A lane's part of the next piece, in registers.
  __device__ __forceinline__ void take(uint32_t (&row)[4], uint32_t (&row8)[4]) {
    barrier_wait(full(at), phase);
    load_shared_16(row, from);
    load_shared_16(row8, from + 8 * S::kPiecePitch);
    __syncwarp();
    if (lane == 0) barrier_arrive(empty(at));
    replace();
    if (turn == 0) owed = index;
    turn = turn > 0 ? turn - 1 : S::kWarps - 1;
    ++index;
    from += S::kPieceBytes;
    if (++at == S::kRing) at = 0, phase ^= 1, from = first_from();
  }

  // The sums of each warp of product p of the staged token, rows of gate and up in tiles that take turns.
  __device__ __forceinline__ void multiply(int p) {
    const int tiles = tiles_of(p), columns = columns_of(p), each = piece_columns(p);
    const uint32_t token = shared_address(shared + S::kToken) + 64 * warp + lane % 4 * 16;
    int* to = sums() + warp * S::kPitch + lane / 4;
    // Sums of columns past a piece's end are not added up: such a warp takes part in the ring alone.
    const bool works = 64 * warp < each;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, to += 16) {
      int sum[4] = {};
#pragma unroll 1
      for (int first = 0; first < columns; first += each) {
        uint32_t row[4], row8[4], b[4];
        take(row, row8);
        if (works && first + 64 * warp < columns) {
          load_shared_16(b, token + first);
          mma_s8(sum, {row[0], row8[0], row[1], row8[1]}, b[0], b[1]);
          mma_s8(sum, {row[2], row8[2], row[3], row8[3]}, b[2], b[3]);
        }
      }
      if (lane % 4 == 0) to[0] = sum[0], to[8] = sum[2];
    }
    replace();  // what comes is wanted before this warp takes a piece again
    __syncthreads();
  }

  // Scales and biases of a thread's row of product p: of its rows of gate and up.
  struct Scales {
    float scale, bias, up_scale, up_bias;
  };
  __device__ __forceinline__ Scales scales_of(int p, int row) const {
    Scales found = {};
    if (row >= 16 * (first_tile(p, 1) - first_tile(p))) return found;
    const BlockProduct& of = block(layer).products[p];
    const int at_row = 16 * first_tile(p) + row;
    found.scale = of.scale[at_row];
    if (of.bias != nullptr) found.bias = of.bias[at_row];
    if (p == kInner && S::Form::kGated) {
      found.up_scale = of.scale[S::kInner + at_row];
      if (of.bias != nullptr) found.up_bias = of.bias[S::kInner + at_row];
    }
    return found;
  }

  // A quarter of the warps' sums of a row are a thread's.
  __device__ __forceinline__ float product_of(int row, float scale, float bias) const {
    const int* const at_row = sums() + thread % 4 * (S::kWarps / 4) * S::kPitch + row;
    int sum = 0;
#pragma unroll
    for (int w = 0; w < S::kWarps / 4; ++w) sum += at_row[w * S::kPitch];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return static_cast<float>(sum) * x_scale * scale + bias;
  }

  // Sends the product's results, or the activated ones; those of the last product become a result.
  __device__ __forceinline__ void finish(int p, const Scales (&scales)[S::kPasses]) const {
    const int count = 16 * (first_tile(p, 1) - first_tile(p));
    const bool ends = p == kDown && layer + 1 == step.layers;
#pragma unroll
    for (int pass = 0; pass < S::kPasses; ++pass) {
      const int row = thread / 4 + pass * kThreads / 4;
      if (row - lane / 4 >= count) break;  // for all of the warp
      const Scales& of = scales[pass];
      float y;
      if (p == kInner && S::Form::kGated) {
        const int gate = row / 16 * 32 + row % 16;
        const float up = rounded<T>(product_of(gate + 16, of.up_scale, of.up_bias));
        y = rounded<T>(silu(rounded<T>(product_of(gate, of.scale, of.bias)))) * up;
      } else {
        y = product_of(row, of.scale, of.bias);
        if (p == kInner) y = gelu_tanh(y);
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

  // The CTA's sum of a number of each thread; `which` of three places in shared memory it goes through.
  __device__ __forceinline__ float total_of(float v, int which) const {
    float* const totals = reinterpret_cast<float*>(shared + S::kTotals) + which * S::kWarps;
    v = warp_sum(v);
    if (lane == 0) totals[warp] = v;
    __syncthreads();
    return chunk_total<S::kWarps>(totals);
  }

  // Stages the token of product p as int8: a vector of packets, or, before attention and MLP, the norm of x, to which the
  // packets are added. The first block's x is as it is. A thread has eight columns, and as many further ones.
  template <int kRounds>
  __device__ __forceinline__ void stage(int p) {
    const bool norm = p == kQkv || p == kInner, first = p == kQkv && layer == 0;
    const DecodeBlock<T>& of = block(layer);
    const T *const gain = p == kQkv ? of.attention_norm : of.mlp_norm, *const shift = p == kQkv ? of.attention_bias : of.mlp_bias;
    const Packet* const packets =
        step.packets + (p == kQkv ? S::kDownPackets : p == kOutput ? S::kMixedPackets : packets_of(p - 1));
    const uint32_t wanted = p == kQkv ? tag(layer - 1, kDown) : p == kOutput ? tag(layer, kMixed) : tag(layer, p - 1);
    const auto column = [&](int r) { return 8 * (thread + r * kThreads); };
    const auto there = [&](int r) { return column(r) < columns_of(p); };
    uint4 gains[kRounds], shifts[kRounds];
    Packet pairs[kRounds][2][2] = {};
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      gains[r] = shifts[r] = make_uint4(0, 0, 0, 0);
      if (norm && there(r)) gains[r] = *reinterpret_cast<const uint4*>(gain + column(r));
      if (S::Form::kLayerNorm && norm && shift != nullptr && there(r)) shifts[r] = *reinterpret_cast<const uint4*>(shift + column(r));
    }
    if (!first) {
      await([&] {
        bool ready = true;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          if (!there(r)) continue;
          ready &= received(pairs[r][0], packets + column(r) / 2, wanted);
          ready &= received(pairs[r][1], packets + column(r) / 2 + 2, wanted);
        }
        return ready;
      });
    }
    __syncwarp();
    float f[kRounds][8], sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      Vector<T>{static_cast<uint32_t>(pairs[r][0][0]), static_cast<uint32_t>(pairs[r][0][1]),
                static_cast<uint32_t>(pairs[r][1][0]), static_cast<uint32_t>(pairs[r][1][1])}
          .to_float(f[r]);
      if (!norm || !there(r)) continue;
      uint4* const mine = reinterpret_cast<uint4*>(x() + column(r));
      const uint4 raw = *mine;
      float old[8];
      Vector<T>{raw.x, raw.y, raw.z, raw.w}.to_float(old);
#pragma unroll
      for (int i = 0; i < 8; ++i) f[r][i] = first ? old[i] : rounded<T>(old[i] + f[r][i]);
      *mine = make_uint4(pack_pair<T>(f[r][0], f[r][1]), pack_pair<T>(f[r][2], f[r][3]), pack_pair<T>(f[r][4], f[r][5]),
                         pack_pair<T>(f[r][6], f[r][7]));
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += f[r][i];
    }
    if (norm) {
      float mean = 0.0f, squares = 0.0f;
      if (S::Form::kLayerNorm) mean = __fdiv_rn(total_of(sum, 0), static_cast<float>(S::kHidden));
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        if (!there(r)) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(f[r][i] - mean, f[r][i] - mean, squares);
      }
      const float inv = inverse_root(total_of(squares, 1), static_cast<float>(S::kHidden), step.eps);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        float g[8], s[8];
        Vector<T>{gains[r].x, gains[r].y, gains[r].z, gains[r].w}.to_float(g);
        Vector<T>{shifts[r].x, shifts[r].y, shifts[r].z, shifts[r].w}.to_float(s);
        if (!there(r)) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) f[r][i] = normalized<T, S::Form::kLayerNorm>(f[r][i], mean, inv, g[i], s[i]);
      }
    }
    uint32_t peak = 0;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) peak = max(peak, __float_as_uint(f[r][i]) & 0x7fffffffu);
    }
    uint32_t* const peaks = reinterpret_cast<uint32_t*>(shared + S::kTotals) + 2 * S::kWarps;
    peak = warp_max(peak);
    if (lane == 0) peaks[warp] = peak;
    __syncthreads();
    const QuantizedRow quantized(warp_max(peaks[lane % S::kWarps]));
    x_scale = quantized.scale();
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (!there(r)) continue;
      uint32_t q[2];
      quantized.quantize(f[r], q);
      *reinterpret_cast<uint2*>(shared + S::kToken + column(r)) = make_uint2(q[0], q[1]);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void stage(int p) {
    constexpr int kMost = 8 * kThreads;
    if (p == kDown) {
      stage<(S::kInner + kMost - 1) / kMost>(p);
    } else {
      stage<(S::larger(S::kHidden, S::kQueries) + kMost - 1) / kMost>(p);
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
      if constexpr (S::Form::kRotary) qcut::turn<T>(low, high, cos.x, sin.x, cos.y, sin.y);
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
    float* const state = this->states() + warp * S::kStatePitch;
    if (lane == 0) state[0] = most, state[1] = total;
    if (lane < kLanes) {
      *reinterpret_cast<float4*>(state + 4 + 8 * lane) = make_float4(o[0], o[1], o[2], o[3]);
      *reinterpret_cast<float4*>(state + 8 + 8 * lane) = make_float4(o[4], o[5], o[6], o[7]);
    }
    __syncthreads();
    Packet* const parts = step.packets + S::kStatePackets;
    const auto states_of = [&](int part_, int query_) {
      return parts + static_cast<long long>((head * S::kParts + part_) * kGroup + query_) * S::kState;
    };
    const uint32_t sent = tag(layer, kState);
#pragma unroll 1
    for (int i = thread; i < kGroup * kHead; i += kThreads) {
      const int of = i / kHead, c = i % kHead;
      float largest = kNoScore, weights = 0.0f, value = 0.0f;
#pragma unroll
      for (int j = 0; j < kWarpsOfHead; ++j) largest = fmaxf(largest, this->states()[(j * kGroup + of) * S::kStatePitch]);
#pragma unroll
      for (int j = 0; j < kWarpsOfHead; ++j) {
        const float* const from = this->states() + (j * kGroup + of) * S::kStatePitch;
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
    if (thread < 4 && column < S::kHidden) {
      const T* const of = thread < 2 ? (thread ? next.mlp_norm : next.attention_norm) : thread < 3 ? next.mlp_bias : next.attention_bias;
      if (of != nullptr) prefetch_l2(of + column);
    }
    if (thread >= 32 && thread < 32 + 4 * 16) {
      const int p = thread / 16 - 2, line = thread % 16 * 32, rows = 16 * (first_tile(p, 1) - first_tile(p));
      const BlockProduct& of = next.products[p];
      for (int half = 0; half < (p == kInner ? S::kUps : 1); ++half) {
        const int row = half * S::kInner + 16 * first_tile(p) + line;
        if (line < rows) prefetch_l2(of.scale + row);
        if (line < rows && of.bias != nullptr) prefetch_l2(of.bias + row);
      }
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (S::Form::kRotary) {
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
        Scales scales[S::kPasses];
#pragma unroll
        for (int pass = 0; pass < S::kPasses; ++pass) scales[pass] = scales_of(p, thread / 4 + pass * kThreads / 4);
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
__device__ __forceinline__ void decode_blocks(const DecodeStep<typename S::T>& step) {
  extern __shared__ __align__(128) char shared[];
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
  if (threadIdx.x < 32) {
#pragma unroll 1
    for (int i = 0; i < S::kRing; ++i) blocks.copy_piece(0, i, i);
  }
  blocks.run();
}

}  // namespace qcut
