// Routes to experts with codebook weights, on the skeleton of stream.cuh. Units and products are those of
// stream/codebook.cuh, as is their exactness.
#pragma once

#include <qcut/experts/stream.cuh>

namespace qcut {

// A warp's tokens, and of weights with offsets their sums.
template <class T, class Tile, int kSlots, bool kOffsets>
struct ExpertTokens : TokenFragments<T, Tile> {
  TokenSums<T, kSlots, Tile::kTokenTiles, kSumsTokens<kSlots, kOffsets>> sums[Tile::kUnits];

  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) sums[u].load(this->b[u]);
  }
  template <class Product, class Acc, class Unit>
  __device__ __forceinline__ void multiply(const Product& product, Acc (&sum)[Tile::kTokenTiles][4], const Unit& unit,
                                           const RowFold<T>& fold, int u) const {
    product.add(sum, unit, fold, this->b[u], sums[u]);
  }
};

template <class T_, int kBits, int kSlots, bool kOffsets, class Tile, class B>
struct CodebookForm {
  using T = T_;
  static constexpr bool kTable = !kIsInt8<T> || B::kPairs;
  using Unit = WeightUnit<kBits, kSlots, kOffsets>;
  using Fold = RowFold<T>;
  using Tokens = ExpertTokens<T, Tile, kSlots, kOffsets>;
  using Product = UnitProduct<T, kBits, typename Either<B::kPairs, PairValues<PairTable>, TableBook>::Type>;
  const char* x;
  const char* units;
  const char* norms;
  const float* fold;
  const B& book;

  struct Walk {
    const CodebookForm& form;
    int of_expert, units_k, k0, rows = 0;  // tiles of 16 rows: of an expert; of all experts, that is loaded next
    const char* unit = nullptr;
    const char* unit_norms = nullptr;

    __device__ __forceinline__ Walk(const CodebookForm& form, int n, int units_k, int k0)
        : form(form), of_expert((n + 63) / 64 * 4), units_k(units_k), k0(k0) {}
    __device__ __forceinline__ void go(int expert, int row) {
      const int lane = threadIdx.x % 32;
      rows = expert * of_expert + row;
      const long long index = static_cast<long long>(rows) * units_k + k0;
      unit = form.units + index * kUnitBytes<kBits> + 16 * lane;
      unit_norms = form.norms + index * Unit::kNormBytes + lane / 4 * Unit::Norms::kLaneBytes;
    }
    __device__ __forceinline__ void load(Unit& loaded, int u, bool wanted) const {
      loaded.load_if(unit + u * kUnitBytes<kBits>, unit_norms + u * Unit::kNormBytes, wanted);
    }
    __device__ __forceinline__ void next(Fold& of_rows, bool wanted) {
      of_rows.load_if(form.fold, rows, wanted);
      ++rows;
      unit += units_k * kUnitBytes<kBits>;
      unit_norms += units_k * Unit::kNormBytes;
    }
  };

  __device__ __forceinline__ void fill(char* shared) const {
    if constexpr (kTable) fill_pair_table<Tile::kWarps>(shared, book);
  }
  __device__ __forceinline__ Product product(const char* shared) const { return Product(book, shared); }
  __device__ __forceinline__ void stage(uint32_t region, int source, int there, int rows, int first, int units_k) const {
    stage_routes<T, Tile>(x, region, source, there, rows, first, units_k);
  }
};

template <class T, int kBits, int kSlots, bool kOffsets, class Tile, class E, bool kEarly, class B>
__device__ __forceinline__ void codebook_experts(const char* x, const char* units, const char* norms, const float* fold,
                                                 typename E::Out* d, int m, int n, int units_k, int ldd, const B& book,
                                                 const typename E::Args& args, const ExpertRows& rows) {
  const CodebookForm<T, kBits, kSlots, kOffsets, Tile, B> form{x, units, norms, fold, book};
  multiply_experts<CodebookForm<T, kBits, kSlots, kOffsets, Tile, B>, Tile, E, kEarly>(form, d, m, n, units_k, ldd, args,
                                                                                      rows);
}

}  // namespace qcut
