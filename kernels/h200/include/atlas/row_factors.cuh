// Factors of a step's rows in products of rows that are yet to be divided by their root mean square
// (ops normed_linear, normed_gated_linear, normed_qkv_append, normed_logits): finished sums are
// multiplied by them.
#pragma once

#include "atlas/mbarrier.cuh"

namespace atlas {

// 1 / RMS of up to kRows rows, from kShares numbers a row that add up to its mean square (op
// norm_parts), in shared memory. Those who multiply ask for the numbers before their first slot and
// add them up when the last one of a group is summed, so that no slot waits for them (Llama-3-8B's
// 32 layers on an H200, us: -10, -13, -2 at 1 row in nvfp4, bf16, fp8, -20 at 128 in fp8).
//
// Lost, from 64 rows on: a warp beside the one that copies, in several turns. While weights stream,
// a load waits behind all copies that its multiprocessor has under way, 3 to 6 us each time.
template <int kRows, int kShares, int kThreads>
class RowFactors {
  // Eight lanes add up a row: an order that depends on kShares alone.
  static constexpr int kLanes = 8, kAtOnce = kThreads / kLanes;
  static constexpr int kTurns = (kRows + kAtOnce - 1) / kAtOnce;
  static constexpr int kOfLane = (kShares + kLanes - 1) / kLanes;
  // In registers while weights stream: up to 128 rows of 4,096 columns. More are added up at once.
  static constexpr int kHeld = kTurns * kOfLane;
  static constexpr bool kLate = kHeld <= 16;
  static_assert(kRows % (32 / kLanes) == 0, "a warp has whole rows or none");

 public:
  static constexpr int kBytes = kRows * static_cast<int>(sizeof(float));

  // All kThreads make one, once inputs are there.
  __device__ RowFactors(unsigned char* shared, const float* squares, int rows)
      : factors_(reinterpret_cast<float*>(shared)) {
    const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = first + turn * kAtOnce;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int share = i * kLanes + lane;
        shares_[turn][i] = 0.0f;
        if (row >= rows || share >= kShares) continue;
        asm volatile("ld.global.f32 %0, [%1];"
                     : "=f"(shares_[turn][i])
                     : "l"(squares + row * kShares + share));
      }
    }
    if constexpr (!kLate) add();
  }

  // All kThreads call it before they use factors.
  __device__ void settle() {
    if (!kLate || settled_) return;
    settled_ = true;
    add();
  }

  __device__ float one(int row) const { return factors_[row]; }
  // Of rows `row` and the next; `row` is even.
  __device__ float2 two(int row) const { return *reinterpret_cast<const float2*>(factors_ + row); }

 private:
  __device__ void add() {
    const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = first + turn * kAtOnce;
      if (row >= kRows) continue;
      float sum = 0.0f;
#pragma unroll
      for (float share : shares_[turn]) sum += share;
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
      if (lane == 0) factors_[row] = rsqrtf(sum);
    }
    named_barrier(3, kThreads);
  }

  float* factors_;
  float shares_[kTurns][kOfLane];
  bool settled_ = false;
};

// Of products whose rows need none.
struct NoRowFactors {
  static constexpr int kBytes = 0;
  __device__ NoRowFactors(unsigned char* /*shared*/, const float* /*squares*/, int /*rows*/) {}
  __device__ void settle() {}
  __device__ float one(int /*row*/) const { return 1.0f; }
  __device__ float2 two(int /*row*/) const { return make_float2(1.0f, 1.0f); }
};

}  // namespace atlas
