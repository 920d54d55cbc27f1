// Two thread blocks of a cluster that have neighbouring ranges of a group (decode_product.cuh)
// trade their sums through shared memory: of every second eight of tokens a block sends its sums to
// the other, and of the rest it has both together. Half as many are left for scratch
// (shared_sums.cuh), or none.
//
// Nobody waits for memory to send into: it has no other use.
#pragma once

#include "atlas/cluster.cuh"
#include "atlas/decode_product.cuh"

namespace atlas {

template <class Split>
class PairedSums {
 public:
  static constexpr int kN = Split::kN, kTogether = Split::kTogether, kEights = kN / 16;
  static constexpr int kThreads = Split::kSides * kConsumers;
  static constexpr int kSent = Split::kPaired ? kEights * kTogether * kThreads * 16 : 0;
  // At the end of the block's shared memory.
  static constexpr int kBytes = Split::kPaired ? kSent + 16 : 0;

  PairedSums() = default;  // of a block without a pair
  // Every thread makes one, before the product.
  __device__ explicit PairedSums(unsigned char* at)
      : got_(reinterpret_cast<float4*>(at)), barrier_(reinterpret_cast<Barrier*>(at + kSent)) {
    if (!Split::kPaired || threadIdx.x != 0) return;
    barrier_->init(1);
    barrier_->arrive_expect(kSent);
    publish_barriers();
  }

  // The pair's sums of eights 2 * n + cluster_rank().
  __device__ void trade(const float (&sum)[kTogether][kN / 2],
                        float (&both)[kTogether][kN / 4]) const {
    const unsigned rank = cluster_rank();
    const unsigned to = cluster_address(got_ + threadIdx.x, rank ^ 1);
    const unsigned barrier = cluster_address(barrier_, rank ^ 1);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        const float *even = sum[block] + 8 * n, *odd = even + 4;
        float mine[4], other[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mine[i] = rank == 0 ? even[i] : odd[i];
          other[i] = (rank == 0 ? odd[i] : even[i]) + 0.0f;  // no -0, as in scratch
          both[block][4 * n + i] = mine[i];
        }
        store_async(to + (n * kTogether + block) * kThreads * 16,
                    make_float4(other[0], other[1], other[2], other[3]), barrier);
      }
    }
    barrier_->wait(0);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        const float4 got = got_[(n * kTogether + block) * kThreads + threadIdx.x];
        float* const four = both[block] + 4 * n;
        four[0] += got.x;
        four[1] += got.y;
        four[2] += got.z;
        four[3] += got.w;
      }
    }
  }

 private:
  float4* got_ = nullptr;
  Barrier* barrier_ = nullptr;
};

}  // namespace atlas
