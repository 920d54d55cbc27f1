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
#include "atlas/instance.h"
#include "atlas/operand_layout.cuh"
#include "atlas/pdl.cuh"
#include "atlas/quad.cuh"

namespace {

// Columns 4 * quad .. 4 * quad + 3 of a row of the table.
__device__ inline void load_row(const types::table* table, int row, int quad, float (&values)[4]) {
#ifdef ATLAS_LAYOUT_TABLE_TILES
  constexpr int kSize = sizeof(types::table);
  using Layout = atlas::TilesLayout<constants::hidden * kSize, false>;
  const char* bytes = reinterpret_cast<const char*>(table) + Layout::at(row, 4 * quad * kSize);
  // Four columns are one run, padded with zeros.
  atlas::load_quad<4>(reinterpret_cast<const types::table*>(bytes), 0, values);
#else
  atlas::load_quad<constants::hidden>(table + static_cast<size_t>(row) * constants::hidden, quad,
                                      values);
#endif
}

}  // namespace

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
    load_row(table, token, quad, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= constants::scale;
  }
  atlas::store_quad<constants::hidden>(values, quad,
                                       out + static_cast<size_t>(row) * constants::hidden);
}
