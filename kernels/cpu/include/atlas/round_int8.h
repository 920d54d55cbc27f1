// Rows of activations rounded to int8 in groups of 32: q = rint(x * (127 / a)) half to even, scale
// a / 127, where a is the largest |x| of the group.
//
// A group whose `a` is below 2^-120 (127 / a would overflow) counts as zeros. One that holds a NaN
// or an infinity gets the scale NaN, and with it every output of the row.
#pragma once

#include "atlas/int_dot.h"
#include "atlas/partition.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

// Nearest integers, half to even, of values within int32. A NaN gives one whose low byte is zero.
ATLAS_INLINE I32x16 round_to_int(F32x16 v) {
  I32x16 r;
  for (int i = 0; i < kParts; ++i) {
#if defined(__AVX512F__)
    r.part[i] = bit_cast<NativeI32>(_mm512_maskz_cvtps_epi32(0xffff, v.part[i]));
#elif defined(__AVX2__)
    r.part[i] = bit_cast<NativeI32>(_mm256_cvtps_epi32(v.part[i]));
#elif defined(__aarch64__)
    r.part[i] = bit_cast<NativeI32>(vcvtnq_s32_f32(v.part[i]));
#elif defined(__SSE2__)
    r.part[i] = bit_cast<NativeI32>(_mm_cvtps_epi32(v.part[i]));
#else
    for (int j = 0; j < kNativeLanes; ++j) {
      const float value = v.part[i][j];
      r.part[i][j] = value == value ? static_cast<int32_t>(__builtin_rintf(value)) : 0;
    }
#endif
  }
  return r;
}
ATLAS_INLINE void store_bytes(int8_t* to, I32x16 v) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, bit_cast<__m512i>(v.part[0]));
  __builtin_memcpy(to, &bytes, sizeof(bytes));
#else
  using Bytes16 = int8_t __attribute__((vector_size(kNativeLanes)));
  for (int i = 0; i < kParts; ++i) {
    const Bytes16 bytes = __builtin_convertvector(v.part[i], Bytes16);
    __builtin_memcpy(to + i * kNativeLanes, &bytes, sizeof(bytes));
  }
#endif
}
ATLAS_INLINE F32x16 abs(F32x16 v) {
  for (int i = 0; i < kParts; ++i) {
    v.part[i] = bit_cast<NativeF32>(bit_cast<NativeU32>(v.part[i]) & 0x7fffffff);
  }
  return v;
}

// The larger of two vectors of magnitudes by their bits: NaN is above infinity.
ATLAS_INLINE NativeF32 larger_bits(NativeF32 a, NativeF32 b) {
  const auto x = bit_cast<NativeI32>(a), y = bit_cast<NativeI32>(b);
  return bit_cast<NativeF32>(x > y ? x : y);
}
ATLAS_INLINE F32x16 larger_bits(F32x16 a, F32x16 b) {
  for (int i = 0; i < kParts; ++i) a.part[i] = larger_bits(a.part[i], b.part[i]);
  return a;
}
ATLAS_INLINE void store_sums(float* to, F32x16 sums) { store(to, sums); }
ATLAS_INLINE void store_sums(int32_t* to, F32x16 sums) {
  const I32x16 ints = round_to_int(sums);
  for (int i = 0; i < kParts; ++i) {
    __builtin_memcpy(to + i * kNativeLanes, &ints.part[i], sizeof(NativeI32));
  }
}

// A group of a tile of rows, as dot products read it. Sum is how the consumer wants the sum of q:
// an integer that dot products start from, or fp32.
template <int rows, class Sum>
struct RoundedGroup {
  int8_t q[rows][kGroup];
  float scale[rows];
  Sum sum[rows];
};

// One group of one row: `count` values from `x`, the rest of the 32 are zeros; and where it goes.
template <class X, class Sum>
struct Unit {
  const X* x;
  int64_t count;
  int8_t* q;
  float* scale;
  Sum* sum;
};
constexpr int kUnits = kLanes;

template <class X, class Sum>
ATLAS_INLINE void load_unit(const Unit<X, Sum>& unit, F32x16& low, F32x16& high) {
  if (unit.count == kGroup) {
    low = load(unit.x);
    high = load(unit.x + kLanes);
  } else {
    low = load(unit.x, min64(unit.count, kLanes));
    high = load(unit.x + kLanes, max64(unit.count - kLanes, 0));
  }
}

// Up to 16 units, a lane each where they are scalars: a horizontal fold and a division of one unit
// take as long as those of 16.
template <class X, class Sum>
void round_units(const Unit<X, Sum>* units, int count) {
  F32x16 wide[kUnits];
  for (int i = count; i < kUnits; ++i) wide[i] = zero();
  for (int i = 0; i < count; ++i) {
    F32x16 low, high;
    load_unit(units[i], low, high);
    wide[i] = larger_bits(abs(low), abs(high));
  }
  const F32x16 a = fold_each(wide, [](auto x, auto y) { return larger_bits(x, y); });
  const Mask16 finite = a < splat(__builtin_inff());  // not of a NaN either
  const Mask16 zeros = a < splat(0x1p-120f);
  const F32x16 nan_or_zero = select(finite, zero(), splat(__builtin_nanf("")));
  float factor[kUnits], scale[kUnits];
  Sum sums[kUnits];
  store(factor, select(zeros, zero(), select(finite, splat(127.0f) / a, zero())));
  store(scale, select(zeros, zero(), select(finite, a / splat(127.0f), nan_or_zero)));
  for (int i = 0; i < count; ++i) {
    F32x16 low, high;
    load_unit(units[i], low, high);
    const I32x16 low_q = round_to_int(low * splat(factor[i]));
    const I32x16 high_q = round_to_int(high * splat(factor[i]));
    store_bytes(units[i].q, low_q);
    store_bytes(units[i].q + kLanes, high_q);
    wide[i] = to_float(low_q) + to_float(high_q);  // exact, and so are sums of it
  }
  store_sums(sums, select(finite, sum_each(wide), zero()));
  for (int i = 0; i < count; ++i) {
    *units[i].scale = scale[i];
    *units[i].sum = sums[i];
  }
}

}  // namespace
}  // namespace atlas
