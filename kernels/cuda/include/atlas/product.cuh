// Tiles of products of rows with a weight matrix, for ops linear and gated_linear: TILE_M rows by
// TILE_N columns, walking k in steps from 0 up. Two ways through a step:
// - x and weight both bf16: tensor cores (mma.m16n8k16). STAGES tiles in flight by cp.async; warps
//   share a tile out in ceil(TILE_M / 64) rows and as many columns as that leaves.
// - anything else: fp32 FMA, one after the other over k.
// Rows beyond `rows`, columns beyond the weight's and the tail of k enter as zeros. Each step is
// summed by itself and then added: sums stay short, and the tensor cores' truncation of long ones
// stays below fp32 rounding. A row's arithmetic depends on that row alone: never on the others, on
// their number, or on where in a tile it lies; nor on the knobs, since the steps over k are the
// same in every tile.
//
// What the columns are and where sums go is the op's part, a class `Op` with:
//   kWidth                              columns of the output that a block's TILE_N columns make
//   weight_row<kGroup>(first, column)   row of the weight of a tile's column; -1: none
//   store<kGroup>(sums, rows, row, first, column)
//                                       a thread's sums of one row: of columns column, column +
//                                       kGroup, ...; `first` is the block's first output column
#pragma once

#include "atlas/async_copy.cuh"
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/mma.cuh"
#include "atlas/pdl.cuh"

namespace atlas {

namespace product {

constexpr int kM = knobs::TILE_M, kN = knobs::TILE_N, kWarps = knobs::WARPS;
constexpr int kK = constants::k;
constexpr int kFragment = 8;  // columns of a tensor-core fragment
constexpr int kAcross = 16;   // threads of the fp32 way along a tile's row

extern __shared__ __align__(16) unsigned char shared_memory[];

// A tile of kHeight rows by kWidth elements of k, as bf16. A row of kStride elements is 4 banks off
// the one before, so the fragment loads below, 8 rows by 4 words, touch each bank once.
template <int kHeight, int kWidth>
struct alignas(16) Bf16Tile {
  static constexpr int kStride = kWidth + 8;
  __nv_bfloat16 data[kHeight * kStride];

  // Starts copying rows `row_of(0..)` of source from k on; rows that are -1 and columns from kK on
  // become zero.
  template <class RowOf>
  __device__ void load(const __nv_bfloat16* source, RowOf row_of, int k) {
    constexpr int kVector = kK % 8 == 0 ? 8 : 1;  // other sizes of k have unaligned rows
    constexpr int kVectors = kHeight * kWidth / kVector;
    for (int i = threadIdx.x; i < kVectors; i += launch::block) {
      const int row = i / (kWidth / kVector), column = i % (kWidth / kVector) * kVector;
      const int from = row_of(row);
      const bool valid = from >= 0 && k + column < kK;
      const size_t element = static_cast<size_t>(from) * kK + k + column;
      __nv_bfloat16* target = data + row * kStride + column;
      if constexpr (kVector == 8) {
        copy_async_16(target, valid ? source + element : source, valid);
      } else {
        *target = valid ? source[element] : __float2bfloat16_rn(0.0f);
      }
    }
  }

  // Elements [row, column..column+1] in one register.
  __device__ unsigned pair(int row, int column) const {
    return *reinterpret_cast<const unsigned*>(data + row * kStride + column);
  }
};

// All three are templates so that the way not taken is not compiled.
template <class X, class Weight, class Op>
__device__ inline void tensor_core_tile(const X* x, const Weight* weight, const Op& op, int rows,
                                        int first_row, int first_column) {
  constexpr int kStep = 64, kStages = knobs::STAGES;
  constexpr int kSteps = ceil_div(kK, kStep);
  constexpr int kDown = ceil_div(kM, 64), kSide = kWarps / kDown;
  constexpr int kWarpM = kM / kDown, kWarpN = kN / kSide;
  static_assert(kWarps % kDown == 0 && kWarpM % 16 == 0,
                "a warp's share is made of 16-row fragments");
  static_assert(kN % (kSide * kFragment) == 0, "a warp's share is made of 8-column fragments");
  struct Stage {
    Bf16Tile<kM, kStep> x;
    Bf16Tile<kN, kStep> weight;
  };
  static_assert(sizeof(Stage) == (kM + kN) * 144, "the launch asks for this much shared memory");
  Stage* stages = reinterpret_cast<Stage*>(shared_memory);

  const auto load_x = [&](int step) {
    const auto row_of = [&](int row) { return first_row + row < rows ? first_row + row : -1; };
    if (step < kSteps) stages[step % kStages].x.load(x, row_of, step * kStep);
  };
  const auto load_weight = [&](int step) {
    const auto row_of = [&](int row) {
      return Op::template weight_row<kFragment>(first_column, row);
    };
    if (step < kSteps) stages[step % kStages].weight.load(weight, row_of, step * kStep);
  };
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
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
    const auto& x_tile = stages[step % kStages].x;
    const auto& weight_tile = stages[step % kStages].weight;
    float partial[kWarpM / 16][kWarpN / kFragment][4] = {};
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      unsigned a[kWarpM / 16][4], b[kWarpN / kFragment][2];
#pragma unroll
      for (int i = 0; i < kWarpM / 16; ++i) {
        a[i][0] = x_tile.pair(warp_row + i * 16 + g, k + 2 * t);
        a[i][1] = x_tile.pair(warp_row + i * 16 + g + 8, k + 2 * t);
        a[i][2] = x_tile.pair(warp_row + i * 16 + g, k + 2 * t + 8);
        a[i][3] = x_tile.pair(warp_row + i * 16 + g + 8, k + 2 * t + 8);
      }
#pragma unroll
      for (int j = 0; j < kWarpN / kFragment; ++j) {
        b[j][0] = weight_tile.pair(warp_column + j * kFragment + g, k + 2 * t);
        b[j][1] = weight_tile.pair(warp_column + j * kFragment + g, k + 2 * t + 8);
      }
#pragma unroll
      for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpN / kFragment; ++j) mma_m16n8k16(partial[i][j], a[i], b[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kWarpN / kFragment; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[i][j][c] += partial[i][j][c];
      }
    }
  }
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

// A thread owns rows y, y + kDown, ... and columns z, z + 16, ... of the tile.
template <class X, class Weight, class Op>
__device__ inline void fma_tile(const X* x, const Weight* weight, const Op& op, int rows,
                                int first_row, int first_column) {
  constexpr int kStep = 32, kDown = kWarps * 32 / kAcross;
  constexpr int kStride = kStep + 1;  // 16 columns' worth of loads touch 16 different banks
  static_assert(kM % kDown == 0 && kN % kAcross == 0, "the tile is made of whole threads' shares");
  float* x_tile = reinterpret_cast<float*>(shared_memory);
  float* weight_tile = x_tile + kM * kStride;
  static_assert((kM + kN) * kStride * 4 <= knobs::STAGES * (kM + kN) * 144,
                "the launch asks for enough");
  const int z = threadIdx.x % kAcross, y = threadIdx.x / kAcross;

  wait_for_inputs();
  float sum[kM / kDown][kN / kAcross] = {};
  for (int step = 0; step < kK; step += kStep) {
    __syncthreads();  // everybody has left the last step's tiles
    for (int i = threadIdx.x; i < (kM + kN) * kStep; i += launch::block) {
      const int row = i / kStep, column = i % kStep;
      const bool inside = step + column < kK;
      const size_t k = step + column;
      if (row < kM) {
        const bool valid = inside && first_row + row < rows;
        const size_t at = static_cast<size_t>(first_row + row) * kK + k;
        x_tile[row * kStride + column] = valid ? to_float(x[at]) : 0.0f;
      } else {
        const int from = Op::template weight_row<kAcross>(first_column, row - kM);
        const bool valid = inside && from >= 0;
        const size_t at = static_cast<size_t>(from) * kK + k;
        weight_tile[(row - kM) * kStride + column] = valid ? to_float(weight[at]) : 0.0f;
      }
    }
    __syncthreads();
    float partial[kM / kDown][kN / kAcross] = {};
    for (int k = 0; k < kStep; ++k) {
#pragma unroll
      for (int i = 0; i < kM / kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kN / kAcross; ++j) {
          partial[i][j] = fmaf(x_tile[(y + i * kDown) * kStride + k],
                               weight_tile[(z + j * kAcross) * kStride + k], partial[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kM / kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kN / kAcross; ++j) sum[i][j] += partial[i][j];
    }
  }
#pragma unroll
  for (int i = 0; i < kM / kDown; ++i) {
    op.template store<kAcross>(sum[i], rows, first_row + y + i * kDown, first_column, z);
  }
}

}  // namespace product

template <class X, class Weight, class Op>
__device__ inline void product_tile(const X* x, const Weight* weight, const Op& op, int rows) {
  const int first_row = blockIdx.x * product::kM, first_column = blockIdx.y * Op::kWidth;
  if (first_row >= rows) {
    wait_for_inputs();
  } else if constexpr (same_type<X, __nv_bfloat16> && same_type<Weight, __nv_bfloat16>) {
    product::tensor_core_tile(x, weight, op, rows, first_row, first_column);
  } else {
    product::fma_tile(x, weight, op, rows, first_row, first_column);
  }
}

}  // namespace atlas
