// Arguments of operators, as plans take them.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "launch.h"

namespace qcut {

inline void const* address(c10::IValue const& tensor) {
  return tensor.isNone() ? nullptr : tensor.toTensor().const_data_ptr();
}

inline bool is_aligned(void const* pointer) { return (reinterpret_cast<std::uintptr_t>(pointer) & 15) == 0; }

// Whether a tensor is as plans take parameters: contiguous and aligned, of this type, on x's device.
inline bool is_dense(at::Tensor const& tensor, at::ScalarType type, c10::Device device) {
  return tensor.scalar_type() == type && tensor.device() == device && tensor.is_contiguous() &&
         is_aligned(tensor.const_data_ptr());
}

// Whether it is such a tensor of this shape.
inline bool is_dense(at::Tensor const& tensor, at::ScalarType type, c10::Device device,
                     std::initializer_list<std::int64_t> shape) {
  return tensor.sizes().equals(shape) && is_dense(tensor, type, device);
}

// Whether a parameter is absent, or such a tensor.
inline bool fits(c10::IValue const& value, at::ScalarType type, c10::Device device,
                 std::initializer_list<std::int64_t> shape) {
  return value.isNone() || is_dense(value.toTensor(), type, device, shape);
}

// Most tokens of a tile of an int8 product, with those of the other CTAs of its cluster; see int8_rows of operands.py.
constexpr std::int64_t kMostTileRows = 256, kFewTokens = 16;

// Rows of memory for so many int8 tokens: whole tiles.
inline std::int64_t memory_rows(std::int64_t tokens) {
  return tokens <= kFewTokens ? tokens : (tokens + kMostTileRows - 1) / kMostTileRows * kMostTileRows;
}

// Whether a contiguous tensor that is not empty lies in memory for so many rows.
inline bool has_rows(at::Tensor const& tensor, std::int64_t rows) {
  std::int64_t const elements = tensor.storage_offset() + rows * (tensor.numel() / tensor.size(0));
  return static_cast<std::int64_t>(tensor.storage().nbytes()) >= elements * tensor.element_size();
}

// The first rows of a tensor; further ones stay in its memory.
inline at::Tensor cut(at::Tensor tensor, c10::IntArrayRef shape) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

// Finds the plan of a key, whose name is still to be filled in; names longer than any there is have none.
inline bool find_plan(Key& key, std::string const& name, Plan& plan) {
  if (name.size() >= sizeof key.name) return false;
  std::memcpy(key.name, name.data(), name.size());
  return table.find(key, plan);
}

inline std::int32_t number(at::ScalarType type) { return static_cast<std::int32_t>(type); }

}  // namespace qcut
