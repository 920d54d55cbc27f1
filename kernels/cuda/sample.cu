/* atlas
[launch]
grid = ["logits", 1, 1]
block = "THREADS"
[knobs]
THREADS = 512
[knobs.choices]
THREADS = [256, 512, 1024]
*/
// sample: one token per row of logits, or of `adjusted` where adjust is not 0; -1 for a row with a
// NaN or without a finite maximum.
//
// logits, adjusted [logits, vocab] f32; one block a row. Temperature <= 0: the first of the largest
// logits. Else weights exp((logit - max) / temperature), top-k, then top-p over what is left, then
// min-p (ties at a threshold are kept), and the inverse CDF in id order at a Philox number that
// depends on (seed, position) alone. The token goes to its slot's last_token, and where penalties
// apply token_count [slots, vocab] counts it. Thresholds are found without sorting: the logits'
// order-preserving integer keys are searched two bits at a time for the largest key whose upper
// side holds enough. Sums are fp64 in a fixed order. Bytes: 4 x vocab per pass over the row: one
// pass when greedy, else 16 more for each of top-k and top-p and two to draw; bound by one
// multiprocessor's cache bandwidth.
#include "atlas/instance.h"
#include "atlas/ordered_key.cuh"
#include "atlas/philox.cuh"
#include "atlas/reduce.cuh"

namespace {

using constants::vocab;
constexpr int kPenalties = 2;  // bit of `adjust`, see adjust_logits.cu
constexpr int kThreads = launch::block, kWarp = atlas::kWarp, kWarps = kThreads / kWarp;

struct Scratch {
  double doubles[kWarps];
  unsigned long long words[kWarps];
  int token;
};

// The largest key T such that the measures of the row's keys >= T sum to `target` or more; 0 if
// there is none. `measure` maps a key to a double >= 0. All threads call it and all get the result.
template <class Measure>
__device__ unsigned highest_key(const float* logits, double target, Measure measure,
                                Scratch& scratch) {
  unsigned prefix = 0;  // the upper bits of T found so far
  double above = 0.0;   // the measure of all keys above every key of this prefix
  for (int shift = 30; shift >= 0; shift -= 2) {
    // at_least[d - 1]: measure of the keys under this prefix whose next two bits are d or more.
    double at_least[3] = {};
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const unsigned key = atlas::ordered_key(logits[i]);
      // Shifting by 32 is undefined, so the first pass, whose prefix is empty, takes everything.
      if (shift < 30 && key >> (shift + 2) != prefix) continue;
      const unsigned digit = key >> shift & 3u;
      if (digit == 0) continue;
      const double amount = measure(key);
      at_least[0] += amount;
      if (digit >= 2) at_least[1] += amount;
      if (digit == 3) at_least[2] += amount;
    }
    unsigned digit = 0;
    double skipped = 0.0;
#pragma unroll
    for (int d = 3; d > 0; --d) {
      const double sum =
          atlas::block_reduce<kThreads>(at_least[d - 1], atlas::Sum(), scratch.doubles);
      if (digit == 0) {
        if (above + sum >= target) {
          digit = d;
        } else {
          skipped = sum;
        }
      }
    }
    above += skipped;
    prefix = prefix << 2 | digit;
  }
  return prefix;
}

// Inclusive sum over a warp's lanes, always by the same tree.
__device__ inline double warp_scan(double value) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const double before = __shfl_up_sync(atlas::kAllLanes, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

// The first id whose cumulative weight exceeds u x the total. `weight` maps a logit to a double >=
// 0; `otherwise` is returned if all weights are zero. Each warp walks its own stretch of ids.
template <class Weight>
__device__ int inverse_cdf(const float* logits, double u, Weight weight, int otherwise,
                           Scratch& scratch) {
  constexpr int kStretch = (vocab + kWarps * kWarp - 1) / (kWarps * kWarp) * kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int begin = warp * kStretch;
  const auto weight_at = [&](int id) { return id < vocab ? weight(logits[id]) : 0.0; };

  double stretch_total = 0.0;
  for (int first = begin; first < begin + kStretch; first += kWarp) {
    const double scan = warp_scan(weight_at(first + lane));
    stretch_total += __shfl_sync(atlas::kAllLanes, scan, kWarp - 1);
  }
  if (lane == 0) scratch.doubles[warp] = stretch_total;
  if (threadIdx.x == 0) scratch.token = otherwise;
  __syncthreads();
  double total = 0.0;
  for (int w = 0; w < kWarps; ++w) total += scratch.doubles[w];
  const double target = u * total;
  int chosen = -1;  // the first stretch that ends above the target
  double before = 0.0;
  for (int w = 0; w < kWarps && chosen < 0; ++w) {
    if (before + scratch.doubles[w] > target) {
      chosen = w;
    } else {
      before += scratch.doubles[w];
    }
  }
  if (warp == chosen) {
    // The same sums as above, so the walk ends where the stretch's total said it would. A weight of
    // zero is never taken, even where the tree's rounding lets a sum grow by an ulp on it; should
    // that have skipped the crossing, the last positive weight is the one.
    double walked = 0.0;
    int found = -1, last_positive = -1;
    for (int first = begin; first < begin + kStretch && found < 0; first += kWarp) {
      const double mine = weight_at(first + lane);
      const double scan = warp_scan(mine);
      const unsigned positive = __ballot_sync(atlas::kAllLanes, mine > 0.0);
      const unsigned reached =
          __ballot_sync(atlas::kAllLanes, mine > 0.0 && before + (walked + scan) > target);
      if (reached != 0) found = first + __ffs(static_cast<int>(reached)) - 1;
      if (positive != 0) last_positive = first + kWarp - 1 - __clz(static_cast<int>(positive));
      walked += __shfl_sync(atlas::kAllLanes, scan, kWarp - 1);
    }
    if (found < 0) found = last_positive;
    if (lane == 0 && found >= 0) scratch.token = found;
  }
  __syncthreads();
  return scratch.token;
}

}  // namespace

ATLAS_KERNEL(const types::logits* __restrict__ all_logits,
             const types::adjusted* __restrict__ adjusted,
             const types::adjust* __restrict__ adjusts,
             const types::temperature* __restrict__ temperatures,
             const types::top_k* __restrict__ top_ks, const types::top_p* __restrict__ top_ps,
             const types::min_p* __restrict__ min_ps, const types::seed* __restrict__ seeds,
             const types::position* __restrict__ positions, const types::slot* __restrict__ slots,
             types::token* __restrict__ tokens, types::last_token* __restrict__ last_token,
             types::token_count* __restrict__ token_count, const int* n_logits,
             const int* /*n_slots*/) {
  __shared__ Scratch scratch;
  const int row = blockIdx.x;
  if (row >= *n_logits) return;
  const int adjust = adjusts[row];
  const float* logits = (adjust != 0 ? adjusted : all_logits) + static_cast<size_t>(row) * vocab;

  // The largest key, and the lowest id among equals, as one 64-bit maximum.
  unsigned long long best = 0;
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    const unsigned long long key = atlas::ordered_key(logits[i]);
    const unsigned long long candidate = key << 32 | (0xFFFFFFFFu - static_cast<unsigned>(i));
    best = candidate > best ? candidate : best;
  }
  best = atlas::block_reduce<kThreads>(best, atlas::Max(), scratch.words);
  const unsigned best_key = static_cast<unsigned>(best >> 32);
  const int best_token = static_cast<int>(0xFFFFFFFFu - static_cast<unsigned>(best));

  int token = best_token;
  const float temperature = temperatures[row];
  if (best_key <= atlas::kKeyMinusInfinity || best_key >= atlas::kKeyPlusInfinity) {
    token = -1;  // a NaN's key is above +infinity's
  } else if (temperature > 0.0f) {
    const float highest = atlas::from_ordered_key(best_key);
    // Subtracting first keeps the largest weight at 1 at any temperature above 0.
    const auto weight_of = [&](float logit) { return expf((logit - highest) / temperature); };
    const int top_k = top_ks[row];
    const double top_p = top_ps[row];
    unsigned lowest_key = 0;
    if (top_k > 0 && top_k < vocab) {
      lowest_key = highest_key(logits, top_k, [](unsigned) { return 1.0; }, scratch);
    }
    float lowest_weight = 0.0f;
    if (top_p < 1.0) {
      const auto kept_by_k = [&](unsigned key) -> double {
        return key >= lowest_key ? weight_of(atlas::from_ordered_key(key)) : 0.0f;
      };
      double kept = 0.0;
      for (int i = threadIdx.x; i < vocab; i += kThreads) {
        kept += kept_by_k(atlas::ordered_key(logits[i]));
      }
      kept = atlas::block_reduce<kThreads>(kept, atlas::Sum(), scratch.doubles);
      unsigned key = highest_key(logits, top_p * kept, kept_by_k, scratch);
      if (key > best_key) key = best_key;  // top_p <= 0: any key will do, but the best one stays
      // Distinct logits may share a weight: the threshold is the weight. A key below every number's
      // means that rounding kept the sum from the target: everything stays.
      if (key > atlas::kKeyMinusInfinity) lowest_weight = weight_of(atlas::from_ordered_key(key));
    }
    lowest_weight = fmaxf(lowest_weight, min_ps[row]);  // the largest weight is 1
    const auto kept_weight = [&](float logit) -> double {
      const float weight = weight_of(logit);
      return atlas::ordered_key(logit) >= lowest_key && weight >= lowest_weight ? weight : 0.0f;
    };
    token = inverse_cdf(logits, atlas::uniform(seeds[row], positions[row]), kept_weight, best_token,
                        scratch);
  }
  if (threadIdx.x == 0) {
    tokens[row] = token;
    const int slot = slots[row];
    if (slot >= 0) {
      last_token[slot] = token;
      if ((adjust & kPenalties) != 0 && token >= 0) {
        ++token_count[static_cast<size_t>(slot) * vocab + token];
      }
    }
  }
}
