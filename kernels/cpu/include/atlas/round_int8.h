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

// Nearest integers, half to even, of values within int32.
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
      r.part[i][j] = static_cast<int32_t>(__builtin_rintf(v.part[i][j]));
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

// A group of a tile of rows, as dot products read it. Sum is how the consumer wants the sum of q:
// an integer that dot products start from, or fp32.
template <int rows, class Sum>
struct RoundedGroup {
  int8_t q[rows][kGroup];
  float scale[rows];
  Sum sum[rows];
};

// One group of one row: `count` values from `x`, the rest of the 32 are zeros.
template <class X, class Sum>
ATLAS_INLINE void round_group(const X* x, int64_t count, int8_t* q, float* scale, Sum* sum) {
  F32x16 low, high;
  if (count >= kGroup) {
    low = load(x), high = load(x + kLanes);
  } else {
    low = load(x, min64(count, kLanes));
    high = count > kLanes ? load(x + kLanes, count - kLanes) : zero();
  }
  const bool finite = !any((low * zero() != zero()) | (high * zero() != zero()));
  const float a = largest(max(abs(low), abs(high)));
  const bool zeros = !finite || a < 0x1p-120f;
  const F32x16 factor = splat(zeros ? 0.0f : 127.0f / a);
  const I32x16 low_q = round_to_int(zeros ? zero() : low * factor);
  const I32x16 high_q = round_to_int(zeros ? zero() : high * factor);
  store_bytes(q, low_q);
  store_bytes(q + kLanes, high_q);
  *sum = static_cast<Sum>(atlas::sum(to_float(low_q) + to_float(high_q)));  // exact
  *scale = !finite ? __builtin_nanf("") : zeros ? 0.0f : a / 127.0f;
}

}  // namespace
}  // namespace atlas
