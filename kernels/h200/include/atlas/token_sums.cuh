// Sums by token (decode_weights.cuh, kByToken) of row blocks that one or two pairs of thread blocks
// have (cluster_sums.cuh): what shared_sums.cuh is for sums by row.
//
// Eights of tokens are a warp's: 2 * warp and the next. A thread block of a pair keeps one of them
// when the pair has traded; of two pairs each gives those of every second warp, of which the other
// leaves its sums in scratch. A warp has all columns of a token, so warps need nothing of one
// another. Who gives what, and the order of additions, are those of shared_sums.cuh.
//
// Llama-3-8B's 32 layers, 128 rows, on an H200, us: o and down -137, qkv -48 in fp8; o, down and
// gate_up -105, qkv -45 in bf16.
#pragma once

#include "atlas/shared_sums.cuh"

namespace atlas {

// What they are for: 128 tokens, row blocks of one or two pairs.
template <class Split>
constexpr bool kFitsTokenSums = Split::kN == 128 && Split::kWays == 2 && Split::kEach <= 4;

template <class Split>
struct TokenSums {
  static constexpr int kN = Split::kN, kEights = kTileRows / 8, kQuads = kN / 16;
  static constexpr int kScaleBytes = kTileRows * 4;
  static_assert(kFitsTokenSums<Split>, "one or two pairs, 128 tokens");

  // This warp's eight, whether it gives it, the token of a lane, and the lane's columns 8 j + 2 t
  // of a row block.
  __device__ static int eight() { return threadIdx.x / 32 * 2 + blockIdx.x % 2; }
  __device__ static bool gives(int rows) {
    const int pair = blockIdx.x % Split::kEach / 2;
    return 8 * eight() < rows && (Split::kEach == 2 || threadIdx.x / 32 % 2 == pair);
  }
  __device__ static int token() { return 8 * eight() + threadIdx.x % 32 / 4; }
  __device__ static int column(int j) { return 8 * j + threadIdx.x % 4 * 2; }

  // The pair's sums in all[2 * j + e]. `spare`: of kScaleBytes.
  template <class Weights>
  __device__ static void trade(const Weights& weights, const ClusterSums<Split>& cluster,
                               unsigned char* spare, float (&sum)[kN / 2], float (&all)[kN / 4]) {
    if constexpr (Weights::kTail != 0) scale(weights.row_scale, spare, sum);
    cluster.trade_by_token(sum, all);
  }
  // Of two pairs, the other's, too: `rows` are there. False for warps whose eight others give.
  __device__ static bool finish(unsigned char* scratch, int rows, float (&all)[kN / 4]) {
    const bool mine = gives(rows);
    if (Split::kEach > 2 && 8 * eight() < rows) {
      uint4* const parts = reinterpret_cast<uint4*>(scratch) + threadIdx.x;
      if (mine) {
        add(parts + (blockIdx.x ^ 2) * kPart, all);
      } else {
        put(parts + blockIdx.x * kPart, all);
      }
    }
    return mine;
  }

 private:
  static constexpr int kPart = kQuads * kConsumers;

  // Of weight rows; each thread has one's.
  __device__ static void scale(float of_row, unsigned char* spare, float (&sum)[kN / 2]) {
    auto* const scales = reinterpret_cast<float*>(spare);
    if (threadIdx.x < kTileRows) scales[threadIdx.x] = of_row;
    named_barrier(1, kConsumers);
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(scales + column(j));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[4 * j + 2 * i] = __fmul_rn(sum[4 * j + 2 * i], by.x);
        sum[4 * j + 2 * i + 1] = __fmul_rn(sum[4 * j + 2 * i + 1], by.y);
      }
    }
  }
  __device__ static void put(uint4* to, const float (&all)[kN / 4]) {
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      store_part(to + n * kConsumers, as_part(all + 4 * n));
    }
  }
  __device__ static void add(uint4* from, float (&all)[kN / 4]) {
    uint4 found[kQuads] = {};
    await_parts(found, [&](int n) { return from + n * kConsumers; }, [](int) { return true; });
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      float4 both = make_float4(all[4 * n] + 0.0f, all[4 * n + 1] + 0.0f, all[4 * n + 2] + 0.0f,
                                all[4 * n + 3] + 0.0f);
      add_part(both, found[n]);
      all[4 * n] = both.x;
      all[4 * n + 1] = both.y;
      all[4 * n + 2] = both.z;
      all[4 * n + 3] = both.w;
      store_part(from + n * kConsumers, uint4{});
    }
  }
};

}  // namespace atlas
