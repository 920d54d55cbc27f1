// The kernel of gated_linear.cu, gated_linear.f8.cu and gated_linear.w4.cu, which say what it
// computes and how it is launched: gated_linear's part of product.cuh.
#pragma once

#include "atlas/activation.cuh"
#include "atlas/out_row.cuh"
#include "atlas/product.cuh"

namespace atlas {

// Groups of kGroup columns: gate, up, gate, up.
struct GatedColumns {
  static constexpr int kWidth = knobs::TILE_N / 2;
  static constexpr int kInner = constants::intermediate;
  // Groups of 128 columns share a scale: rows meet in shared memory before they are rounded.
  static constexpr bool kGathers = same_type<types::out, unsigned char>;
  static constexpr int kStride = kWidth + 4;  // of a gathered row

  template <int kGroup>
  __device__ static int weight_row(int first, int column) {
    const int n = first + column / (2 * kGroup) * kGroup + column % kGroup;
    return n < kInner ? n + column / kGroup % 2 * kInner : -1;
  }

  types::out* out;
  const types::bias* bias;  // null in instances without one

  template <int kGroup, int kCount>
  __device__ void store(const float (&sums)[kCount], int rows, int row, int first,
                        int column) const {
    static_assert(kCount % 2 == 0, "a thread has both factors");
    if (row >= rows) return;
#pragma unroll
    for (int j = 0; j < kCount; j += 2) {
      const int n = first + (column + j * kGroup) / (2 * kGroup) * kGroup + column % kGroup;
      float gate = sums[j], up = sums[j + 1], value = 0.0f;
      if (n < kInner) {
        if constexpr (HAS_BIAS) {
          gate += bias[n];
          up += bias[kInner + n];
        }
        value = activate<constants::activation>(gate) * up;
      }
      put(value, row, n, first);
    }
  }

  // Each warp rounds rows of the block, four columns a lane.
  __device__ void finish(int rows, int first_row, int first) const {
    static_assert(!kGathers || kWidth == 128, "a block has whole groups");
    static_assert(!kGathers || product::kM * kStride * 4 <= launch::shared);
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < product::kM && first_row + row < rows;
         row += launch::block / 32) {
      const float4 four = *reinterpret_cast<const float4*>(gathered() + row * kStride + 4 * lane);
      const float values[1][4] = {{four.x, four.y, four.z, four.w}};
      OutRow<kInner>(out, first_row + row).template store<1, 1>(first / 4 + lane, values);
    }
  }

 private:
  __device__ static float* gathered() { return reinterpret_cast<float*>(product::shared_memory); }

  template <class T = types::out>  // a parameter, so that a branch can be dropped by it
  __device__ void put(float value, int row, int n, int first) const {
    if constexpr (same_type<T, unsigned char>) {
      gathered()[row % product::kM * kStride + n - first] = value;  // blocks begin at multiples
    } else if (n < kInner) {
      out[static_cast<size_t>(row) * kInner + n] = from_float<T>(value);
    }
  }
};

}  // namespace atlas

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::out* out, const int* rows) {
  atlas::launch_dependents();
  atlas::product_tile(x, weight, atlas::GatedColumns{out, bias}, *rows);
}
