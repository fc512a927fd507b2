// What few tokens are made of where a projection's kernel makes them itself.
#pragma once

#include <qcut/activation.cuh>
#include <qcut/norm.cuh>

namespace qcut {

// kNone and kGiven: tokens come as they are, and with kNone the previous kernel may have written the weights too.
enum class Prologue { kNone, kGiven, kQuantize, kGate, kRms, kLayer };

template <Prologue kPrologue>
constexpr bool kIsNorm = kPrologue == Prologue::kRms || kPrologue == Prologue::kLayer;

// What tokens are made of. `other`: a residual, null where there is none, or what the gate multiplies; rows of both are
// apart by their strides. `sum`, rows close together, takes x + residual.
template <class T>
struct TokenSource {
  const T* x;
  const T* other;
  T* sum;
  const T* weight;
  const T* bias;
  long long x_stride, other_stride;
  float eps;
};

// x joined with `other`, rounded to T: rne(x + residual) before a norm, rne(rne(silu(x)) * other) of a gate.
template <class T, Prologue kPrologue>
__device__ __forceinline__ float joined(float x, float other) {
  return to_float(from_float<T>(kIsNorm<kPrologue> ? x + other : to_float(from_float<T>(silu(x))) * other));
}

}  // namespace qcut
