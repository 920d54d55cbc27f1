// Rounding to formats of 4 bits, bit for bit as atlas/weights/quantizers.py defines it.
//
// Four lanes of a warp hold a group of a row together, each of every 16 columns (a step) the four
// 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, as mma's operands have them; t is the lane modulo 4.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "atlas/reduce.cuh"

namespace atlas {

template <class T, class Combine>
__device__ inline T reduce_four_lanes(T value, Combine combine) {
  value = combine(value, __shfl_xor_sync(kAllLanes, value, 1));
  return combine(value, __shfl_xor_sync(kAllLanes, value, 2));
}
// Zero has no multiples: what is divided by it is divided by one.
__device__ inline float divide(float value, float scale) {
  return __fdiv_rn(value, scale == 0.0f ? 1.0f : scale);
}

// E2M1 codes with an E4M3 scale for 16 columns, of a row whose own scale makes its largest
// magnitude 6 * 448.
struct Nvfp4Rounding {
  static constexpr int kGroup = 16, kSteps = 1;
  static constexpr bool kRowScale = true;
  using Scale = unsigned char;

  // From the largest magnitude of a row.
  __device__ static float row_scale(float largest) {
    constexpr float kMost = 6.0f * 448.0f;
    return largest >= kMost * 0x1p-126f ? __fdiv_rn(largest, kMost) : 1.0f;
  }
  // A group; returns its scale. Negative zeros keep their sign.
  __device__ static Scale group(const float (&x)[kSteps][4], float row_scale,
                                unsigned (&code)[kSteps][4], bool& /*fault*/) {
    float value[4], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[i] = __fdiv_rn(x[0][i], row_scale);
      largest = fmaxf(largest, fabsf(value[i]));
    }
    largest = reduce_four_lanes(largest, Max{});
    const Scale scale = __nv_cvt_float_to_fp8(__fdiv_rn(largest, 6.0f), __NV_SATFINITE, __NV_E4M3);
    const float step = __half2float(__half(__nv_cvt_fp8_to_halfraw(scale, __NV_E4M3)));
#pragma unroll
    for (int i = 0; i < 4; ++i) code[0][i] = step == 0.0f ? 0 : nearest(__fdiv_rn(value[i], step));
    return scale;
  }

 private:
  // Ties go to the even code; beyond 6 is 6.
  __device__ static unsigned nearest(float value) {
    const float m = fabsf(value);
    const unsigned magnitude = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) +
                               (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return magnitude | __float_as_uint(value) >> 31 << 3;
  }
};

// 4-bit integers, (code - 8) * scale, with a bf16 scale for 32 columns: of six ranges, with the
// scale that has the least squared error in each, the one with the least of all.
struct I4g32bRounding {
  static constexpr int kGroup = 32, kSteps = 2;
  static constexpr bool kRowScale = false;
  using Scale = unsigned short;

  __device__ static float row_scale(float /*largest*/) { return 1.0f; }
  __device__ static Scale group(const float (&x)[kSteps][4], float /*row_scale*/,
                                unsigned (&code)[kSteps][4], bool& fault) {
    float unit[kSteps][4], least = 0.0f, most = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        least = fminf(least, x[s][i]);
        most = fmaxf(most, x[s][i]);
      }
    }
    least = reduce_four_lanes(-least, Max{});
    most = reduce_four_lanes(most, Max{});
    const float largest = fabsf(fmaxf(least, most));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) unit[s][i] = divide(x[s][i], largest);
    }
    // The largest value, with its sign, goes to code 0, which reaches one step further than 15.
    const float end = largest != 0.0f && most == largest ? -0.125f : 0.125f;
    constexpr float kRanges[] = {1.05f, 1.0f, 0.93f, 0.86f, 0.79f, 0.72f};
    float best = 0.0f, gain = -1.0f;
#pragma unroll
    for (float range : kRanges) {
      const float factor = __fdiv_rn(1.0f, __fmul_rn(end, range));
      // Sums are exact in any order: their terms are multiples of 2^-14, and less than 2^8
      // together.
      float dot = 0.0f, squares = 0.0f;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float c = rounded(__fmul_rn(unit[s][i], factor));
          dot += c * (rintf(unit[s][i] * 0x1p14f) * 0x1p-14f);
          squares += c * c;
        }
      }
      dot = reduce_four_lanes(dot, Sum{});
      squares = reduce_four_lanes(squares, Sum{});
      const float scale = divide(dot, squares), gained = __fmul_rn(dot, scale);
      if (gained > gain) gain = gained, best = scale;
    }
    const float wanted = __fmul_rn(best, largest);
    Scale bits = __bfloat16_as_ushort(__float2bfloat16_rn(wanted));
    // The smallest number rather than none.
    if ((bits & 0x7FFF) == 0 && wanted != 0.0f) bits |= 1;
    fault = fault || (bits & 0x7F80) == 0x7F80;
    const float scale = __uint_as_float(static_cast<unsigned>(bits) << 16);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        code[s][i] = static_cast<int>(rounded(divide(x[s][i], scale))) + 8;
      }
    }
    return bits;
  }

 private:
  __device__ static float rounded(float value) { return fminf(fmaxf(rintf(value), -8.0f), 7.0f); }
};

}  // namespace atlas
