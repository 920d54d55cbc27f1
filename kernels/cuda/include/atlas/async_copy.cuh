// Asynchronous copies from global to shared memory (cp.async).
#pragma once

namespace atlas {

// Copies 16 bytes if `valid`, else writes 16 zero bytes; `source` must be a mapped address either
// way. Both addresses are multiples of 16.
__device__ inline void copy_async_16(void* destination, const void* source, bool valid) {
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(destination));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// Copies the first `valid` of kBytes bytes, whose addresses are multiples of kBytes, and zeros for
// the rest; `source` must be a mapped address even if none is. Of 1 or 2 bytes the thread waits.
template <int kBytes>
__device__ inline void copy_async(unsigned char* destination, const unsigned char* source,
                                  int valid) {
  if constexpr (kBytes >= 4) {
    const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(destination));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source),
                 "n"(kBytes), "r"(valid)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) destination[i] = i < valid ? source[i] : 0;
  }
}

// Ends a group of copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are in flight. Other threads' copies are
// seen only after a __syncthreads() that follows.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace atlas
