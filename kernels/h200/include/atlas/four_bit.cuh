// Weights of 4 bits as A operands of wgmma, in bf16: layout `frag4` (atlas/weights/fragments.py).
//
// A tile is 128 rows by 64 columns: 4 KB of codes, then scales. A thread of a warpgroup (warp w,
// lane 4 g + t) finds the 32 codes that it holds as registers of A in 16 bytes, one word for each
// step of 16 columns. Register i + 2 h of a step holds row 16 w + g + 8 i, columns 8 h + 2 t (low
// half) and 8 h + 2 t + 1 (high half). Scales lie by [warpgroup][w][g][i][group], so that a thread
// reads those of both of its rows at once.
//
// A format is a class with
//   kTile, kTail   bytes of a tile, and of what follows the tiles of a row block
//   Packed         what a thread loads of a tile: load(tile)
//   expand(packed, step, a)   the four registers of one step
//   kFactor        what finished sums are multiplied by, beside a tail's 128 f32 factors of rows
//
// Each value of A is code times scale rounded to bf16 once. The arithmetic is in packed bf16, exact
// but for that rounding; instructions decide the speed of a small product, so they are counted: a
// tile takes a thread 48 (i4g32b), 54 (nvfp4) to about 105 (i4g32m).
#pragma once

#include <cuda_fp16.h>

#include "atlas/mbarrier.cuh"
#include "atlas/packed_bf16.cuh"

namespace atlas {

constexpr int kCodeBytes = 128 * 64 / 2;

// Which of the 256 threads that share a tile this is.
__device__ inline int fragment_thread() { return threadIdx.x % 256; }

// Where a thread's bytes of a tile lie.
struct Place4 {
  int codes, row;  // bytes; of the pairs of rows
  __device__ Place4() : codes(fragment_thread() * 16), row(fragment_thread() / 4) {}
  template <class T>
  __device__ T of_row(const unsigned char* first) const {
    return reinterpret_cast<const T*>(first)[row];
  }
};

__device__ inline unsigned rotate_right(unsigned word, int bits) {
  return __funnelshift_r(word, word, bits);
}
// Half `which` of a pair in both halves; arithmetic takes it without an instruction.
__device__ inline unsigned twice(unsigned pair, int which) {
  unsigned d;
  if (which == 0) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
        : "=r"(d)
        : "r"(pair));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}"
        : "=r"(d)
        : "r"(pair));
  }
  return d;
}

// Factors of the two rows of which a thread has finished sums, where a format has them: behind the
// tiles of a row block. Loads them here and now: once they are needed, nothing else is waited for.
template <class Format>
class RowFactors4 {
 public:
  __device__ RowFactors4() {}
  __device__ explicit RowFactors4(const unsigned char* tail) {
    if constexpr (Format::kTail != 0) {
      const int row = fragment_thread() / 32 * 16 + threadIdx.x % 32 / 4;
      const float* from = reinterpret_cast<const float*>(tail) + row;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(factor_[i]) : "l"(from + 8 * i));
      }
    }
  }
  template <int kCount>
  __device__ void apply(float (&sum)[kCount]) const {
    if constexpr (Format::kTail != 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] *= factor_[i / 2 % 2] * Format::kFactor;
    } else if constexpr (Format::kFactor != 1.0f) {
#pragma unroll
      for (float& value : sum) value *= Format::kFactor;
    }
  }

 private:
  float factor_[2];
};

// E2M1 codes, a scale for each 16 columns, an f32 factor for each row behind a row block's tiles.
//
// The bits of a code, moved to sign, low exponent bits and first mantissa bit of a bf16 number, are
// its value times 2^-126. Scales (never negative) are stored with a wider exponent, so that none is
// subnormal: with the same mantissa, the number they become is the scale times 2^107. Their product
// is exact: 2^-19 times the weight.
struct Nvfp4 {
  static constexpr int kTile = kCodeBytes + 128 * 4, kTail = 128 * 4;
  static constexpr float kFactor = 0x1p19f;

  struct Packed {
    uint4 codes;
    uint2 scales;
  };
  __device__ static Packed load(const unsigned char* tile, const Place4& place = Place4()) {
    return {*reinterpret_cast<const uint4*>(tile + place.codes),
            place.of_row<uint2>(tile + kCodeBytes)};
  }
  __device__ static void expand(const Packed& packed, int step, unsigned (&a)[4]) {
    const unsigned word = (&packed.codes.x)[step];
    constexpr unsigned kBits = 0x81C081C0;
    const unsigned low = scale(packed.scales.x, step), high = scale(packed.scales.y, step);
    a[0] = bf16x2_mul(word & kBits, low);
    a[1] = bf16x2_mul(rotate_right(word, 3) & kBits, high);
    a[2] = bf16x2_mul(rotate_right(word, 6) & kBits, low);
    // The bits that are left, in four places, by one multiplication whose other products miss them.
    a[3] = bf16x2_mul((word & 0x001B001B) * (1u << 3 | 1u << 8 | 1u << 14) & kBits, high);
  }

 private:
  // The scale of a step, in both halves: the row's word has those of the first two in the middle of
  // its halves, turned by a byte those of the others.
  __device__ static unsigned scale(unsigned row, int step) {
    const unsigned moved = step < 2 ? row : rotate_right(row, 24);
    return twice(and_or(moved, 0x0FF00FF0, 0x70007000), step % 2);
  }
};

// 4-bit integers: code p of a step (register p) in bits 4 p of the half words.
__device__ inline unsigned integer_codes(unsigned word, int p) {
  // As bf16, 128 + code.
  return and_or(word >> 4 * p, 0x000F000F, 0x43004300);
}
// (code - 8) * scale, scales in bf16, one for each 32 columns.
//
// A code stands as a sign and the three bits m of which code - 8 = +-(m + 1/2) - 1/2. With a one
// below them they are, wherever they stand in the lower byte, a subnormal bf16 number, which is
// linear in m: one fma with two multiples of the scale makes the weight, rounded once. Weights are
// made 2^-32 times as large, so that both multiples of scales from 2^-86 to 2^29 are exact.
struct I4g32b {
  static constexpr int kTile = kCodeBytes + 128 * 4, kTail = 0;
  static constexpr float kFactor = 0x1p32f;

  struct Packed {
    uint4 codes;
    uint2 scales;
  };
  __device__ static Packed load(const unsigned char* tile, const Place4& place = Place4()) {
    return {*reinterpret_cast<const uint4*>(tile + place.codes),
            place.of_row<uint2>(tile + kCodeBytes)};
  }
  __device__ static void expand(const Packed& packed, int step, unsigned (&a)[4]) {
    const unsigned word = (&packed.codes.x)[step];
    const Scales low(packed.scales.x, step / 2), high(packed.scales.y, step / 2);
    const unsigned other = __byte_perm(word, 0, 0x2301);
    a[0] = low.times(word);
    a[1] = high.times(word * 16);
    a[2] = low.times(other);
    a[3] = high.times(other * 16);
  }

 private:
  struct Scales {
    unsigned whole, half;
    // Times 2^97 and -2^-33.
    __device__ Scales(unsigned pair, int which)
        : whole(twice(bf16x2_mul(pair, 0x70007000), which)),
          half(twice(bf16x2_mul(pair, 0xAF00AF00), which)) {}
    __device__ unsigned times(unsigned codes) const {
      return bf16x2_fma(and_or(codes, 0x80708070, 0x00080008), whole, half);
    }
  };
};

// Two scales of f16, each as the sum of two bf16 numbers: the second takes the three bits that the
// first has no place for. code * high + (code * low) is then rounded once.
struct SplitScales {
  unsigned high, low;
  __device__ SplitScales(float first, float second) {
    high = bf16x2_pack(first, second);
    low = bf16x2_pack(first - __uint_as_float(high << 16),
                      second - __uint_as_float(high & 0xFFFF0000u));
  }
  __device__ unsigned times(unsigned codes, int which) const {
    return bf16x2_fma(codes, twice(high, which), bf16x2_mul(codes, twice(low, which)));
  }
};
__device__ inline float half_of(unsigned pair, int which) {
  const __half2 halves = *reinterpret_cast<const __half2*>(&pair);
  return which ? __high2float(halves) : __low2float(halves);
}

// (code - 8) * scale, or with kZeros (code - zero) * scale; scales in f16, one for each 32 columns.
// Zeros are bytes below 128 (of 4-bit weights they are 16 at most).
template <bool kZeros>
struct I4g32 {
  static constexpr int kTile = kCodeBytes + 128 * 4 + (kZeros ? 128 * 2 : 0), kTail = 0;
  static constexpr float kFactor = 1.0f;

  struct Packed {
    uint4 codes;
    uint2 scales;
    unsigned zeros;
  };
  __device__ static Packed load(const unsigned char* tile, const Place4& place = Place4()) {
    Packed packed{*reinterpret_cast<const uint4*>(tile + place.codes),
                  place.of_row<uint2>(tile + kCodeBytes), 0};
    if constexpr (kZeros) {
      packed.zeros = place.of_row<unsigned>(tile + kCodeBytes + 128 * 4);
    }
    return packed;
  }
  __device__ static void expand(const Packed& packed, int step, unsigned (&a)[4]) {
    const unsigned word = (&packed.codes.x)[step];
    const int group = step / 2;
    const SplitScales scales(half_of(packed.scales.x, group), half_of(packed.scales.y, group));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned offset = 0xC308C308;  // -136
      if constexpr (kZeros) {
        // -(128 + zero): the byte as mantissa.
        offset = __byte_perm(packed.zeros, 0xC3, 0x4040 + 0x0101 * (2 * i + group));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int p = i + 2 * h;
        a[p] = scales.times(bf16x2_add(integer_codes(word, p), offset), i);
      }
    }
  }
};

// code * scale + minimum, both in f16, one for each 32 columns. In fp32, whose fma has the
// minimum's bits too: a code in mantissa bits b.. of 2^(23 - b) is that power plus the code, and
// the power is taken off again by the addend.
struct I4g32m {
  static constexpr int kTile = kCodeBytes + 2 * 128 * 4, kTail = 0;
  static constexpr float kFactor = 1.0f;

  struct Packed {
    uint4 codes;
    uint2 scales, minimums;
  };
  __device__ static Packed load(const unsigned char* tile, const Place4& place = Place4()) {
    return {*reinterpret_cast<const uint4*>(tile + place.codes),
            place.of_row<uint2>(tile + kCodeBytes),
            place.of_row<uint2>(tile + kCodeBytes + 128 * 4)};
  }
  __device__ static void expand(const Packed& packed, int step, unsigned (&a)[4]) {
    const unsigned word = (&packed.codes.x)[step];
    const int group = step / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = half_of(i ? packed.scales.y : packed.scales.x, group);
      const float minimum = half_of(i ? packed.minimums.y : packed.minimums.x, group);
      const float addend = fmaf(scale, -16.0f, minimum);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int p = i + 2 * h;
        a[p] =
            bf16x2_pack(value(word, 4 * p, scale, addend), value(word, 16 + 4 * p, scale, addend));
      }
    }
  }

 private:
  __device__ static float value(unsigned word, int bit, float scale, float addend) {
    constexpr int kAt = 19;  // of 16 + code
    const unsigned moved = bit < kAt ? word << (kAt - bit) : word >> (bit - kAt);
    return fmaf(__uint_as_float(and_or(moved, 0xFu << kAt, 0x41800000)), scale, addend);
  }
};

}  // namespace atlas
