// Matrices in block formats (atlas/targets/formats.py) as kernels store them: layout "panel16".
//
// A panel is 16 rows of the matrix, that is 16 output columns of a linear; panels follow each
// other. A panel is a list of blocks, one per group of 32 k:
//   codes     8-bit: [8 steps][16 columns][4 k], each code + 128, so that it is unsigned;
//             4-bit: [4][16 columns][4 k] bytes, step s in the low nibble and s + 4 in the high;
//   scales    [16], f16 or f32;
//   offsets   [16]: minimums of the scales' type, zero points as u8, or nothing.
// So one step of a panel is one vector, and a panel streams through memory in order.
#pragma once

#include "atlas/int_dot.h"
#include "atlas/partition.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

struct F16 {
  uint16_t bits;
};
// One value. Exponent and mantissa at fp32's places are off by 2^112; infinities and NaN need all
// ones.
ATLAS_INLINE float widen(F16 value) {
  const uint32_t half = value.bits;
  const float scaled = bit_cast<float>((half & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
  return bit_cast<float>(bit_cast<uint32_t>(scaled) | special | (half & 0x8000) << 16);
}
ATLAS_INLINE float widen(float value) { return value; }
ATLAS_INLINE float widen(uint8_t value) { return value; }

ATLAS_INLINE NativeF32 load_part(const F16* from) {
#if defined(__AVX512F__)
  __m256i half;
  __builtin_memcpy(&half, from, sizeof(half));
  return _mm512_maskz_cvtph_ps(0xffff, half);
#elif defined(__AVX2__)
  __m128i half;
  __builtin_memcpy(&half, from, sizeof(half));
  return _mm256_cvtph_ps(half);
#else
  NativeF32 values;
  for (int i = 0; i < kNativeLanes; ++i) values[i] = widen(from[i]);
  return values;
#endif
}
ATLAS_INLINE F32x16 load(const F16* from) {
  F32x16 r;
  for (int i = 0; i < kParts; ++i) r.part[i] = load_part(from + i * kNativeLanes);
  return r;
}
ATLAS_INLINE F32x16 load(const uint8_t* from) {
  I32x16 r;
  for (int i = 0; i < kParts; ++i) {
    for (int j = 0; j < kNativeLanes; ++j) r.part[i][j] = from[i * kNativeLanes + j];
  }
  return to_float(r);
}

struct NoOffset {};

// bias: what a stored code is above the value that the scale multiplies.
template <int bits_, int bias_, class Scale_, class Offset_>
struct Blocks {
  using Scale = Scale_;
  using Offset = Offset_;
  static constexpr int kBits = bits_, kBias = bias_;
  static constexpr int kLoads = kGroup / kStepK * kBits / 8;  // vectors of codes in a block
  static constexpr bool kHasZero = sizeof(Offset) == 1 && !__is_empty(Offset);
  static constexpr bool kHasMinimum = sizeof(Offset) > 1;
  static constexpr bool kHasOffset = kHasZero || kHasMinimum;
  static constexpr int64_t kScalesAt = kLoads * kStepBytes;
  static constexpr int64_t kOffsetsAt = kScalesAt + kLanes * int64_t{sizeof(Scale)};
  static constexpr int64_t kBytes =
      kOffsetsAt + (kHasOffset ? kLanes * int64_t{sizeof(Offset)} : 0);

  ATLAS_INLINE static F32x16 scales(const uint8_t* block) {
    return load(reinterpret_cast<const Scale*>(block + kScalesAt));
  }
  // What is added for each unit of x: the minimum, or -zero * scale, which fp32 holds exactly.
  ATLAS_INLINE static F32x16 minimums(const uint8_t* block, F32x16 scales) {
    if constexpr (kHasOffset) {
      const F32x16 offset = load(reinterpret_cast<const Offset*>(block + kOffsetsAt));
      return kHasZero ? (zero() - offset) * scales : offset;
    } else {
      return zero();
    }
  }
  // The scale, and the offset as it is stored, of one column.
  ATLAS_INLINE static float scale(const uint8_t* block, int64_t column) {
    return widen(reinterpret_cast<const Scale*>(block + kScalesAt)[column]);
  }
  ATLAS_INLINE static float offset(const uint8_t* block, int64_t column) {
    return widen(reinterpret_cast<const Offset*>(block + kOffsetsAt)[column]);
  }
  // Bytes of a panel of a matrix with k columns.
  ATLAS_INLINE static int64_t panel_bytes(int64_t k) { return ceil_div(k, kGroup) * kBytes; }
};

using I8g32 = Blocks<8, 128, F16, NoOffset>;
using I8g32f = Blocks<8, 128, float, NoOffset>;
using I4g32 = Blocks<4, 8, F16, NoOffset>;
using I4g32z = Blocks<4, 0, F16, uint8_t>;
using I4g32m = Blocks<4, 0, F16, F16>;
using I4g32f = Blocks<4, 0, float, float>;

}  // namespace
}  // namespace atlas
