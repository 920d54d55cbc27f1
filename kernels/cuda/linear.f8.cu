/* atlas
like = "linear.cu"
[launch]
shared = "STAGES * (TILE_M + TILE_N) * (128 + 4)"
[serves]
x = ["f8g128"]
weight = ["f8", "f8g128"]
[knobs]
# 1: mma of E4M3, which compute capability 8.9 has; 0: codes made f16.
NATIVE = "min(1, compute_capability // 89)"
[knobs.choices]
STAGES = [2, 3, 6]
[cost]
bytes = "(TILE_M + TILE_N) * k * 33 // 32"
trips = "1 + ceil_div(ceil_div(k, 128), STAGES - 1)"
steps = "ceil_div(k, 128)"
memory = "n * k * 33 // 32"
*/
// linear of E4M3 numbers: out[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n].
//
// x [rows, k] and weight [n, k] E4M3 codes, x with an f32 scale for each row and 128 columns
// (f8g128), weight too or with one for each row (f8); out [rows, n] f32 or bf16; all row-major;
// bias [n] f32, or none. The products of 128 columns are summed by the tensor cores, scaled and
// added in fp32; a row's own scale multiplies the finished sum (atlas/product_f8.cuh). A block
// computes TILE_M rows by TILE_N columns. Bytes: n x k of weights (f8g128 33 / 32) once per TILE_M
// rows; bound by weight bandwidth at few rows, by latency at one.
#include "atlas/linear_columns.cuh"
