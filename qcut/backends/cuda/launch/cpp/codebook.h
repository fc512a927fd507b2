// Rotations of tokens, and their products with codebook weights: qcut/backends/cuda/codebook.py's hot path.

#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "tensors.h"

namespace qcut {

constexpr std::int64_t kUnitRows = 16, kUnitColumns = 128, kRowAlignment = 64;
constexpr std::int64_t kTokenRows = 8, kTokenBytes = 128;  // of a block of tokens
constexpr std::int64_t kRowColumns = 16;  // of which rows of int8 tokens have a multiple

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Whether tensors are as kernels of a rotation read them: signs, or a matrix for each group of columns.
inline bool are_operands(at::Tensor const& operands, std::string const& kind, at::Tensor const& x, std::int64_t group,
                         std::int64_t passes, std::int64_t k_padded) {
  if (kind == "hadamard") return is_dense(operands, at::kInt, x.device(), {passes, k_padded / 32});
  at::ScalarType const type = x.scalar_type() == at::kBFloat16 ? at::kBFloat16 : at::kHalf;
  std::int64_t const side = ceil_div(group, 16) * 16;
  return is_dense(operands, type, x.device(), {passes, ceil_div(x.size(1), group), side, side});
}

// Of ``x, operands, kind, group_size, seeds, out_dtype``.
constexpr std::size_t kRotateArguments = 6;

inline std::array<at::Tensor, 2> rotate_tokens(c10::IValue const* args, bool early_read) {
  at::Tensor const &x = args[0].toTensor(), &operands = args[1].toTensor();
  std::string const& kind = args[2].toStringRef();
  std::int64_t const group_size = args[3].toInt();
  auto const passes = static_cast<std::int64_t>(args[4].toListRef().size());
  at::ScalarType const out = args[5].toScalarType();
  if (x.dim() != 2 || group_size < 1 || passes < 1 || passes > kMaxInt) return {};
  std::int64_t const m = x.size(0), k = x.size(1), stride = m > 1 ? x.stride(0) : k;
  if ((x.stride(1) != 1 && k > 1) || m > kMaxInt || k > kMaxInt) return {};

  c10::Device const device = x.device();
  void const* const data = x.const_data_ptr();
  bool const aligned = is_aligned(data) && (m == 1 || stride * x.element_size() % 16 == 0);
  Key key{.n = group_size, .k = k, .rows = bucket(m), .op = kRotate, .dtype = number(x.scalar_type()),
          .out = number(out), .device = device.index(),
          .flags = (aligned ? kAligned : 0) | (early_read ? kEarlyRead : 0),
          .passes = static_cast<std::int32_t>(passes)};
  Plan plan;
  if (!find_plan(key, kind, plan)) return {};

  bool const turns = kind != "none";
  if (turns && !are_operands(operands, kind, x, std::min(group_size, k), passes, plan.k_padded)) return {};
  std::int64_t const width = passes * plan.k_padded;
  if (width > kMaxInt) return {};
  void* stream = nullptr;
  if (runtime->current_stream(device.index(), &stream) != 0) return {};

  bool const quantizes = out == at::kChar;
  std::int64_t const columns = kTokenBytes / static_cast<std::int64_t>(c10::elementSize(out));
  auto const options = x.options();
  at::Tensor blocks = at::empty({width / columns, ceil_div(m, kTokenRows), kTokenRows, columns}, options.dtype(out));
  at::Tensor scale = at::empty({quantizes ? m : 0}, options.dtype(at::kFloat));
  void* const y = blocks.mutable_data_ptr();
  void const* const y_scale = quantizes ? scale.mutable_data_ptr() : nullptr;
  void const* const turn = turns ? operands.const_data_ptr() : nullptr;
  auto const rows = static_cast<std::int32_t>(m), depth = static_cast<std::int32_t>(k);
  auto const padded = static_cast<std::int32_t>(plan.k_padded), wide = static_cast<std::int32_t>(width);
  if (plan.prepares()) {  // kernels of dense rotations do not quantize: float32 rows lie between them and one that does
    auto const rotated = c10::GetAllocator(device.type())->allocate(m * width * std::int64_t{sizeof(float)});
    Arguments first(data, rotated.get(), turn, stride, rows, depth, padded);
    Arguments last(rotated.get(), y, y_scale, width, rows, wide, wide);
    if (launch(plan.first(), rows, first, stream) != 0 || launch(plan.last(), rows, last, stream) != 0) return {};
  } else {
    Arguments arguments(data, y);
    arguments.add_present(y_scale, turn);
    arguments.add(stride, rows, depth, padded);
    if (launch(plan.last(), rows, arguments, stream) != 0) return {};
  }
  return {std::move(blocks), std::move(scale)};
}

// Of ``x, operands, group_size, seed``.
constexpr std::size_t kQuantizeRotatedArguments = 4;

inline std::array<at::Tensor, 2> quantize_rotated(c10::IValue const* args, bool early_read) {
  at::Tensor const &x = args[0].toTensor(), &operands = args[1].toTensor();
  std::int64_t const group_size = args[2].toInt();
  if (x.dim() != 2 || group_size < 1) return {};
  bool const dense = x.is_contiguous();
  if (!dense && x.stride(1) != 1) return {};
  std::int64_t const m = x.size(0), k = x.size(1), stride = dense ? k : x.stride(0);
  if (m > kMaxInt || k > kMaxInt) return {};

  c10::Device const device = x.device();
  void const* const data = x.const_data_ptr();
  bool const aligned = is_aligned(data) && stride * x.element_size() % 16 == 0;
  Key key{.n = group_size, .k = k, .rows = bucket(m), .op = kQuantizeRotated, .dtype = number(x.scalar_type()),
          .out = number(at::kChar), .device = device.index(),
          .flags = (aligned ? kAligned : 0) | (early_read ? kEarlyRead : 0), .passes = 1};
  static std::string const kind = "hadamard";
  Plan plan;
  if (!find_plan(key, kind, plan)) return {};
  if (!are_operands(operands, kind, x, std::min(group_size, k), 1, plan.k_padded)) return {};
  void* stream = nullptr;
  if (runtime->current_stream(device.index(), &stream) != 0) return {};

  std::int64_t const columns = ceil_div(k, kRowColumns) * kRowColumns;
  at::Tensor q = cut(at::empty({memory_rows(m), columns}, x.options().dtype(at::kChar)), {m, columns});
  at::Tensor scale = cut(at::empty({memory_rows(m)}, x.options().dtype(at::kFloat)), {m});
  Arguments arguments(data, q.mutable_data_ptr(), scale.mutable_data_ptr(), operands.const_data_ptr(), stride);
  auto const rows = static_cast<std::int32_t>(m);
  arguments.add(rows, static_cast<std::int32_t>(k), static_cast<std::int32_t>(columns));
  if (launch(plan.last(), rows, arguments, stream) != 0) return {};
  return {std::move(q), std::move(scale)};
}

// Of ``x, operands, group_size, seed, qweight, weight_scale, bias, activation``.
constexpr std::size_t kRotatedTokenArguments = 8;

inline std::array<at::Tensor, 1> rotated_token(c10::IValue const* args, bool early_read) {
  at::Tensor const &x = args[0].toTensor(), &operands = args[1].toTensor(), &qweight = args[4].toTensor();
  if (x.dim() != 2 || x.size(0) != 1 || x.size(1) < 1 || qweight.dim() != 2) return {};
  std::int64_t const k = x.size(1), n = qweight.size(0), group = std::min(args[2].toInt(), k);
  c10::Device const device = x.device();
  if ((group != 32 && group != 64 && group != 128) || k % group != 0 || k > kMaxInt || n > kMaxInt ||
      !is_dense(x, x.scalar_type(), device) ||
      !is_dense(operands, at::kInt, device, {1, ceil_div(k, kUnitColumns) * (kUnitColumns / 32)}) ||
      !is_dense(qweight, at::kChar, device, {n, k}) || !is_dense(args[5].toTensor(), at::kFloat, device, {n}) ||
      !fits(args[6], at::kFloat, device, {n})) {
    return {};
  }
  Key key{.n = n, .k = k, .rows = 1, .op = kRotatedToken, .dtype = number(x.scalar_type()), .device = device.index(),
          .flags = (early_read ? kEarlyRead : 0) | (args[6].isNone() ? 0 : kBias),
          .slots = static_cast<std::int32_t>(group)};
  Plan plan;
  if (!find_plan(key, args[7].toStringRef(), plan)) return {};
  void* stream = nullptr;
  if (runtime->current_stream(device.index(), &stream) != 0) return {};

  at::Tensor y = at::empty({1, n}, x.options());
  auto const columns = static_cast<std::int32_t>(n), depth = static_cast<std::int32_t>(k);
  Arguments arguments(x.const_data_ptr(), qweight.const_data_ptr(), y.mutable_data_ptr(), std::int32_t{1}, columns,
                      depth, depth, depth, columns, operands.const_data_ptr(), address(args[5]));
  arguments.add_present(address(args[6]));
  if (launch(plan.last(), 1, arguments, stream) != 0) return {};
  return {std::move(y)};
}

// Of ``x, row_scale, m`` or ``x, operands, group_size, seeds``, with those of a weight behind them: ``units, norms, fold,
// col_scale, book, bias, bits, activation, residual, out_dtype``; a product of blocks ends in ``row_norm``.
template <Op op>
constexpr std::size_t kWeight = op == kGemm ? 3 : 4;
constexpr std::size_t kProductArguments = 14;

// Whether x is blocks of m tokens, with a scale for each where they are int8.
inline bool are_blocks(at::Tensor const& x, c10::IValue const& row_scale, std::int64_t m, std::int64_t units) {
  std::int64_t const columns = kTokenBytes / x.element_size();
  return (x.scalar_type() == at::kChar) != row_scale.isNone() && fits(row_scale, at::kFloat, x.device(), {m}) &&
         is_dense(x, x.scalar_type(), x.device(),
                  {units * kUnitColumns / columns, ceil_div(m, kTokenRows), kTokenRows, columns});
}

// Whether x is one token that a kernel can rotate: in Hadamard groups of 32, 64 or 128 columns, one norm for each.
inline bool is_token(at::Tensor const& x, at::Tensor const& operands, std::int64_t group_size, std::int64_t passes,
                     std::int64_t units, std::int64_t slots) {
  if (x.dim() != 2 || x.size(0) != 1 || x.size(1) < 1 || passes < 1) return false;
  std::int64_t const k = x.size(1), group = std::min(group_size, k), pass = ceil_div(k, kUnitColumns);
  return k <= kMaxInt && (group == 32 || group == 64 || group == 128) && k % group == 0 &&
         slots * group == kUnitColumns && passes * pass == units && is_dense(x, x.scalar_type(), x.device(), {1, k}) &&
         is_dense(operands, at::kInt, x.device(), {passes, pass * (kUnitColumns / 32)});
}

// Whether value i of a codebook of 16 is value 15 - i with the other sign, and values 0 to 7 have the sign bit.
inline bool is_mirrored(c10::ArrayRef<c10::IValue> book) {
  constexpr std::uint32_t kSigns = 0x80008000;
  if (book.size() != 8) return false;
  for (std::size_t i = 0; i < 4; ++i) {
    auto const low = static_cast<std::uint32_t>(book[i].toInt()), high = static_cast<std::uint32_t>(book[7 - i].toInt());
    if ((low & kSigns) != kSigns || (low ^ kSigns) != (high >> 16 | high << 16)) return false;
  }
  return true;
}

template <Op op>
std::array<at::Tensor, 1> multiply(c10::IValue const* args, bool early_read) {
  auto const* const weight = args + kWeight<op>;
  at::Tensor const &x = args[0].toTensor(), &units = weight[0].toTensor(), &norms = weight[1].toTensor();
  at::Tensor const& col_scale = weight[3].toTensor();
  auto const book = weight[4].toListRef();
  c10::IValue const &fold = weight[2], &bias = weight[5], &residual = weight[8];
  at::ScalarType const out = weight[9].toScalarType();
  c10::Device const device = x.device();
  if (units.dim() != 3 || norms.dim() != 5 || col_scale.dim() != 1) return {};
  if (op == kGemm && !args[2].isInt()) return {};
  std::int64_t const m = op == kGemm ? args[2].toInt() : 1, n = col_scale.size(0), units_k = units.size(1);
  std::int64_t const bits = weight[6].toInt(), slots = norms.size(2), width = norms.size(4);
  if (m < 1 || m > kMaxInt || n > kMaxInt || units_k > kMaxInt || bits < 2 || bits > 4 || slots > 8) return {};
  if ((width != 2 && width != 4) || (book.size() != 8 && book.size() != 64)) return {};

  std::int64_t const tiles = ceil_div(n, kRowAlignment) * (kRowAlignment / kUnitRows);
  if (!is_dense(units, at::kByte, device, {tiles, units_k, kUnitRows * kUnitColumns * bits / 8}) ||
      !is_dense(norms, at::kHalf, device, {tiles, units_k, slots, 8, width}) ||
      !is_dense(col_scale, at::kFloat, device, {n}) || !fits(fold, at::kFloat, device, {tiles * kUnitRows}) ||
      !fits(bias, at::kFloat, device, {n}) || !fits(residual, out, device, {m, n})) {
    return {};
  }
  std::int64_t passes = 1;
  if constexpr (op == kGemm) {
    if (!are_blocks(x, args[1], m, units_k)) return {};
  } else {
    passes = static_cast<std::int64_t>(args[3].toListRef().size());
    if (!is_token(x, args[1].toTensor(), args[2].toInt(), passes, units_k, slots)) return {};
  }

  auto const flags = (early_read ? kEarlyRead : 0) | (bias.isNone() ? 0 : kBias) |
                     (residual.isNone() ? 0 : kResidual) | (fold.isNone() ? 0 : kFold) | (width == 4 ? kOffsets : 0) |
                     (book.size() == 64 ? kPairs : 0) |
                     (!fold.isNone() && bits == 4 && is_mirrored(book) ? kMirrored : 0) |
                     (op == kGemm && args[13].toBool() ? kRowNorm : 0);
  Key key{.n = n, .k = units_k, .rows = bucket(m), .op = op, .dtype = number(x.scalar_type()), .out = number(out),
          .device = device.index(), .flags = flags, .bits = static_cast<std::int32_t>(bits),
          .slots = static_cast<std::int32_t>(slots)};
  Plan plan;
  if (!find_plan(key, weight[7].toStringRef(), plan)) return {};
  void* stream = nullptr;
  if (runtime->current_stream(device.index(), &stream) != 0) return {};

  at::Tensor y = at::empty({m, n}, x.options().dtype(out));
  auto const rows = static_cast<std::int32_t>(m), columns = static_cast<std::int32_t>(n);
  auto const depth = static_cast<std::int32_t>(units_k);
  Arguments arguments(x.const_data_ptr());
  if constexpr (op == kGemv) arguments.add(address(args[1]));
  arguments.add(units.const_data_ptr(), norms.const_data_ptr());
  arguments.add_present(address(fold));
  arguments.add(y.mutable_data_ptr(), rows, columns, depth);
  if constexpr (op == kGemv) {
    arguments.add(static_cast<std::int32_t>(x.size(1)), static_cast<std::int32_t>(units_k / passes));
  }
  arguments.add(columns);
  for (auto const& word : book) {
    if (word.toInt() != static_cast<std::int32_t>(word.toInt())) return {};
    arguments.add(static_cast<std::int32_t>(word.toInt()));
  }
  if constexpr (op == kGemm) arguments.add_present(address(args[1]));
  arguments.add(col_scale.const_data_ptr());
  arguments.add_present(address(bias), address(residual));
  if (launch(plan.last(), rows, arguments, stream) != 0) return {};
  return {std::move(y)};
}

}  // namespace qcut
