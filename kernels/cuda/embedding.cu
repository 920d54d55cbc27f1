/* atlas
[launch]
grid = ["rows", "ceil_div(hidden, TILE)", 1]
block = "TILE"
[knobs]
TILE = 256
*/
// embedding: out[r] = table[token(r)] * scale, in fp32.
//
// table [vocab, hidden] f32 or bf16, out [rows, hidden] f32. One thread an element.
// Bytes: hidden x (element + 4) per row; bound by memory latency.
#include "atlas/convert.cuh"
#include "atlas/instance.h"

ATLAS_KERNEL(const types::row_token* __restrict__ row_token,
             const types::row_seq* __restrict__ row_seq,
             const types::seq_slot* __restrict__ seq_slot,
             const types::last_token* __restrict__ last_token,
             const types::table* __restrict__ table, types::out* __restrict__ out, const int* rows,
             const int* /*seqs*/, const int* /*slots*/) {
  const int row = blockIdx.x;
  const int column = blockIdx.y * launch::block + threadIdx.x;
  if (row >= *rows || column >= constants::hidden) return;
  int token = row_token[row];
  if (token < 0) token = last_token[seq_slot[row_seq[row]]];
  // A slot may remember -1, the token of a row of NaN logits: what follows it is NaN too.
  float value = __int_as_float(0x7fffffff);
  if (token >= 0 && token < constants::vocab) {
    value = atlas::to_float(table[static_cast<size_t>(token) * constants::hidden + column]) *
            constants::scale;
  }
  out[static_cast<size_t>(row) * constants::hidden + column] = value;
}
