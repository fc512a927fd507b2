// Rounding to an integer by one addition, on the host and on the device.
#pragma once

namespace qcut {

// The sum of this constant, 1.5 * 2^23, and a float of magnitude below 2^22 is that float rounded to the nearest
// integer, ties to even. The low byte of the sum's bits is the low byte of the integer in two's complement.
constexpr float kRoundingBias = 12582912.0f;

}  // namespace qcut
