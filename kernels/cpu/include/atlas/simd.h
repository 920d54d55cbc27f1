// 16-lane fp32 vectors on GCC and Clang vector extensions.
//
// F32x16 is 16 lanes on every instruction-set level, stored as 1, 2 or 4 machine vectors, so that
// kernels are written once and every level adds up in the same order. bf16 is storage only: loads
// widen to fp32 exactly, stores round to nearest even.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <type_traits>
#include <utility>

#include "atlas/kernel.h"

#if defined(__GNUC__) && !defined(__clang__)
// The ABI of vector arguments changes with the level. No function here is called across levels.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kNativeLanes = 16;
#elif defined(__AVX2__)
constexpr int kNativeLanes = 8;
#else
constexpr int kNativeLanes = 4;
#endif
constexpr int kParts = kLanes / kNativeLanes;

using NativeF32 = float __attribute__((vector_size(kNativeLanes * 4)));
using NativeI32 = int32_t __attribute__((vector_size(kNativeLanes * 4)));
using NativeU32 = uint32_t __attribute__((vector_size(kNativeLanes * 4)));
using NativeU64 = uint64_t __attribute__((vector_size(kNativeLanes * 4)));
using NativeU16 = uint16_t __attribute__((vector_size(kNativeLanes * 2)));

struct Bf16 {
  uint16_t bits;
};

struct F32x16 {
  NativeF32 part[kParts];
};
// All ones where true, zero where false.
struct Mask16 {
  NativeI32 part[kParts];
};

template <class To, class From>
ATLAS_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

ATLAS_INLINE F32x16 splat(float value) {
  F32x16 r;
  for (int i = 0; i < kParts; ++i) r.part[i] = value - NativeF32{};  // -0.0 stays -0.0
  return r;
}
ATLAS_INLINE F32x16 zero() {
  F32x16 r;
  for (int i = 0; i < kParts; ++i) r.part[i] = NativeF32{};
  return r;
}

#define ATLAS_LANEWISE(op)                                               \
  ATLAS_INLINE F32x16 operator op(F32x16 a, F32x16 b) {                  \
    F32x16 r;                                                            \
    for (int i = 0; i < kParts; ++i) r.part[i] = a.part[i] op b.part[i]; \
    return r;                                                            \
  }
ATLAS_LANEWISE(+)
ATLAS_LANEWISE(-)
ATLAS_LANEWISE(*)
ATLAS_LANEWISE(/)
#undef ATLAS_LANEWISE
#define ATLAS_COMPARE(op)                                                \
  ATLAS_INLINE Mask16 operator op(F32x16 a, F32x16 b) {                  \
    Mask16 r;                                                            \
    for (int i = 0; i < kParts; ++i) r.part[i] = a.part[i] op b.part[i]; \
    return r;                                                            \
  }
ATLAS_COMPARE(<)
ATLAS_COMPARE(>)
ATLAS_COMPARE(==)
ATLAS_COMPARE(!=)
#undef ATLAS_COMPARE

ATLAS_INLINE Mask16 operator|(Mask16 a, Mask16 b) {
  for (int i = 0; i < kParts; ++i) a.part[i] |= b.part[i];
  return a;
}
ATLAS_INLINE F32x16 select(Mask16 mask, F32x16 yes, F32x16 no) {
  F32x16 r;
  for (int i = 0; i < kParts; ++i) r.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
  return r;
}
// b where a is not greater: a NaN in `a` gives b, a NaN in `b` stays.
ATLAS_INLINE F32x16 max(F32x16 a, F32x16 b) { return select(a > b, a, b); }

ATLAS_INLINE bool any(Mask16 mask) {
  NativeI32 all = mask.part[0];
  for (int i = 1; i < kParts; ++i) all |= mask.part[i];
  int64_t words[kNativeLanes / 2], or_ = 0;
  __builtin_memcpy(words, &all, sizeof(words));
  for (int64_t word : words) or_ |= word;
  return or_ != 0;
}

// Lane numbers 0..15 compared with `count`: true for the first `count` lanes.
ATLAS_INLINE Mask16 first_lanes(int64_t count) {
  Mask16 r;
  for (int i = 0; i < kParts; ++i) {
    NativeI32 lane;
    for (int j = 0; j < kNativeLanes; ++j) lane[j] = i * kNativeLanes + j;
    r.part[i] = lane < static_cast<int32_t>(count);
  }
  return r;
}

#if defined(__clang__)
#define ATLAS_SHUFFLE(Indices, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ATLAS_SHUFFLE(Indices, a, b, ...) __builtin_shuffle(a, b, Indices{__VA_ARGS__})
#endif

// Memory. No alignment is needed; the `count` forms touch only the first `count` < 16 elements.

ATLAS_INLINE F32x16 load(const float* from) {
  F32x16 r;
  for (int i = 0; i < kParts; ++i) {
    __builtin_memcpy(&r.part[i], from + i * kNativeLanes, sizeof(NativeF32));
  }
  return r;
}
// The bits of a bf16 are the upper half of its fp32's. __builtin_convertvector would say it too,
// but GCC 12 makes four instructions of what is one here.
ATLAS_INLINE NativeF32 load_part(const Bf16* from) {
#if defined(__AVX512F__)
  __m256i half;
  __builtin_memcpy(&half, from, sizeof(half));
  // Not the form without a mask: GCC 12 warns about its unused operand.
  const auto bits = bit_cast<NativeU32>(_mm512_maskz_cvtepu16_epi32(0xffff, half)) << 16;
#elif defined(__AVX2__)
  __m128i half;
  __builtin_memcpy(&half, from, sizeof(half));
  const auto bits = bit_cast<NativeU32>(_mm256_cvtepu16_epi32(half)) << 16;
#else
  using Words = uint16_t __attribute__((vector_size(16)));
  uint64_t half;
  __builtin_memcpy(&half, from, sizeof(half));
  const Words words = bit_cast<Words>(NativeU64{half, 0});
  const Words bits = ATLAS_SHUFFLE(Words, Words{}, words, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
  return bit_cast<NativeF32>(bits);
}
ATLAS_INLINE F32x16 load(const Bf16* from) {
  F32x16 r;
  for (int i = 0; i < kParts; ++i) r.part[i] = load_part(from + i * kNativeLanes);
  return r;
}
ATLAS_INLINE void store(float* to, F32x16 value) {
  for (int i = 0; i < kParts; ++i) {
    __builtin_memcpy(to + i * kNativeLanes, &value.part[i], sizeof(NativeF32));
  }
}
ATLAS_INLINE void store(Bf16* to, F32x16 value) {
  for (int i = 0; i < kParts; ++i) {
    const NativeU32 bits = bit_cast<NativeU32>(value.part[i]);
    const NativeU32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const NativeU32 nan = (bits >> 16) | 0x40;  // rounding could turn a NaN into infinity
    const NativeI32 is_nan = value.part[i] != value.part[i];
    const NativeU16 out = __builtin_convertvector(is_nan ? nan : rounded, NativeU16);
    __builtin_memcpy(to + i * kNativeLanes, &out, sizeof(out));
  }
}
template <class T>
ATLAS_INLINE F32x16 load(const T* from, int64_t count) {
  T lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
  return load(lanes);
}
template <class T>
ATLAS_INLINE void store(T* to, F32x16 value, int64_t count) {
  T lanes[kLanes];
  store(lanes, value);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

// Calls body(i, count) for i = 0, 16, ... below n; count is 16 but for a last, partial vector. The
// call with 16 has a literal argument, so that load and store below choose at compile time.
template <class Body>
ATLAS_INLINE void for_lanes(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, std::integral_constant<int, kLanes>());
  if (i < n) body(i, n - i);
}
template <class T>
ATLAS_INLINE F32x16 load(const T* from, std::integral_constant<int, kLanes>) {
  return load(from);
}
template <class T>
ATLAS_INLINE void store(T* to, F32x16 value, std::integral_constant<int, kLanes>) {
  store(to, value);
}

// Horizontal operations, always by halves: lane i with i + 8, then i + 4, i + 2, i + 1.

template <int distance, int... i>
ATLAS_INLINE NativeF32 rotate_lanes(NativeF32 v, std::integer_sequence<int, i...>) {
  return ATLAS_SHUFFLE(NativeI32, v, v, ((i + distance) % kNativeLanes)...);
}
template <int half, class Combine>
ATLAS_INLINE float fold_part(NativeF32 v, Combine combine) {
  if constexpr (half == 0) {
    return v[0];
  } else {
    const auto lanes = std::make_integer_sequence<int, kNativeLanes>();
    return fold_part<half / 2>(combine(v, rotate_lanes<half>(v, lanes)), combine);
  }
}
template <class Combine>
ATLAS_INLINE float fold(F32x16 v, Combine combine) {
  for (int half = kParts / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v.part[i] = combine(v.part[i], v.part[i + half]);
  }
  return fold_part<kNativeLanes / 2>(v.part[0], combine);
}
ATLAS_INLINE float sum(F32x16 value) {
  return fold(value, [](NativeF32 a, NativeF32 b) { return a + b; });
}
// Any lane where one is NaN.
ATLAS_INLINE float largest(F32x16 value) {
  return fold(value, [](NativeF32 a, NativeF32 b) { return a > b ? a : b; });
}

// Index of lane i of the result of combine_halves: groups of 2 * half lanes, their low (or high)
// half.
constexpr int half_index(int i, int half, bool high) {
  return i / half * 2 * half + i % half + (high ? half : 0);
}
template <int half, class Combine, int... i>
ATLAS_INLINE NativeF32 combine_halves(NativeF32 a, NativeF32 b, Combine combine,
                                      std::integer_sequence<int, i...>) {
  return combine(ATLAS_SHUFFLE(NativeI32, a, b, half_index(i, half, false)...),
                 ATLAS_SHUFFLE(NativeI32, a, b, half_index(i, half, true)...));
}
// Folds of groups: `rows` holds 2 * half vectors; the result has one lane per vector (and group).
template <int half, class Combine>
ATLAS_INLINE NativeF32 fold_groups(const NativeF32* rows, Combine combine) {
  const auto lanes = std::make_integer_sequence<int, kNativeLanes>();
  if constexpr (half * 2 == kNativeLanes) {
    return combine_halves<half>(rows[0], rows[1], combine, lanes);
  } else {
    constexpr int below = kNativeLanes / 2 / half;
    return combine_halves<half>(fold_groups<half * 2>(rows, combine),
                                fold_groups<half * 2>(rows + below, combine), combine, lanes);
  }
}
// Lane t of the result is fold(rows[t], combine), in the same order.
template <class Combine>
ATLAS_INLINE F32x16 fold_each(const F32x16* rows, Combine combine) {
  F32x16 r;
  for (int group = 0; group < kParts; ++group) {
    NativeF32 folded[kNativeLanes];
    for (int i = 0; i < kNativeLanes; ++i) {
      const F32x16& row = rows[group * kNativeLanes + i];
      if constexpr (kParts == 1) {
        folded[i] = row.part[0];
      } else if constexpr (kParts == 2) {
        folded[i] = combine(row.part[0], row.part[1]);
      } else {
        folded[i] = combine(combine(row.part[0], row.part[2]), combine(row.part[1], row.part[3]));
      }
    }
    r.part[group] = fold_groups<1>(folded, combine);
  }
  return r;
}
ATLAS_INLINE F32x16 sum_each(const F32x16* rows) {
  return fold_each(rows, [](NativeF32 a, NativeF32 b) { return a + b; });
}

// e^x within 2 ulp, denormal results included; 0 and inf outside the range, NaN stays.
// x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor series to r^7 (relative error 5e-9); 2^n in
// two factors, so that neither overflows where the product does not.
ATLAS_INLINE F32x16 exp(F32x16 x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  F32x16 result;
  for (int i = 0; i < kParts; ++i) {
    NativeF32 v = x.part[i];
    v = v < -104.0f ? NativeF32{} - 104.0f : v;
    v = v > 89.0f ? NativeF32{} + 89.0f : v;
    const NativeF32 shifted = v * 1.44269504f + kMagic;
    const NativeF32 n = shifted - kMagic;
    const NativeF32 r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
    NativeF32 p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // Unsigned where a NaN's bits could overflow; p is NaN then, whatever it is multiplied by.
    const NativeU32 exponent = bit_cast<NativeU32>(shifted) - bit_cast<uint32_t>(kMagic);
    const NativeU32 low = bit_cast<NativeU32>(bit_cast<NativeI32>(exponent) >> 1);
    const NativeU32 high = exponent - low;
    const auto power = [](NativeU32 e) { return bit_cast<NativeF32>((e + 127) << 23); };
    result.part[i] = p * power(low) * power(high);
  }
  return result;
}

}  // namespace
}  // namespace atlas
