// Linear layers with int8 weights, or E4M3 where tokens are floats: qcut/backends/cuda/linear.py's hot path.

#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/util/DimVector.h>

#include <array>
#include <cfloat>
#include <string>
#include <utility>

#include "tensors.h"

namespace qcut {

// Of ``x, qweight, scale[, colsum], bias[, x_scale, x_zero_point], activation``.
template <Op op>
constexpr std::size_t kLinearArguments = op == kStatic ? 8 : 5;

template <Op op>
std::array<at::Tensor, 1> linear(c10::IValue const* args, bool early_read) {
  at::Tensor const &x = args[0].toTensor(), &qweight = args[1].toTensor();
  void const* const weight = qweight.const_data_ptr();
  void const* const scale = address(args[2]);
  void const* const colsum = op == kStatic ? address(args[3]) : nullptr;
  void const* const bias = address(args[op == kStatic ? 4 : 3]);

  std::int64_t const dim = x.dim();
  if (dim == 0 || qweight.dim() != 2) return {};
  std::int64_t const n = qweight.size(0), k = x.size(-1), m = x.numel() / k;
  c10::Device const device = x.device();
  bool const e4m3 = op == kWeightOnly && qweight.scalar_type() == at::kFloat8_e4m3fn;
  bool const units = e4m3 && args[2].toTensor().dim() == 2;  // have scales
  if (!is_dense(qweight, e4m3 ? at::kFloat8_e4m3fn : at::kChar, device)) return {};
  if (units ? !fits(args[2], at::kFloat, device, {(n + 15) / 16, (k + 127) / 128}) : !fits(args[2], at::kFloat, device, {n})) {
    return {};
  }
  if (!fits(args[op == kStatic ? 4 : 3], at::kFloat, device, {n})) return {};
  if (op == kStatic && !fits(args[3], at::kInt, device, {n})) return {};
  std::int64_t stride = k;
  if (!x.is_contiguous()) {
    if (dim != 2 || x.stride(1) != 1) return {};
    stride = x.stride(0);
  }
  if (m > kMaxInt || stride > kMaxInt) return {};

  auto const* const data = static_cast<char const*>(x.const_data_ptr());
  bool const aligned = is_aligned(data) && stride * x.element_size() % 16 == 0;
  auto const flags = (aligned ? kAligned : 0) | (early_read ? kEarlyRead : 0) | (bias != nullptr ? kBias : 0) |
                     (e4m3 ? kE4M3 : 0) | (units ? kUnitScales : 0);
  Key key{.n = n, .k = k, .rows = bucket(m), .op = op, .dtype = number(x.scalar_type()), .device = device.index(),
          .flags = flags};
  Plan plan;
  std::string const& activation = args[kLinearArguments<op> - 1].toStringRef();
  if (!find_plan(key, activation, plan) || qweight.size(1) != plan.k_padded) return {};
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
  if (plan.prepares()) {
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
      status = launch(plan.first(), tokens, arguments, stream);
    } else if constexpr (op == kStatic) {
      double const x_scale = args[5].toDouble();
      std::int64_t const x_zero_point = args[6].toInt();
      if (!(x_scale > 0 && x_scale <= FLT_MAX) || x_zero_point < -128 || x_zero_point > 127) return {};
      zero_point = static_cast<std::int32_t>(x_zero_point);
      Arguments arguments(data, q, stride, tokens, depth, padded, static_cast<float>(x_scale), zero_point);
      status = launch(plan.first(), tokens, arguments, stream);
    }
    if (status != 0) return {};
  }

  c10::DimVector shape(x.sizes());
  shape.back() = n;
  at::Tensor out = at::empty(rows == m ? c10::IntArrayRef(shape) : c10::IntArrayRef{rows, n}, x.options());
  Arguments arguments(a, weight, out.mutable_data_ptr(), a_rows, columns, k_gemm, lda, padded, columns);
  if constexpr (op == kInt16) arguments.add(gemm_rows);
  if constexpr (op == kStatic) arguments.add(zero_point, colsum);
  arguments.add_present(row_scale);
  arguments.add(scale);
  arguments.add_present(bias);
  if (launch(plan.last(), gemm_rows, arguments, stream) != 0) return {};
  return {rows == m ? std::move(out) : cut(std::move(out), shape)};
}

// Of ``q, q_scale, qweight, weight_scale, bias, activation, dtype``, with ``absmax`` behind them unless the operator is the
// pure one, all of whose calls read early.
constexpr std::size_t kInt8Arguments = 7;

template <bool has_absmax>
std::array<at::Tensor, 1> int8_linear(c10::IValue const* args, bool early_read) {
  at::Tensor const &q = args[0].toTensor(), &qweight = args[2].toTensor();
  if (has_absmax && !args[kInt8Arguments].isNone()) return {};
  if (q.dim() != 2 || qweight.dim() != 2) return {};
  std::int64_t const m = q.size(0), k = q.size(1), n = qweight.size(0);
  c10::Device const device = q.device();
  if (m > kMaxInt || !is_dense(q, at::kChar, device) || !is_dense(args[1].toTensor(), at::kFloat, device, {m}) ||
      !is_dense(qweight, at::kChar, device, {n, k}) || !is_dense(args[3].toTensor(), at::kFloat, device, {n}) ||
      !fits(args[4], at::kFloat, device, {n})) {
    return {};
  }
  at::ScalarType const out = args[6].toScalarType();
  Key key{.n = n, .k = k, .rows = bucket(m), .op = kInt8, .dtype = number(out), .device = device.index(),
          .flags = (early_read ? kEarlyRead : 0) | (args[4].isNone() ? 0 : kBias)};
  Plan plan;
  if (!find_plan(key, args[5].toStringRef(), plan)) return {};
  void* stream = nullptr;
  if (runtime->current_stream(device.index(), &stream) != 0) return {};

  std::int64_t whole = (m + plan.row_multiple - 1) / plan.row_multiple * plan.row_multiple;
  if (whole > kMaxInt || !(whole == m || (has_rows(q, whole) && has_rows(args[1].toTensor(), whole)))) whole = m;
  at::Tensor y = at::empty({whole, n}, q.options().dtype(out));
  auto const rows = static_cast<std::int32_t>(whole), columns = static_cast<std::int32_t>(n);
  auto const depth = static_cast<std::int32_t>(k);
  Arguments arguments(q.const_data_ptr(), qweight.const_data_ptr(), y.mutable_data_ptr(), rows, columns, depth, depth,
                      depth, columns, address(args[1]), address(args[3]));
  arguments.add_present(address(args[4]));
  if (launch(plan.last(), rows, arguments, stream) != 0) return {};
  return {whole == m ? std::move(y) : cut(std::move(y), {m, n})};
}

}  // namespace qcut
