// fp32 values as unsigned integers in the same order: comparisons, maxima and searches by bits.
#pragma once

namespace atlas {

constexpr unsigned kKeyMinusInfinity = 0x007FFFFFu;
constexpr unsigned kKeyPlusInfinity = 0xFF800000u;
constexpr unsigned kKeyNan = 0xFFFFFFFFu;  // above every number, so that a maximum shows it

// a < b exactly if ordered_key(a) < ordered_key(b). -0 counts as 0, every NaN as kKeyNan.
__device__ inline unsigned ordered_key(float value) {
  if (value != value) return kKeyNan;
  if (value == 0.0f) return 0x80000000u;
  const unsigned bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The value of a key from kKeyMinusInfinity to kKeyPlusInfinity.
__device__ inline float from_ordered_key(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

}  // namespace atlas
