/* atlas
[launch]
grid = ["logits", "ceil_div(hidden, 4 * TILE)", 1]
block = "TILE"
pdl = true
[knobs]
TILE = 256
*/
// gather_rows: out[i] = x[index[i]].
//
// x [rows, hidden] f32, out [logits, hidden] f32. One thread four columns. Bytes: 8 x hidden per
// row; bound by memory latency.
#include "atlas/instance.h"
#include "atlas/pdl.cuh"
#include "atlas/quad.cuh"

ATLAS_KERNEL(const types::x* x, const types::index* index, types::out* out, const int* /*rows*/,
             const int* logits) {
  atlas::launch_dependents();
  const int row = blockIdx.x, quad = blockIdx.y * launch::block + threadIdx.x;
  const bool mine = row < *logits && 4 * quad < constants::hidden;
  const size_t source = mine ? index[row] : 0;
  atlas::wait_for_inputs();
  if (!mine) return;
  float values[4];
  atlas::load_quad<constants::hidden>(x + source * constants::hidden, quad, values);
  atlas::store_quad<constants::hidden>(values, quad,
                                       out + static_cast<size_t>(row) * constants::hidden);
}
