// Rounding to format f8g128: E4M3 codes with one f32 scale for 128 columns of a row, bit for bit as
// atlas/weights/e4m3.py defines it.
#pragma once

#include <cuda_fp8.h>

namespace atlas {

// Magnitudes in the order of their bits: a NaN is the largest.
__device__ inline unsigned magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7FFFFFFFu;
}

// From the largest magnitude_bits of a group. Without branches, so that groups can overlap.
struct F8Group {
  float scale, factor;
  bool used;

  __device__ explicit F8Group(unsigned largest) {
    constexpr float kMost = 448.0f, kLeast = 0x1p-100f;
    const bool finite = largest < 0x7F800000u;
    used = finite && __uint_as_float(largest) >= kLeast;
    const float magnitude = used ? __uint_as_float(largest) : 1.0f;
    const float zero_or_nan = finite ? 0.0f : __uint_as_float(0x7FC00000u);
    scale = used ? __fdiv_rn(magnitude, kMost) : zero_or_nan;
    factor = __fdiv_rn(kMost, magnitude);
  }
  __device__ unsigned code(float value) const {
    return used ? __nv_cvt_float_to_fp8(value * factor, __NV_SATFINITE, __NV_E4M3) : 0;
  }
  // Codes of four columns, or of two, the first in the low byte.
  __device__ unsigned codes(const float (&v)[4]) const {
    return codes(v[0], v[1]) | codes(v[2], v[3]) << 16;
  }
  __device__ unsigned codes(float first, float second) const {
    const float2 scaled = make_float2(first * factor, second * factor);
    return used ? __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3) : 0;
  }
};

}  // namespace atlas
