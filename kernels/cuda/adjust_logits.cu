/* atlas
[launch]
grid = ["SPLITS", "logits", 1]
block = 256
pdl = true
[knobs]
# H200, 128,256 ids, nobody asks, with sample and logprobs: one row takes 3.4 us with 8, 16 or 32,
# 128 rows 30.8, 32.0 and 34.5. A row that asks wants many.
SPLITS = 16
*/
// adjust_logits: adjusted[i] = logits[i] with a bias added, penalties of tokens that occurred, and
// forbidden tokens at -inf, as the bits of adjust[i] say; rows of 0 are left alone.
//
// logits, adjusted [logits, vocab] f32; bias f32 and token_count i32 [slots, vocab] by the row's
// slot, bit 31 of a count: in the prompt, the others: times generated; mask [logits, ceil(vocab /
// 32)] u32, bit v is bit v % 32 of word v / 32. SPLITS blocks a row: enough to have the row's reads
// in flight together, few enough that rows that ask for nothing cost little. Bytes: 8 x vocab for a
// row that asks for something and 4 more for each of bias and counts, nothing for the others; bound
// by memory latency.
#include "atlas/instance.h"
#include "atlas/pdl.cuh"

namespace {

using constants::vocab;
constexpr int kBias = 1, kPenalties = 2, kMask = 4;
constexpr int kWords = (vocab + 31) / 32;

// What a row asks for.
struct Change {
  int what;
  const float* bias;
  const int* counts;
  const unsigned* mask;
  float repetition, frequency, presence;

  __device__ float operator()(float x, int token) const {
    if ((what & kBias) != 0) x += bias[token];
    if ((what & kPenalties) != 0) {
      const int count = counts[token], generated = count & 0x7FFFFFFF;
      if (count != 0) x = x > 0.0f ? x / repetition : x * repetition;
      x -= frequency * static_cast<float>(generated);
      if (generated != 0) x -= presence;
    }
    // A NaN is a fault to report, whatever is forbidden.
    if ((what & kMask) != 0 && (mask[token / 32] >> (token % 32) & 1u) == 0 && x == x) {
      x = __uint_as_float(0xFF800000u);
    }
    return x;
  }
};

}  // namespace

ATLAS_KERNEL(const types::logits* logits, const types::adjust* adjusts, const types::slot* slots,
             const types::bias* bias, const types::token_count* token_count,
             const types::repetition* repetitions, const types::frequency* frequencies,
             const types::presence* presences, const types::mask_index* mask_index,
             const types::mask* mask, types::adjusted* adjusted, const int* n_logits,
             const int* /*n_slots*/) {
  atlas::launch_dependents();
  const int row = blockIdx.y;
  const int what = row < *n_logits ? adjusts[row] : 0;
  atlas::wait_for_inputs();
  if (what == 0) return;
  Change change{};
  change.what = what;
  if ((what & (kBias | kPenalties)) != 0) {
    const size_t of_slot = static_cast<size_t>(slots[row]) * vocab;
    change.bias = bias + of_slot;
    change.counts = token_count + of_slot;
    change.repetition = repetitions[row];
    change.frequency = frequencies[row];
    change.presence = presences[row];
  }
  if ((what & kMask) != 0) change.mask = mask + static_cast<size_t>(mask_index[row]) * kWords;
  logits += static_cast<size_t>(row) * vocab;
  adjusted += static_cast<size_t>(row) * vocab;
#pragma unroll 8
  for (int token = blockIdx.x * launch::block + threadIdx.x; token < vocab;
       token += knobs::SPLITS * launch::block) {
    adjusted[token] = change(logits[token], token);
  }
}
