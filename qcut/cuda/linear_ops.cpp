// The hot path of qcut's linear operators: find what Python planned for a call, allocate, pack, launch.
//
// Anything out of the ordinary, errors included, is left to Python's kernel of the same operator, which is the next one
// in the dispatcher's order. qcut/cuda/native.py compiles this file against torch's headers and mirrors Key, Launch and Plan.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/DimVector.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <type_traits>
#include <unordered_map>

#define QCUT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

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

enum Op : std::int32_t { kDynamic, kStatic, kWeightOnly, kInt16 };

// A layer at one bucket of rows. Plans hold no address: what a call's parameters must be is the same for all plans and
// is compared (is_vector, and the weight in run).
enum Flags : std::int32_t { kAligned = 1, kBias = 2, kConstants = 4 };

struct Key {
  std::int64_t n, k, rows;
  char activation[16];
  std::int32_t op, dtype, device, flags;

  bool operator==(Key const& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(std::has_unique_object_representations_v<Key>, "compared as bytes");

struct Hash {
  // Layers differ in n and k; one layer's keys differ in rows, and seldom in more.
  std::size_t operator()(Key const& key) const {
    std::uint64_t hash = 0;
    for (std::int64_t const part : {key.n, key.k, key.rows, std::int64_t{key.flags}}) {
      hash = (hash ^ static_cast<std::uint64_t>(part)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct Launch {
  void* function;      // CUfunction
  HostLauncher* host;  // computes its own grid from the arguments and the tail; null for a raw kernel
  std::int32_t grid_rows, grid_x, grid_y;  // a raw kernel's CTAs: grid_x times ceil(rows / grid_rows), by grid_y
  std::int32_t block, smem_bytes, pdl;
  std::int32_t tail_count, tail[5];  // arguments after those of a call
};

struct Plan {
  Launch quantize, gemm;  // none to quantize where weights alone are int8
  std::int64_t k_padded, row_multiple;
};

static_assert(sizeof(Key) == 56 && sizeof(Launch) == 64 && sizeof(Plan) == 144, "as qcut/cuda/native.py has them");

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
  void clear() {
    std::unique_lock lock(mutex_);
    plans_.clear();
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
Table& table = *new Table;
Runtime const* runtime;
std::atomic<std::uint64_t> hits;
std::atomic<std::int64_t> chosen;  // blocks of an execution path that Python must look up

// ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────

// A kernel's arguments in C's natural alignment. Padding is zero: host launchers compare blocks as bytes.
class Arguments {
 public:
  template <class... T>
  explicit Arguments(T... values) {
    (add(values), ...);
  }
  template <class T>
  void add(T value) {
    static_assert(std::is_pointer_v<T> || std::is_arithmetic_v<T>);
    size_ = (size_ + alignof(T) - 1) / alignof(T) * alignof(T);
    addresses_[count_++] = std::memcpy(bytes_ + size_, &value, sizeof value);
    size_ += sizeof value;
  }
  void const* block() const { return bytes_; }
  void** addresses() { return addresses_; }

 private:
  alignas(16) std::byte bytes_[128]{};
  void* addresses_[24];
  std::size_t size_ = 0, count_ = 0;
};

int launch(Launch const& plan, std::int32_t rows, Arguments& arguments, void* stream) {
  for (std::int32_t i = 0; i < plan.tail_count; ++i) arguments.add(plan.tail[i]);
  if (plan.host != nullptr) {
    arguments.add(static_cast<void*>(nullptr));  // workspace
    return plan.host(arguments.block(), plan.function, stream, plan.pdl);
  }
  auto const ctas = static_cast<unsigned>((rows - 1) / plan.grid_rows + 1) * plan.grid_x;
  LaunchAttribute pdl{kProgrammaticStreamSerialization, 1, {}};
  LaunchConfig const config{{ctas, static_cast<unsigned>(plan.grid_y), 1},
                            {static_cast<unsigned>(plan.block), 1, 1},
                            static_cast<unsigned>(plan.smem_bytes),
                            stream,
                            plan.pdl ? &pdl : nullptr,
                            plan.pdl ? 1u : 0u};
  return runtime->launch_kernel(&config, plan.function, arguments.addresses(), nullptr);
}

// ── the operators ────────────────────────────────────────────────────────────────────────────────────────────────

constexpr std::int64_t kMaxInt = INT32_MAX;

// Rows up to which one plan serves: 1, 8, 16, 32, 64, then four steps an octave (qcut.cuda.plans.m_bucket).
constexpr std::int64_t bucket(std::int64_t m) {
  if (m <= 64) return m <= 1 ? 1 : m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64;
  std::int64_t const step = std::int64_t{1} << (std::bit_width(static_cast<std::uint64_t>(m - 1)) - 3);
  return (m + step - 1) / step * step;
}

void const* address(c10::IValue const& tensor) {
  return tensor.isNone() ? nullptr : tensor.toTensor().const_data_ptr();
}

template <class T>
std::uint64_t number(T const* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

// Whether a tensor is as plans take parameters: contiguous and aligned, of this type, on x's device.
bool is_dense(at::Tensor const& tensor, at::ScalarType type, c10::Device device) {
  return tensor.scalar_type() == type && tensor.device() == device && tensor.is_contiguous() &&
         (number(tensor.const_data_ptr()) & 15) == 0;
}

// Whether a parameter is absent, or such a vector of n elements.
bool is_vector(c10::IValue const& value, at::ScalarType type, c10::Device device, std::int64_t n) {
  if (value.isNone()) return true;
  at::Tensor const& vector = value.toTensor();
  return vector.dim() == 1 && vector.size(0) == n && is_dense(vector, type, device);
}

// Whether a backward pass may reach the call, which Python then serves.
bool wants_gradient(c10::IValue const* args, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (args[i].isTensor() && args[i].toTensor().requires_grad()) return c10::GradMode::is_enabled();
  }
  return false;
}

// Of ``x, qweight, scale[, colsum], bias[, x_scale, x_zero_point], activation, constants``.
template <Op op>
constexpr std::size_t kArguments = op == kStatic ? 9 : 6;

// The operator's result, or an undefined tensor where Python must serve the call.
template <Op op>
at::Tensor run(c10::IValue const* args) {
  if (chosen.load(std::memory_order_relaxed) != 0) return {};
  at::Tensor const &x = args[0].toTensor(), &qweight = args[1].toTensor();
  void const* const weight = qweight.const_data_ptr();
  void const* const scale = address(args[2]);
  void const* const colsum = op == kStatic ? address(args[3]) : nullptr;
  void const* const bias = address(args[op == kStatic ? 4 : 3]);
  std::string const& activation = args[kArguments<op> - 2].toStringRef();
  bool const constants = args[kArguments<op> - 1].toBool();

  std::int64_t const dim = x.dim();
  if (dim == 0 || x.numel() == 0 || qweight.dim() != 2 || activation.size() >= sizeof(Key::activation)) return {};
  std::int64_t const n = qweight.size(0), k = x.size(-1), m = x.numel() / k;
  c10::Device const device = x.device();
  if (!is_dense(qweight, at::kChar, device) || !is_vector(args[2], at::kFloat, device, n)) return {};
  if (!is_vector(args[op == kStatic ? 4 : 3], at::kFloat, device, n)) return {};
  if (op == kStatic && !is_vector(args[3], at::kInt, device, n)) return {};
  if (wants_gradient(args, op == kStatic ? 5 : 4)) return {};
  std::int64_t stride = k;
  if (!x.is_contiguous()) {
    if (dim != 2 || x.stride(1) != 1) return {};
    stride = x.stride(0);
  }
  if (m > kMaxInt || stride > kMaxInt) return {};
  // A launch needs the device's context to be current.
  if (device.type() != runtime->device) return {};
  if (c10::impl::VirtualGuardImpl(device.type()).getDevice() != device) return {};

  auto const* const data = static_cast<char const*>(x.const_data_ptr());
  bool const aligned = ((number(data) | static_cast<std::uint64_t>(stride) * x.element_size()) & 15) == 0;
  auto const flags = (aligned ? kAligned : 0) | (bias != nullptr ? kBias : 0) | (constants ? kConstants : 0);
  Key key{n, k, bucket(m), {}, op, static_cast<std::int32_t>(x.scalar_type()), device.index(), flags};
  std::memcpy(key.activation, activation.data(), activation.size());
  Plan plan;
  if (!table.find(key, plan) || qweight.size(1) != plan.k_padded) return {};
  void* stream = nullptr;
  if (runtime->current_stream(device.index(), &stream) != 0) return {};

  auto const tokens = static_cast<std::int32_t>(m), columns = static_cast<std::int32_t>(n);
  auto const depth = static_cast<std::int32_t>(k), padded = static_cast<std::int32_t>(plan.k_padded);
  std::int64_t const rows = (m + plan.row_multiple - 1) / plan.row_multiple * plan.row_multiple;
  if (rows > kMaxInt) return {};
  auto const gemm_rows = static_cast<std::int32_t>(rows);
  constexpr bool kScaled = op == kDynamic || op == kInt16;  // each token
  c10::DataPtr scratch;  // int8 rows, and behind them the scales of tokens; back to the stream's pool on return
  void const* a = data;
  std::int32_t a_rows = gemm_rows, k_gemm = depth, lda = static_cast<std::int32_t>(stride), zero_point = 0;
  char const* row_scale = nullptr;
  if (plan.quantize.function != nullptr) {
    std::int64_t const scale_bytes = kScaled ? rows * std::int64_t{sizeof(float)} : 0;
    // Two rows for each token of int16, in whole blocks of eight tokens.
    std::int64_t const q_rows = op == kInt16 ? (rows + 7) / 8 * 16 : rows, q_bytes = plan.k_padded * q_rows;
    if (q_rows > kMaxInt) return {};
    a_rows = static_cast<std::int32_t>(q_rows);
    // Not a tensor: the allocator itself is spared the dispatcher's share of at::empty.
    scratch = c10::GetAllocator(device.type())->allocate(q_bytes + scale_bytes);
    auto* const q = static_cast<char*>(scratch.get());
    if constexpr (kScaled) row_scale = q + q_bytes;
    a = q;
    k_gemm = lda = padded;
    int status = 0;
    if constexpr (kScaled) {
      Arguments arguments(data, q, row_scale, stride, tokens, depth, padded);
      status = launch(plan.quantize, tokens, arguments, stream);
    } else if constexpr (op == kStatic) {
      double const x_scale = args[5].toDouble();
      std::int64_t const x_zero_point = args[6].toInt();
      if (!(x_scale > 0 && x_scale <= FLT_MAX) || x_zero_point < -128 || x_zero_point > 127) return {};
      zero_point = static_cast<std::int32_t>(x_zero_point);
      Arguments arguments(data, q, stride, tokens, depth, padded, static_cast<float>(x_scale), zero_point);
      status = launch(plan.quantize, tokens, arguments, stream);
    }
    if (status != 0) return {};
  }

  c10::DimVector shape(x.sizes());
  shape.back() = n;
  at::Tensor out = at::empty(rows == m ? c10::IntArrayRef(shape) : c10::IntArrayRef{rows, n}, x.options());
  Arguments arguments(a, weight, out.mutable_data_ptr(), a_rows, columns, k_gemm, lda, padded, columns);
  if constexpr (op == kInt16) arguments.add(gemm_rows);
  if constexpr (op == kStatic) {
    arguments.add(zero_point);
    arguments.add(colsum);
  }
  if (row_scale != nullptr) arguments.add(row_scale);
  arguments.add(scale);
  if (bias != nullptr) arguments.add(bias);
  if (launch(plan.gemm, gemm_rows, arguments, stream) != 0) return {};
  // Rows beyond x's lie behind the result in its memory.
  if (rows != m) out.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  hits.fetch_add(1, std::memory_order_relaxed);
  return out;
}

// The dispatch key in front of all backends' for every tensor.
constexpr auto kInFront = c10::DispatchKey::BackendSelect;

template <Op op>
void linear(c10::OperatorHandle const& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  at::Tensor out = run<op>(stack->data() + stack->size() - kArguments<op>);
  if (!out.defined()) {
    return handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInFront), stack);
  }
  torch::jit::drop(*stack, kArguments<op>);
  stack->emplace_back(std::move(out));
}

}  // namespace

// Puts the operators of a namespace in front of Python's, for good. To be called once. Returns null, or what went wrong.
//
// Other threads may be calling the operators, and the dispatcher does not lock its table against calls. Python's kernels
// are therefore not replaced: the entry written here is one that the operator's mask has calls skip, and a call sees the
// mask, one word, as it was before or after.
QCUT_EXPORT char const* qcut_register(char const* ns, char const* device, LaunchKernel* launch_kernel,
                                      CurrentStream* current_stream) noexcept try {
  for (auto const* const name : {"w8a8_linear", "w8a8_static_linear", "w8a16_linear", "int16x8_linear"}) {
    c10::Dispatcher::singleton().findSchemaOrThrow((std::string(ns) + "::" + name).c_str(), "");
  }
  runtime = new Runtime{launch_kernel, current_stream, c10::Device(device).type()};
  auto* const library = new torch::Library(torch::Library::IMPL, ns, kInFront, __FILE__, __LINE__);
  library->impl("w8a8_linear", torch::CppFunction::makeFromBoxedFunction<&linear<kDynamic>>());
  library->impl("w8a8_static_linear", torch::CppFunction::makeFromBoxedFunction<&linear<kStatic>>());
  library->impl("w8a16_linear", torch::CppFunction::makeFromBoxedFunction<&linear<kWeightOnly>>());
  library->impl("int16x8_linear", torch::CppFunction::makeFromBoxedFunction<&linear<kInt16>>());
  return nullptr;
} catch (std::exception const& error) {
  static std::string message;
  message = error.what();
  return message.c_str();
}

QCUT_EXPORT void qcut_insert(Key const* key, Plan const* plan) { table.insert(*key, *plan); }

QCUT_EXPORT void qcut_clear() { table.clear(); }

// While blocks of another execution path than the fused run, Python serves all calls: paths are a thread's own.
QCUT_EXPORT void qcut_chosen(std::int64_t blocks) { chosen.store(blocks); }

QCUT_EXPORT std::uint64_t qcut_hits() { return hits.load(std::memory_order_relaxed); }

QCUT_EXPORT std::int64_t qcut_bucket(std::int64_t m) { return bucket(m); }

// A launcher that launches nothing: with it, a benchmark sees what the rest of a call costs.
QCUT_EXPORT int qcut_skip_launch(void const*, void*, void*, int) { return 0; }
