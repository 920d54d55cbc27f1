/* atlas
[launch]
grid = ["rows", 1, 1]
block = "min(256, ceil_div(hidden, 128) * 32)"
pdl = true
[layouts]
out = { f32 = "row_major", other = "operand" }
*/
// norm_parts: out = x * weight, rounded once, and of every 128 columns of a row the share of their
// squares in its mean square plus epsilon: rms_norm without its division, which normed_linear and
// normed_gated_linear do.
//
// x [rows, hidden] f32, weight [hidden] f32, out [rows, hidden] f32, bf16 or f8g128 as products
// read it, squares [rows, ceil(hidden / 128)] f32. One block a row, four columns a thread, so that
// a warp has 128 columns: nothing meets across warps. Twice a step: behind the embedding and before
// the last MLP. Bound by memory latency.
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

namespace {

constexpr int kHidden = constants::hidden, kShares = atlas::ceil_div(kHidden, 128);
using Out = atlas::OutRow<kHidden>;
constexpr int kCount = atlas::ceil_div(Out::kQuads, launch::block);

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, types::out* out,
             types::squares* squares, const int* rows) {
  atlas::launch_dependents();
  float weights[kCount][4], values[kCount][4];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    atlas::load_quad<kHidden>(weight, threadIdx.x + i * launch::block, weights[i]);
  }
  const int row = blockIdx.x;
  const bool mine = row < *rows;
  atlas::wait_for_inputs();
  if (!mine) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int quad = threadIdx.x + i * launch::block;
    atlas::load_quad<kHidden>(x + static_cast<size_t>(row) * kHidden, quad, values[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int quad = threadIdx.x + i * launch::block;
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      square = fmaf(values[i][j], values[i][j], square);
      values[i][j] = __fmul_rn(values[i][j], weights[i][j]);
    }
    square = atlas::warp_reduce(square, atlas::Sum());
    if (quad % atlas::kWarp == 0 && quad / atlas::kWarp < kShares) {
      squares[static_cast<size_t>(row) * kShares + quad / atlas::kWarp] =
          fmaf(square, 1.0f / kHidden, constants::eps / kShares);
    }
  }
  Out(out, row).template store<kCount, launch::block>(threadIdx.x, values);
}
