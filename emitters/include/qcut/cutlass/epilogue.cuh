// Elementwise nodes of the epilogue that CUTLASS's visitor trees do not have.
//
// Exactness: each arithmetic node is one rounded operation, as emitters/core/epilogue.py states; activations are those
// of core/activation.cuh.
//
// Source: visitor concept of cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp, 4.2.0.
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"
#include <qcut/core/activation.cuh>

namespace qcut {

template <class Array, class Fn>
CUTLASS_HOST_DEVICE Array map(Array const& x, Fn fn) {
  Array y;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Array::kElements; ++i) y[i] = fn(x[i]);
  return y;
}

#define QCUT_ARRAY_FUNCTOR(Name, fn)                                                  \
  template <class Array>                                                              \
  struct Name {                                                                       \
    CUTLASS_HOST_DEVICE Array operator()(Array const& x) const {                      \
      return map(x, [](float v) { return fn(v); });                                   \
    }                                                                                 \
  };
QCUT_ARRAY_FUNCTOR(Relu, relu)
QCUT_ARRAY_FUNCTOR(GeluErf, gelu_erf)
QCUT_ARRAY_FUNCTOR(GeluTanh, gelu_tanh)
QCUT_ARRAY_FUNCTOR(Silu, silu)
#undef QCUT_ARRAY_FUNCTOR

// The function that a launch names by its place in emitters/core/epilogue.py's ACTIVATIONS, the same for all elements.
template <class Array>
struct Activate {
  CUTLASS_HOST_DEVICE Array operator()(Array const& x, Array const& activation) const {
    int const which = static_cast<int>(activation[0]);
    if (which == 1) return Relu<Array>{}(x);
    if (which == 2) return GeluErf<Array>{}(x);
    if (which == 3) return GeluTanh<Array>{}(x);
    return which == 4 ? Silu<Array>{}(x) : x;
  }
};

template <class Array>
struct Identity {
  CUTLASS_HOST_DEVICE Array operator()(Array const& x) const { return x; }
};

// Integer and float arithmetic for the SM80 tree, in which a node is one operation.
template <class Array, class Fn>
CUTLASS_HOST_DEVICE Array zip(Array const& a, Array const& b, Fn fn) {
  Array y;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Array::kElements; ++i) y[i] = fn(a[i], b[i]);
  return y;
}

#define QCUT_BINARY_FUNCTOR(Name, op)                                                 \
  template <class Array>                                                              \
  struct Name {                                                                       \
    CUTLASS_HOST_DEVICE Array operator()(Array const& a, Array const& b) const {      \
      return zip(a, b, [](auto x, auto y) { return x op y; });                              \
    }                                                                                 \
  };
QCUT_BINARY_FUNCTOR(Multiply, *)
QCUT_BINARY_FUNCTOR(Subtract, -)
QCUT_BINARY_FUNCTOR(Add, +)
#undef QCUT_BINARY_FUNCTOR

// Requantizes to floats that hold integers. The conversion to int8 that follows is exact for them and saturates.
template <class Array>
struct Requantize {
  CUTLASS_HOST_DEVICE Array operator()(Array const& v, Array const& inv_scale, Array const& zero_point) const {
    Array y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Array::kElements; ++i) y[i] = requantize(v[i], inv_scale[i], zero_point[i]);
    return y;
  }
};

}  // namespace qcut
