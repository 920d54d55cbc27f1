/* atlas
[launch]
grid = ["rows", "ceil_div(k, 4 * THREADS)", 1]
block = "min(THREADS, ceil_div(k, 128) * 32)"
[knobs]
# Not tuned: at 3.8 TB/s of device memory it would wait 40 times less than the host link needs.
THREADS = 256
[layouts]
x = "row_major"
out = "operand"
*/
// load_rows: rows of a matrix as a checkpoint has them, in the format and layout of a weight.
//
// x [rows, k] f32 or bf16, row-major; out [rows, k] bf16 or f8g128 as products read it, rounded
// once. A thread has four columns; a warp is a group of f8g128. Bytes: k x (both elements) per row;
// bound by the host link that brings x.
#include "atlas/in_row.cuh"
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

ATLAS_KERNEL(const types::x* x, types::out* out, const int* rows) {
  using Out = atlas::OutRow<constants::k>;
  const int row = blockIdx.x, quad = blockIdx.y * launch::block + threadIdx.x;
  atlas::launch_dependents();
  atlas::wait_for_inputs();
  if (row >= *rows) return;
  float values[1][4];
  atlas::load_row_quad<false, constants::k>(x, row, quad, values[0]);
  Out(out, row).template store<1, launch::block>(quad, values);
}
