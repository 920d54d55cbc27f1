/* atlas
[launch]
grid = ["rows", 1, 1]
block = "THREADS"
[knobs]
THREADS = 256
[knobs.choices]
THREADS = [64, 128, 256, 512]
*/
// rms_norm: out = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once.
//
// x [rows, hidden] f32, weight [hidden] f32, out [rows, hidden] f32 or bf16. One block a row:
// squares summed per thread, then in a fixed order over the block, so a row's result depends on
// that row alone. Bytes: hidden x (8 + element) per row, x is read a second time from cache; bound
// by memory latency.
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/reduce.cuh"

ATLAS_KERNEL(const types::x* __restrict__ x, const types::weight* __restrict__ weight,
             types::out* __restrict__ out, const int* rows) {
  __shared__ float scratch[launch::block / atlas::kWarp];
  const int row = blockIdx.x;
  if (row >= *rows) return;
  x += static_cast<size_t>(row) * constants::hidden;
  out += static_cast<size_t>(row) * constants::hidden;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < constants::hidden; i += launch::block) squares += x[i] * x[i];
  squares = atlas::block_reduce<launch::block>(squares, atlas::Sum(), scratch);
  const float mean = squares / static_cast<float>(constants::hidden);
  const float scale = 1.0f / sqrtf(mean + constants::eps);
  for (int i = threadIdx.x; i < constants::hidden; i += launch::block) {
    out[i] = atlas::from_float<types::out>(x[i] * scale * weight[i]);
  }
}
