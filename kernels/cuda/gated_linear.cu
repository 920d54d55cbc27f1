/* atlas
like = "linear.cu"
[launch]
grid = ["ceil_div(rows, TILE_M)", "ceil_div(intermediate, TILE_N // 2)", 1]
[serves]
out = ["f32", "bf16"]
[knobs]
# A warp has gate and up of the same columns.
SIDES = 2
[knobs.choices]
# The fp32 way pairs columns 16 apart.
TILE_N = [32, 64, 128]
[cost]
memory = "2 * intermediate * k * size_weight"
*/
// gated_linear: out = act(x Wg^T + bg) * (x Wu^T + bu), accumulated in fp32, rounded once.
//
// x [rows, k], weight [2 * intermediate, k] = [Wg; Wu], out [rows, intermediate], all row-major,
// f32 or bf16 each; bias [2 * intermediate] f32, or none, is added to the finished
// sums. A block computes TILE_M rows by TILE_N / 2 columns of out: TILE_N columns of products
// (atlas/product.cuh), groups of gate and up by turns, so that a thread has both factors of what it
// leaves. Bytes: 2 x intermediate x k weights once per TILE_M rows; bound by weight bandwidth at
// few rows, by latency at one.
#include "atlas/gated_columns.cuh"
