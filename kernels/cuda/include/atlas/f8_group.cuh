// Rounding to format f8g128: E4M3 codes with one f32 scale for 128 columns of a row, bit for bit as
// atlas/weights/activations.py defines it.
#pragma once

#include <cuda_fp8.h>

namespace atlas {

// Magnitudes in the order of their bits: a NaN is the largest.
__device__ inline unsigned magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7FFFFFFFu;
}

// From the largest magnitude_bits of a group.
struct F8Group {
  float scale = 0.0f, factor = 0.0f;
  bool used = false;

  __device__ explicit F8Group(unsigned largest) {
    constexpr float kMost = 448.0f, kLeast = 0x1p-100f;
    const float magnitude = __uint_as_float(largest);
    if (largest >= 0x7F800000u) {
      scale = __uint_as_float(0x7FC00000u);
    } else if (magnitude >= kLeast) {
      scale = __fdiv_rn(magnitude, kMost);
      factor = __fdiv_rn(kMost, magnitude);
      used = true;
    }
  }
  __device__ unsigned code(float value) const {
    return used ? __nv_cvt_float_to_fp8(value * factor, __NV_SATFINITE, __NV_E4M3) : 0;
  }
};

}  // namespace atlas
