// A tile of products on the tensor cores, whatever the formats: the walk over k.
//
// STAGES steps are in flight by cp.async; warps share a tile out in ceil(TILE_M / 64) rows and as
// many columns as that leaves. A class of operands (product_bf16.cuh, product_f8.cuh,
// product_w4.cuh) says what a step is:
//   kStep                          columns of k
//   Stage                          a step of both operands in shared memory
//   load_x, load_weight(stage, from, row_of, step)   start copying; rows that are -1 become zeros
//   multiply(stage, row, column, sum)                adds the step's products of a warp's share
//   kFactors, factor(weight, row)  whether sums are scaled by a factor of the weight's row, and it
#pragma once

#include "atlas/async_copy.cuh"
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/mma.cuh"
#include "atlas/pdl.cuh"

namespace atlas::product {

constexpr int kM = knobs::TILE_M, kN = knobs::TILE_N, kWarps = knobs::WARPS;
constexpr int kK = constants::k;
constexpr int kFragment = 8;  // columns of a tensor-core fragment
constexpr int kAcross = 16;   // threads of the fp32 way along a tile's row

extern __shared__ __align__(16) unsigned char shared_memory[];

template <int kDown, int kAcross>
__device__ inline void add(float (&sum)[kDown][kAcross][4],
                           const float (&partial)[kDown][kAcross][4]) {
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[i][j][c] += partial[i][j][c];
    }
  }
}

template <class Operands, class X, class Weight, class Op>
__device__ inline void tensor_core_tile(const X* x, const Weight* weight, const Op& op, int rows,
                                        int first_row, int first_column) {
  using Stage = typename Operands::Stage;
  constexpr int kStages = knobs::STAGES, kSteps = ceil_div(kK, Operands::kStep);
  constexpr int kDown = ceil_div(kM, 64), kSide = kWarps / kDown;
  constexpr int kWarpM = kM / kDown, kWarpN = kN / kSide;
  static_assert(kWarps % kDown == 0 && kWarpM % 16 == 0,
                "a warp's share is made of 16-row fragments");
  static_assert(kN % (kSide * kFragment) == 0, "a warp's share is made of 8-column fragments");
  static_assert(kStages * sizeof(Stage) <= launch::shared, "the launch asks for too little");
  Stage* stages = reinterpret_cast<Stage*>(shared_memory);

  const auto load_x = [&](int step) {
    const auto row_of = [&](int row) { return first_row + row < rows ? first_row + row : -1; };
    if (step < kSteps) Operands::load_x(stages[step % kStages], x, row_of, step);
  };
  const auto load_weight = [&](int step) {
    const auto row_of = [&](int row) {
      return Op::template weight_row<kFragment>(first_column, row);
    };
    if (step < kSteps) Operands::load_weight(stages[step % kStages], weight, row_of, step);
  };
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int warp_row = threadIdx.x / 32 / kSide * kWarpM;
  const int warp_column = threadIdx.x / 32 % kSide * kWarpN;

  float sum[kWarpM / 16][kWarpN / kFragment][4] = {};
  for (int step = 0; step < kStages - 1; ++step) load_weight(step);
  wait_for_inputs();
  for (int step = 0; step < kStages - 1; ++step) {
    load_x(step);
    commit_copies();  // the first group has all weights so far
  }
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // this step's tile is whole, and everybody has left the one loaded next
    load_x(step + kStages - 1);
    load_weight(step + kStages - 1);
    commit_copies();  // an empty group at the end keeps the count above the same
    Operands::multiply(stages[step % kStages], warp_row, warp_column, sum);
  }
  if constexpr (Operands::kFactors) {
#pragma unroll
    for (int j = 0; j < kWarpN / kFragment; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = warp_column + j * kFragment + 2 * t + c;
        const int row = Op::template weight_row<kFragment>(first_column, column);
        const float factor = row < 0 ? 1.0f : Operands::factor(weight, row);
#pragma unroll
        for (int i = 0; i < kWarpM / 16; ++i) {
          sum[i][j][c] *= factor;
          sum[i][j][c + 2] *= factor;
        }
      }
    }
  }
  if constexpr (Op::kGathers) __syncthreads();  // everybody has left the stages
#pragma unroll
  for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float of_row[kWarpN / kFragment];
#pragma unroll
      for (int j = 0; j < kWarpN / kFragment; ++j) of_row[j] = sum[i][j][c];
      op.template store<kFragment>(of_row, rows, first_row + warp_row + i * 16 + g + c / 2 * 8,
                                   first_column, warp_column + 2 * t + c % 2);
    }
  }
}

}  // namespace atlas::product
