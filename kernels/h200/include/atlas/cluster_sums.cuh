// Thread blocks of a cluster that have neighbouring ranges of a group (decode_product.cuh) trade
// their sums through shared memory: of kWays blocks, each takes every kWays-th eight of tokens and
// sends the others its sums of the rest. Less is left for scratch (shared_sums.cuh), or nothing.
// Two by two, then pair by pair: the order in which parts in scratch are added up.
//
// Nobody waits for memory to send into: it has no other use, and a block has one group in one pass.
// Nor at the end: a block stays until it has all that is sent to it, so no store comes too late.
#pragma once

#include "atlas/cluster.cuh"
#include "atlas/decode_product.cuh"

namespace atlas {

template <class Split>
class ClusterSums {
 public:
  static constexpr int kN = Split::kN, kTogether = Split::kTogether, kWays = Split::kWays;
  static constexpr int kThreads = Split::kSides * kConsumers;
  // Eights that a block takes, at most, and the bytes of one.
  static constexpr int kEights = (kN / 8 + kWays - 1) / kWays, kEight = kTogether * kThreads * 16;
  static constexpr int kGot = (kWays - 1) * kEights * kEight;
  // At the end of the block's shared memory.
  static constexpr int kBytes = Split::kTrades ? kGot + 16 : 0;

  ClusterSums() = default;  // of a block that does not trade
  // Every thread makes one, before the product, whose constructor lets the others see the barrier.
  __device__ explicit ClusterSums(unsigned char* at)
      : got_(reinterpret_cast<float4*>(at)), barrier_(reinterpret_cast<Barrier*>(at + kGot)) {
    if (!Split::kTrades || threadIdx.x != 0) return;
    barrier_->init(1);
    barrier_->arrive_expect((kWays - 1) * eights(kN) * kEight);
    publish_barriers();
  }

  // How many eights of `rows` tokens this block takes.
  __device__ static int eights(int rows) {
    return ((rows + 7) / 8 + kWays - 1 - static_cast<int>(cluster_rank())) / kWays;
  }

  // The cluster's sums of eights kWays * n + cluster_rank().
  __device__ void trade(const float (&sum)[kTogether][kN / 2],
                        float (&all)[kTogether][4 * kEights]) const {
    if constexpr (kWays == 2 && kN % 16 == 0) {
      trade_pair(cluster_rank(), sum, all);
    } else {
      trade_all(cluster_rank(), sum, all);
    }
  }

  // The pair's sums of sums by token (decode_weights.cuh), whose eights are 2 * warp + i: columns
  // 8 j + 2 t + e of token g in both[2 * j + e].
  __device__ void trade_by_token(const float (&sum)[kN / 2], float (&both)[kN / 4]) const {
    static_assert(kWays == 2 && kTogether == 1, "a pair that has a row block");
    const unsigned rank = cluster_rank();
    const unsigned to = cluster_address(got(0, 0), rank ^ 1);
    const unsigned barrier = cluster_address(barrier_, rank ^ 1);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      float other[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = sum + 8 * n + i / 2 * 4 + i % 2;  // of both eights
        both[4 * n + i] = rank == 0 ? two[0] : two[2];
        other[i] = (rank == 0 ? two[2] : two[0]) + 0.0f;
      }
      store_async(to + n * kThreads * 16, make_float4(other[0], other[1], other[2], other[3]),
                  barrier);
    }
    barrier_->wait(0);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const float4 four = *got(0, n);
      both[4 * n] += four.x;
      both[4 * n + 1] += four.y;
      both[4 * n + 2] += four.z;
      both[4 * n + 3] += four.w;
    }
  }

 private:
  // Where block `to` keeps what block `rank` sends.
  __device__ static int from(int rank, int to) { return rank - (rank > to ? 1 : 0); }
  __device__ float4* got(int from, int n) const {
    return got_ + (from * kEights + n) * (kEight / 16) + threadIdx.x;
  }

  __device__ void trade_all(int rank, const float (&sum)[kTogether][kN / 2],
                            float (&all)[kTogether][4 * kEights]) const {
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const int to = j % kWays, n = j / kWays;
      if (to == rank) {
#pragma unroll
        for (int block = 0; block < kTogether; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) all[block][4 * n + i] = sum[block][4 * j + i];
        }
        continue;
      }
      const unsigned at = cluster_address(got(from(rank, to), n), to);
      const unsigned barrier = cluster_address(barrier_, to);
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        const float* const four = sum[block] + 4 * j;
        store_async(at + block * kThreads * 16,
                    make_float4(four[0] + 0.0f, four[1] + 0.0f, four[2] + 0.0f, four[3] + 0.0f),
                    barrier);  // no -0, as in scratch
      }
    }
    if (kN / 8 < kWays && rank >= kN / 8) return;
    barrier_->wait(0);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int block = 0; block < kTogether; ++block) add_up(rank, n, block, all[block] + 4 * n);
    }
  }

  // Of a pair: chosen without branches.
  __device__ void trade_pair(int rank, const float (&sum)[kTogether][kN / 2],
                             float (&all)[kTogether][4 * kEights]) const {
    const unsigned at = cluster_address(got(0, 0), rank ^ 1);
    const unsigned barrier = cluster_address(barrier_, rank ^ 1);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        const float *even = sum[block] + 8 * n, *odd = even + 4;
        float other[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          all[block][4 * n + i] = rank == 0 ? even[i] : odd[i];
          other[i] = (rank == 0 ? odd[i] : even[i]) + 0.0f;
        }
        store_async(at + (n * kTogether + block) * kThreads * 16,
                    make_float4(other[0], other[1], other[2], other[3]), barrier);
      }
    }
    barrier_->wait(0);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        const float4 four = got(0, n)[block * kThreads];
        float* const own = all[block] + 4 * n;
        own[0] += four.x;
        own[1] += four.y;
        own[2] += four.z;
        own[3] += four.w;
      }
    }
  }

  // Adds what the others sent to its own four sums, in the order of their numbers.
  __device__ void add_up(int rank, int n, int block, float* own) const {
    float total[4];
#pragma unroll
    for (int first = 0; first < kWays; first += 2) {
      float pair[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool mine = first + i == rank;
        const float4 four = got(mine ? 0 : from(first + i, rank), n)[block * kThreads];
        pair[i][0] = mine ? own[0] : four.x;
        pair[i][1] = mine ? own[1] : four.y;
        pair[i][2] = mine ? own[2] : four.z;
        pair[i][3] = mine ? own[3] : four.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float both = pair[0][i] + pair[1][i];
        total[i] = first == 0 ? both : total[i] + both;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i] = total[i];
  }

  float4* got_ = nullptr;
  Barrier* barrier_ = nullptr;
};

}  // namespace atlas
