// Activations of gated MLPs, by the numbers of op gated_activation's constant `activation`.
#pragma once

#include "atlas/simd.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

struct Silu {
  ATLAS_INLINE F32x16 operator()(F32x16 x) const { return x / (splat(1.0f) + exp(zero() - x)); }
};

// x / 2 * (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
struct GeluTanh {
  ATLAS_INLINE F32x16 operator()(F32x16 x) const {
    const F32x16 cubic = x + splat(0.044715f) * x * x * x;
    return x / (splat(1.0f) + exp(splat(-1.5957691216f) * cubic));
  }
};

// x / 2 * erfc(-x / sqrt 2). For z >= 0, erfc z = t exp(q(t) - z^2) with t = 1 / (1 + z / 2), and q
// a polynomial fitted at 400 Chebyshev nodes of t for z up to 11, beyond which the result is 0 in
// fp32. Evaluated in fp32 it is within 3e-7 of its value, so erfc keeps its digits in the tail.
struct GeluErf {
  ATLAS_INLINE F32x16 operator()(F32x16 x) const {
    constexpr float kQ[] = {-1.26546876f,   0.999060409f,  0.382924554f,  0.0525327002f,
                            -0.0518615174f, 0.0203504905f, -0.818536591f, 1.24898503f,
                            -0.720157548f,  0.152171282f};
    const F32x16 negative = zero() - x;
    const F32x16 z = select(x < zero(), negative, x) * splat(0.707106781f);
    const F32x16 t = splat(1.0f) / (splat(1.0f) + splat(0.5f) * z);
    F32x16 q = splat(kQ[9]);
    for (int i = 8; i >= 0; --i) q = q * t + splat(kQ[i]);
    const F32x16 half = splat(0.5f) * t * exp(q - z * z);  // erfc(z) / 2
    return x * select(x < zero(), half, splat(1.0f) - half);
  }
};

// Calls body with the functor of `activation`.
template <class Body>
ATLAS_INLINE void with_activation(int64_t activation, Body body) {
  if (activation == 0) return body(Silu());
  if (activation == 1) return body(GeluTanh());
  body(GeluErf());
}

}  // namespace
}  // namespace atlas
