/* atlas
[launch]
grid = ["logits", 1, 1]
block = "THREADS"
[knobs]
THREADS = 512
*/
// logprobs: for each row with n_top >= 0, log-softmax at one token, the token's rank, and the n_top
// largest logits with their ids, equals in the order of ids. NaN and rank 0 where there is no
// answer: no token, a NaN among the logits, no finite maximum.
//
// logits [logits, vocab] f32; top_token, top_logprob [logits, max_top]. One block a row. Weights
// exp(logit - max) are summed in fp64 in a fixed order. The list is made one by one: the largest of
// the order-preserving (logit, id) keys below the last one. Bytes: 4 x vocab per pass, three passes
// and one more for each of n_top; nothing for rows that do not ask; bound by one multiprocessor's
// cache bandwidth.
#include "atlas/instance.h"
#include "atlas/ordered_key.cuh"
#include "atlas/reduce.cuh"

namespace {

using constants::vocab;
constexpr int kThreads = launch::block, kWarps = kThreads / atlas::kWarp;
using Key = unsigned long long;

// Larger for larger logits, and for lower ids among equals; never 0.
__device__ inline Key key_of(float logit, int id) {
  return static_cast<Key>(atlas::ordered_key(logit)) << 32 |
         (0xFFFFFFFFu - static_cast<unsigned>(id));
}
__device__ inline int id_of(Key key) {
  return static_cast<int>(0xFFFFFFFFu - static_cast<unsigned>(key));
}

}  // namespace

ATLAS_KERNEL(const types::logits* __restrict__ all_logits, const types::n_top* __restrict__ n_tops,
             const types::target* __restrict__ targets, const types::token* __restrict__ tokens,
             types::logprob* __restrict__ logprobs, types::rank* __restrict__ ranks,
             types::top_token* __restrict__ top_tokens,
             types::top_logprob* __restrict__ top_logprobs, const int* n_logits) {
  __shared__ double doubles[kWarps];
  __shared__ Key keys[kWarps];
  __shared__ int ints[kWarps];
  const int row = blockIdx.x;
  if (row >= *n_logits) return;
  const int n_top = min(static_cast<int>(n_tops[row]), constants::max_top);
  if (n_top < 0) return;
  const float* logits = all_logits + static_cast<size_t>(row) * vocab;
  const float nan = __uint_as_float(0x7FC00000u);

  // The largest key below `bound`, 0 if there is none.
  const auto largest_below = [&](Key bound) {
    Key best = 0;
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const Key key = key_of(logits[i], i);
      if (key < bound && key > best) best = key;
    }
    return atlas::block_reduce<kThreads>(best, atlas::Max(), keys);
  };
  const Key best = largest_below(~Key{0});
  const auto best_key = static_cast<unsigned>(best >> 32);
  // A NaN's key is above +infinity's.
  const bool valid = best_key > atlas::kKeyMinusInfinity && best_key < atlas::kKeyPlusInfinity;
  const double top = valid ? atlas::from_ordered_key(best_key) : 0.0f;

  double sum = 0.0;
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    sum += static_cast<double>(expf(logits[i] - static_cast<float>(top)));
  }
  const double log_sum = log(atlas::block_reduce<kThreads>(sum, atlas::Sum(), doubles));
  const auto logprob_of = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - top - log_sum);
  };

  const int token = targets[row] >= 0 ? targets[row] : tokens[row];
  const bool answered = valid && token >= 0 && token < vocab;
  int above = 0;
  if (answered) {
    const Key own = key_of(logits[token], token);
    for (int i = threadIdx.x; i < vocab; i += kThreads) above += key_of(logits[i], i) > own;
  }
  above = atlas::block_reduce<kThreads>(above, atlas::Sum(), ints);
  if (threadIdx.x == 0) {
    logprobs[row] = answered ? logprob_of(logits[token]) : nan;
    ranks[row] = answered ? above + 1 : 0;
  }

  Key last = best;
  for (int j = 0; j < n_top; ++j) {
    if (j > 0) last = largest_below(last);
    const bool found = valid && last != 0;
    if (threadIdx.x == 0) {
      const size_t element = static_cast<size_t>(row) * constants::max_top + j;
      top_tokens[element] = found ? id_of(last) : -1;
      top_logprobs[element] = found ? logprob_of(logits[id_of(last)]) : nan;
    }
  }
}
