/* atlas
[launch]
grid = ["rows", "ceil_div(hidden, 4 * TILE)", 1]
block = "TILE"
pdl = true
[knobs]
TILE = 256
*/
// residual_add: residual += scale * x, in fp32.
//
// x [rows, hidden] f32 or bf16, residual [rows, hidden] f32. One thread four columns.
// Bytes: hidden x (element + 8) per row; bound by memory latency for few rows, by bandwidth for
// many.
#include "atlas/instance.h"
#include "atlas/pdl.cuh"
#include "atlas/quad.cuh"

ATLAS_KERNEL(const types::x* x, types::residual* residual, const int* rows) {
  atlas::launch_dependents();
  const int row = blockIdx.x, quad = blockIdx.y * launch::block + threadIdx.x;
  const bool mine = row < *rows && 4 * quad < constants::hidden;
  atlas::wait_for_inputs();
  if (!mine) return;
  const size_t start = static_cast<size_t>(row) * constants::hidden;
  float sum[4], added[4];
  atlas::load_quad<constants::hidden>(residual + start, quad, sum);
  atlas::load_quad<constants::hidden>(x + start, quad, added);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += constants::scale * added[i];
  atlas::store_quad<constants::hidden>(sum, quad, residual + start);
}
