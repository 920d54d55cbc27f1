// Tiles of products in fp32 FMA, one after the other over k: for what tensor cores would round.
#pragma once

#include "atlas/product_tile.cuh"

namespace atlas::product {

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
  if constexpr (Op::kGathers) __syncthreads();  // everybody has left the tiles
#pragma unroll
  for (int i = 0; i < kM / kDown; ++i) {
    op.template store<kAcross>(sum[i], rows, first_row + y + i * kDown, first_column, z);
  }
}

}  // namespace atlas::product
