// The kernel of linear.cu, linear.f8.cu and linear.w4.cu, which say what it
// computes and how it is launched: linear's part of product.cuh.
#pragma once

#include "atlas/product.cuh"

namespace atlas {

// Columns of the tile are rows of the weight, one after the other.
struct LinearColumns {
  static constexpr int kWidth = knobs::TILE_N;
  static constexpr int kColumns = constants::n;
  static constexpr bool kGathers = false;

  template <int kGroup>
  __device__ static int weight_row(int first, int column) {
    return first + column < kColumns ? first + column : -1;
  }

  types::out* out;
  const types::bias* bias;  // null in instances without one

  // A fragment's columns lie side by side: `sums` are of row `row`, column `column` and kGroup on.
  template <int kGroup, int kCount>
  __device__ void store(const float (&sums)[kCount], int rows, int row, int first,
                        int column) const {
    if (row >= rows) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int n = first + column + j * kGroup;
      if (n >= kColumns) continue;
      float value = sums[j];
      if constexpr (HAS_BIAS) value += bias[n];
      out[static_cast<size_t>(row) * kColumns + n] = atlas::from_float<types::out>(value);
    }
  }
};

}  // namespace atlas

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::out* out, const int* rows) {
  atlas::launch_dependents();
  atlas::product_tile(x, weight, atlas::LinearColumns{out, bias}, *rows);
}
