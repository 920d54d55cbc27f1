// Thread blocks of a cluster and each other's shared memory.
#pragma once

#include "atlas/mbarrier.cuh"

namespace atlas {

// A barrier of all threads of a cluster, in two parts: after the second the others' blocks run, and
// barriers that they published (mbarrier.cuh) before the first can be seen. Whole warps.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// This block's number in its cluster.
__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where shared memory of this block's address lies in block `rank`.
__device__ inline unsigned cluster_address(const void* pointer, unsigned rank) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

// Stores to another block's shared memory and counts the bytes at a barrier there.
__device__ inline void store_async(unsigned address, const float4& four, unsigned barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w), "r"(barrier)
      : "memory");
}

}  // namespace atlas
