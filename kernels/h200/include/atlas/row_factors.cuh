// Factors of a step's rows in products of rows that are yet to be divided by their root mean square
// (ops normed_linear, normed_gated_linear): finished sums are multiplied by them.
#pragma once

#include "atlas/mbarrier.cuh"

namespace atlas {

// 1 / RMS of up to kRows rows, from kShares numbers a row that add up to its mean square (op
// norm_parts), in shared memory. Those who multiply add them up while their first tokens come.
//
// Lost, from 64 rows on: a warp beside the one that copies, in several turns. While weights stream,
// a load waits behind all copies that its multiprocessor has under way, 3 to 6 us each time; here
// all loads are under way before.
template <int kRows, int kShares, int kThreads>
class RowFactors {
  // Eight lanes add up a row: an order that depends on kShares alone.
  static constexpr int kLanes = 8, kAtOnce = kThreads / kLanes;
  static constexpr int kTurns = (kRows + kAtOnce - 1) / kAtOnce;
  static_assert(kRows % (32 / kLanes) == 0, "a warp has whole rows or none");

 public:
  static constexpr int kBytes = kRows * static_cast<int>(sizeof(float));

  // All kThreads call it, once inputs are there.
  __device__ RowFactors(unsigned char* shared, const float* squares, int rows)
      : factors_(reinterpret_cast<float*>(shared)) {
    const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
    float sums[kTurns] = {};
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = first + turn * kAtOnce;
#pragma unroll
      for (int i = 0; i < kShares; i += kLanes) {
        if (row < rows && i + lane < kShares) sums[turn] += squares[row * kShares + i + lane];
      }
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = first + turn * kAtOnce;
      if (row >= kRows) continue;
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) {
        sums[turn] += __shfl_xor_sync(0xFFFFFFFFu, sums[turn], mask);
      }
      if (lane == 0) factors_[row] = rsqrtf(sums[turn]);
    }
    named_barrier(3, kThreads);
  }

  // Of rows `row` and the next; `row` is even.
  __device__ float2 two(int row) const { return *reinterpret_cast<const float2*>(factors_ + row); }

 private:
  float* factors_;
};

// Of products whose rows need none.
struct NoRowFactors {
  static constexpr int kBytes = 0;
  __device__ NoRowFactors(unsigned char* /*shared*/, const float* /*squares*/, int /*rows*/) {}
  __device__ float2 two(int /*row*/) const { return make_float2(1.0f, 1.0f); }
};

}  // namespace atlas
