// 8 x 8 matrices of 16-bit elements between shared memory and registers (PTX ISA, ldmatrix).
//
// Lane l gives the address of row l % 8 (16 bytes) of matrix l / 8. With g = lane / 4 and t = lane
// % 4, register i of a lane holds elements [g][2t..2t+1] of matrix i, or [2t..2t+1][g] in the
// transposed form: what mma.cuh takes as B when the rows are B's columns, or B's rows.
#pragma once

namespace atlas {

__device__ inline void ldmatrix_x4(unsigned (&registers)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

__device__ inline void ldmatrix_x4_transposed(unsigned (&registers)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

// From registers to shared memory, as ldmatrix_x4 reads (sm_90 on).
__device__ inline void stmatrix_x4(unsigned address, const unsigned (&registers)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
               : "memory");
}

// The transpose of an 8 x 8 matrix that lies in the lanes' registers as above (PTX ISA, movmatrix).
__device__ inline unsigned transpose_8x8(unsigned value) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(value));
  return transposed;
}

}  // namespace atlas
