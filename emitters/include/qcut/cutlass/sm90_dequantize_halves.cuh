// The whole SM90 epilogue of products of int16 tokens, as one visitor node of CUTLASS. 16 rows of the kernel hold eight
// tokens as a hi/lo split: eight rows of high bytes and eight of low bytes. D has a row for each token and is not
// CUTLASS's (ElementD is void): the node stores D.
//
// A thread's accumulators are those of wgmma: four for eight columns, two of row g and two of row g + 8. The thread has
// both sums of an element, combines them in 64 bits and rounds once. Two columns of four blocks of eight then
// go around the four threads of a row, after which each has eight neighbours.
//
// Exactness: one float32 operation after the other, in the order of emitters/core/epilogue.py.
//
// Source: visitor concept of cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp, 4.2.0; PTX ISA, "Register
// Fragments for wgmma.mma_async.m64nNk32".
#pragma once

#include <qcut/cutlass/epilogue.cuh>
#include <qcut/cutlass/sm90_node.cuh>

#if !defined(__CUDACC__)  // for a host compiler that only reads types, as core/host_prelude.cuh
unsigned __shfl_xor_sync(unsigned, unsigned, int, int = 32);
#endif

namespace qcut {

struct HalvesArguments {
  void* d = nullptr;  // [tokens, N], rows ldd elements apart
  int ldd = 0;
  int tokens = 0;
  float const* row_scale = nullptr;
  float const* col_scale = nullptr;
  float const* bias = nullptr;
  int activation = 0;  // where kActivation is 5
};

// The four words of a thread, one of each of four blocks, become the four of one block: that of the thread's number in
// its quad.
CUTLASS_DEVICE void transpose_quad(uint32_t (&w)[4]) {
  bool const odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; i += 2) {
    uint32_t const got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = got;
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t const got = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = got;
  }
}

// kActivation is an index into ACTIVATIONS of emitters/core/epilogue.py; one past them, HalvesArguments has the index.
template <class CtaTile, class ElementOutput, class kActivation, bool kRowScale, bool kColScale, bool kBias>
struct Sm90DequantizeHalves : Sm90VectorNode<HalvesArguments, CtaTile, int(kColScale) + int(kBias)> {
  using ElementAux = ElementOutput;  // what CUTLASS divides the tile by, in place of D's type
  using Node = Sm90VectorNode<HalvesArguments, CtaTile, int(kColScale) + int(kBias)>;
  using Node::Node;

  template <int kThreads, class SmemVector, class RegVector, class Coord, class RowReg>
  struct ConsumerStoreCallbacks : Node::template VectorCallbacks<kThreads, SmemVector> {
    using Base = typename Node::template VectorCallbacks<kThreads, SmemVector>;
    using Base::n_size;
    using Base::params;
    using Base::thread_idx;

    int thread_m, thread_n;  // first row and column of this thread
    RegVector r_scale, r_bias;
    Coord coord;  // relative to this thread's first element
    RowReg r_row;

    CUTLASS_DEVICE
    ConsumerStoreCallbacks(Base const& base, int thread_m_, int thread_n_, RegVector r_vec_, Coord coord_,
                           RowReg r_row_)
        : Base(base), thread_m(thread_m_), thread_n(thread_n_), r_scale(r_vec_), r_bias(r_vec_), coord(coord_),
          r_row(r_row_) {}

    static CUTLASS_DEVICE int token_of(int row) { return row / 16 * 8 + row % 8; }

    CUTLASS_DEVICE void begin() {
      using namespace cute;
      // In CUTLASS only the producer warps wait for the previous kernel, which may have written these vectors: this
      // thread waits, too.
      cutlass::arch::wait_on_dependent_grids();
      typename Base::Words v;
      this->for_columns([&](int n, bool in, int i) {
        int slot = 0;
        if constexpr (kColScale) v[slot++][i] = in ? params.col_scale[n] : 0.f;
        if constexpr (kBias) v[slot++][i] = in ? params.bias[n] : 0.f;
      });
      if constexpr (kRowScale) {
        // The columns are modes of stride 0. Without these modes, one coordinate per distinct row is left.
        Tensor rows = filter_zeros(coord, r_row.stride());
        Tensor scales = filter_zeros(r_row);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(scales); ++i) {
          int token = token_of(thread_m + get<0>(rows(i)));
          scales(i) = token < params.tokens ? params.row_scale[token] : 0.f;
        }
      }
      this->store(v);
    }

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      if (epi_m != 0) return;  // the loop over subtiles runs along M first, and columns depend only on epi_n
      int slot = 0;
      if constexpr (kColScale) this->fetch(r_scale, slot++, epi_m, epi_n);
      if constexpr (kBias) this->fetch(r_bias, slot++, epi_m, epi_n);
    }

    CUTLASS_DEVICE float activate(float v) const {
      if constexpr (kActivation::value == 1) return relu(v);
      if constexpr (kActivation::value == 2) return gelu_erf(v);
      if constexpr (kActivation::value == 3) return gelu_tanh(v);
      if constexpr (kActivation::value == 4) return silu(v);
      if constexpr (kActivation::value == 5) {
        if (params.activation == 1) return relu(v);
        if (params.activation == 2) return gelu_erf(v);
        if (params.activation == 3) return gelu_tanh(v);
        if (params.activation == 4) return silu(v);
      }
      return v;
    }

    template <int kFragment>
    CUTLASS_DEVICE cutlass::Array<ElementOutput, kFragment> visit(cutlass::Array<int32_t, kFragment> const& unused,
                                                                  int epi_v, int epi_m, int epi_n,
                                                                  cutlass::Array<int32_t, kFragment> const& acc) {
      using namespace cute;
      static_assert(kFragment % 4 == 0, "whole blocks of eight columns");
      constexpr int kBlocks = kFragment / 4;
      using Pair = cutlass::Array<ElementOutput, 2>;
      Tensor row = r_row(_, _, _, epi_m, epi_n);
      Tensor at = coord(_, _, _, epi_m, epi_n);
      Pair y[kBlocks];
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        cutlass::Array<float, 2> pair;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2; ++j) {
          int const i = epi_v * kFragment + 4 * b + j;
          float v = static_cast<float>(256ll * acc[4 * b + j] + acc[4 * b + 2 + j]);
          if constexpr (kRowScale) v *= row(i);
          if constexpr (kColScale) v *= r_scale(i);
          if constexpr (kBias) v += r_bias(i);
          pair[j] = activate(v);
        }
        y[b] = cutlass::NumericArrayConverter<ElementOutput, float, 2>{}(pair);
      }
      auto* const d = static_cast<ElementOutput*>(params.d);
      auto const place = [&](int b) {  // token and column of a block's first element of this thread
        auto const c = at(epi_v * kFragment + 4 * b);
        return make_coord(token_of(thread_m + get<0>(c)), thread_n + get<1>(c));
      };
      if constexpr (sizeof(ElementOutput) == 2 && kBlocks % 4 == 0) {
        int const lane = thread_idx % 4;
        CUTLASS_PRAGMA_UNROLL
        for (int b = 0; b < kBlocks; b += 4) {
          uint32_t w[4];
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 4; ++j) w[j] = reinterpret_cast<uint32_t const&>(y[b + j]);
          transpose_quad(w);
          auto const c = place(b);
          int const n = get<1>(c) + 6 * lane;  // two columns a thread, before; eight, now
          if (get<0>(c) < params.tokens && n < n_size) {
            auto* const to = d + int64_t(get<0>(c)) * params.ldd + n;
            *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
          }
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int b = 0; b < kBlocks; ++b) {
          auto const c = place(b);
          if (get<0>(c) < params.tokens && get<1>(c) < n_size) {
            *reinterpret_cast<Pair*>(d + int64_t(get<0>(c)) * params.ldd + get<1>(c)) = y[b];
          }
        }
      }
      return cutlass::Array<ElementOutput, kFragment>{};
    }
  };

  template <bool kReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    constexpr int kThreads = decltype(size(args.tiled_copy))::value;

    Tensor s_vec = this->template partition<kReferenceSrc>(args, make_stride(_0{}, _1{}));
    Tensor r_vec = make_tensor_like<float>(take<0, 3>(s_vec));
    Tensor row_part = this->template partition<kReferenceSrc>(args, make_stride(_1{}, _0{}));
    Tensor r_row = make_tensor_like<float>(row_part);

    // The residue is the distance from this thread's first element to the corner of the accumulators.
    int const thread_m = int(M) - int(get<0>(args.residue_tCcD));
    int const thread_n = int(N) - int(get<1>(args.residue_tCcD));
    using Callbacks = ConsumerStoreCallbacks<kThreads, decltype(s_vec), decltype(r_vec), decltype(args.tCcD),
                                             decltype(r_row)>;
    return Callbacks({{}, this->params, this->shared, args.thread_idx, int(n) * Node::kTileN, int(N), s_vec}, thread_m,
                     thread_n, r_vec, args.tCcD, r_row);
  }
};

}  // namespace qcut
