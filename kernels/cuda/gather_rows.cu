/* atlas
[launch]
grid = ["logits", "ceil_div(hidden, TILE)", 1]
block = "TILE"
[knobs]
TILE = 256
*/
// gather_rows: out[i] = x[index[i]].
//
// x [rows, hidden] f32, out [logits, hidden] f32. One thread an element.
// Bytes: 8 x hidden per row; bound by memory latency.
#include "atlas/instance.h"

ATLAS_KERNEL(const types::x* __restrict__ x, const types::index* __restrict__ index,
             types::out* __restrict__ out, const int* /*rows*/, const int* logits) {
  const int row = blockIdx.x;
  const int column = blockIdx.y * launch::block + threadIdx.x;
  if (row >= *logits || column >= constants::hidden) return;
  out[static_cast<size_t>(row) * constants::hidden + column] =
      x[static_cast<size_t>(index[row]) * constants::hidden + column];
}
