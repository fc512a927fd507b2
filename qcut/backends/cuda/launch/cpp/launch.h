// What Python planned, and its launch: keys, plans and their table, arguments, the driver's call.
//
// qcut/backends/cuda/launch/native.py mirrors Op, Flags, Key, Launch and Plan.

#pragma once

#include <c10/core/DeviceType.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <type_traits>
#include <unordered_map>

namespace qcut {

// ── the driver API's part of a launch ────────────────────────────────────────────────────────────────────────────

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  alignas(8) int value;
  char rest[60];
};
constexpr int kProgrammaticStreamSerialization = 6;

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], smem_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

using LaunchKernel = int(LaunchConfig const*, void* function, void** arguments, void** extra);  // cuLaunchKernelEx
using HostLauncher = int(void const* arguments, void* function, void* stream, int flags);       // qcut_launch
using CurrentStream = int(std::int32_t device, void** stream);

// ── what Python inserts ──────────────────────────────────────────────────────────────────────────────────────────

enum Op : std::int32_t {
  kDynamic,
  kStatic,
  kWeightOnly,
  kInt16,
  kRotate,
  kGemm,
  kGemv,
  kQuantizeRotated,
  kInt8,
  kRotatedToken
};

enum Flags : std::int32_t {
  kAligned = 1,    // rows of tokens start at multiples of 16 bytes
  kEarlyRead = 2,  // weights are ready: no kernel queued just before writes them
  kBias = 4,
  kResidual = 8,
  kRowNorm = 16,
  kOffsets = 32,
  kPairs = 64,
  kFold = 128,
  kE4M3 = 256,  // weights, which are int8 otherwise
  kUnitScales = 512,
  kMirrored = 1024,  // codebooks, see is_mirrored
};

// A call at one bucket of rows. Plans hold no address: what a call's parameters must be is the same for all plans, and
// each operator compares it. Fields that an operator has no use for are zero.
struct Key {
  std::int64_t n{}, k{}, rows{};  // of a rotation n is the columns of a group, of a codebook's product k is units;
                                  // slots are the columns of a group of a rotated token
  char name[16]{};                // the activation, or the kind of the rotation
  std::int32_t op{}, dtype{}, out{}, device{}, flags{}, passes{}, bits{}, slots{};

  bool operator==(Key const& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(std::has_unique_object_representations_v<Key>, "compared as bytes");

struct Hash {
  // Layers differ in n and k; one layer's keys differ in operator and rows, and seldom in more.
  std::size_t operator()(Key const& key) const {
    std::uint64_t hash = 0;
    for (std::int64_t const part : {key.n, key.k, key.rows, std::int64_t{key.flags} << 8 | key.op}) {
      hash = (hash ^ static_cast<std::uint64_t>(part)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct Launch {
  void* function;      // CUfunction
  HostLauncher* host;  // computes its own grid from the arguments and the tail; null for a raw kernel
  std::int32_t grid_rows, grid_x, grid_y, grid_z, grid_most;  // a raw kernel's CTAs, as qcut's Grid has them
  std::int32_t block, smem_bytes, pdl;
  std::int32_t tail_count, tail[5];  // arguments after those of a call
};

struct Plan {
  Launch launches[2];  // in order
  std::int32_t count, row_multiple;
  std::int64_t k_padded;  // columns of prepared tokens, of a rotation those of a pass

  bool prepares() const { return count == 2; }  // whether one kernel makes what the other reads
  Launch const& first() const { return launches[0]; }
  Launch const& last() const { return launches[count - 1]; }
};

static_assert(sizeof(Key) == 72 && sizeof(Launch) == 72 && sizeof(Plan) == 160, "as qcut/backends/cuda/launch/native.py has them");

class Table {
 public:
  bool find(Key const& key, Plan& plan) const {
    std::shared_lock lock(mutex_);
    auto const found = plans_.find(key);
    if (found == plans_.end()) return false;
    plan = found->second;
    return true;
  }
  void insert(Key const& key, Plan const& plan) {
    std::unique_lock lock(mutex_);
    plans_.insert_or_assign(key, plan);
  }
  void clear(std::int32_t op) {
    std::unique_lock lock(mutex_);
    std::erase_if(plans_, [op](auto const& entry) { return entry.first.op == op; });
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, Plan, Hash> plans_;
};

struct Runtime {
  LaunchKernel* launch_kernel;
  CurrentStream* current_stream;
  c10::DeviceType device;
};

// Both outlive main: threads may still be calling.
inline Table& table = *new Table;
inline Runtime const* runtime;
inline std::atomic<std::uint64_t> hits;
inline std::atomic<std::int64_t> chosen;  // blocks of an execution path that Python must look up

// ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────

// A kernel's arguments in C's natural alignment. Padding is zero: host launchers compare blocks as bytes.
class Arguments {
 public:
  template <class... T>
  explicit Arguments(T... values) {
    add(values...);
  }
  template <class... T>
  void add(T... values) {
    (append(values), ...);
  }
  // Adds the addresses that are not null.
  template <class... T>
  void add_present(T const*... tensors) {
    ((tensors != nullptr ? append(tensors) : void()), ...);
  }
  void const* block() const { return bytes_; }
  void** addresses() { return addresses_; }

 private:
  template <class T>
  void append(T value) {
    static_assert(std::is_pointer_v<T> || std::is_arithmetic_v<T>);
    size_ = (size_ + alignof(T) - 1) / alignof(T) * alignof(T);
    addresses_[count_++] = std::memcpy(bytes_ + size_, &value, sizeof value);
    size_ += sizeof value;
  }

  // The longest list is that of a product with a codebook of pairs: 64 words and 22 others.
  alignas(16) std::byte bytes_[448]{};
  void* addresses_[96];
  std::size_t size_ = 0, count_ = 0;
};

inline int launch(Launch const& plan, std::int32_t rows, Arguments& arguments, void* stream) {
  for (std::int32_t i = 0; i < plan.tail_count; ++i) arguments.add(plan.tail[i]);
  if (plan.host != nullptr) {
    arguments.add(static_cast<void*>(nullptr));  // workspace
    return plan.host(arguments.block(), plan.function, stream, plan.pdl);
  }
  std::int64_t const ctas = std::int64_t{(rows - 1) / plan.grid_rows + 1} * plan.grid_x;
  LaunchAttribute pdl{kProgrammaticStreamSerialization, 1, {}};
  LaunchConfig const config{
      {static_cast<unsigned>(std::min<std::int64_t>(ctas, plan.grid_most)), static_cast<unsigned>(plan.grid_y),
       static_cast<unsigned>(plan.grid_z)},
      {static_cast<unsigned>(plan.block), 1, 1},
      static_cast<unsigned>(plan.smem_bytes),
      stream,
      plan.pdl ? &pdl : nullptr,
      plan.pdl ? 1u : 0u};
  return runtime->launch_kernel(&config, plan.function, arguments.addresses(), nullptr);
}

constexpr std::int64_t kMaxInt = INT32_MAX;

// Rows up to which one plan serves: 1, 8, 16, 32, 64, then four steps an octave (qcut.dispatch.buckets.m_bucket).
constexpr std::int64_t bucket(std::int64_t m) {
  if (m <= 64) return m <= 1 ? 1 : m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64;
  std::int64_t const step = std::int64_t{1} << (std::bit_width(static_cast<std::uint64_t>(m - 1)) - 3);
  return (m + step - 1) / step * step;
}

}  // namespace qcut
