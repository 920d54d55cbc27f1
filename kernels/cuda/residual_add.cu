/* atlas
[launch]
grid = ["rows", "ceil_div(hidden, TILE)", 1]
block = "TILE"
[knobs]
TILE = 256
*/
// residual_add: residual += scale * x, in fp32.
//
// x [rows, hidden] f32 or bf16, residual [rows, hidden] f32. One thread an element.
// Bytes: hidden x (element + 8) per row; bound by memory bandwidth.
#include "atlas/convert.cuh"
#include "atlas/instance.h"

ATLAS_KERNEL(const types::x* __restrict__ x, types::residual* __restrict__ residual,
             const int* rows) {
  const int row = blockIdx.x;
  const int column = blockIdx.y * launch::block + threadIdx.x;
  if (row >= *rows || column >= constants::hidden) return;
  const size_t element = static_cast<size_t>(row) * constants::hidden + column;
  residual[element] += constants::scale * atlas::to_float(x[element]);
}
