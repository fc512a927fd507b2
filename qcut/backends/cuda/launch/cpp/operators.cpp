// The hot path of qcut's linear operators: find what Python planned for a call, allocate, pack, launch.
//
// Anything out of the ordinary, errors included, is left to Python's kernel of the same operator, which is the next one
// in the dispatcher's order. qcut/backends/cuda/launch/native.py compiles this file with the headers beside it and with torch's.

#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "codebook.h"
#include "int8.h"
#include "launch.h"

#define QCUT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using qcut::Op;

// Whether a backward pass may reach the call, which Python then serves.
bool wants_gradient(c10::IValue const* args, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (args[i].isTensor() && args[i].toTensor().requires_grad()) return c10::GradMode::is_enabled();
  }
  return false;
}

// Whether C++ may look at a call, the first of whose arguments is x.
bool is_usual(c10::IValue const* args, std::size_t count) {
  at::Tensor const& x = args[0].toTensor();
  if (qcut::chosen.load(std::memory_order_relaxed) != 0 || x.numel() == 0 || wants_gradient(args, count)) return false;
  // A launch needs the device's context to be current.
  c10::Device const device = x.device();
  return device.type() == qcut::runtime->device && c10::impl::VirtualGuardImpl(device.type()).getDevice() == device;
}

// The dispatch key in front of all backends' for every tensor.
constexpr auto kInFront = c10::DispatchKey::BackendSelect;

// An overload of an operator: ``run`` returns its results, or undefined tensors where Python must serve the call.
template <std::size_t count, auto run, bool early_read>
void serve(c10::OperatorHandle const& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto const* const args = stack->data() + stack->size() - count;
  decltype(run(args, early_read)) results;
  if (is_usual(args, count)) results = run(args, early_read);
  if (!results[0].defined()) {
    return handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInFront), stack);
  }
  qcut::hits.fetch_add(1, std::memory_order_relaxed);
  torch::jit::drop(*stack, count);
  for (at::Tensor& result : results) stack->emplace_back(std::move(result));
}

// Overloads of operators, and what serves them.
class Operators {
 public:
  template <std::size_t count, auto run, bool early_read>
  void add(char const* name, char const* overload) {
    entries_.push_back({name, overload, torch::CppFunction::makeFromBoxedFunction<&serve<count, run, early_read>>()});
  }
  // The overloads ``default`` and ``early_read``.
  template <std::size_t count, auto run>
  void add(char const* name) {
    add<count, run, false>(name, "");
    add<count, run, true>(name, "early_read");
  }
  template <Op op>
  void add_linear(char const* name) {
    add<qcut::kLinearArguments<op>, &qcut::linear<op>>(name);
  }
  template <Op op>
  void add_product(char const* name) {
    add<qcut::kProductArguments, &qcut::multiply<op>>(name);
  }

  struct Entry {
    std::string name, overload;
    torch::CppFunction function;
  };
  std::vector<Entry>& entries() { return entries_; }

 private:
  std::vector<Entry> entries_;
};

}  // namespace

// Puts the operators of a namespace in front of Python's, for good. To be called once. Returns null, or what went wrong.
//
// Other threads may be calling the operators, and the dispatcher does not lock its table against calls. Python's kernels
// are therefore not replaced: the entry written here is one that the operator's mask has calls skip, and a call sees the
// mask, one word, as it was before or after.
QCUT_EXPORT char const* qcut_register(char const* ns, char const* device, qcut::LaunchKernel* launch_kernel,
                                      qcut::CurrentStream* current_stream) noexcept try {
  Operators operators;
  operators.add_linear<qcut::kDynamic>("w8a8_linear");
  operators.add_linear<qcut::kStatic>("w8a8_static_linear");
  operators.add_linear<qcut::kWeightOnly>("w8a16_linear");
  operators.add_linear<qcut::kInt16>("int16x8_linear");
  operators.add<qcut::kRotateArguments, &qcut::rotate_tokens>("rotate_tokens");
  operators.add_product<qcut::kGemm>("codebook_gemm");
  operators.add_product<qcut::kGemv>("codebook_gemv");
  operators.add<qcut::kQuantizeRotatedArguments, &qcut::quantize_rotated>("quantize_rotated");
  operators.add<qcut::kRotatedTokenArguments, &qcut::rotated_token>("w8a8_rotated_linear");
  operators.add<qcut::kInt8Arguments + 1, &qcut::int8_linear<true>>("int8_linear");
  operators.add<qcut::kInt8Arguments, &qcut::int8_linear<false>, true>("int8_linear_pure", "");
  for (auto const& op : operators.entries()) {
    std::string const name = std::string(ns) + "::" + op.name;
    c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), op.overload.c_str());
  }
  qcut::runtime = new qcut::Runtime{launch_kernel, current_stream, c10::Device(device).type()};
  auto* const library = new torch::Library(torch::Library::IMPL, ns, kInFront, __FILE__, __LINE__);
  for (auto& op : operators.entries()) {
    std::string const name = op.overload.empty() ? op.name : op.name + "." + op.overload;
    library->impl(name.c_str(), std::move(op.function));
  }
  return nullptr;
} catch (std::exception const& error) {
  static std::string message;
  message = error.what();
  return message.c_str();
}

QCUT_EXPORT void qcut_insert(qcut::Key const* key, qcut::Plan const* plan) { qcut::table.insert(*key, *plan); }

QCUT_EXPORT void qcut_clear(std::int32_t op) { qcut::table.clear(op); }

// While blocks of another execution path than the fused run, Python serves all calls: paths are a thread's own.
QCUT_EXPORT void qcut_chosen(std::int64_t blocks) { qcut::chosen.store(blocks); }

QCUT_EXPORT std::uint64_t qcut_hits() { return qcut::hits.load(std::memory_order_relaxed); }

QCUT_EXPORT std::int64_t qcut_bucket(std::int64_t m) { return qcut::bucket(m); }

// A launcher that launches nothing: with it, a benchmark sees what the rest of a call costs.
QCUT_EXPORT int qcut_skip_launch(void const*, void*, void*, int) { return 0; }
