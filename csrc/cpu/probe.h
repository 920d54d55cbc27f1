// What this machine can do at most, measured: the ceilings that kernels are held against.
#pragma once

namespace atlas {

// Of `threads` threads together. Dot products of bf16 and int8 are 0 where the CPU has none.
// A multiplication and an addition are two operations.
struct CpuRates {
  double read_bytes;       // per second, from memory
  double f32, bf16, int8;  // operations per second, operands in registers
};

// Takes about a second and 512 MiB of memory.
CpuRates measure_cpu_rates(int threads);

}  // namespace atlas
