/* atlas
[launch]
grid = ["rows", "ceil_div(k, 4 * THREADS)", 1]
block = "min(THREADS, ceil_div(k, 128) * 32)"
pdl = true
[knobs]
THREADS = 256
[layouts]
out = "operand"
*/
// quantize_rows: x in format f8g128: E4M3 codes with one fp32 scale per row and 128 columns.
//
// x [rows, k] f32 or bf16, out [rows, k] f8g128 as products read it. One thread four columns, one
// warp a group. Bytes: k x (element + 1.03) per row; bound by memory latency for few rows, by
// bandwidth for many.
#include "atlas/instance.h"
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

ATLAS_KERNEL(const types::x* x, types::out* out, const int* rows) {
  using Out = atlas::OutRow<constants::k>;
  atlas::launch_dependents();
  const int row = blockIdx.x, quad = blockIdx.y * launch::block + threadIdx.x;
  const bool mine = row < *rows && quad < Out::kQuads;
  atlas::wait_for_inputs();
  if (!mine) return;
  float values[4];
  atlas::load_quad<constants::k>(x + static_cast<size_t>(row) * constants::k, quad, values);
  Out(out, row).store(quad, values);
}
