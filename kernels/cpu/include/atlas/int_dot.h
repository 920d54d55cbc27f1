// Dot products of unsigned codes and int8 activations, 16 columns at a time, exact in int32.
//
// A step is 4 consecutive k of 16 columns: 64 bytes, column c's four codes at byte 4c, against the
// four activations of a row at the same k. `Dots<bits>` sums the 8 steps of a group of 32 k.
//
// VNNI (and the usdot of aarch64 i8mm) takes unsigned times signed bytes straight into int32.
// Without it, x86 has maddubs, which adds two neighbouring products in int16 and saturates. It is
// used on nibbles only: |code * x| <= 15 * 128, a lane collects 2 products from each of 8 steps,
// 16 * 15 * 128 = 30720 < 32768, so nothing saturates; 8-bit codes are two nibbles, 16 * high +
// low.
#pragma once

#include "atlas/simd.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

constexpr int kGroup = 32;  // k that share a scale
constexpr int kStepK = 4;   // k of a step
constexpr int kStepBytes = kLanes * kStepK;

struct I32x16 {
  NativeI32 part[kParts];
};
ATLAS_INLINE F32x16 to_float(I32x16 v) {
  F32x16 r;
  for (int i = 0; i < kParts; ++i) r.part[i] = __builtin_convertvector(v.part[i], NativeF32);
  return r;
}

// a * b + c, fused where the level can: unlike an expression, the same on every path by which
// the compiler gets here.
ATLAS_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  for (int i = 0; i < kParts; ++i) {
#if defined(__AVX512F__)
    c.part[i] = _mm512_fmadd_ps(a.part[i], b.part[i], c.part[i]);
#elif defined(__AVX2__)
    c.part[i] = _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]);
#elif defined(__aarch64__)
    c.part[i] = vfmaq_f32(c.part[i], a.part[i], b.part[i]);
#else
    c.part[i] = a.part[i] * b.part[i] + c.part[i];
#endif
  }
  return c;
}

ATLAS_INLINE int32_t load_x(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof(four));
  return four;
}

#if defined(__AVX512VNNI__) && defined(__AVX512F__)

using Codes = __m512i;
ATLAS_INLINE Codes load_codes(const uint8_t* from) { return _mm512_loadu_si512(from); }
ATLAS_INLINE Codes low_nibbles(Codes c) { return _mm512_and_si512(c, _mm512_set1_epi8(15)); }
ATLAS_INLINE Codes high_nibbles(Codes c) {
  return _mm512_and_si512(_mm512_srli_epi16(c, 4), _mm512_set1_epi8(15));
}

template <int bits>
struct Dots {
  __m512i sums;
  ATLAS_INLINE void start(int32_t value) { sums = _mm512_set1_epi32(value); }
  ATLAS_INLINE void add(Codes codes, const int8_t* x) {
    sums = _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(load_x(x)));
  }
  ATLAS_INLINE I32x16 finish() const { return {{bit_cast<NativeI32>(sums)}}; }
};

#elif defined(__AVX2__)

// The few operations that differ between 256 and 512 bits.
#if defined(__AVX512BW__)
using Bytes = __m512i;
ATLAS_INLINE Bytes bytes_splat(int32_t v) { return _mm512_set1_epi32(v); }
ATLAS_INLINE Bytes bytes_and(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
ATLAS_INLINE Bytes words_right4(Bytes a) { return _mm512_srli_epi16(a, 4); }
ATLAS_INLINE Bytes words_add(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
ATLAS_INLINE Bytes ints_add(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
ATLAS_INLINE Bytes maddubs(Bytes codes, Bytes x) { return _mm512_maddubs_epi16(codes, x); }
ATLAS_INLINE Bytes madd(Bytes a, Bytes b) { return _mm512_madd_epi16(a, b); }
#else
using Bytes = __m256i;
ATLAS_INLINE Bytes bytes_splat(int32_t v) { return _mm256_set1_epi32(v); }
ATLAS_INLINE Bytes bytes_and(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
ATLAS_INLINE Bytes words_right4(Bytes a) { return _mm256_srli_epi16(a, 4); }
ATLAS_INLINE Bytes words_add(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
ATLAS_INLINE Bytes ints_add(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
ATLAS_INLINE Bytes maddubs(Bytes codes, Bytes x) { return _mm256_maddubs_epi16(codes, x); }
ATLAS_INLINE Bytes madd(Bytes a, Bytes b) { return _mm256_madd_epi16(a, b); }
#endif

struct Codes {
  Bytes part[kParts];
};
ATLAS_INLINE Codes load_codes(const uint8_t* from) {
  Codes r;
  for (int i = 0; i < kParts; ++i) {
    __builtin_memcpy(&r.part[i], from + i * sizeof(Bytes), sizeof(Bytes));
  }
  return r;
}
ATLAS_INLINE Codes low_nibbles(Codes c) {
  for (int i = 0; i < kParts; ++i) c.part[i] = bytes_and(c.part[i], bytes_splat(0x0f0f0f0f));
  return c;
}
ATLAS_INLINE Codes high_nibbles(Codes c) {
  for (int i = 0; i < kParts; ++i) c.part[i] = words_right4(c.part[i]);
  return low_nibbles(c);
}

template <int bits>
struct Dots {
  int32_t first;
  Codes low, high;  // int16 sums; `high` only of 8-bit codes
  ATLAS_INLINE void start(int32_t value) {
    first = value;
    for (int i = 0; i < kParts; ++i) low.part[i] = high.part[i] = bytes_splat(0);
  }
  ATLAS_INLINE void add(Codes codes, const int8_t* x) {
    const Bytes four = bytes_splat(load_x(x));
    const Codes lower = bits == 4 ? codes : low_nibbles(codes), upper = high_nibbles(codes);
    for (int i = 0; i < kParts; ++i) {
      low.part[i] = words_add(low.part[i], maddubs(lower.part[i], four));
      if (bits == 8) high.part[i] = words_add(high.part[i], maddubs(upper.part[i], four));
    }
  }
  ATLAS_INLINE I32x16 finish() const {
    I32x16 r;
    for (int i = 0; i < kParts; ++i) {
      Bytes sum = madd(low.part[i], bytes_splat(0x00010001));
      if (bits == 8) sum = ints_add(sum, madd(high.part[i], bytes_splat(0x00100010)));
      r.part[i] = bit_cast<NativeI32>(ints_add(sum, bytes_splat(first)));
    }
    return r;
  }
};

#elif defined(__ARM_FEATURE_DOTPROD)

struct Codes {
  uint8x16_t part[kParts];
};
ATLAS_INLINE Codes load_codes(const uint8_t* from) {
  Codes r;
  for (int i = 0; i < kParts; ++i) r.part[i] = vld1q_u8(from + 16 * i);
  return r;
}
ATLAS_INLINE Codes low_nibbles(Codes c) {
  for (int i = 0; i < kParts; ++i) c.part[i] = vandq_u8(c.part[i], vdupq_n_u8(15));
  return c;
}
ATLAS_INLINE Codes high_nibbles(Codes c) {
  for (int i = 0; i < kParts; ++i) c.part[i] = vshrq_n_u8(c.part[i], 4);
  return c;
}

template <int bits>
struct Dots {
  int32x4_t sums[kParts];
  ATLAS_INLINE void start(int32_t value) {
    for (int i = 0; i < kParts; ++i) sums[i] = vdupq_n_s32(value);
  }
  ATLAS_INLINE void add(Codes codes, const int8_t* x) {
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(load_x(x)));
    for (int i = 0; i < kParts; ++i) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
      sums[i] = vusdotq_s32(sums[i], codes.part[i], four);
#else
      if constexpr (bits == 4) {  // a nibble has the same value signed
        sums[i] = vdotq_s32(sums[i], vreinterpretq_s8_u8(codes.part[i]), four);
      } else {  // code = (code - 128) + 128
        const auto code = vreinterpretq_s8_u8(veorq_u8(codes.part[i], vdupq_n_u8(128)));
        sums[i] = vdotq_s32(vdotq_s32(sums[i], code, four), four, vdupq_n_s8(64));
        sums[i] = vdotq_s32(sums[i], four, vdupq_n_s8(64));
      }
#endif
    }
  }
  ATLAS_INLINE I32x16 finish() const {
    I32x16 r;
    for (int i = 0; i < kParts; ++i) r.part[i] = bit_cast<NativeI32>(sums[i]);
    return r;
  }
};

#else

// Products of 16-bit halves: an int32 lane holds the codes 4c .. 4c+3, two at a time.
struct Codes {
  NativeU32 part[kParts];
};
ATLAS_INLINE Codes load_codes(const uint8_t* from) {
  Codes r;
  for (int i = 0; i < kParts; ++i) {
    __builtin_memcpy(&r.part[i], from + i * sizeof(NativeU32), sizeof(NativeU32));
  }
  return r;
}
ATLAS_INLINE Codes low_nibbles(Codes c) {
  for (int i = 0; i < kParts; ++i) c.part[i] &= 0x0f0f0f0f;
  return c;
}
ATLAS_INLINE Codes high_nibbles(Codes c) {
  for (int i = 0; i < kParts; ++i) c.part[i] = (c.part[i] >> 4) & 0x0f0f0f0f;
  return c;
}

template <int bits>
struct Dots {
  NativeI32 sums[kParts];
  ATLAS_INLINE void start(int32_t value) {
    for (int i = 0; i < kParts; ++i) sums[i] = value - NativeI32{};
  }
  ATLAS_INLINE void add(Codes codes, const int8_t* x) {
    for (int i = 0; i < kParts; ++i) {
#if defined(__SSE2__)
      // Codes 4c, 4c+2 and 4c+1, 4c+3 as int16 pairs.
      const auto even = bit_cast<__m128i>(codes.part[i] & 0x00ff00ff);
      const auto odd = bit_cast<__m128i>((codes.part[i] >> 8) & 0x00ff00ff);
      const __m128i x02 = _mm_set1_epi32((x[0] & 0xffff) | x[2] * 65536);
      const __m128i x13 = _mm_set1_epi32((x[1] & 0xffff) | x[3] * 65536);
      sums[i] += bit_cast<NativeI32>(_mm_madd_epi16(even, x02));
      sums[i] += bit_cast<NativeI32>(_mm_madd_epi16(odd, x13));
#else
      for (int j = 0; j < kStepK; ++j) {
        sums[i] += bit_cast<NativeI32>((codes.part[i] >> (8 * j)) & 0xff) * int32_t{x[j]};
      }
#endif
    }
  }
  ATLAS_INLINE I32x16 finish() const {
    I32x16 r;
    for (int i = 0; i < kParts; ++i) r.part[i] = sums[i];
    return r;
  }
};

#endif

}  // namespace
}  // namespace atlas
