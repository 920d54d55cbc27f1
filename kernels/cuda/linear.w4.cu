/* atlas
like = "linear.cu"
[launch]
shared = "STAGES * (TILE_M * 256 + TILE_N * 80)"
[serves]
x = ["bf16"]
weight = ["nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m"]
[knobs.choices]
STAGES = [2, 3, 6]
[cost]
bytes = "(TILE_M * 32 + TILE_N * 9) * k // 16"
trips = "1 + ceil_div(ceil_div(k, 128), STAGES - 1)"
steps = "ceil_div(k, 128)"
memory = "n * k * 9 // 16"
*/
// linear of bf16 rows and weights of 4 bits: out[r, n] = sum over k of x[r, k] * weight[n, k] +
// bias[n].
//
// x [rows, k] bf16, weight [n, k] in nvfp4 or int4 with a scale (and a zero point or a minimum) for
// each 32 columns, out [rows, n] f32 or bf16, all row-major; bias [n] f32, or none. Weights become
// bf16 in registers; 128 columns are summed by the tensor cores, then added in fp32; row scales of
// nvfp4 multiply the finished sum (atlas/product_w4.cuh). A block computes TILE_M rows by TILE_N
// columns. Bytes: n x k x 9 / 16 of weights (i4g32z 19 / 32, i4g32m 5 / 8) once per TILE_M rows;
// bound by weight bandwidth at few rows, by latency at one.
#include "atlas/linear_columns.cuh"
