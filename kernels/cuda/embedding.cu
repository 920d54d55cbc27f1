/* atlas
[launch]
grid = ["rows", "ceil_div(hidden, 4 * TILE)", 1]
block = "TILE"
pdl = true
[serves]
table = ["f32", "bf16"]
[knobs]
TILE = 256
[layouts]
table = { f32 = "row_major", other = "operand" }
*/
// embedding: out[r] = table[token(r)] * scale, in fp32.
//
// table [vocab, hidden] f32 or bf16, in the layout of a product's weight, which a tied head makes
// it; out [rows, hidden] f32. One thread four columns. Bytes: hidden x (element + 4) per row; bound
// by memory latency.
#include "atlas/in_row.cuh"
#include "atlas/instance.h"
#include "atlas/pdl.cuh"

#ifdef ATLAS_LAYOUT_TABLE_TILES
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

ATLAS_KERNEL(const types::row_token* row_token, const types::row_seq* row_seq,
             const types::seq_slot* seq_slot, const types::last_token* last_token,
             const types::table* table, types::out* out, const int* rows, const int* /*seqs*/,
             const int* /*slots*/) {
  atlas::launch_dependents();
  const int row = blockIdx.x, quad = blockIdx.y * launch::block + threadIdx.x;
  const bool mine = row < *rows && 4 * quad < constants::hidden;
  int token = mine ? row_token[row] : 0;
  const int slot = token < 0 ? seq_slot[row_seq[row]] : 0;
  atlas::wait_for_inputs();
  if (!mine) return;
  if (token < 0) token = last_token[slot];
  // A slot may remember -1, the token of a row of NaN logits: what follows it is NaN too.
  const float nan = __int_as_float(0x7fffffff);
  float values[4] = {nan, nan, nan, nan};
  if (token >= 0 && token < constants::vocab) {
    atlas::load_row_quad<kTiles, constants::hidden>(table, token, quad, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= constants::scale;
  }
  atlas::store_quad<constants::hidden>(values, quad,
                                       out + static_cast<size_t>(row) * constants::hidden);
}
