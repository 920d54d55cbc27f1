/* atlas
[launch]
grid = ["rows", "ceil_div(k, 4 * QUADS * THREADS)", 1]
block = "min(THREADS, ceil_div(k, 128) * 32)"
pdl = true
[rows]
up_to = [256, 0]
[knobs]
THREADS = 256
# Quads of a thread. H200, k 4096, bf16, us: 1 takes 0.97 for one row, 4 take 1.31; of 8,192
# rows 45 and 35.
QUADS = "4 - 3 * min(1, max_rows)"
[layouts]
x = { f32 = "row_major", other = "operand" }
out = "operand"
*/
// quantize_rows: x in format f8g128: E4M3 codes with one fp32 scale per row and 128 columns.
//
// x [rows, k] f32, or bf16 as products read it (as attention leaves it), out [rows, k] f8g128 as
// products read it. A thread has QUADS times four columns, loaded together: many rows need loads in
// flight, few want to be done soon. One warp a group. Bytes: k x (element + 1.03) per row; bound by
// memory latency for few rows, by bandwidth for many.
#include "atlas/in_row.cuh"
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

#ifdef ATLAS_LAYOUT_X_TILES
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

ATLAS_KERNEL(const types::x* x, types::out* out, const int* rows) {
  using Out = atlas::OutRow<constants::k>;
  constexpr int kThreads = launch::block;
  constexpr int kAll = atlas::ceil_div(Out::kQuads, kThreads);
  constexpr int kCount = kAll < knobs::QUADS ? kAll : knobs::QUADS;
  atlas::launch_dependents();
  const int row = blockIdx.x, first = blockIdx.y * kCount * kThreads + threadIdx.x;
  const bool mine = row < *rows;
  atlas::wait_for_inputs();
  if (!mine) return;
  float values[kCount][4];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    atlas::load_row_quad<kTiles, constants::k>(x, row, first + i * kThreads, values[i]);
  }
  Out(out, row).store<kCount, kThreads>(first, values);
}
