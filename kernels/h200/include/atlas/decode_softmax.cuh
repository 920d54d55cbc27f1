// Decode attention of one group of query heads by the warps of a block: scores and weighted values
// of pages by tensor cores, online softmax per warp, and the merge of the warps' results and of
// splits.
//
// For paged_attention.decode.cu, which says what is summed in which order. Head and element indices
// of registers follow mma.cuh, with g = lane / 4 and t = lane % 4.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/kv_tiles.cuh"
#include "atlas/ldmatrix.cuh"
#include "atlas/mbarrier.cuh"
#include "atlas/mma.cuh"
#include "atlas/reduce.cuh"
#include "atlas/relaxed.cuh"

namespace decode {

using namespace constants;

constexpr int kWarps = knobs::WARPS;
constexpr int kThreads = kWarps * atlas::kWarp;  // that compute; the block may have others
constexpr int kHeads = knobs::HEADS;             // query heads of a group
constexpr int kHeadsPerKv = n_heads / n_kv_heads;
constexpr int kGroupsPerKv = atlas::ceil_div(kHeadsPerKv, kHeads);
constexpr int kHalves = kHeads > 8 ? 2 : 1;  // fragments of 8 query heads
constexpr int kSteps = atlas::ceil_div(head_dim, 16);
constexpr int kWidth = knobs::WIDTH;  // elements of a head, and zeros up to whole fragments
constexpr float kScale = scale * 1.4426950408889634f;  // weights are powers of 2
constexpr int kColumns = knobs::COLUMNS;  // of all heads, that the merge takes in a pass
constexpr int kPasses = atlas::ceil_div(kWidth, kColumns);
constexpr int kStride = kColumns + 4;            // two rows of the buffer start 8 banks apart
constexpr int kPartial = kHeads * (kWidth + 2);  // floats of a split's result in scratch

static_assert(n_heads % n_kv_heads == 0, "every KV head serves the same number of query heads");
static_assert(kWidth == kSteps * 16 && kHeads <= (head_dim > 128 ? 8 : 16) && kColumns % 16 == 0 &&
                  kHeads * kColumns <= 2 * kThreads,
              "the declaration's sizes are this header's");
static_assert(head_dim % 2 == 0 && head_dim <= 256, "heads are read in pairs of elements");

__device__ inline float minus_infinity() { return __uint_as_float(0xFF800000u); }

// 2^x; 0 of -inf.
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A barrier of the threads that compute.
__device__ inline void join_warps() { atlas::named_barrier(1, kThreads); }

// What weights are taken relative to: the maximum, and any number where nothing was seen yet.
__device__ inline float base_of(float maximum) {
  return maximum == minus_infinity() ? 0.0f : maximum;
}

// Online softmax of a warp over its pages of a split. As the accumulators of mma.cuh lie: heads in
// the columns, 8 i + 2 t + e, elements in the rows: values[i][j][2 r + e] is element 16 j + g + 8
// r. A thread's total is of its own keys.
struct Softmax {
  float maximum[kHalves][2], total[kHalves][2], values[kHalves][kSteps][4];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) maximum[i][e] = minus_infinity(), total[i][e] = 0.0f;
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) values[i][j][c] = 0.0f;
    }
  }

  // Takes in the scores of a page and leaves their weights as the B operand of the product with V.
  __device__ void weigh(const float (&score)[kHalves][4], unsigned (&weights)[kHalves][2]) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      float weight[4], correction[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float highest = fmaxf(score[i][e], score[i][2 + e]);
#pragma unroll
        for (int distance = 4; distance < atlas::kWarp; distance *= 2) {
          highest = fmaxf(highest, __shfl_xor_sync(atlas::kAllLanes, highest, distance));
        }
        highest = fmaxf(highest, maximum[i][e]);
        const float base = base_of(highest);
        correction[e] = power_of_two(maximum[i][e] - base);
        maximum[i][e] = highest;
        weight[e] = power_of_two(score[i][e] - base);
        weight[2 + e] = power_of_two(score[i][2 + e] - base);
        total[i][e] = fmaf(total[i][e], correction[e], weight[e] + weight[2 + e]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(weight[2 * n], weight[2 * n + 1]);
        weights[i][n] = atlas::transpose_8x8(*reinterpret_cast<const unsigned*>(&pair));
      }
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) values[i][j][c] *= correction[c % 2];
    }
  }
};

// The heads of a group as the B operand of the product with K: 8 i + g, elements 16 step + 2 t...
struct Query {
  unsigned pairs[kHalves][kSteps][2];

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
          pairs[i][step][n] =
              inside ? *reinterpret_cast<const unsigned*>(source + h * head_dim + element) : 0;
        }
  }
};

// Scores of a page: keys g and g + 8 in the rows, heads in the columns.
__device__ inline void score_page(float (&score)[kHalves][4], const Query& query, unsigned page,
                                  int lane) {
  float sum[2][kHalves][4] = {};  // two chains of products, for half the latency
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned keys[4];
    atlas::ldmatrix_x4(keys, page + atlas::in_page(lane % 16, step * 16 + lane / 16 * 8));
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

// Takes away the keys before `begin` and after `position`; `token` is the page's first. `keep`
// becomes the bits of V that count in this thread's registers, of tokens 2 t, 2 t + 1 and of 2 t +
// 8, 2 t + 9.
__device__ inline void hide(float (&score)[kHalves][4], unsigned (&keep)[2], int token, int begin,
                            int position, int lane) {
  const auto seen = [&](int key) { return token + key >= begin && token + key <= position; };
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int key = lane % 4 * 2 + 8 * n;
    keep[n] = (seen(key) ? 0x0000FFFFu : 0) | (seen(key + 1) ? 0xFFFF0000u : 0);
    if (seen(lane / 4 + 8 * n)) continue;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) score[i][2 * n] = score[i][2 * n + 1] = minus_infinity();
  }
}

// Adds the page's values by their weights; what `keep` lacks is left out, for a weight of 0 does
// not keep a NaN out.
__device__ inline void add_page(Softmax& softmax, const unsigned (&weights)[kHalves][2],
                                const unsigned (&keep)[2], unsigned page, int lane) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned values[4];
    atlas::ldmatrix_x4_transposed(
        values, page + atlas::in_page(lane / 16 * 8 + lane % 8, step * 16 + lane / 8 % 2 * 8));
#pragma unroll
    for (int c = 0; c < 4; ++c) values[c] &= keep[c / 2];
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      atlas::mma_m16n8k16(softmax.values[i][step], values, weights[i]);
    }
  }
}

// A split's or a group's result, as the threads of the block share it at the merge: columns
// p * kColumns + column() and the next of head `head()` of the group, for every pass p.
struct Share {
  float maximum = minus_infinity(), total = 0.0f;
  float2 values[kPasses] = {};

  __device__ static int head() { return threadIdx.x / (kColumns / 2); }
  __device__ static int column() { return threadIdx.x % (kColumns / 2) * 2; }
  __device__ static bool used(int pass) {
    return head() < kHeads && pass * kColumns + column() < kWidth;
  }
  // Appends the result of the keys that follow.
  __device__ void absorb(const Share& next) {
    const float highest = fmaxf(maximum, next.maximum), base = base_of(highest);
    const float mine = power_of_two(maximum - base), theirs = power_of_two(next.maximum - base);
    maximum = highest;
    total = __fmaf_rn(next.total, theirs, __fmul_rn(total, mine));
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      values[p].x = __fmaf_rn(next.values[p].x, theirs, __fmul_rn(values[p].x, mine));
      values[p].y = __fmaf_rn(next.values[p].y, theirs, __fmul_rn(values[p].y, mine));
    }
  }
  // Leaves the result to another block, in scratch that is zero. Words go out complemented, so that
  // none is zero: no result has all bits set, for arithmetic makes other NaNs.
  __device__ void send(float* partial) const {
    visit(partial, [&](uint2* at, float2 pair) {
      atlas::store_relaxed(at, {outgoing(pair.x), outgoing(pair.y)});
    });
  }
  // Whether all of a result has come. No branch, so that several are under way together.
  __device__ bool receive(const float* partial) {
    bool complete = true;
    const auto take = [&](int at) {
      const uint2 words = atlas::load_relaxed(pairs_of(partial) + at);
      complete &= words.x != 0 && words.y != 0;
      return float2{__uint_as_float(~words.x), __uint_as_float(~words.y)};
    };
    const float2 weight = take(0);
    maximum = weight.x, total = weight.y;
#pragma unroll
    for (int p = 0; p < kPasses; ++p) values[p] = take(place(p));
    return complete;
  }
  // Makes it zero again.
  __device__ void empty(float* partial) const {
    visit(partial, [&](uint2* at, float2) { *at = {0, 0}; });
  }

 private:
  __device__ static unsigned outgoing(float x) {
    const unsigned word = ~__float_as_uint(x);
    return word == 0 ? 0x80000000u : word;
  }
  // A head's result: maximum and total, then its elements, in pairs. A thread without a head takes
  // the first one's, in a pass without columns it takes its first.
  __device__ static const uint2* pairs_of(const float* partial) {
    return reinterpret_cast<const uint2*>(partial + (head() < kHeads ? head() : 0) * (kWidth + 2));
  }
  __device__ static int place(int pass) {
    return 1 + (used(pass) ? pass * kColumns + column() : column()) / 2;
  }
  // Calls with(address, pair) for what this thread has to write of a result.
  template <class With>
  __device__ void visit(float* partial, With with) const {
    if (head() >= kHeads) return;
    uint2* pairs = const_cast<uint2*>(pairs_of(partial));
    if (column() == 0) with(pairs, float2{maximum, total});
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      if (used(p)) with(pairs + place(p), values[p]);
    }
  }
};

// Shared memory of the merge of a block's warps.
struct Merge {
  float maximum[kWarps][kHeads], total[kWarps][kHeads];

  // All threads call it; `buffer` holds kWarps x kHeads x kStride floats.
  __device__ Share operator()(const Softmax& softmax, float* buffer, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = softmax.total[i][e];
#pragma unroll
        for (int distance = 4; distance < atlas::kWarp; distance *= 2) {
          sum += __shfl_xor_sync(atlas::kAllLanes, sum, distance);
        }
        const int h = 8 * i + 2 * t + e;
        if (g == 0 && h < kHeads) {
          maximum[warp][h] = softmax.maximum[i][e];
          total[warp][h] = sum;
        }
      }
    }
    Share share;
    float weight[kWarps];
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (j * 16 / kColumns != p) continue;
#pragma unroll
        for (int i = 0; i < kHalves; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int h = 8 * i + 2 * t + c % 2, column = j * 16 % kColumns + g + c / 2 * 8;
            if (h < kHeads)
              buffer[(warp * kHeads + h) * kStride + column] = softmax.values[i][j][c];
          }
        }
      }
      join_warps();
      if (p == 0 && Share::head() < kHeads) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          share.maximum = fmaxf(share.maximum, maximum[w][Share::head()]);
        }
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          weight[w] = power_of_two(maximum[w][Share::head()] - base_of(share.maximum));
          share.total = __fmaf_rn(total[w][Share::head()], weight[w], share.total);
        }
      }
      if (Share::used(p)) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float2 value = *reinterpret_cast<const float2*>(
              buffer + (w * kHeads + Share::head()) * kStride + Share::column());
          share.values[p].x = __fmaf_rn(value.x, weight[w], share.values[p].x);
          share.values[p].y = __fmaf_rn(value.y, weight[w], share.values[p].y);
        }
      }
      join_warps();  // the buffer is written again
    }
    return share;
  }
};

}  // namespace decode
