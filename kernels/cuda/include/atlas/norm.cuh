// A block that normalises one row of `hidden` fp32 values by their root mean square: the row in
// registers, quad i of the block's threads being threadIdx.x + i * block.
#pragma once

#include "atlas/instance.h"
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

namespace atlas {

class Norm {
  using Out = OutRow<constants::hidden>;
  static constexpr int kHidden = constants::hidden;
  static constexpr int kCount = ceil_div(Out::kQuads, launch::block);

  template <class Visit>
  __device__ static void for_each_quad(Visit visit) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int quad = threadIdx.x + i * launch::block;
      if (quad < Out::kQuads) visit(i, quad);
    }
  }

 public:
  // Quads past the row's end are zeros.
  struct Row {
    float values[kCount][4] = {};
  };

  template <class T>
  __device__ static void load(const T* source, Row& row) {
    for_each_quad([&](int i, int quad) { load_quad<kHidden>(source, quad, row.values[i]); });
  }

  __device__ static void add(const Row& added, float scale, Row& row) {
#pragma unroll
    for (int i = 0; i < kCount * 4; ++i)
      row.values[i / 4][i % 4] += scale * added.values[i / 4][i % 4];
  }

  __device__ static void store(const Row& row, float* target) {
    for_each_quad([&](int i, int quad) { store_quad<kHidden>(row.values[i], quad, target); });
  }

  __device__ explicit Norm(const float* weight) { load(weight, weight_); }

  // row / sqrt(mean(row^2) + eps) * weight to row `index` of `out`. All threads call it, once.
  __device__ void store_normalised(const Row& row, types::out* out, int index) const {
    constexpr int kWarps = launch::block / kWarp;
    __shared__ float scratch[kWarps];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount * 4; ++i) {
      squares = fmaf(row.values[i / 4][i % 4], row.values[i / 4][i % 4], squares);
    }
    squares = warp_reduce(squares, Sum());
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = squares;
    __syncthreads();
    // A tree: a chain over 16 warps is 64 cycles of a decode step's critical path.
    float sums[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sums[i] = scratch[i];
#pragma unroll
    for (int distance = 1; distance < kWarps; distance *= 2) {
#pragma unroll
      for (int i = 0; i + distance < kWarps; i += 2 * distance) sums[i] += sums[i + distance];
    }
    const float factor = rsqrtf(sums[0] / static_cast<float>(kHidden) + constants::eps);
    Row scaled;
#pragma unroll
    for (int i = 0; i < kCount * 4; ++i) {
      scaled.values[i / 4][i % 4] =
          row.values[i / 4][i % 4] * factor * weight_.values[i / 4][i % 4];
    }
    Out(out, index).template store<kCount, launch::block>(threadIdx.x, scaled.values);
  }

 private:
  Row weight_;
};

}  // namespace atlas
