/* atlas
[launch]
grid = ["rows", "ceil_div(intermediate, 4 * TILE)", 1]
block = "TILE"
pdl = true
[knobs]
TILE = 256
[knobs.choices]
TILE = [64, 128, 256, 512]
[layouts]
out = { f32 = "row_major", other = "operand" }
*/
// gated_activation: out = act(gate) * up, in fp32, rounded once; act is SiLU, GELU by tanh or exact
// GELU.
//
// gate_up [rows, 2 * intermediate] is [gate | up], f32 or bf16; out [rows, intermediate] f32, bf16
// or f8g128 as products read it. One thread four columns. Bytes: intermediate x 3 elements per row;
// bound by memory latency for few rows, by bandwidth for many.
#include "atlas/activation.cuh"
#include "atlas/instance.h"
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

ATLAS_KERNEL(const types::gate_up* gate_up, types::out* out, const int* rows) {
  using Out = atlas::OutRow<constants::intermediate>;
  atlas::launch_dependents();
  const int row = blockIdx.x, quad = blockIdx.y * launch::block + threadIdx.x;
  const bool mine = row < *rows && quad < Out::kQuads;
  atlas::wait_for_inputs();
  if (!mine) return;
  const types::gate_up* gates = gate_up + static_cast<size_t>(row) * 2 * constants::intermediate;
  float gate[4], up[1][4];
  atlas::load_quad<constants::intermediate>(gates, quad, gate);
  atlas::load_quad<constants::intermediate>(gates + constants::intermediate, quad, up[0]);
#pragma unroll
  for (int i = 0; i < 4; ++i) up[0][i] *= atlas::activate<constants::activation>(gate[i]);
  Out(out, row).store<1, 1>(quad, up);
}
