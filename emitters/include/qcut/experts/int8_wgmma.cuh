// D^T = epilogue(W X^T) of many tokens X and int8 weights W in row-major order (sm_90a), for prefill: codebook/wgmma.cuh
// with weights that need no codebook. Tokens lie in its blocks, int8 ones with their columns in natural order. Three warps copy
// weights to the stages, as far ahead as tokens: a unit's products do not hide the latency of a loaded memory. Products of
// int8 tokens take both operands from there; for tokens of 16 bits, weights are converted in registers.
//
// Exactness: int8 products are added in int32. 16-bit products are exact and are added in float32 in a fixed order.
//
// Source: PTX ISA "wgmma.mma_async", "cp.async", "cp.async.mbarrier.arrive", "fence.proxy.async".
#pragma once

#include <qcut/codebook/wgmma.cuh>
#include <qcut/core/int8_rows.cuh>
#include <qcut/core/streaming.cuh>
#include <qcut/core/wgmma_int8.cuh>

namespace qcut {

// Where chunk c, 16 columns, of row r of a unit of weights lies in a stage: for int8 tokens X where wgmma reads it, else
// so that eight lanes, which read four chunks of two rows at a time, meet every bank once.
template <class X>
__device__ __forceinline__ uint32_t int8_chunk(int r, int c) {
  return 128 * r + 16 * (c ^ (sizeof(X) == 1 ? r % 8 : 4 * (r % 2)));
}

// Copies 16 bytes to shared memory as loads of weights do: without a place in the L1.
__device__ __forceinline__ void copy_stream_16(uint32_t shared, const void* p) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared), "l"(p) : "memory");
}

// Decoders load weights themselves.
struct NoStream {
  template <class Weights>
  __device__ __forceinline__ explicit NoStream(const Weights&) {}
  template <class Weights, class Work>
  __device__ __forceinline__ void begin(const Weights&, const Work&, int, int, int) {}
  __device__ __forceinline__ void advance(bool, int) {}
};

// Converts a row's bytes B to 16 bits. Word i of its 64 columns has columns 2t, 2t + 1, 8 + 2t and 9 + 2t of 16.
template <class T, class B>
struct Int8Decoder {
  using X = typename T::X;
  static constexpr int kSteps = 8;
  uint32_t words[2][4];  // of 64 columns of rows g and g + 8
  uint32_t mine;

  template <class Book>
  __device__ __forceinline__ Int8Decoder(const Book&, uint32_t base, int warp, int lane)
      : mine(base + T::kSupply + int8_chunk<X>(kUnitRows * warp + lane / 4, lane % 4)) {}
  __device__ __forceinline__ void fetch(int step, int stage) {
    if (step % 4 != 0) return;
    const uint32_t at = (mine + stage * T::kSupplyBytes) ^ int8_chunk<X>(0, step);
#pragma unroll
    for (int i = 0; i < 2; ++i) load_shared_16(words[i], at + int8_chunk<X>(8 * i, 0));
#pragma unroll
    for (int i = 0; i < 2; ++i) exchange_columns(words[i]);
  }
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const NoStream&, int step) const {
    from_bytes<X, B>(words[0][step % 4], a[0], a[2]);
    from_bytes<X, B>(words[1][step % 4], a[1], a[3]);
    pin(a);  // copies: products in flight read them while the next words come
  }
};

// Products of int8 tokens and weights that both lie in a stage.
template <class T>
struct StagedProducts {
  unsigned long long weights0;

  template <class Weights, class B>
  __device__ __forceinline__ StagedProducts(const Weights&, const B&, uint32_t base, int warp, int)
      : weights0(wgmma_descriptor(base + T::kSupply + warp / 4 * (64 * 128))) {}
  template <class Weights, class Work>
  __device__ __forceinline__ void begin(const Weights&, const Work&, int, int, int) {}
  __device__ __forceinline__ void advance(bool, int) {}
  __device__ __forceinline__ void keep_all() {}
  template <int kTokens>
  __device__ __forceinline__ void issue(int (&acc)[T::kTokens / 2], unsigned long long tokens0, int stage) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      WgmmaInt8<kTokens>::issue(reinterpret_cast<int(&)[kTokens / 2]>(acc),
                                weights0 + stage * (T::kSupplyBytes / 16) + i * kWgmmaStep,
                                tokens0 + stage * (T::kTokenBytes / 16) + i * kWgmmaStep);
    }
    wgmma_commit();
  }
  template <class Release>
  __device__ __forceinline__ void multiply(int (&acc)[T::kTokens / 2], unsigned long long tokens0, int stage, bool is_short,
                                           const Release& release) {
    fence_shared_for_async();  // other threads' copies of weights
    if (is_short) {
      issue<T::kShort>(acc, tokens0, stage);
    } else {
      issue<T::kTokens>(acc, tokens0, stage);
    }
    wgmma_wait<1>();
    release();
  }
};

// Weights of experts in bytes B, [experts, n, ldb]; k columns of a row count.
template <class B>
struct Int8Rows {
  const B* b;
  int n, k, ldb;

  template <class T>
  using Stream = NoStream;
  template <class T>
  using Decoder = Int8Decoder<T, B>;

  // Copies the rows of a CTA's tiles to the stages, 128 columns at a time. Rows past n repeat the last row and are not
  // stored. Columns past k repeat the last 16 columns and are multiplied by zero tokens.
  template <class T, class Rows, class Book>
  __device__ __forceinline__ void supply(const PromptWork<T, Rows>& work, const Book&, uint32_t base) const {
    using X = typename T::X;
    constexpr int kStep = 32 * T::kSupplyWarps / 8;  // rows copied at a time
    static_assert(kStep % 4 == 0, "rows of two steps have their chunks in the same places");
    const int thread = keep(threadIdx.x - T::kThreads - 32);
    const int row = thread / 8, chunk = thread % 8;
    const uint32_t to = base + T::kSupply + int8_chunk<X>(row, chunk);
    const int last_column = (k - 1) / 16 * 16;
    if constexpr (Rows::kOfExperts) wait_for_dependencies();
    RingPlace<T::kStages> place;
    for (int i = work.first(); i < work.count(); i = work.next(i)) {
      int first = kUnitRows * work.tile(i).y + row;
      const B* from = b + static_cast<long long>(work.expert(i)) * n * ldb;
      for (int u = 0; u < work.units; ++u) {
        const B* column = from + min(128 * (work.first_unit + u) + 16 * chunk, last_column);
        const uint32_t stage = to + place.stage * T::kSupplyBytes;
        barrier_wait(base + T::kEmpty + 8 * place.stage, place.parity ^ 1);
        pin(first);  // the addresses of all rows are more than these threads' registers
#pragma unroll
        for (int j = 0; j < T::kRows; j += kStep) {
          if (j + kStep > T::kRows && row >= T::kRows - j) continue;
          const uint32_t swizzled = stage ^ int8_chunk<X>(j % 8, 0) % 128;
          copy_stream_16(swizzled + 128 * j, column + static_cast<long long>(min(first + j, n - 1)) * ldb);
        }
        barrier_arrive_copied(base + T::kSupplied + 8 * place.stage);
        place.advance();
      }
    }
    copy_async_wait_all();
  }
};

struct NoBook {
  static constexpr bool kPairs = false;
};

template <class T, class E, int kAlign, class B, class Rows>
__device__ __forceinline__ void int8_wgmma(const char* x, const B* b, typename E::Out* d, int m, int n, int k,
                                           int ldb, int ldd, const typename E::Args& args, const Rows& rows) {
  using Decoded = DecodedProducts<T, Int8Rows<B>, NoBook>;
  using Products = typename Either<sizeof(typename T::X) == 1, StagedProducts<T>, Decoded>::Type;
  prompt_product<T, E, kAlign, Products>(x, Int8Rows<B>{b, n, k, ldb}, d, m, n, (k + 127) / 128, ldd, NoBook(), args, rows);
}

}  // namespace qcut
