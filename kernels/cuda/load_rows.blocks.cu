/* atlas
[launch]
grid = ["ceil_div(rows, ROWS)", "ceil_div(k, COLUMNS)", 1]
block = "min(THREADS, ROWS * ceil_div(k, 128) * 32)"
[serves]
out = ["f8g128"]
[knobs]
# Not tuned: at 3.8 TB/s of device memory it would wait 40 times less than the host link needs.
THREADS = 256
# What a block makes: a part of a row, or 128 rows by 128 columns of f8g128 (whose size is 0).
ROWS = "1 + 127 * max(0, 1 - size_out)"
COLUMNS = "128 + (4 * THREADS - 128) * min(1, size_out)"
[layouts]
x = "row_major"
out = "operand"
*/
// load_rows: rows of a matrix as a checkpoint has them, in the format and layout of a weight.
//
// x [rows, k] f32 or bf16, row-major; out [rows, k] bf16 or f8g128 as products read it, rounded
// once. A thread has four columns; a warp is 128 columns. Of f8g128, 128 rows share their scales: a
// block reads them twice, the second time from the cache. Bytes: k x (both elements) per row; bound
// by the host link that brings x.
#include "atlas/in_row.cuh"
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

namespace {

using Out = atlas::OutRow<constants::k>;

template <class T>
__device__ inline void make_row(const types::x* x, T* out, int rows) {
  const int row = blockIdx.x, quad = blockIdx.y * launch::block + threadIdx.x;
  if (row >= rows) return;
  float values[1][4];
  atlas::load_row_quad<false, constants::k>(x, row, quad, values[0]);
  Out(out, row).template store<1, launch::block>(quad, values);
}

template <class T>
__device__ inline void make_block(const types::x* x, T* out, int rows) {
  constexpr int kWarps = launch::block / 32;
  __shared__ unsigned largest_of[kWarps];
  const int warp = threadIdx.x / 32, quad = blockIdx.y * 32 + threadIdx.x % 32;
  const int first = blockIdx.x * knobs::ROWS + warp;
  const int end = min(rows, (blockIdx.x + 1) * knobs::ROWS);
  float values[4];
  unsigned largest = 0;
  for (int row = first; row < end; row += kWarps) {
    atlas::load_row_quad<false, constants::k>(x, row, quad, values);
#pragma unroll
    for (float value : values) largest = max(largest, atlas::magnitude_bits(value));
  }
  largest = atlas::block_reduce<launch::block>(largest, atlas::Max{}, largest_of);
  const atlas::F8Group group(largest);
  for (int row = first; row < end; row += kWarps) {
    atlas::load_row_quad<false, constants::k>(x, row, quad, values);
    Out(out, row).store_group(quad, values, group);
  }
}

}  // namespace

ATLAS_KERNEL(const types::x* x, types::out* out, types::fault*, const int* rows) {
  atlas::launch_dependents();
  atlas::wait_for_inputs();
#ifdef ATLAS_TYPE_OUT_F8G128
  make_block(x, out, *rows);
#else
  make_row(x, out, *rows);
#endif
}
