// Arithmetic on two bf16 numbers in a register. Sums and products of their own came with compute
// capability 9.0; before it they are an fma with one neutral operand, whose bits are the same.
#pragma once

#include <cuda_bf16.h>

namespace atlas {

__device__ inline unsigned bf16x2_fma(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ inline unsigned bf16x2_add(unsigned a, unsigned b) {
#if __CUDA_ARCH__ >= 900
  unsigned d;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return bf16x2_fma(a, 0x3F803F80, b);  // a * 1 + b
#endif
}
__device__ inline unsigned bf16x2_mul(unsigned a, unsigned b) {
#if __CUDA_ARCH__ >= 900
  unsigned d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return bf16x2_fma(a, b, 0x80008000);  // - 0 keeps the sign of a zero
#endif
}
__device__ inline unsigned bf16x2_pack(float low, float high) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
// (word & mask) | bits in one instruction: of two constants in C the compiler makes two.
__device__ inline unsigned and_or(unsigned word, unsigned mask, unsigned bits) {
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(word), "r"(mask), "r"(bits));
  return d;
}

}  // namespace atlas
