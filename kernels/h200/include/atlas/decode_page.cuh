// Decode attention of a unit of two pages: a group of query heads over 32 keys, by one warp's
// tensor cores.
//
// For paged_attention.decode.cu. Head and element indices of registers follow mma.cuh, with g =
// lane / 4 and t = lane % 4.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/kv_tiles.cuh"
#include "atlas/ldmatrix.cuh"
#include "atlas/mbarrier.cuh"
#include "atlas/mma.cuh"
#include "atlas/reduce.cuh"

namespace decode {

using namespace constants;

constexpr int kWarps = knobs::WARPS;  // that compute, a unit each
constexpr int kUnitPages = 2;
constexpr int kHeads = knobs::HEADS;  // query heads of a group
constexpr int kHeadsPerKv = n_heads / n_kv_heads;
constexpr int kGroupsPerKv = atlas::ceil_div(kHeadsPerKv, kHeads);
constexpr int kHalves = kHeads > 8 ? 2 : 1;  // fragments of 8 query heads
constexpr int kSteps = atlas::ceil_div(head_dim, 16);
constexpr int kWidth = knobs::WIDTH;  // elements of a head, and zeros up to whole fragments
constexpr float kScale = scale * 1.4426950408889634f;  // weights are powers of 2
constexpr int kStride = kWidth + 4;  // of heads in a unit's result: two start 8 banks apart
constexpr int kResult = kHeads * kStride;

static_assert(n_heads % n_kv_heads == 0, "every KV head serves the same number of query heads");
static_assert(kWidth == kSteps * 16 && kHeads <= (head_dim > 128 ? 8 : 16),
              "the declaration's sizes are this header's");
static_assert(head_dim % 2 == 0 && head_dim <= 256, "heads are read in pairs of elements");

__device__ inline float minus_infinity() { return __uint_as_float(0xFF800000u); }

// 2^x; 0 of -inf.
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What weights are taken relative to: the maximum, and any number where nothing was seen yet.
__device__ inline float base_of(float maximum) {
  return maximum == minus_infinity() ? 0.0f : maximum;
}

// The heads of a group as the B operand of the product with K: 8 i + g, elements 16 step + 2 t...
struct Query {
  unsigned pairs[kHalves][kSteps][2];

  // What a lane has of head `head` of the rows, and of those that follow.
  __device__ static const __nv_bfloat16* source(const __nv_bfloat16* q, size_t head, int lane) {
    return q + (head + lane / 4) * head_dim + lane % 4 * 2;
  }
  // `heads` of them are there; the others, and elements past head_dim, are zeros.
  __device__ void load(const __nv_bfloat16* source, int heads, int lane) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i)
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int h = 8 * i + lane / 4, element = step * 16 + 8 * n + lane % 4 * 2;
          const bool inside = h < heads && element < head_dim;
          const __nv_bfloat16* pair = source + 8 * i * head_dim + step * 16 + 8 * n;
          pairs[i][step][n] = inside ? *reinterpret_cast<const unsigned*>(pair) : 0;
        }
  }
};

// Where elements 16 step.. of a token are in a page, from where the first ones are: pages begin at
// multiples of 128 bytes, so that the permutation of chunks is an exclusive or of addresses.
__device__ inline unsigned at_step(unsigned first, int step) {
  return (first ^ step % 4 * 32) + step / 4 * (atlas::kPageTokens * atlas::kPageRowBytes);
}

// Scores of a page of K at shared address `page`: keys g and g + 8 in the rows, heads in the
// columns.
__device__ inline void score_page(float (&score)[kHalves][4], const Query& query, unsigned page,
                                  int lane) {
  float sum[2][kHalves][4] = {};  // two chains of products, for half the latency
  const unsigned first = page + atlas::in_page(lane % 16, lane / 16 * 8);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned keys[4];
    atlas::ldmatrix_x4(keys, at_step(first, step));
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      atlas::mma_m16n8k16(sum[step % 2][i], keys, query.pairs[i][step]);
    }
  }
#pragma unroll
  for (int i = 0; i < kHalves; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) score[i][c] = (sum[0][i][c] + sum[1][i][c]) * kScale;
}

// Takes away the keys of a page before `begin` and after `position`; `token` is the page's first.
__device__ inline void hide(float (&score)[kHalves][4], int token, int begin, int position,
                            int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int key = token + lane / 4 + 8 * n;
    if (key >= begin && key <= position) continue;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) score[i][2 * n] = score[i][2 * n + 1] = minus_infinity();
  }
}

// Their values become zeros, for a weight of 0 does not keep a NaN out. `page` is of V, where the
// next copy may write as soon as the warp has met.
__device__ inline void blank(unsigned char* page, int token, int begin, int position, int lane) {
  constexpr int kChunks = atlas::kPageRowBytes / 16;
#pragma unroll 1
  for (int i = lane; i < knobs::PAGE / 16; i += atlas::kWarp) {
    const int key = token + i / kChunks % atlas::kPageTokens;
    if (key < begin || key > position) reinterpret_cast<uint4*>(page)[i] = {0, 0, 0, 0};
  }
  atlas::publish_to_async_proxy();
  __syncwarp();
}

// Weights of a unit's keys, relative to their maximum, as the B operands of the products with V.
struct Weights {
  float maximum[kHalves][2];
  unsigned pairs[kUnitPages][kHalves][2];

  __device__ explicit Weights(const float (&score)[kUnitPages][kHalves][4]) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      float weight[kUnitPages][4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float highest = minus_infinity();
#pragma unroll
        for (int n = 0; n < kUnitPages; ++n) {
          highest = fmaxf(highest, fmaxf(score[n][i][e], score[n][i][2 + e]));
        }
#pragma unroll
        for (int distance = 4; distance < atlas::kWarp; distance *= 2) {
          highest = fmaxf(highest, __shfl_xor_sync(atlas::kAllLanes, highest, distance));
        }
        maximum[i][e] = highest;
#pragma unroll
        for (int n = 0; n < kUnitPages; ++n) {
          weight[n][e] = power_of_two(score[n][i][e] - base_of(highest));
          weight[n][2 + e] = power_of_two(score[n][i][2 + e] - base_of(highest));
        }
      }
#pragma unroll
      for (int n = 0; n < kUnitPages; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const __nv_bfloat162 pair = __floats2bfloat162_rn(weight[n][2 * r], weight[n][2 * r + 1]);
          pairs[n][i][r] = atlas::transpose_8x8(*reinterpret_cast<const unsigned*>(&pair));
        }
    }
  }
};

// Leaves a unit's result: for each head the sum of its values by their weights, kStride apart, and
// behind the elements the maximum and the sum of the weights. `pages` are those of V, one or `two`.
__device__ inline void sum_unit(float* result, const Weights& weights,
                                const unsigned (&pages)[kUnitPages], bool two, int lane) {
  const int g = lane / 4, t = lane % 4;
  const unsigned in_page = atlas::in_page(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
  float* mine = result + 2 * t * kStride + g;
#pragma unroll
  for (int i = 0; i < kHalves; ++i) {
    constexpr unsigned kOnes = 0x3F803F80u;  // the total is of the rounded weights, too
    const unsigned ones[4] = {kOnes, kOnes, kOnes, kOnes};
    float sum[4] = {};
#pragma unroll
    for (int n = 0; n < kUnitPages; ++n) atlas::mma_m16n8k16(sum, ones, weights.pairs[n][i]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int head = 8 * i + e;
      if (g == 0 && 2 * t + head < kHeads) {
        *reinterpret_cast<float2*>(mine + head * kStride + kWidth) = {weights.maximum[i][e],
                                                                      sum[e]};
      }
    }
  }
  constexpr int kTogether = 4 / kHalves;  // steps whose loads come before their stores
#pragma unroll
  for (int first = 0; first < kSteps; first += kTogether) {
    float sum[kTogether][kHalves][4] = {};
#pragma unroll
    for (int n = 0; n < kUnitPages; ++n) {
      if (n > 0 && !two) continue;
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
        if (first + s >= kSteps) continue;
        unsigned values[4];
        atlas::ldmatrix_x4_transposed(values, at_step(pages[n] + in_page, first + s));
#pragma unroll
        for (int i = 0; i < kHalves; ++i) {
          atlas::mma_m16n8k16(sum[s][i], values, weights.pairs[n][i]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kTogether; ++s)
#pragma unroll
      for (int i = 0; i < kHalves; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int head = 8 * i + c % 2, element = (first + s) * 16 + c / 2 * 8;
          if (2 * t + head < kHeads && first + s < kSteps) {
            mine[head * kStride + element] = sum[s][i][c];
          }
        }
  }
}

}  // namespace decode
