// Activations of gated feed-forward layers, by the ops' number: 0 SiLU, 1 GELU by tanh, 2 exact
// GELU.
#pragma once

namespace atlas {

template <int kActivation>
__device__ inline float activate(float x) {
  static_assert(kActivation >= 0 && kActivation <= 2,
                "activation is 0 (SiLU), 1 (GELU by tanh) or 2 (exact GELU)");
  if constexpr (kActivation == 0) {
    return x / (1.0f + expf(-x));  // expf(-x) = inf gives the right limit, 0
  } else if constexpr (kActivation == 1) {
    // x / 2 * (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
    return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
  } else {
    return 0.5f * x * erfcf(-0.707106781f * x);
  }
}

// The same with the hardware's exponential and reciprocal, a quarter of the instructions: for
// results that are rounded to 16 bits or fewer. What is too small for a normal number counts as
// zero, which beside the 1 it would.
__device__ inline float sigmoid_rounded(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.44269504f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}
template <int kActivation>
__device__ inline float activate_rounded(float x) {
  if constexpr (kActivation == 0) {
    return x * sigmoid_rounded(x);
  } else if constexpr (kActivation == 1) {
    return x * sigmoid_rounded(1.5957691216f * (x + 0.044715f * x * x * x));
  } else {
    return activate<kActivation>(x);
  }
}

}  // namespace atlas
