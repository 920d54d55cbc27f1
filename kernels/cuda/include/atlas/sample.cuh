// The kernel of ops sample and sample_largest: their files say what it computes.
#pragma once

#include "atlas/logits.cuh"
#include "atlas/pdl.cuh"
#include "atlas/philox.cuh"

namespace {

using atlas::Word;
constexpr int kPenalties = 2;  // bit of `adjust`, see adjust_logits.cu

// How a row is sampled. All members are the same in all threads of its blocks.
struct Row {
  const float* logits;
  float temperature, inverse, top_p, min_p, highest;
  int top_k;

  // Below the largest logit: subtracting first keeps the largest weight at 1 at any temperature.
  __device__ float below(float logit) const { return highest - logit; }

  // expf(-below / temperature), with the quotient rounded as a division rounds it (Markstein: one
  // correction by a reciprocal that is rounded right). An infinite one has weight 0.
  __device__ float weight(float below) const {
    float quotient = below * inverse;
    quotient = fmaf(fmaf(-quotient, temperature, below), inverse, quotient);
    return expf(-fminf(quotient, 200.0f));
  }
};

// Temperatures under this are taken as this: the division above must not overflow, and only logits
// closer than 1e-28 could tell.
constexpr float kLeastTemperature = 0x1p-100f;

// What top-k, top-p and min-p keep: logits whose key and weight are these or more.
struct Threshold {
  unsigned key;
  float weight;
};

// The smallest weight that top-p keeps of the logits whose key is `least` or more. It depends on
// the distance below the largest logit alone, so that is searched: in even steps first, which
// spread over the bins what keys would crowd into a few, then by the distance's bits.
__device__ inline float top_p_weight(const Row& row, unsigned least, atlas::Scratch& scratch) {
  constexpr int kLast = atlas::kBins - 1;
  // Weights under 2^-45, whose distance is 31.2 temperatures or more, count as 0.
  const float steps = atlas::kBins / (32.0f * row.temperature);
  const auto mass = [&](float logit) { return atlas::fixed(row.weight(row.below(logit))); };
  const auto step_of = [&](float logit) {
    return static_cast<int>(fminf(row.below(logit) * steps, static_cast<float>(kLast)));
  };
  atlas::for_each_logit<2>(row.logits, [&](float logit, int) {
    if (atlas::ordered_key(logit) < least) return;
    const int bin = kLast - step_of(logit);
    atlas::add_word(&scratch.low[bin], &scratch.high[bin], mass(logit));
  });
  atlas::Word target = 0;
  const atlas::Found found = atlas::find_bin(
      0,
      [&](atlas::Word total) {
        const double asked = ceil(static_cast<double>(row.top_p) * static_cast<double>(total));
        target = asked > 0.0 ? static_cast<atlas::Word>(asked) : 0;
        return target;
      },
      scratch);
  if (target <= atlas::kOne) return 1.0f;  // the largest alone has it
  // Distances of this step lie between the ends of its neighbours, whatever was rounded.
  const int step = kLast - found.bin;
  const unsigned high = ~__float_as_uint(static_cast<float>(max(step - 1, 0)) / steps);
  const unsigned low =
      ~(step < kLast ? __float_as_uint(static_cast<float>(step + 2) / steps) : 0x7F800000u);
  const unsigned key = atlas::highest_key<false>(
      row.logits, low, high, found.above, target,
      [&](float logit, int) {
        const bool in = step_of(logit) == step && atlas::ordered_key(logit) >= least;
        return in ? ~__float_as_uint(row.below(logit)) : 0u;
      },
      mass, scratch);
  return row.weight(__uint_as_float(~key));
}

__device__ inline Threshold find_threshold(const Row& row, const atlas::Largest& largest,
                                           atlas::Scratch& scratch) {
  Threshold kept{0, row.min_p};  // the largest weight is 1
  if (row.top_k > 0 && row.top_k < constants::vocab) {
    kept.key = atlas::highest_key<true>(
        row.logits, row.top_k <= atlas::kGroups ? largest.floor : 0, largest.key(), 0, row.top_k,
        [](float logit, int) { return atlas::ordered_key(logit); }, [](float) { return Word{1}; },
        scratch);
  }
  if (row.top_p < 1.0f) kept.weight = fmaxf(kept.weight, top_p_weight(row, kept.key, scratch));
  return kept;
}

// The first id whose cumulative weight exceeds u times the total, u = (2 word + 1) / 2^25. One
// thread of one part gets it, all others get -1.
__device__ inline int inverse_cdf(const Row& row, const Threshold& kept, unsigned word,
                                  atlas::Scratch& scratch) {
  const auto weight = [&](float logit) -> Word {
    if (atlas::ordered_key(logit) < kept.key) return 0;
    const float own = row.weight(row.below(logit));
    return own >= kept.weight ? atlas::fixed(own) : 0;
  };
  Word mine = 0;
  atlas::for_each_logit<2>(row.logits, [&](float logit, int) { mine += weight(logit); });
  atlas::sum_parts<1>(mine, scratch);
  Word total = 0, before = 0;
#pragma unroll
  for (int i = 0; i < atlas::kParts; ++i) {
    if (i < atlas::part()) before += scratch.part_sums[1][i];
    total += scratch.part_sums[1][i];
  }
  // A sum exceeds u x total exactly if it exceeds the integer part of it.
  const Word factor = 2 * static_cast<Word>(word) + 1;
  const Word target = (__umul64hi(total, factor) << 39) | (total * factor >> 25);
  if (before > target || before + scratch.part_sums[1][atlas::part()] <= target) return -1;
  int warp = 0;  // the one in whose stretch the target is; the whole block walks that
  for (; warp < atlas::kWarps - 1 && before + scratch.warp_words[warp] <= target; ++warp) {
    before += scratch.warp_words[warp];
  }
  const int begin = (atlas::part() * atlas::kWarps + warp) * atlas::kStretch;
  const int end = min(begin + atlas::kStretch, constants::vocab);
#pragma unroll 1
  for (int base = begin; base < end; base += atlas::kThreads * atlas::kVector) {
    const int id = base + static_cast<int>(threadIdx.x) * atlas::kVector;
    float values[atlas::kVector];
    Word weights[atlas::kVector] = {}, own = 0;
    if (id < end) {
      atlas::load_logits(row.logits, id, values);
#pragma unroll
      for (int i = 0; i < atlas::kVector; ++i) own += weights[i] = weight(values[i]);
    }
    const atlas::Scan scan = atlas::scan_block(own, scratch);
    if (before + scan.total > target) {
      Word sum = before + scan.upto;
      if (sum <= target || sum - own > target) return -1;
      int chosen = id + atlas::kVector - 1;
#pragma unroll
      for (int i = atlas::kVector - 1; i >= 0; --i) {
        if (sum > target) chosen = id + i;
        sum -= weights[i];
      }
      return chosen;
    }
    before += scan.total;
  }
  return -1;
}

#ifdef ATLAS_TYPE_LARGEST_F32
constexpr int kLargest = atlas::ceil_div(constants::vocab, 16);

// ranked() of a row's first largest logit, from the largest of every 16 and their ids. All threads
// of one part call it, the first gets it.
__device__ inline Word best_of(const float* largest, const int* ids, atlas::Scratch& scratch) {
  constexpr int kEach = atlas::ceil_div(kLargest, atlas::kThreads);
  constexpr int kBatch = kEach < 16 ? kEach : 16;
  Word best = 0;
#pragma unroll kBatch
  for (int i = 0; i < kEach; ++i) {
    const int at = i * atlas::kThreads + static_cast<int>(threadIdx.x);
    if (at < kLargest) best = max(best, atlas::ranked(largest[at], at));
  }
  best = atlas::warp_reduce(best, atlas::Max());
  if (atlas::lane() == 0) scratch.warp_words[atlas::warp()] = best;
  __syncthreads();
  if (threadIdx.x != 0) return 0;
#pragma unroll
  for (int i = 1; i < atlas::kWarps; ++i) best = max(best, scratch.warp_words[i]);
  return best & ~Word{0xFFFFFFFFu} | 0xFFFFFFFFu - static_cast<unsigned>(ids[atlas::id_of(best)]);
}
#endif

}  // namespace

ATLAS_KERNEL(const types::logits* all_logits,
#ifdef ATLAS_TYPE_LARGEST_F32
             const types::largest* all_largest, const types::largest_id* all_ids,
#endif
             const types::adjusted* adjusted, const types::adjust* adjusts,
             const types::temperature* temperatures, const types::top_k* top_ks,
             const types::top_p* top_ps, const types::min_p* min_ps, const types::seed* seeds,
             const types::position* positions, const types::slot* slots, types::token* tokens,
             types::last_token* last_token, types::token_count* token_count, const int* n_logits,
             const int* /*n_slots*/) {
  __shared__ atlas::Scratch scratch;
  atlas::launch_dependents();
  const int index = blockIdx.y;
  const bool mine = index < *n_logits;
  Row row{};
  int adjust = 0, slot = -1;
  if (mine) {
    adjust = adjusts[index];
    slot = slots[index];
    row.temperature = temperatures[index];
    if (row.temperature > 0.0f) {
      row.temperature = fmaxf(row.temperature, kLeastTemperature);
      row.inverse = 1.0f / row.temperature;
      row.top_k = top_ks[index];
      row.top_p = top_ps[index];
      row.min_p = min_ps[index];
      atlas::clear_bins(scratch);
    }
  }
  atlas::group_arrive();
  atlas::wait_for_inputs();
  if (!mine) return;
  row.logits =
      (adjust != 0 ? adjusted : all_logits) + static_cast<size_t>(index) * constants::vocab;
  const auto give = [&](int token) {
    tokens[index] = token;
    if (slot < 0) return;
    last_token[slot] = token;
    if ((adjust & kPenalties) != 0 && token >= 0) {
      ++token_count[static_cast<size_t>(slot) * constants::vocab + token];
    }
  };
#ifdef ATLAS_TYPE_LARGEST_F32
  if (adjust == 0 && !(row.temperature > 0.0f)) {
    if (atlas::part() != 0) return;
    const size_t first = static_cast<size_t>(index) * kLargest;
    const atlas::Largest largest{best_of(all_largest + first, all_ids + first, scratch), 0};
    if (threadIdx.x == 0) give(largest.valid() ? largest.id() : -1);
    return;
  }
#endif
  const atlas::Largest largest = atlas::find_largest(row.logits, scratch);

  int token = -1;
  bool chosen = atlas::part() == 0 && threadIdx.x == 0;
  if (largest.valid()) {
    if (row.temperature > 0.0f) {
      row.highest = atlas::from_ordered_key(largest.key());
      const Threshold kept = find_threshold(row, largest, scratch);
      token = inverse_cdf(row, kept, atlas::random_word(seeds[index], positions[index]), scratch);
      chosen = token >= 0;
    } else {
      token = largest.id();
    }
  }
  if (chosen) give(token);
}
