/* atlas
like = "linear.cu"
[launch]
grid = ["ceil_div(rows, TILE_M)", "ceil_div(intermediate, TILE_N // 2)", 1]
shared = "STAGES * (TILE_M * 256 + TILE_N * 80)"
[serves]
x = ["bf16"]
weight = ["nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m"]
out = ["f32", "bf16"]
[knobs]
# A warp has gate and up of the same columns.
SIDES = 2
[knobs.choices]
TILE_N = [32, 64, 128]
STAGES = [2, 3, 6]
[cost]
bytes = "(TILE_M * 32 + TILE_N * 9) * k // 16"
trips = "1 + ceil_div(ceil_div(k, 128), STAGES - 1)"
steps = "ceil_div(k, 128)"
memory = "2 * intermediate * k * 9 // 16"
*/
// gated_linear of bf16 rows and weights of 4 bits: out = act(x Wg^T + bg) * (x Wu^T + bu).
//
// x [rows, k] bf16, weight [2 * intermediate, k] = [Wg; Wu] in nvfp4 or int4 with a scale (and a
// zero point or a minimum) for each 32 columns, out [rows, intermediate] f32 or bf16, all
// row-major; bias [2 * intermediate] f32, or none. Weights become bf16 in registers; 128 columns
// are summed by the tensor cores, then added in fp32; row scales of nvfp4 multiply the finished
// sums (atlas/product_w4.cuh). A block computes TILE_M rows by TILE_N / 2 columns of out, groups of
// gate and up by turns. Bytes: 2 x intermediate x k x 9 / 16 of weights (i4g32z 19 / 32, i4g32m
// 5 / 8) once per TILE_M rows; bound by weight bandwidth at few rows, by latency at one.
#include "atlas/gated_columns.cuh"
