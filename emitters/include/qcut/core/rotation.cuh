// Rows of results as kernels store them: as they are, or rotated by codebook/rotate_rows.cuh.
#pragma once

namespace qcut {

// Rows that are not rotated.
struct NotRotated {
  static constexpr bool kRotates = false;
};

}  // namespace qcut
