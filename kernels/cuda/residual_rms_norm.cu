/* atlas
[launch]
grid = ["rows", 1, 1]
block = "min(THREADS, ceil_div(hidden, 128) * 32)"
pdl = true
[knobs]
# H200, hidden 4096, residual_rms_norm to bf16 / f8g128, us: of one row 256 threads 1.45 / 1.82,
# 512 1.44 / 1.69, 1,024 1.74 / 1.94; of 8,192 rows within 3 % of each other. 256 threads take
# 16 K registers, 512 take 20 K, of what two products' blocks beside them leave.
THREADS = 256
[knobs.choices]
THREADS = [128, 256, 512, 1024]
[layouts]
out = { f32 = "row_major", other = "operand" }
*/
// residual_rms_norm: residual += scale * x, then out = residual / sqrt(mean(residual^2) + eps) *
// weight, in fp32, out rounded once.
//
// x [rows, hidden] f32 or bf16, residual [rows, hidden] f32, weight [hidden] f32, out [rows,
// hidden] f32, bf16 or f8g128 as products read it. One block a row, which stays in registers:
// everything is read once, 16 bytes a thread. The squares are summed per thread, then in a fixed
// order over the block, so a row's bits depend on that row alone. The weight is fetched before the
// predecessor has ended. Bytes: hidden x (8 + elements of x and out) per row and the weight from
// cache; bound by memory latency for few rows, by bandwidth for many.
#include "atlas/norm.cuh"

ATLAS_KERNEL(const types::x* x, types::residual* residual, const types::weight* weight,
             types::out* out, const int* rows) {
  atlas::launch_dependents();
  const atlas::Norm norm(weight);
  const bool mine = blockIdx.x < *rows;
  atlas::wait_for_inputs();
  if (!mine) return;
  const size_t start = static_cast<size_t>(blockIdx.x) * constants::hidden;
  atlas::Norm::Row row;
  atlas::Norm::load(residual + start, row);
  {
    atlas::Norm::Row added;
    atlas::Norm::load(x + start, added);
    atlas::Norm::add(added, constants::scale, row);
  }
  atlas::Norm::store(row, residual + start);
  norm.store_normalised(row, out, blockIdx.x);
}
