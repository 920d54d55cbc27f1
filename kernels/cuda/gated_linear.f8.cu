/* atlas
[launch]
grid = ["ceil_div(rows, TILE_M)", "ceil_div(intermediate, TILE_N // 2)", 1]
block = "WARPS * 32"
shared = "STAGES * (TILE_M + TILE_N) * (128 + 4)"
pdl = true
[serves]
x = ["f8g128"]
weight = ["f8", "f8g128"]
out = ["f8g128"]
[limits]
same_bits = true
[knobs]
# 1: mma of E4M3, which compute capability 8.9 has; 0: codes made f16.
NATIVE = "min(1, compute_capability // 89)"
# A group of 128 columns of out has one scale: a block has gate and up of a whole group, a warp
# those of the same 16 columns. At 64 rows that is 64 accumulators a thread, and as many for a
# step's own sum, which is what registers hold.
TILE_N = 256
WARPS = 8
TILE_M = 16
STAGES = 2
legal = [
  # Deep pipelines hide latency at few rows; at many they only take shared memory from others.
  "(STAGES - 3) * TILE_M <= 96",
]
[knobs.choices]
TILE_M = [16, 32, 64]
STAGES = [2, 3, 6]
[cost]
bytes = "(TILE_M + TILE_N) * k * 33 // 32"
flops = "2 * TILE_M * TILE_N * k"
trips = "1 + ceil_div(ceil_div(k, 128), STAGES - 1)"
steps = "ceil_div(k, 128)"
memory = "2 * intermediate * k * 33 // 32"
*/
// gated_linear of E4M3 numbers: out = act(x Wg^T + bg) * (x Wu^T + bu).
//
// x [rows, k] and weight [2 * intermediate, k] = [Wg; Wu] E4M3 codes, x with an f32 scale for each
// row and 128 columns (f8g128), weight too or with one for each row (f8); out [rows, intermediate]
// f8g128; all row-major; bias [2 * intermediate] f32, or none. The products of 128 columns are
// summed by the tensor cores, scaled and added in fp32; a row's own scale multiplies the finished
// sum (atlas/product_f8.cuh). A block computes TILE_M rows by TILE_N / 2 columns of out, groups of
// gate and up by turns. Bytes: 2 x intermediate x k of weights (f8g128 33 / 32) once
// per TILE_M rows; bound by weight bandwidth at few rows, by latency at one.
#include "atlas/gated_columns.cuh"
