// The gate of an MLP, by kernels of its own (decoder/activate.cuh) and by products (stream/gated.cuh).
#pragma once

#include <qcut/core/activation.cuh>
#include <qcut/core/common.cuh>

namespace qcut {

// rne(silu(gate)) * up, rne rounding to the nearest value of T. The product is one float32 operation.
template <class T>
__device__ __forceinline__ float silu_mul(float gate, float up) {
  return to_float(from_float<T>(silu(gate))) * up;
}

}  // namespace qcut
