// How results of units, splits and groups add up in a decode step's attention, and how blocks hand
// on those of splits.
//
// For paged_attention.decode.cu, which says in which order.
#pragma once

#include "atlas/decode_list.cuh"
#include "atlas/mbarrier.cuh"
#include "atlas/relaxed.cuh"

namespace decode {

constexpr int kAdders = knobs::ADDERS;  // the next warps, which add up
constexpr int kAddThreads = kAdders * atlas::kWarp;
constexpr int kQuads = kHeads * kWidth / 4;  // four elements of a head
constexpr int kPasses = atlas::ceil_div(kQuads, kAddThreads);
constexpr int kPartial = kHeads * (1 + kWidth / 2);  // pairs of floats of a result in scratch

// A result, as the adding threads share it: of each pass a quad, and its head's maximum and total.
struct Part {
  float maximum[kPasses], total[kPasses], values[kPasses][4];

  __device__ static int index() { return threadIdx.x - kWarps * atlas::kWarp; }
  __device__ static int quad(int pass) { return pass * kAddThreads + index(); }
  __device__ static bool used(int pass) { return quad(pass) < kQuads; }
  __device__ static int head(int pass) { return used(pass) ? quad(pass) / (kWidth / 4) : 0; }
  __device__ static int column(int pass) { return quad(pass) % (kWidth / 4) * 4; }

  __device__ void clear() {
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      maximum[p] = minus_infinity(), total[p] = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) values[p][i] = 0.0f;
    }
  }
  // Takes a unit's result.
  __device__ void load(const float* result) {
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      const float* mine = result + head(p) * kStride;
      const float4 quad = *reinterpret_cast<const float4*>(mine + column(p));
      const float2 weight = *reinterpret_cast<const float2*>(mine + kWidth);
      maximum[p] = weight.x, total[p] = weight.y;
      values[p][0] = quad.x, values[p][1] = quad.y, values[p][2] = quad.z, values[p][3] = quad.w;
    }
  }
  // Becomes the sum of all.
  template <int kCount>
  __device__ void add_up(const Part (&parts)[kCount]) {
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      float highest = parts[0].maximum[p];
#pragma unroll
      for (int n = 1; n < kCount; ++n) highest = fmaxf(highest, parts[n].maximum[p]);
      maximum[p] = highest, total[p] = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) values[p][i] = 0.0f;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const float weight = power_of_two(parts[n].maximum[p] - base_of(highest));
        total[p] = __fmaf_rn(parts[n].total[p], weight, total[p]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[p][i] = __fmaf_rn(parts[n].values[p][i], weight, values[p][i]);
        }
      }
    }
  }
  // Appends the result of the keys that follow. Where one is of no keys, the other stays as it is.
  __device__ void append(const Part& next) {
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      const float highest = fmaxf(maximum[p], next.maximum[p]);
      const float mine = power_of_two(maximum[p] - base_of(highest));
      const float theirs = power_of_two(next.maximum[p] - base_of(highest));
      maximum[p] = highest;
      total[p] = __fmaf_rn(next.total[p], theirs, __fmul_rn(total[p], mine));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[p][i] = __fmaf_rn(next.values[p][i], theirs, __fmul_rn(values[p][i], mine));
      }
    }
  }

  // Leaves the result to another block, in scratch that is zero. Words go out complemented, so that
  // none is zero: no result has all bits set, for arithmetic makes other NaNs.
  __device__ void send(uint2* partial) const {
    const auto leave = [&](int at, float x, float y) {
      atlas::store_relaxed(partial + at, {outgoing(x), outgoing(y)});
    };
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      if (!used(p)) continue;
      if (column(p) == 0) leave(head(p), maximum[p], total[p]);
      leave(place(p), values[p][0], values[p][1]);
      leave(place(p) + 1, values[p][2], values[p][3]);
    }
  }
  // Whether all of a result has come. No branch, so that several are under way together.
  __device__ bool receive(const uint2* partial) {
    bool complete = true;
    const auto take = [&](int at, float& x, float& y) {
      const uint2 words = atlas::load_relaxed(partial + at);
      complete &= words.x != 0 && words.y != 0;
      x = __uint_as_float(~words.x), y = __uint_as_float(~words.y);
    };
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      take(head(p), maximum[p], total[p]);
      take(place(p), values[p][0], values[p][1]);
      take(place(p) + 1, values[p][2], values[p][3]);
    }
    return complete;
  }

 private:
  __device__ static unsigned outgoing(float x) {
    const unsigned word = ~__float_as_uint(x);
    return word == 0 ? 0x80000000u : word;
  }
  // Maximum and total of each head, then the quads. A thread without a quad takes the first.
  __device__ static int place(int pass) { return kHeads + 2 * (used(pass) ? quad(pass) : 0); }
};

}  // namespace decode
