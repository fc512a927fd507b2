// Gathers token embeddings of a codebook weight, decodes them, rotates them back, and adds position embeddings.
//
// A thread computes 16 neighbouring columns. Their indices are four pieces of two bytes of one unit (three bits: and
// four of the third bits). The CTA has the codebooks in shared memory, in float32. A group's threads are neighbours in
// a warp.
//
// Exactness: butterflies, products and sums are float32, each rounded, in the order of
// qcut.numerics.codebook.lookup.look_up_rows; results are equal bitwise. As eager modules do, a row is rounded to T before a
// position's row is added, and the sum is rounded.
#pragma once

#include <qcut/codebook/rotate.cuh>
#include <qcut/decoder/embed.cuh>

namespace qcut {

// Operands of a pass except norms and signs: its first unit of the first tile of 16 rows, bytes from a tile to the
// next, and the codebook, floats or pairs of them.
struct CodebookPass {
  const char* units;
  const float* codebook;
  long long tile_bytes;
};

// The indices of columns 16 * chunk to 16 * chunk + 15 of a row of a unit. Word t has those of columns 2t and 2t + 1 in
// its lowest byte, and those of 2t + 8 and 2t + 9 in the next.
__device__ __forceinline__ void load_row_indices(uint32_t (&w)[4], const char* unit, int row, int chunk, int bits) {
  const auto piece = [&](int at) { return static_cast<uint32_t>(*reinterpret_cast<const unsigned short*>(unit + at)); };
  const int lane = row % 8 * 4, upper = row / 8 * 2;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    if (bits == 4) {
      w[t] = piece(chunk / 4 * 512 + 16 * (lane + t) + chunk % 4 * 4 + upper);
    } else {
      w[t] = piece(16 * (lane + t) + chunk / 2 * 4 + upper) >> (2 * (chunk % 2)) & 0x3333u;
      if (bits == 3) w[t] |= (piece(512 + 8 * (lane + t) + chunk / 4 * 4 + upper) >> chunk % 4 & 0x1111u) << 2;
    }
  }
}

// The kernel: y [rows, k] = T(the weight's rows ids), plus place_table[places] with kPlaces. Of the weight's passes,
// with indices of kBits bits, the second is added to the first. Groups of kGroup columns are rotated, or, where kGroup is
// 0, those of `group` columns are not. `norms` are [count, passes * groups]; `signs` are [passes, k_padded / 32]. An
// index beyond a table reads the table's nearest row. k is a multiple of 32, kGroup divides k, and rows of the table of
// positions start at multiples of 16 bytes.
template <class T, class Norm, int kGroup, bool kPairs, bool kPlaces, int kThreads, int... kBits>
__device__ __forceinline__ void embed_codebook(const long long* ids, const CodebookPass (&passes)[sizeof...(kBits)],
                                               const Norm* norms, const uint32_t* signs, float factor,
                                               const int* places, const T* place_table, T* y, long long place_stride,
                                               int count, int place_count, int rows, int k, int k_padded, int group) {
  constexpr int kPasses = sizeof...(kBits), kSize = Vector<T>::kSize;
  constexpr int bits[] = {kBits...};
  constexpr int kEntries = kPairs ? 512 : 16;
  constexpr int kEach = (kEntries + kThreads - 1) / kThreads;
  __shared__ __align__(8) float books[kPasses][kEntries];
  const unsigned chunks = k / kLaneColumns;
  const unsigned item = blockIdx.x * kThreads + threadIdx.x;
  const bool live = item / chunks < static_cast<unsigned>(rows);  // others take part in barriers and shuffles
  const int row = live ? item / chunks : rows - 1, col = item % chunks * kLaneColumns;
  const int width = kGroup > 0 ? kGroup : group, groups = (k + width - 1) / width, own_group = col / width;
  launch_dependents();
  wait_for_dependencies();

  const long long last = count - 1, id = ids[row];
  const long long at = id < 0 ? 0 : id > last ? last : id;
  float values[kPasses][kEach];
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int entry = i * kThreads + threadIdx.x;
      values[p][i] = entry < (kPairs ? kEntries : 1 << bits[p]) ? passes[p].codebook[entry] : 0.0f;
    }
  }
  uint32_t indices[kPasses][4], flips[kPasses];
  float scales[kPasses];
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
    const int bytes = kUnitRows * kUnitColumns * bits[p] / 8;
    const char* unit = passes[p].units + at / kUnitRows * passes[p].tile_bytes + col / kUnitColumns * bytes;
    load_row_indices(indices[p], unit, at % kUnitRows, col % kUnitColumns / kLaneColumns, bits[p]);
    scales[p] = to_float(norms[at * kPasses * groups + p * groups + own_group]) * factor;
    flips[p] = kGroup ? signs[(p * k_padded + col) / 32] >> col % 32 : 0u;
  }
  // The codebook is waited for last, with all other loads in flight.
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int entry = i * kThreads + threadIdx.x;
      if (entry < kEntries) books[p][entry] = values[p][i];
    }
  }
  __syncthreads();

  float f[kLaneColumns];
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
    float r[kLaneColumns];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t byte = indices[p][i % 4] >> (8 * (i / 4)) & 0xffu;
      if constexpr (kPairs) {
        const float2 pair = reinterpret_cast<const float2*>(books[p])[byte];
        r[2 * i] = pair.x, r[2 * i + 1] = pair.y;
      } else {
        r[2 * i] = books[p][byte & 15], r[2 * i + 1] = books[p][byte >> 4];
      }
    }
    if constexpr (kGroup > 0) {
      butterflies<kGroup, 1>(r, kGroup, threadIdx.x, nullptr);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        r[i] = __uint_as_float(__float_as_uint(r[i] * factor) ^ (flips[p] << (31 - i) & 0x80000000u));
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) f[i] = p ? f[i] + r[i] * scales[p] : r[i] * scales[p];
  }
  if (!live) return;

  T* const to = y + static_cast<long long>(row) * k;
  [[maybe_unused]] const T* added = nullptr;
  if constexpr (kPlaces) added = place_table + min(max(places[row], 0), place_count - 1) * place_stride;
#pragma unroll
  for (int first = 0; first < kLaneColumns; first += kSize) {
    float part[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) part[i] = f[first + i];
    if constexpr (kPlaces) {
      float place[kSize];
      load_floats<T, kSize, true>(place, added, col + first, k);
#pragma unroll
      for (int i = 0; i < kSize; ++i) part[i] = to_float(from_float<T>(part[i])) + place[i];
    }
    store_vector<T, true>(to, col + first, col + first + kSize, part);
  }
}

}  // namespace qcut
