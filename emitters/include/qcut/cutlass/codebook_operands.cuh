// Operands of codebook products in CUTLASS's mixed main loop for sm_90a: weights in units, tokens in blocks, as
// qcut/numerics/codebook/layout.py describes them, so that one copy of a weight serves these kernels and all others.
//
// Weights. CUTLASS takes a layout in place of strides for the operand that it converts in registers. A unit's words are
// fragments: a thread's 16 indices of one wgmma lie in 8 neighbouring bytes.
//
// Tokens. Blocks carry the 128-byte swizzle of shared memory already, so a plain box of a tensor map brings them to
// where wgmma looks for them. BlockTokens has that tensor map in addition to CUTLASS's.
//
// Source: CUTLASS 4.2.0, cutlass/gemm/collective/sm90_mma_tma_gmma_rs_warpspecialized_mixed_input.hpp.
#pragma once

#include <algorithm>
#include <cmath>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

#ifndef QCUT_BOOK_PARAM
#define QCUT_BOOK_PARAM ""
#endif

namespace qcut {

// The 16 values of a codebook as int8, the first in the lowest byte.
struct Int8Book {
  uint32_t words[4];
};

// The int8 values of a codebook of 16 float16 values, two to a word: rne(127 * value / the largest magnitude).
inline Int8Book int8_book(int const* halves) {
  float values[16], largest = 0.f;
  for (int i = 0; i < 16; ++i) {
    auto const bits = static_cast<uint16_t>(static_cast<uint32_t>(halves[i / 2]) >> (i % 2 * 16));
    values[i] = static_cast<float>(cutlass::half_t::bitcast(bits));
    largest = std::max(largest, std::fabs(values[i]));
  }
  double const factor = largest > 0.f ? 127.0 / largest : 0.0;
  Int8Book book{};
  for (int i = 0; i < 16; ++i) {
    auto const value = static_cast<int>(std::nearbyint(values[i] * factor));
    book.words[i / 4] |= static_cast<uint32_t>(value & 255) << (i % 4 * 8);
  }
  return book;
}

// An index into 16 values. A type of its own has a conversion of its own.
struct CodebookIndex : cutlass::integer_subbyte<4, false> {
  using Base = cutlass::integer_subbyte<4, false>;
  using Base::Base;
  CodebookIndex() = default;
  CUTLASS_HOST_DEVICE CodebookIndex(Base base) : Base(base) {}
};

// The argument of a kernel: the codebook, then CUTLASS's parameters.
template <class Params_>
struct WithBook {
  alignas(128) Int8Book book;
  Params_ params;
};

// A conversion that CUTLASS calls cannot be handed the codebook: it reads the start of the kernel's argument, by the
// name that the compiler gives it.
CUTLASS_DEVICE Int8Book book_argument() {
  Int8Book book;
  asm("ld.param.v4.b32 {%0, %1, %2, %3}, [" QCUT_BOOK_PARAM "];"
      : "=r"(book.words[0]), "=r"(book.words[1]), "=r"(book.words[2]), "=r"(book.words[3]));
  return book;
}

// The values of four indices, the lowest 16 bits of `indices`: of each half of the codebook, then the right half's.
CUTLASS_DEVICE uint32_t look_up(uint32_t indices, Int8Book const& book) {
  uint32_t const within = indices & 0x7777;
  uint32_t const half = ((indices & 0x8888) >> 1) | 0x3210;
  uint32_t low, high, values;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(low) : "r"(book.words[0]), "r"(book.words[1]), "r"(within));
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(book.words[2]), "r"(book.words[3]), "r"(within));
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(values) : "r"(low), "r"(high), "r"(half));
  return values;
}

// Weights of n rows (a multiple of 16) and `units` units. Columns are counted as int8 tokens lie in memory.
// rows: 8 (lane / 4), 2, tiles; columns: 4 in a word, 4 (lane % 4), 4 words, 2 halves, units. Strides in indices.
using UnitsLayout =
    cute::Layout<cute::Shape<cute::Shape<cute::_8, cute::_2, int>,
                             cute::Shape<cute::_4, cute::_4, cute::_4, cute::_2, int>, cute::_1>,
                 cute::Stride<cute::Stride<cute::_128, cute::_4, int64_t>,
                              cute::Stride<cute::_1, cute::_32, cute::_8, cute::_1024, cute::_2048>, cute::_0>>;

inline UnitsLayout units_layout(int tiles, int units) {
  using namespace cute;
  return UnitsLayout{make_shape(make_shape(_8{}, _2{}, tiles), make_shape(_4{}, _4{}, _4{}, _2{}, units), _1{}),
                     make_stride(make_stride(_128{}, _4{}, int64_t(units) * 2048),
                                 make_stride(_1{}, _32{}, _8{}, _1024{}, _2048{}), _0{})};
}

// CUTLASS's main loop with tokens read from blocks.
template <class Mainloop>
struct BlockTokens : Mainloop {
  using typename Mainloop::Arguments;
  using typename Mainloop::MainloopPipeline;
  using typename Mainloop::PipelineState;
  using typename Mainloop::TensorStorage;
  using typename Mainloop::TileShape;
  using ClusterShape = typename Mainloop::DispatchPolicy::ClusterShape;
  using SmemLayoutB = typename Mainloop::SmemLayoutB;

  static constexpr int kTokens = cute::size<1>(TileShape{});
  static_assert(cute::size<2>(TileShape{}) == 128, "a stage holds one block of columns");
  using PlainTile = cute::Layout<cute::Shape<cute::Int<kTokens>, cute::_128>, cute::Stride<cute::_128, cute::_1>>;
  // (tokens, (column in the block, block), 1)
  using BlocksLayout = cute::Layout<cute::Shape<int, cute::Shape<cute::_128, int>, cute::_1>,
                                    cute::Stride<cute::_128, cute::Stride<cute::_1, int64_t>, cute::_0>>;

  CUTE_HOST_DEVICE static BlocksLayout blocks_layout(int tokens, int columns) {
    using namespace cute;
    int const rows = (tokens + 7) / 8 * 8;
    return BlocksLayout{make_shape(rows, make_shape(_128{}, columns / 128), _1{}),
                        make_stride(_128{}, make_stride(_1{}, int64_t(rows) * 128), _0{})};
  }

  struct Params : Mainloop::Params {
    using TmaTokens = decltype(cute::make_tma_copy_B_sm90(
        typename Mainloop::GmemTiledCopyB{},
        cute::make_tensor(static_cast<uint8_t const*>(nullptr), BlocksLayout{}), PlainTile{}, TileShape{},
        ClusterShape{}));
    TmaTokens tma_tokens;
  };

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const& shape, Arguments const& args, void* workspace) {
    using namespace cute;
    auto tokens = make_tensor(reinterpret_cast<uint8_t const*>(args.ptr_B),
                              blocks_layout(get<1>(shape), get<2>(shape)));
    return {Mainloop::to_underlying_arguments(shape, args, workspace),
            make_tma_copy_B_sm90(typename Mainloop::GmemTiledCopyB{}, tokens, PlainTile{}, TileShape{},
                                 ClusterShape{})};
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(params.tma_load_a.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.tma_tokens.get_tma_descriptor());
  }

  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& shape, Params const& params) const {
    using namespace cute;
    auto weights = get<0>(Mainloop::load_init(shape, params));
    Tensor tokens = params.tma_tokens.get_tma_tensor(cute::shape(blocks_layout(get<1>(shape), get<2>(shape))));
    return cute::make_tuple(weights, local_tile(tokens, TileShape{}, make_coord(_, _, _), Step<X, _1, _1>{}));
  }

  template <class Inputs, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write,
                           Inputs const& inputs, BlockCoord const& at, KTileIterator k_tile, int k_tile_count,
                           int thread_idx, uint32_t rank, TensorStorage& storage) {
    using namespace cute;
    Tensor sA = as_position_independent_swizzle_tensor(
        make_tensor(make_smem_ptr(storage.smem_A.begin()), typename Mainloop::SmemLayoutA{}));
    // Plain rows, one stage behind the other: the swizzle came with the tokens.
    constexpr int kStages = Mainloop::DispatchPolicy::Stages;
    Tensor sB = make_tensor(make_smem_ptr(reinterpret_cast<uint8_t*>(storage.smem_B.begin())),
                            make_layout(Shape<Int<kTokens>, _128, Int<kStages>>{},
                                        Stride<_128, _1, Int<kTokens * 128>>{}));

    constexpr uint32_t kClusterM = get<0>(ClusterShape{});
    uint2 const local = {rank % kClusterM, rank / kClusterM};
    auto tma_a = params.tma_load_a.get_slice(local.y);
    auto tma_b = params.tma_tokens.get_slice(local.x);
    auto [m, n, k, l] = at;
    Tensor tAgA = tma_a.partition_S(get<0>(inputs)(_, _, m, _, l));
    Tensor tAsA = tma_a.partition_D(sA);
    Tensor tBgB = tma_b.partition_S(get<1>(inputs)(_, _, n, _, l));
    Tensor tBsB = tma_b.partition_D(sB);

    uint16_t mask_a = 0, mask_b = 0;
    auto ranks = Layout<ClusterShape>{};
    if constexpr (is_same_v<typename Mainloop::GmemTiledCopyA, SM90_TMA_LOAD_MULTICAST>) {
      for (int i = 0; i < size<1>(ranks); ++i) mask_a |= uint16_t(1) << ranks(local.x, i, Int<0>{});
    }
    if constexpr (is_same_v<typename Mainloop::GmemTiledCopyB, SM90_TMA_LOAD_MULTICAST>) {
      for (int i = 0; i < size<0>(ranks); ++i) mask_b |= uint16_t(1) << ranks(i, local.y, Int<0>{});
    }

    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tile_count > 0; --k_tile_count, ++k_tile, ++write) {
      pipeline.producer_acquire(write);
      auto* barrier = pipeline.producer_get_barrier(write);
      if (elect_one_sync()) {
        copy(params.tma_load_a.with(*barrier, mask_a), tAgA(_, _, _, *k_tile), tAsA(_, _, _, write.index()));
        copy(params.tma_tokens.with(*barrier, mask_b), tBgB(_, _, _, *k_tile), tBsB(_, _, _, write.index()));
      }
    }
  }
};

}  // namespace qcut

namespace cutlass {

template <>
struct sizeof_bits<qcut::CodebookIndex> {
  static constexpr int value = 4;
};
template <>
struct is_subbyte<qcut::CodebookIndex> {
  static constexpr bool value = true;
};

template <FloatRoundStyle kRound, int N>
struct NumericArrayConverter<int8_t, qcut::CodebookIndex, N, kRound> {
  static_assert(N % 4 == 0, "four indices at a time");
  using source_type = Array<qcut::CodebookIndex, N>;
  using result_type = Array<int8_t, N>;

  CUTLASS_DEVICE static result_type convert(source_type const& source) {
    qcut::Int8Book const book = qcut::book_argument();
    result_type result;
    auto const* indices = reinterpret_cast<uint16_t const*>(&source);
    auto* values = reinterpret_cast<uint32_t*>(&result);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N / 4; ++i) values[i] = qcut::look_up(indices[i], book);
    return result;
  }
  CUTLASS_DEVICE result_type operator()(source_type const& source) const { return convert(source); }
};

}  // namespace cutlass
