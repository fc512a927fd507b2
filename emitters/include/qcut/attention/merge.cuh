// The last step of decode attention: combines the warps' maxima, sums of weights and weighted values into results.
//
// The warps of a CTA are combined in shared memory. Parts of the context, which are CTAs along x, are combined in the
// shared memory of their cluster, where each CTA adds up a share of the columns; without a cluster, they are combined
// in a workspace by the CTA that finishes last.
//
// Exactness: float32 sums in a fixed order.
//
// Source: PTX ISA 8.x, "atom" (.acq_rel); Dao et al., "Flash-Decoding" (2023).
#pragma once

#include <qcut/core/barrier.cuh>
#include <qcut/core/mma.cuh>
#include <qcut/core/rotation.cuh>
#include <qcut/attention/softmax.cuh>
#include <qcut/decoder/nibbles.cuh>

namespace qcut {

// Counts up to `last`, then starts again at 0, and returns the count before. The CTA's memory accesses before its
// barrier are visible to the CTAs that count later.
__device__ __forceinline__ unsigned count_up(unsigned* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}

// Sinks of a CTA's queries; empty without.
template <bool kSinks, int kGroup>
struct SinkRoom {};
template <int kGroup>
struct SinkRoom<true, kGroup> {
  float sinks[kGroup];
};

// Where rotated results of a CTA go: the row of its first token, the rows of the launch, and the column of the CTA's
// first query in a row of all heads.
struct ResultPlace {
  int row, rows, column;
};

// T is the type of results. With kTurned, values are rotated (nibbles.cuh) and results are rotated back. A
// kernel calls begin() first and run() last. With kSinks, it calls fetch_sinks() early, and await_sinks() before the
// barrier that precedes run(): sinks are added where results are divided, once. With kTokens above 1, the queries are
// the same heads of so many tokens, a token's side by side. A Rotation (codebook/rotate_rows.cuh, vectors of 4 columns)
// rotates results, rounded to T, into blocks of tokens; a CTA's queries of a token are whole groups then.
template <class T, int kHead, int kGroup, int kWarps, int kCluster, bool kTurned = false, bool kSinks = false,
          int kTokens = 1, class Rotation = NotRotated>
struct AttentionMerge {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRecord = kHead + 4;                            // weighted values, maximum, sum
  static constexpr int kVectors = kGroup * kHead / 4;                  // vectors of a CTA's records
  static constexpr bool kRotates = Rotation::kRotates;
  static constexpr int kSide = kRotates ? 32 : 1;  // neighbouring vectors that a CTA of the cluster adds up
  static constexpr int kSides = (kVectors + kSide - 1) / kSide;
  static constexpr int kShare = (kSides + kCluster - 1) / kCluster * kSide;  // vectors of a CTA of the cluster
  static constexpr int kMaxParts = kCluster > 1 ? kCluster : 64;
  static constexpr int kHeads = kGroup / kTokens;  // queries of a token
  static_assert(kHead % 4 == 0, "heads are whole vectors");
  static_assert(kGroup % kTokens == 0, "tokens have the same heads");
  static_assert(!kRotates || !kTurned, "lanes that rotate values back have other columns");

  struct Shared : SinkRoom<kSinks, kGroup> {
    alignas(16) float records[kWarps][kGroup][kRecord];
    alignas(16) float4 received[kCluster > 1 ? kCluster * kShare : 1];
    float2 parts[kMaxParts][kGroup];  // maximum and sum
    alignas(8) unsigned long long barrier;  // counts the bytes that other CTAs send
    bool last;
  };

  struct Combined {
    float peak, weights;
    float4 value;
  };

  // Adds up `count` states in order, for four columns of each of kWide queries. `part(i, j)` is the maximum and the sum
  // of state i of the j-th one, `value(i, j)` its weighted values; those of kAtOnce states are loaded at once.
  template <int kAtOnce, int kWide, class Part, class Value>
  static __device__ __forceinline__ void combine(Combined (&sums)[kWide], int count, const Part& part,
                                                 const Value& value) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) sums[j] = {kNoScore, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) sums[j].peak = fmaxf(sums[j].peak, part(i, j).x);
    }
#pragma unroll kAtOnce
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        Combined& sum = sums[j];
        const float2 state = part(i, j);
        const float4 v = value(i, j);
        const float weight = power(state.x - sum.peak);
        sum.weights = fmaf(weight, state.y, sum.weights);
        sum.value.x = fmaf(weight, v.x, sum.value.x);
        sum.value.y = fmaf(weight, v.y, sum.value.y);
        sum.value.z = fmaf(weight, v.z, sum.value.z);
        sum.value.w = fmaf(weight, v.w, sum.value.w);
      }
    }
  }

  // The same of one query.
  template <class Part, class Value>
  static __device__ __forceinline__ Combined combined(int count, const Part& part, const Value& value) {
    Combined sums[1];
    combine<8>(sums, count, [&](int i, int) { return part(i); }, [&](int i, int) { return value(i); });
    return sums[0];
  }

  // Starts copying the sinks of the CTA's `mine` queries; `sinks` are of the first token's.
  static __device__ __forceinline__ void fetch_sinks(Shared& shared, const float* sinks, int mine) {
    if constexpr (kSinks) {
      const int query = threadIdx.x;
      const int head = kTokens > 1 ? query % kHeads : query;
      if (query < mine) copy_async<4>(shared_address(&shared.sinks[query]), sinks + head, false);
    }
  }
  static __device__ __forceinline__ void await_sinks() {
    if constexpr (kSinks) copy_async_wait_all();
  }

  // Adds the sink of a query to a sum of all its weights.
  static __device__ __forceinline__ void add_sink(Combined& sum, [[maybe_unused]] const Shared& shared,
                                                  [[maybe_unused]] int query) {
    if constexpr (kSinks) sum.weights += sink_weight(shared.sinks[query], sum.peak);
  }

  // Four columns of the result.
  static __device__ __forceinline__ uint2 divided(const Combined& sum) {
    const float4& v = sum.value;
    return make_uint2(pack_pair<T>(__fdiv_rn(v.x, sum.weights), __fdiv_rn(v.y, sum.weights)),
                      pack_pair<T>(__fdiv_rn(v.z, sum.weights), __fdiv_rn(v.w, sum.weights)));
  }

  // Stores four columns and returns the bits of their largest magnitude.
  static __device__ __forceinline__ uint32_t store(T* out, const Combined& sum) {
    const uint2 both = divided(sum);
    *reinterpret_cast<uint2*>(out) = both;
    return Vector<T>{both.x, both.y, 0, 0}.abs_max();
  }

  // The CTA of the cluster that adds up a vector, and the vector's place among those of this CTA.
  static __device__ __forceinline__ int rank_of(int v) { return v / kSide % kCluster; }
  static __device__ __forceinline__ int place_of(int v) { return v / kSide / kCluster * kSide + v % kSide; }
  // The i-th vector of a CTA of the cluster.
  static __device__ __forceinline__ int vector_of(int i, int rank) {
    return (i / kSide * kCluster + rank) * kSide + i % kSide;
  }
  // Whether a thread takes part for a vector: with a rotation, whole warps do.
  static __device__ __forceinline__ bool takes_part(int v, int vectors) { return v - v % kSide < vectors; }

  // Rotates the columns of a query back: a lane has four columns of each of kChunks times 4 * kLanes. All lanes call.
  template <int kLanes, int kChunks>
  static __device__ __forceinline__ void turn_back(Combined (&sums)[kChunks], int lane) {
    const float size = turned_size<kHead>();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float4& v = sums[c].value;
      butterfly(v.x, v.y), butterfly(v.z, v.w);
      butterfly(v.x, v.z), butterfly(v.y, v.w);
#pragma unroll
      for (int offset = 1; offset < kLanes; offset *= 2) {
        v.x = butterfly(v.x, offset), v.y = butterfly(v.y, offset);
        v.z = butterfly(v.z, offset), v.w = butterfly(v.w, offset);
      }
    }
    static_assert(kChunks <= 2, "heads of up to 256 columns");
    if constexpr (kChunks == 2) {
      float4 &low = sums[0].value, &high = sums[1].value;
      butterfly(low.x, high.x), butterfly(low.y, high.y), butterfly(low.z, high.z), butterfly(low.w, high.w);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float4& v = sums[c].value;
      const int column = 4 * (lane + c * kLanes);
      v.x *= turned_sign(column) * size, v.y *= turned_sign(column + 1) * size;
      v.z *= turned_sign(column + 2) * size, v.w *= turned_sign(column + 3) * size;
    }
  }

  // Calls `use(v, sum)` for each of a thread's vectors of the CTA's queries; `sum(v)` makes one.
  template <class Sum, class Use>
  static __device__ __forceinline__ void for_vectors(int mine, const Sum& sum, const Use& use) {
    if constexpr (kTurned) {
      constexpr int kLanes = kHead / 4 < 32 ? kHead / 4 : 32, kChunks = kHead / 4 / kLanes;
      const int lane = threadIdx.x % kLanes;
      for (int first = threadIdx.x / 32 * 32; first < mine * kLanes; first += kThreads) {
        const int query = (first + static_cast<int>(threadIdx.x % 32)) / kLanes;
        Combined sums[kChunks] = {};
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (query < mine) sums[c] = sum(query * (kHead / 4) + lane + c * kLanes);
        }
        turn_back<kLanes>(sums, lane);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (query < mine) use(query * (kHead / 4) + lane + c * kLanes, sums[c]);
        }
      }
    } else {
      for (int v = threadIdx.x; v < mine * (kHead / 4); v += kThreads) use(v, sum(v));
    }
  }

  // The column of the result in which a vector begins; beyond the CTA's vectors, the first column that is none.
  static __device__ __forceinline__ int column_of(const Rotation& rotation, const ResultPlace& to, int v, int vectors) {
    constexpr int kOfToken = kHeads * (kHead / 4);
    return v < vectors ? to.column + 4 * (kTokens > 1 ? v % kOfToken : v) : rotation.k_padded;
  }

  // Comes first: all CTAs of a cluster must have started before one of them sends. `mine` counts the CTA's queries.
  static __device__ __forceinline__ void begin(Shared& shared, int mine) {
    if constexpr (kCluster > 1) {
      if (threadIdx.x == 0) {
        const int rank = static_cast<int>(blockIdx.x), vectors = mine * (kHead / 4);
        const int sides = (vectors + kSide - 1) / kSide;
        int share = (sides + kCluster - 1 - rank) / kCluster * kSide;
        if (kRotates && rank_of(vectors - 1) == rank) share -= sides * kSide - vectors;
        barrier_init(shared_address(&shared.barrier), 1);
        barrier_init_fence();
        barrier_expect(shared_address(&shared.barrier), kCluster * (16 * share + 8 * mine));
      }
      cluster_arrive_relaxed();
    }
  }

  // Comes after a barrier that makes the records of all warps visible to the CTA. `out` is the result of the CTA's
  // first query; four columns lie at a multiple of 8 bytes. The workspace holds a record for every part and query.
  // Counters, one for each CTA of a part, are 0 before the first launch and after every launch. A cluster uses neither.
  // If absmax is not null, the element of each token is raised to the largest magnitude that the CTA stores of it.
  // Tokens' results are `stride` elements apart. With a rotation `out` is the first block of all tokens, and absmax is
  // not raised.
  static __device__ __forceinline__ void run(Shared& shared, T* out, int mine, float* workspace, unsigned* counters,
                                             float* absmax = nullptr, long long stride = 0, Rotation rotation = {},
                                             const ResultPlace& to = {}) {
    constexpr int kOfToken = kHeads * (kHead / 4);  // vectors
    const int vectors = mine * (kHead / 4);
    uint32_t peak[kTokens] = {};
    const auto note = [&] {
      if (absmax == nullptr) return;
      const auto raise = [&](int i) {
        const uint32_t largest = warp_max(peak[i]);
        if (threadIdx.x % 32 == 0 && largest > 0) atomicMax(reinterpret_cast<unsigned*>(absmax + i), largest);
      };
      raise(0);
#pragma unroll
      for (int i = 1; i < kTokens; ++i) raise(i);
    };
    // Loads what a rotation reads, early.
    [[maybe_unused]] const auto prepare = [&](int v) {
      if constexpr (kRotates) rotation.begin(column_of(rotation, to, v, vectors), 0);
    };
    const auto keep = [&](int v, const Combined& sum) {
      if constexpr (kRotates) {
        const uint2 both = divided(sum);
        float result[Vector<T>::kSize], columns[1][4];
        Vector<T>{both.x, both.y, 0, 0}.to_float(result);
#pragma unroll
        for (int j = 0; j < 4; ++j) columns[0][j] = result[j];
        const int token = kTokens > 1 ? v / kOfToken : 0;
        rotation.store(columns, to.row + token, to.rows, column_of(rotation, to, v, vectors), 0, out, nullptr);
      } else if constexpr (kTokens == 1) {
        peak[0] = max(peak[0], store(out + 4 * v, sum));
      } else {
        const uint32_t largest = store(out + v / kOfToken * stride + 4 * (v % kOfToken), sum);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {  // an index that is known keeps them in registers
          if (v / kOfToken == i) peak[i] = max(peak[i], largest);
        }
      }
    };
    const int part = blockIdx.x, parts = kCluster > 1 ? kCluster : gridDim.x;
    const auto of_warps = [&](int v) {
      const int query = v / (kHead / 4), column = v % (kHead / 4) * 4;
      return combined(
          kWarps, [&](int w) { return *reinterpret_cast<const float2*>(&shared.records[w][query][kHead]); },
          [&](int w) { return *reinterpret_cast<const float4*>(&shared.records[w][query][column]); });
    };
    // Threads beyond the CTA's vectors take part in a rotation, with the last one.
    const auto within = [&](int v) { return kRotates ? min(v, vectors - 1) : v; };
    const auto finish = [&](int v, Combined sum) {
      add_sink(sum, shared, within(v) / (kHead / 4));
      keep(v, sum);
    };
    if constexpr (kCluster > 1) {
      const uint32_t barrier = shared_address(&shared.barrier);
      cluster_wait();
      for_vectors(mine, of_warps, [&](int v, const Combined& sum) {
        store_async(shared_address(&shared.received[part * kShare + place_of(v)]), barrier, rank_of(v), sum.value);
        if (v % (kHead / 4) != 0) return;
        const uint32_t to = shared_address(&shared.parts[part][v / (kHead / 4)]);
#pragma unroll
        for (int rank = 0; rank < kCluster; ++rank) store_async(to, barrier, rank, make_float2(sum.peak, sum.weights));
      });
      prepare(vector_of(threadIdx.x, part));
      barrier_wait_cluster(barrier);
      for (int i = threadIdx.x; takes_part(vector_of(i, part), vectors); i += kThreads) {
        const int v = vector_of(i, part);
        if (i >= kThreads) prepare(v);
        const int query = within(v) / (kHead / 4);
        finish(v, combined(
                      kCluster, [&](int p) { return shared.parts[p][query]; },
                      [&](int p) { return shared.received[p * kShare + i]; }));
      }
      note();
      return;
    }
    if (parts == 1) {
      if constexpr (kRotates) {
        for (int v = threadIdx.x; takes_part(v, vectors); v += kThreads) {
          prepare(v);
          finish(v, of_warps(within(v)));
        }
      } else {
        for_vectors(mine, of_warps, finish);
      }
      note();
      return;
    }
    const long long place = blockIdx.z * static_cast<long long>(gridDim.y) + blockIdx.y;
    float* const records = workspace + place * parts * (kGroup * kRecord);
    for_vectors(mine, of_warps, [&](int v, const Combined& sum) {
      const int query = v / (kHead / 4), column = v % (kHead / 4) * 4;
      float* const to = records + (part * kGroup + query) * kRecord;
      *reinterpret_cast<float4*>(to + column) = sum.value;
      if (column == 0) *reinterpret_cast<float2*>(to + kHead) = make_float2(sum.peak, sum.weights);
    });
    __syncthreads();
    if (threadIdx.x == 0) shared.last = count_up(counters + place, parts - 1) == static_cast<unsigned>(parts - 1);
    __syncthreads();
    if (!shared.last) return;
    // These loads skip the L1, which is not coherent with stores of other multiprocessors.
    for (int i = threadIdx.x; i < parts * mine; i += kThreads) {
      const float* const from = records + (i / mine * kGroup + i % mine) * kRecord + kHead;
      shared.parts[i / mine][i % mine] = __ldcg(reinterpret_cast<const float2*>(from));
    }
    __syncthreads();
    constexpr int kWide = kVectors > kThreads ? 2 : 1;  // vectors of a thread whose loads are in flight at once
    for (int first = threadIdx.x; takes_part(first, vectors); first += kWide * kThreads) {
      Combined sums[kWide];
      const auto vector = [&](int j) { return min(first + j * kThreads, vectors - 1); };
      combine<16>(
          sums, parts, [&](int p, int j) { return shared.parts[p][vector(j) / (kHead / 4)]; },
          [&](int p, int j) {
            const int query = vector(j) / (kHead / 4), column = vector(j) % (kHead / 4) * 4;
            return __ldcg(reinterpret_cast<const float4*>(records + (p * kGroup + query) * kRecord + column));
          });
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        const int v = first + j * kThreads;
        if (!takes_part(v, vectors)) continue;
        prepare(v);
        finish(v, sums[j]);
      }
    }
    note();
  }
};

}  // namespace qcut
