// sin and cos of an fp32 angle, right to the last bit or nearly so, at any magnitude.
//
// The library's sinf and cosf take a slow path through local memory for angles above 1e5, which
// RoPE reaches at long contexts. Here the angle is reduced in fp64 (exact below 2^31 quarter turns
// to far below an fp32 ulp) and the series are summed in fp64; a block computes only head_dim / 2
// of them.
#pragma once

namespace atlas {

struct SinCos {
  float sin, cos;
};

__device__ inline SinCos sincos(float angle) {
  const double x = angle;
  const double turns = rint(x * 0.63661977236758134);  // quarter turns: 2 / pi
  // pi / 2 in two parts; the remainder is in [-pi/4, pi/4].
  double r = fma(-turns, 1.5707963267948966, x);
  r = fma(-turns, 6.123233995736766e-17, r);
  const double r2 = r * r;
  // Taylor series; the first term left out is below 1e-16 of the result.
  double s = -1.0 / 1307674368000.0;
  s = fma(s, r2, 1.0 / 6227020800.0);
  s = fma(s, r2, -1.0 / 39916800.0);
  s = fma(s, r2, 1.0 / 362880.0);
  s = fma(s, r2, -1.0 / 5040.0);
  s = fma(s, r2, 1.0 / 120.0);
  s = fma(s, r2, -1.0 / 6.0);
  s = fma(s * r2, r, r);
  double c = 1.0 / 20922789888000.0;
  c = fma(c, r2, -1.0 / 87178291200.0);
  c = fma(c, r2, 1.0 / 479001600.0);
  c = fma(c, r2, -1.0 / 3628800.0);
  c = fma(c, r2, 1.0 / 40320.0);
  c = fma(c, r2, -1.0 / 720.0);
  c = fma(c, r2, 1.0 / 24.0);
  c = fma(c, r2, -0.5);
  c = fma(c, r2, 1.0);
  const int quadrant = static_cast<int>(static_cast<long long>(turns) & 3);
  const double sine = quadrant & 1 ? c : s, cosine = quadrant & 1 ? s : c;
  return {static_cast<float>(quadrant & 2 ? -sine : sine),
          static_cast<float>(quadrant == 1 || quadrant == 2 ? -cosine : cosine)};
}

}  // namespace atlas
