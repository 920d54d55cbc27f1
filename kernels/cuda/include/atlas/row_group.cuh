// The blocks that share a row: the `launch::cluster` blocks of a cluster, along x of the grid; a
// single block where the hardware has no clusters. They see each other's shared memory.
#pragma once

#include "atlas/instance.h"

namespace atlas {

constexpr int kParts = launch::cluster;

__device__ inline int part() { return blockIdx.x; }

// Says that this part has begun. All threads call it once, before the first group_wait().
__device__ inline void group_arrive() {
  if constexpr (kParts > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Waits until all parts have arrived; only then may their shared memory be touched.
__device__ inline void group_wait() {
  if constexpr (kParts > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier over all threads of all parts; shared memory written before it, in any part, is seen
// after it.
__device__ inline void group_barrier() {
  if constexpr (kParts == 1) {
    __syncthreads();
  } else {
    group_arrive();
    group_wait();
  }
}

// This block's shared object `object`, as part `of` has it.
template <class T>
__device__ inline T* in_part(T* object, int of) {
  if constexpr (kParts == 1) {
    return object;
  } else {
    unsigned long long address;
    asm("mapa.u64 %0, %1, %2;"
        : "=l"(address)
        : "l"(reinterpret_cast<unsigned long long>(object)), "r"(of));
    return reinterpret_cast<T*>(address);
  }
}

}  // namespace atlas
