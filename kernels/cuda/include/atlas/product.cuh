// Tiles of products of rows with a weight matrix, for ops linear and gated_linear: TILE_M rows by
// TILE_N columns, walking k in steps from 0 up. Ways through a step, by the operands' formats:
// - both bf16, rows in f8g128 and a weight of E4M3, or bf16 rows and a weight of 4 bits: tensor
//   cores (product_tile.cuh);
// - f32: fp32 FMA (product_fma.cuh).
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
//   kGathers, finish(rows, first_row, first)
//                                       whether store() puts results into shared memory; then
//                                       finish() writes the block's rows, when all are there
#pragma once

#include "atlas/instance.h"  // says which formats there are

#if defined(ATLAS_TYPE_X_F8G128)
#include "atlas/product_f8.cuh"
#elif defined(ATLAS_TYPE_WEIGHT_BF16) || defined(ATLAS_TYPE_WEIGHT_F32)
#include "atlas/product_bf16.cuh"
#include "atlas/product_fma.cuh"
#else
#include "atlas/product_w4.cuh"
#endif

namespace atlas {

template <class X, class Weight, class Op>
__device__ inline void product_tile(const X* x, const Weight* weight, const Op& op, int rows) {
  const int first_row = blockIdx.x * product::kM, first_column = blockIdx.y * Op::kWidth;
  if (first_row >= rows) {
    wait_for_inputs();
    return;
  }
#if defined(ATLAS_TYPE_X_F8G128)
  product::tensor_core_tile<product::F8Operands>(x, weight, op, rows, first_row, first_column);
#elif defined(ATLAS_TYPE_WEIGHT_BF16) && defined(ATLAS_TYPE_X_BF16)
  product::tensor_core_tile<product::Bf16Operands>(x, weight, op, rows, first_row, first_column);
#elif defined(ATLAS_TYPE_WEIGHT_BF16) || defined(ATLAS_TYPE_WEIGHT_F32)
  product::fma_tile(x, weight, op, rows, first_row, first_column);
#else
  product::tensor_core_tile<product::W4Operands>(x, weight, op, rows, first_row, first_column);
#endif
  if constexpr (Op::kGathers) {
    __syncthreads();
    op.finish(rows, first_row, first_column);
  }
}

}  // namespace atlas
