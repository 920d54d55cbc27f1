/* atlas
[launch]
grid = ["rows", "ceil_div(intermediate, TILE)", 1]
block = "TILE"
[knobs]
TILE = 256
[knobs.choices]
TILE = [64, 128, 256, 512]
*/
// swiglu: out = gate / (1 + exp(-gate)) * up, in fp32, rounded once.
//
// gate_up [rows, 2 * intermediate] is [gate | up]; out [rows, intermediate]; f32 or bf16 each. One
// thread an element. Bytes: intermediate x 3 elements per row; bound by memory bandwidth.
#include "atlas/convert.cuh"
#include "atlas/instance.h"

ATLAS_KERNEL(const types::gate_up* __restrict__ gate_up, types::out* __restrict__ out,
             const int* rows) {
  const int row = blockIdx.x;
  const int column = blockIdx.y * launch::block + threadIdx.x;
  if (row >= *rows || column >= constants::intermediate) return;
  const types::gate_up* source = gate_up + static_cast<size_t>(row) * 2 * constants::intermediate;
  const float gate = atlas::to_float(source[column]);
  const float up = atlas::to_float(source[constants::intermediate + column]);
  // expf(-gate) = inf gives the right limit, 0.
  out[static_cast<size_t>(row) * constants::intermediate + column] =
      atlas::from_float<types::out>(gate / (1.0f + expf(-gate)) * up);
}
