// Tensor core multiply-accumulate, as the PTX ISA defines `mma.m16n8k16` for bf16.
//
// A warp multiplies A [16, 16] (row-major) by B [16, 8] (column-major, so B^T is row-major, as
// weights are stored) and adds to C [16, 8] in fp32. With g = lane / 4 and t = lane % 4, a lane
// holds
//   a[0] = A[g,   2t..2t+1]    a[1] = A[g+8, 2t..2t+1]
//   a[2] = A[g,   2t+8..2t+9]  a[3] = A[g+8, 2t+8..2t+9]
//   b[0] = B[2t..2t+1, g]      b[1] = B[2t+8..2t+9, g]
//   c[0..1] = C[g, 2t..2t+1]   c[2..3] = C[g+8, 2t..2t+1]
// where each 32-bit register holds two bf16, the lower index in the lower half.
#pragma once

namespace atlas {

__device__ inline void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with f16 instead of bf16.
__device__ inline void mma_m16n8k16_f16(float (&c)[4], const unsigned (&a)[4],
                                        const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with 32 columns of E4M3 (compute capability 8.9 and later): four to a register, 4t.. in
// place of 2t.., and 4t + 16.. in place of 2t + 8.. .
__device__ inline void mma_m16n8k32_e4m3(float (&c)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace atlas
