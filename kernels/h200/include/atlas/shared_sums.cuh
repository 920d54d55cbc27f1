// Groups of row blocks of which several teams have a part (decode_product.cuh): each writes its
// sums to scratch, waits for the others, and finishes a share of the group, adding the parts up in
// the order of k.
//
// Scratch holds one word per thread block, zero at load, and behind them kKept parts per thread
// block, each of 128 x N fp32 as the threads held them. A word counts: kKept for every launch
// before, and in a launch the parts written so far. The launch waits for every thread block of a
// group, so all of a team's neighbours must be resident: a launch has one thread block per
// multiprocessor.
#pragma once

#include "atlas/decode_product.cuh"

namespace atlas {

// kKept is 2, a team's first and last groups, or, where whole groups are kept too, as many as a
// range may touch.
template <class Split, int kKept>
class SharedSums {
 public:
  static constexpr int kN = Split::kN, kPair = Split::kPair;
  static constexpr int kWords = Split::kTeams * kPair;
  static constexpr int kItems = kConsumers / 32;  // of 8 tokens: one for each warp

  // The consumers, once inputs are there.
  __device__ explicit SharedSums(unsigned char* scratch)
      : words_(reinterpret_cast<unsigned*>(scratch)),
        parts_(reinterpret_cast<float4*>(scratch + align_up(kWords * 4, 256))),
        team_(blockIdx.x / kPair),
        base_(team_ < Split::kTeams ? __ldcg(words_ + blockIdx.x) : 0) {}

  // This thread block's part of a group.
  __device__ void put(int group, const float (&sum)[kN / 2], int rows) {
    const int kept = kept_at(team_, group);
    float4* to = part(blockIdx.x, kept) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      if (8 * j >= rows) break;
      __stcg(to + j * kConsumers,
             make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
    }
    named_barrier(1, kConsumers);
    if (threadIdx.x == 0) publish(kept + 1);
  }

  // Waits for the parts that thread blocks first_pair .. + pairs - 1 of each team have of a group.
  __device__ void wait(int group, int first_pair, int pairs) const {
    const int first = Split::first_team(group), count = Split::last_team(group) - first + 1;
    for (int i = threadIdx.x; i < count * pairs; i += kConsumers) {
      const int team = first + i / pairs;
      const unsigned* word = words_ + team * kPair + first_pair + i % pairs;
      const unsigned wanted = base_ + kept_at(team, group) + 1;
      unsigned found;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(word) : "memory");
      } while (static_cast<int>(found - wanted) < 0);
    }
    named_barrier(1, kConsumers);
  }

  // What thread `thread` held of the sums of tokens 8 j .., added up over the teams.
  __device__ float4 get(int group, int pair, int j, int thread) const {
    const int first = Split::first_team(group), last = Split::last_team(group);
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int team = first; team <= last; ++team) {
      const float4 value =
          __ldcg(part(team * kPair + pair, kept_at(team, group)) + j * kConsumers + thread);
      total.x += value.x;
      total.y += value.y;
      total.z += value.z;
      total.w += value.w;
    }
    return total;
  }

  // A share of a group's row block: store(j, warp, sums) for some warps' sums of tokens 8 j ..
  template <class Store>
  __device__ void finish(int group, int pair, int rows, Store store) const {
    wait(group, pair, 1);
    const int first = Split::first_team(group), count = Split::last_team(group) - first + 1;
    const int items = (rows + 7) / 8 * kItems;
#pragma unroll 1
    for (int i = team_ - first + count * (threadIdx.x / 32); i < items; i += count * kItems) {
      const int j = i / kItems, warp = i % kItems;
      store(j, warp, get(group, pair, j, warp * 32 + threadIdx.x % 32));
    }
  }

  // The last thing: makes the word what every thread block expects of a launch before.
  __device__ void leave() {
    if (threadIdx.x == 0 && team_ < Split::kTeams) publish(kKept);
  }

 private:
  __device__ static int kept_at(int team, int group) {
    const int kept = group - Split::first_group(team);
    return kept < kKept ? kept : kKept - 1;
  }
  __device__ float4* part(int block, int kept) const {
    return parts_ + static_cast<size_t>(block * kKept + kept) * (kN / 8 * kConsumers);
  }
  __device__ void publish(int count) {
    __threadfence();
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(words_ + blockIdx.x),
                 "r"(base_ + count)
                 : "memory");
  }

  unsigned* words_;
  float4* parts_;
  int team_;
  unsigned base_;
};

}  // namespace atlas
