/* atlas
[launch]
grid = ["logits", "ceil_div(vocab, TILE)", 1]
block = "TILE"
[knobs]
TILE = 256
*/
// adjust_logits: adjusted[i] = logits[i] with a bias added, penalties of tokens that occurred, and
// forbidden tokens at -inf, as the bits of adjust[i] say; rows of 0 are left alone.
//
// logits, adjusted [logits, vocab] f32; bias f32 and token_count i32 [slots, vocab] by the row's
// slot, bit 31 of a count: in the prompt, the others: times generated; mask [logits, ceil(vocab /
// 32)] u32, bit v is bit v % 32 of word v / 32. One thread a token. Bytes: 8 x vocab for a row that
// asks for something and 4 more for each of bias and counts, nothing for the others; bound by
// memory latency.
#include "atlas/convert.cuh"
#include "atlas/instance.h"

namespace {
constexpr int kBias = 1, kPenalties = 2, kMask = 4;
}

ATLAS_KERNEL(const types::logits* __restrict__ logits, const types::adjust* __restrict__ adjusts,
             const types::slot* __restrict__ slots, const types::bias* __restrict__ bias,
             const types::token_count* __restrict__ token_count,
             const types::repetition* __restrict__ repetitions,
             const types::frequency* __restrict__ frequencies,
             const types::presence* __restrict__ presences,
             const types::mask_index* __restrict__ mask_index, const types::mask* __restrict__ mask,
             types::adjusted* __restrict__ adjusted, const int* n_logits, const int* /*n_slots*/) {
  const int row = blockIdx.x;
  const int token = blockIdx.y * launch::block + threadIdx.x;
  if (row >= *n_logits || token >= constants::vocab) return;
  const int adjust = adjusts[row];
  if (adjust == 0) return;
  const size_t element = static_cast<size_t>(row) * constants::vocab + token;
  float x = logits[element];
  if ((adjust & (kBias | kPenalties)) != 0) {
    const size_t of_slot = static_cast<size_t>(slots[row]) * constants::vocab + token;
    if ((adjust & kBias) != 0) x += bias[of_slot];
    if ((adjust & kPenalties) != 0) {
      const int count = token_count[of_slot], generated = count & 0x7FFFFFFF;
      const float repetition = repetitions[row];
      if (count != 0) x = x > 0.0f ? x / repetition : x * repetition;
      x -= frequencies[row] * static_cast<float>(generated);
      if (generated != 0) x -= presences[row];
    }
  }
  if ((adjust & kMask) != 0) {
    constexpr int words = atlas::ceil_div(constants::vocab, 32);
    const unsigned word = mask[static_cast<size_t>(mask_index[row]) * words + token / 32];
    // A NaN is a fault to report, whatever is forbidden.
    if ((word >> (token % 32) & 1u) == 0 && x == x) x = __uint_as_float(0xFF800000u);
  }
  adjusted[element] = x;
}
