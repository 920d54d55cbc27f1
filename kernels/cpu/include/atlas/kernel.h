// The CPU kernel ABI, and how a kernel file declares its instances.
//
// Every worker of the thread pool calls the kernel with its own index; the kernel splits the work
// by (worker, n_workers) so that one worker computes an output element wholly, always by the same
// arithmetic: results depend neither on the number of workers nor on the other rows of a batch.
//
// A kernel file is compiled once per instruction-set level and all copies are linked into one
// library, so nothing in it may be an ordinary inline function or template with external linkage:
// the linker would keep one copy of it, maybe one this machine cannot run. Kernels therefore stand
// in anonymous namespaces, shared headers too, and use no standard-library templates. Kernels do
// not throw and do not allocate.
#pragma once

#include <cstddef>
#include <cstdint>

#define ATLAS_INLINE inline __attribute__((always_inline))

namespace atlas {

struct CpuLaunch {
  void* const* operands;  // arena pointers, in the op contract's order; null: optional, left out
  const int64_t* dims;    // run-time dims, in the contract's order
  const void* constants;  // 8-byte int64 or double each, in the contract's order
  int worker;
  int n_workers;
  std::byte* scratch;  // what the kernel asked for, private to the worker, 64-byte aligned, garbage
  std::byte* shared;   // the same, one for all workers; null where the kernel asked for none
  void (*barrier)(void*);  // used through wait_for_others
  void* barrier_context;

  template <class T>
  ATLAS_INLINE T* operand(int index) const {
    return static_cast<T*>(operands[index]);
  }
  ATLAS_INLINE int64_t integer(int index) const {
    return static_cast<const int64_t*>(constants)[index];
  }
  // Returns when all workers have called it: what they wrote before is seen after. Every worker of
  // the launch must call it equally often.
  ATLAS_INLINE void wait_for_others() const {
    if (n_workers > 1) barrier(barrier_context);
  }
  ATLAS_INLINE double real(int index) const { return static_cast<const double*>(constants)[index]; }
};

using CpuKernel = void (*)(const CpuLaunch&);
// Bytes that a launch needs, per worker or shared; called at load with only the constants set.
using CpuScratch = size_t (*)(const CpuLaunch&);

// Called by static initialisers of kernel files, once per level and signature. Takes pointers and
// is defined elsewhere, so that an initialiser holds no instruction above the machine's baseline
// although its file is compiled for a higher level. The strings are kept by pointer.
bool register_cpu_kernel(const char* level, const char* signature, CpuKernel kernel,
                         CpuScratch scratch = nullptr, CpuScratch shared = nullptr);

}  // namespace atlas

#define ATLAS_CONCAT_(a, b) a##b
#define ATLAS_CONCAT(a, b) ATLAS_CONCAT_(a, b)

// ATLAS_CPU_KERNEL("linear.x_f32.weight_f32.out_f32", linear<float, float, float>, scratch<float>);
// Two more arguments are for kernels that need scratch: per worker, and shared. The build reads
// these lines too: they are the list of what is compiled in. ATLAS_CPU_LEVEL is a string set by the
// build for each level.
#define ATLAS_CPU_KERNEL(signature, ...)                                   \
  [[maybe_unused]] static const bool ATLAS_CONCAT(registered_, __LINE__) = \
      ::atlas::register_cpu_kernel(ATLAS_CPU_LEVEL, signature, __VA_ARGS__)
