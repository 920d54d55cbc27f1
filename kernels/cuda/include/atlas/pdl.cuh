// Programmatic dependent launch: a kernel may start before the one it depends on has ended.
//
// A kernel calls launch_dependents() first, so that its successor can be made resident and fetch
// weights, and wait_for_inputs() in every thread before it reads or writes what other kernels of
// the program touch, and before it exits. wait_for_inputs() returns once the predecessor has ended
// and its writes are visible; since the predecessor waited for its own, everything before it has
// ended too. Weights and the step block are never written by kernels: they may be read at once.
// Launched without the attribute, or on an architecture before 9.0, both do nothing.
#pragma once

namespace atlas {

__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace atlas
