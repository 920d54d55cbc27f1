/* atlas
[launch]
grid = ["rows", "ceil_div(k, 16 * THREADS)", 1]
block = "min(THREADS, ceil_div(k, 128) * 32)"
pdl = true
[knobs]
THREADS = 256
[layouts]
x = { f32 = "row_major", other = "operand" }
out = "operand"
*/
// quantize_rows: x in format f8g128: E4M3 codes with one fp32 scale per row and 128 columns.
//
// x [rows, k] f32, or bf16 as products read it (as attention leaves it), out [rows, k] f8g128 as
// products read it. One thread four times four columns, loaded together; one warp a group. Bytes: k
// x (element + 1.03) per row; bound by memory latency for few rows, by bandwidth for many.
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
  constexpr int kCount = Out::kQuads < 4 * kThreads ? atlas::ceil_div(Out::kQuads, kThreads) : 4;
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
