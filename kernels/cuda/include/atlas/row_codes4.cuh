// Weights of 4 bits to bf16, from rows as they are stored (atlas/targets/formats.py).
//
// A format is a class of what a thread needs to expand 32 columns of a weight row, from a multiple
// of 32 on:
//   kGroup, kScale, kOffset, kRowScale   columns of a group; bytes of a group's scale and of its
//                                        zero point or minimum; of a row's scale
//   Format(scales, offsets)              those of the 32 columns
//   expand(word, run, pairs)             codes of columns 8 run .. 8 run + 7, of which pair p
//                                        becomes columns p (low half) and p + 4 (high half)
//   factor(row_scale)                    what a sum of products is multiplied by, if rows have one
// Each value is code times scale rounded to bf16 once; the arithmetic is exact but for that.
#pragma once

#include <cuda_fp16.h>

#include "atlas/packed_bf16.cuh"

namespace atlas {

namespace row_codes4 {

__device__ inline unsigned short load_u16(const unsigned char* at) {
  return *reinterpret_cast<const unsigned short*>(at);
}
__device__ inline float load_f16(const unsigned char* at) {
  return __half2float(*reinterpret_cast<const __half*>(at));
}
// Codes p and p + 4 as bf16: 128 + code.
__device__ inline unsigned integers(unsigned word, int p) {
  return and_or(word >> 4 * p, 0x000F000F, 0x43004300);
}

}  // namespace row_codes4

// E2M1 codes, an E4M3 scale for each 16 columns, an f32 factor for each row.
//
// The bits of a code, moved to sign, low exponent bits and first mantissa bit of a bf16 number, are
// its value times 2^-126; scales are taken times 2^107. The product is exact.
struct Nvfp4Row {
  static constexpr int kGroup = 16, kScale = 1, kOffset = 0, kRowScale = 4;

  Nvfp4Row() = default;
  __device__ Nvfp4Row(const unsigned char* scales, const unsigned char*) {
    const unsigned both = row_codes4::load_u16(scales);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned code = both >> 8 * i & 0x7F;  // scales have no sign
      const float value = __uint_as_float(code << 20) * 0x1p120f * 0x1p107f;
      const float scale = code == 0x7F ? __uint_as_float(0x7FC00000u) : value;
      scales_[i] = bf16x2_pack(scale, scale);
    }
  }
  __device__ void expand(unsigned word, int run, unsigned (&pairs)[4]) const {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const unsigned moved = word << (12 - 4 * p);
      pairs[p] = bf16x2_mul(and_or(moved, 0x80008000, moved >> 6 & 0x01C001C0), scales_[run / 2]);
    }
  }
  __device__ static float factor(float row_scale) { return row_scale * 0x1p19f; }

 private:
  unsigned scales_[2];
};

// (code - 8) * scale, scales in bf16, one for each 32 columns.
struct I4g32bRow {
  static constexpr int kGroup = 32, kScale = 2, kOffset = 0, kRowScale = 0;

  I4g32bRow() = default;
  __device__ I4g32bRow(const unsigned char* scales, const unsigned char*)
      : scale_(row_codes4::load_u16(scales) * 0x00010001u) {}
  __device__ void expand(unsigned word, int, unsigned (&pairs)[4]) const {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const unsigned code = bf16x2_add(row_codes4::integers(word, p), 0xC308C308);  // - 136
      pairs[p] = bf16x2_mul(code, scale_);
    }
  }

 private:
  unsigned scale_;
};

// (code - 8) * scale, or with kZeros (code - zero) * scale; scales in f16, one for each 32 columns.
// Zeros are bytes below 128 (of 4-bit weights they are 16 at most).
//
// A scale is the sum of two bf16 numbers, the second with the three bits that the first has no
// place for: code * high + (code * low) is rounded once.
template <bool kZeros>
struct I4g32Row {
  static constexpr int kGroup = 32, kScale = 2, kOffset = kZeros, kRowScale = 0;

  I4g32Row() = default;
  __device__ I4g32Row(const unsigned char* scales, const unsigned char* zeros) {
    const float scale = row_codes4::load_f16(scales);
    high_ = bf16x2_pack(scale, scale);
    const float rest = scale - __uint_as_float(high_ << 16);
    low_ = bf16x2_pack(rest, rest);
    offset_ = 0xC308C308;  // - (128 + 8)
    if constexpr (kZeros) offset_ = 0xC300C300 | *zeros * 0x00010001u;
  }
  __device__ void expand(unsigned word, int, unsigned (&pairs)[4]) const {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const unsigned code = bf16x2_add(row_codes4::integers(word, p), offset_);
      pairs[p] = bf16x2_fma(code, high_, bf16x2_mul(code, low_));
    }
  }

 private:
  unsigned high_, low_, offset_;
};

// code * scale + minimum, both in f16, one for each 32 columns; in fp32, which has the minimum's
// bits too.
struct I4g32mRow {
  static constexpr int kGroup = 32, kScale = 2, kOffset = 2, kRowScale = 0;

  I4g32mRow() = default;
  __device__ I4g32mRow(const unsigned char* scales, const unsigned char* minimums)
      : scale_(row_codes4::load_f16(scales)), minimum_(row_codes4::load_f16(minimums)) {}
  __device__ void expand(unsigned word, int, unsigned (&pairs)[4]) const {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      pairs[p] = bf16x2_pack(value(word >> 4 * p), value(word >> (16 + 4 * p)));
    }
  }

 private:
  __device__ float value(unsigned code) const {
    // As fp32, 2^23 + code.
    const float number = __uint_as_float(and_or(code, 0xF, 0x4B000000)) - 0x1p23f;
    return fmaf(number, scale_, minimum_);
  }

  float scale_, minimum_;
};

}  // namespace atlas
