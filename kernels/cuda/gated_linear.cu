/* atlas
[launch]
grid = ["ceil_div(rows, TILE_M)", "ceil_div(intermediate, TILE_N // 2)", 1]
block = "WARPS * 32"
shared = "STAGES * (TILE_M + TILE_N) * 144"
pdl = true
[serves]
x = ["f32", "bf16"]
weight = ["f32", "bf16"]
out = ["f32", "bf16"]
[limits]
same_bits = true
[knobs]
TILE_M = 32
TILE_N = 64
WARPS = 4
STAGES = 3
legal = [
  # Warps form ceil_div(TILE_M, 64) rows; each owns 16 x 8 fragments, at most 32 columns of them.
  "WARPS % ceil_div(TILE_M, 64) == 0",
  "TILE_N % (WARPS // ceil_div(TILE_M, 64) * 8) == 0",
  "TILE_N <= WARPS // ceil_div(TILE_M, 64) * 32",
  # 64 accumulators a thread, and as many for a step's own sum, is what registers hold.
  "TILE_M * TILE_N <= WARPS * 2048",
  # Deep pipelines hide latency at few rows; at many they only take shared memory from others.
  "(STAGES - 3) * TILE_M <= 96",
  "STAGES * (TILE_M + TILE_N) * 144 <= shared_memory_per_block",
  # A warp has gate and up of the same columns.
  "TILE_N % (WARPS // ceil_div(TILE_M, 64) * 16) == 0",
  # The fp32 way shares its tile out over rows of 16 threads, and pairs columns 16 apart.
  "TILE_N % 32 == 0",
  "TILE_M % (WARPS * 2) == 0",
]
[knobs.choices]
TILE_M = [16, 32, 64, 128]
TILE_N = [32, 64, 128]
WARPS = [2, 4, 8]
STAGES = [3, 6]
[cost]
bytes = "(TILE_M + TILE_N) * k * size_weight"
flops = "2 * TILE_M * TILE_N * k"
trips = "1 + ceil_div(ceil_div(k, 64), STAGES - 1)"
steps = "ceil_div(k, 64)"
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
