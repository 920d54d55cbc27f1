/* atlas
[launch]
grid = ["cluster_blocks", "logits", 1]
block = "THREADS"
cluster = "cluster_blocks"
pdl = true
resident = "min(2, cluster_blocks)"
[knobs]
THREADS = 512
*/
// logprobs: for each row with n_top >= 0, log-softmax at one token, the token's rank, and the n_top
// largest logits with their ids, equals in the order of ids. NaN and rank 0 where there is no
// answer: no token, a NaN among the logits, no finite maximum.
//
// logits [logits, vocab] f32; top_token, top_logprob [logits, max_top]. A row has the blocks of a
// cluster, which exchange what they find through shared memory. Weights exp(logit - max) are summed
// as exact integers. The list's last entry is found by histograms of the order-preserving (logit,
// id) keys (logits.cuh), the list is gathered and sorted. Bytes: 4 x vocab, and as much from the L1
// cache (or L2) for each of three or four more passes; nothing for rows that do not ask.
#include "atlas/logits.cuh"
#include "atlas/pdl.cuh"

using atlas::Word;

ATLAS_KERNEL(const types::logits* all_logits, const types::n_top* n_tops,
             const types::target* targets, const types::token* tokens, types::logprob* logprobs,
             types::rank* ranks, types::top_token* top_tokens, types::top_logprob* top_logprobs,
             const int* n_logits) {
  static_assert(constants::max_top <= atlas::kGroups && constants::max_top <= launch::block,
                "the list is sorted by one thread an entry, its end searched above the floor");
  __shared__ atlas::Scratch scratch;
  __shared__ Word list[constants::max_top];
  __shared__ int listed;
  atlas::launch_dependents();
  const int index = blockIdx.y;
  const int n_top =
      index < *n_logits ? min(static_cast<int>(n_tops[index]), constants::max_top) : -1;
  if (n_top >= 0) {
    atlas::clear_bins(scratch);
    if (threadIdx.x == 0) listed = 0;
  }
  atlas::group_arrive();
  atlas::wait_for_inputs();
  if (n_top < 0) return;
  const float* logits = all_logits + static_cast<size_t>(index) * constants::vocab;
  const atlas::Largest largest = atlas::find_largest(logits, scratch);
  const float nan = __uint_as_float(0x7FC00000u);
  const bool writes = atlas::part() == 0;
  top_tokens += static_cast<size_t>(index) * constants::max_top;
  top_logprobs += static_cast<size_t>(index) * constants::max_top;

  if (!largest.valid()) {
    if (!writes) return;
    if (threadIdx.x == 0) logprobs[index] = nan, ranks[index] = 0;
    if (threadIdx.x < n_top) top_tokens[threadIdx.x] = -1, top_logprobs[threadIdx.x] = nan;
    return;
  }
  const int token = targets[index] >= 0 ? targets[index] : tokens[index];
  const bool answered = token >= 0 && token < constants::vocab;
  const float own_logit = answered ? logits[token] : 0.0f;
  const Word own = answered ? atlas::ranked(own_logit, token) : ~Word{0};
  const float top = atlas::from_ordered_key(largest.key());
  Word weights = 0, above = 0;
  atlas::for_each_logit<2>(logits, [&](float logit, int id) {
    weights += atlas::fixed(expf(logit - top));
    above += atlas::ranked(logit, id) > own;
  });
  weights = atlas::group_sum<1>(weights, scratch);
  above = atlas::group_sum<2>(above, scratch);
  const double log_sum = log(static_cast<double>(weights) * 0x1p-44);
  const auto logprob_of = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - static_cast<double>(top) - log_sum);
  };
  if (writes && threadIdx.x == 0) {
    logprobs[index] = answered ? logprob_of(own_logit) : nan;
    ranks[index] = answered ? static_cast<int>(above) + 1 : 0;
  }
  if (n_top == 0) return;

  const int entries = min(n_top, constants::vocab);
  const Word last = atlas::highest_key<true>(
      logits, static_cast<Word>(largest.floor) << 32, largest.best, 0, static_cast<Word>(entries),
      [](float logit, int id) { return atlas::ranked(logit, id); }, [](float) { return Word{1}; },
      scratch);
  atlas::for_each_logit<4>(logits, [&](float logit, int id) {
    const Word key = atlas::ranked(logit, id);
    if (key >= last) *atlas::in_part(&list[atomicAdd(atlas::in_part(&listed, 0), 1)], 0) = key;
  });
  atlas::group_barrier();
  if (!writes || threadIdx.x >= n_top) return;
  if (threadIdx.x >= entries) {
    top_tokens[threadIdx.x] = -1, top_logprobs[threadIdx.x] = nan;
    return;
  }
  const Word key = list[threadIdx.x];
  int place = 0;
  for (int i = 0; i < entries; ++i) place += list[i] > key;
  top_tokens[place] = atlas::id_of(key);
  top_logprobs[place] = logprob_of(atlas::from_ordered_key(atlas::key_of(key)));
}
