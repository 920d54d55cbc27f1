/* atlas
[launch]
grid = ["rows", "ceil_div(intermediate, TILE)", 1]
block = "TILE"
[knobs]
TILE = 256
[knobs.choices]
TILE = [64, 128, 256, 512]
*/
// gated_activation: out = act(gate) * up, in fp32, rounded once; act is SiLU, GELU by tanh or exact
// GELU.
//
// gate_up [rows, 2 * intermediate] is [gate | up]; out [rows, intermediate]; f32 or bf16 each. One
// thread an element. Bytes: intermediate x 3 elements per row; bound by memory bandwidth.
#include "atlas/convert.cuh"
#include "atlas/instance.h"

namespace {

static_assert(constants::activation >= 0 && constants::activation <= 2,
              "activation is 0 (SiLU), 1 (GELU by tanh) or 2 (exact GELU)");

__device__ inline float activate(float x) {
  if constexpr (constants::activation == 0) {
    return x / (1.0f + expf(-x));  // expf(-x) = inf gives the right limit, 0
  } else if constexpr (constants::activation == 1) {
    // x / 2 * (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
    return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
  } else {
    return 0.5f * x * erfcf(-0.707106781f * x);
  }
}

}  // namespace

ATLAS_KERNEL(const types::gate_up* __restrict__ gate_up, types::out* __restrict__ out,
             const int* rows) {
  const int row = blockIdx.x;
  const int column = blockIdx.y * launch::block + threadIdx.x;
  if (row >= *rows || column >= constants::intermediate) return;
  const types::gate_up* source = gate_up + static_cast<size_t>(row) * 2 * constants::intermediate;
  const float gate = atlas::to_float(source[column]);
  const float up = atlas::to_float(source[constants::intermediate + column]);
  out[static_cast<size_t>(row) * constants::intermediate + column] =
      atlas::from_float<types::out>(activate(gate) * up);
}
