/* atlas
[launch]
grid = ["logits", "ceil_div(vocab, TILE)", 1]
block = "TILE"
[knobs]
TILE = 256
*/
// mask_logits: logits[i, v] = -inf where bit v of mask[mask_index[i]] is 0; mask_index < 0 leaves
// row i.
//
// mask [logits, ceil(vocab / 32)] u32, bit v is bit v % 32 of word v / 32; logits [logits, vocab]
// f32 in place. One thread a token. Bytes: vocab / 8 read and at most 4 x vocab written per masked
// row, nothing for the others; bound by memory latency.
#include "atlas/convert.cuh"
#include "atlas/instance.h"

ATLAS_KERNEL(const types::mask_index* __restrict__ mask_index, const types::mask* __restrict__ mask,
             types::logits* __restrict__ logits, const int* n_logits) {
  const int row = blockIdx.x;
  const int token = blockIdx.y * launch::block + threadIdx.x;
  if (row >= *n_logits || token >= constants::vocab) return;
  const int index = mask_index[row];
  if (index < 0) return;
  constexpr int words = atlas::ceil_div(constants::vocab, 32);
  const unsigned word = mask[static_cast<size_t>(index) * words + token / 32];
  if ((word >> (token % 32) & 1u) == 0) {
    logits[static_cast<size_t>(row) * constants::vocab + token] = __uint_as_float(0xFF800000u);
  }
}
