// Bulk asynchronous copies of contiguous bytes between global and shared memory (cp.async.bulk).
//
// One thread starts a copy of any multiple of 16 bytes; both addresses are multiples of 16. A load
// counts its bytes at a barrier (mbarrier.cuh), which must have been told to expect them.
#pragma once

#include "atlas/mbarrier.cuh"

namespace atlas {

__device__ inline void bulk_load(void* destination, const void* source, unsigned bytes,
                                 Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// An L2 policy for bytes that are read once: they make room for others first.
__device__ inline unsigned long long evict_first_policy() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline unsigned long long evict_last_policy() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void bulk_load(void* destination, const void* source, unsigned bytes,
                                 Barrier& barrier, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

// Shared to global memory. Grouped by bulk_commit(); the source may be overwritten after
// bulk_wait_read, the bytes are written after bulk_wait.
__device__ inline void bulk_store(void* destination, const void* source, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ inline void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace atlas
