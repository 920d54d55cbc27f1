/* atlas
[launch]
grid = ["ceil_div(rows, TILE_M)", "ceil_div(n, TILE_N)", 1]
block = "WARPS * 32"
shared = "STAGES * (TILE_M + TILE_N) * 144"
pdl = true
[serves]
x = ["f32", "bf16"]
weight = ["f32", "bf16"]
[limits]
same_bits = true
[knobs]
# Products of which a warp has the same columns.
SIDES = 1
TILE_M = 32
TILE_N = 64
WARPS = 4
STAGES = 3
legal = [
  # Warps form ceil_div(TILE_M, 64) rows; each owns 16 x 8 fragments, at most 32 columns of them.
  "WARPS % ceil_div(TILE_M, 64) == 0",
  "TILE_N % (WARPS // ceil_div(TILE_M, 64) * 8 * SIDES) == 0",
  "TILE_N <= WARPS // ceil_div(TILE_M, 64) * 32",
  # 64 accumulators a thread, and as many for a step's own sum, is what registers hold.
  "TILE_M * TILE_N <= WARPS * 2048",
  # Deep pipelines hide latency at few rows; at many they only take shared memory from others.
  "(STAGES - 3) * TILE_M <= 96",
  # The fp32 way shares its tile out over rows of 16 threads.
  "TILE_M % (WARPS * 2) == 0",
]
[knobs.choices]
TILE_M = [16, 32, 64, 128]
TILE_N = [16, 32, 64, 128]
WARPS = [2, 4, 8]
STAGES = [3, 6]
[cost]
bytes = "(TILE_M + TILE_N) * k * size_weight"
flops = "2 * TILE_M * TILE_N * k"
trips = "1 + ceil_div(ceil_div(k, 64), STAGES - 1)"
steps = "ceil_div(k, 64)"
memory = "n * k * size_weight"
*/
// linear: out[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n], accumulated in fp32, rounded
// once.
//
// x [rows, k], weight [n, k], out [rows, n], all row-major, f32 or bf16 each; bias [n] f32, or
// none, is added to the finished sum. A block computes TILE_M rows by TILE_N columns
// (atlas/product.cuh). Bytes: n x k weights once per TILE_M rows; bound by weight bandwidth at few
// rows, by latency at one.
#include "atlas/linear_columns.cuh"
