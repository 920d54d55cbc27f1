// Barriers in shared memory that count arrivals and bytes (PTX ISA, mbarrier), and what the warps
// that wait on them need.
#pragma once

namespace atlas {

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// A ring slot's barrier. Phase p (0, 1, 0, ...) completes when `arrivals` threads have arrived and
// every announced byte has come.
struct Barrier {
  unsigned long long state;

  __device__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // Arrives, and announces that `bytes` more will come through copies.
  __device__ void arrive_expect(unsigned bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  // Arrives once the copies (cp.async) that this thread has started are there.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this))
                 : "memory");
  }
  // Announces bytes without arriving.
  __device__ void expect(unsigned bytes) {
    asm volatile(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  // Waits until the phase of this parity has completed.
  __device__ void wait(unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

// After init() by one thread, before others (or copies) use the barriers: this, then a barrier of
// the block.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Ordinary stores to shared memory before it become visible to copies and matrix instructions after
// the next barrier. Each writing thread calls it.
__device__ inline void publish_to_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier among `threads` threads (whole warps) under one of the ids 1..15.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this warp at such a barrier without waiting for the others.
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One elected lane of a converged warp.
__device__ inline bool elect_one() {
  unsigned chosen;
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 lane;\nelect.sync lane|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(chosen));
  return chosen != 0;
}

// Moves registers between warpgroups: whole warpgroups, in a kernel with launch bounds (threads,
// 1).
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace atlas
