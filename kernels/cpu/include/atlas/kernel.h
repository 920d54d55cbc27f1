// The CPU kernel ABI, and how a kernel file declares its instances.
//
// Every worker of the thread pool calls the kernel with its own index; the kernel splits the work
// by (worker, n_workers) so that one worker computes an output element wholly, always by the same
// arithmetic: results depend neither on the number of workers nor on the other rows of a batch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace atlas {

union Constant;

struct CpuLaunch {
  void* const* operands;      // arena pointers, in the op contract's order
  const int64_t* dims;        // run-time dims, in the contract's order
  const void* constants;      // 8-byte int64 or double each, in the contract's order
  int worker;
  int n_workers;
  std::byte* scratch;         // private to the worker, 64-byte aligned
  size_t scratch_bytes;       // at least kCpuScratchBytes

  template <class T>
  T* operand(int index) const { return static_cast<T*>(operands[index]); }
  int64_t integer(int index) const { return static_cast<const int64_t*>(constants)[index]; }
  double real(int index) const { return static_cast<const double*>(constants)[index]; }
};

constexpr size_t kCpuScratchBytes = 4u << 20;

using CpuKernel = void (*)(const CpuLaunch&);

// Called by static initialisers of kernel files, once per instruction-set level.
void register_cpu_kernel(const char* level, const char* signature, CpuKernel kernel);

struct CpuKernelRegistration {
  CpuKernelRegistration(const char* level, const char* signature, CpuKernel kernel) {
    register_cpu_kernel(level, signature, kernel);
  }
};

}  // namespace atlas

#define ATLAS_CONCAT_(a, b) a##b
#define ATLAS_CONCAT(a, b) ATLAS_CONCAT_(a, b)

// ATLAS_CPU_KERNEL("linear.x_f32.weight_f32.out_f32", linear<float, float, float>)
// The build reads these lines too: they are the list of what is compiled in. ATLAS_CPU_LEVEL is a
// string set by the build for each level.
#define ATLAS_CPU_KERNEL(signature, ...)                                              \
  static const ::atlas::CpuKernelRegistration ATLAS_CONCAT(registration_, __COUNTER__)( \
      ATLAS_CPU_LEVEL, signature, __VA_ARGS__)
