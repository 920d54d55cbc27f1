// sample: one token per row of logits (of `adjusted` where the row's adjust is not 0): the first
// argmax at temperature 0, else the inverse CDF of softmax(logits / temperature), cut by top_k,
// top_p and min_p, in id order. A row with a NaN, or without a finite largest logit, gives -1. The
// token is remembered in the row's slot, and counted there if penalties apply.
//
// Layout: logits and adjusted [logits, vocab] fp32; token_count [slots, vocab].
// Shapes: any vocab. Scratch: a weight and an id per token.
// Order: weights fp32; sums fp64, in blocks of 256 candidates, so that ids map to one interval
// each. Thresholds: first a bound that no kept token can be below, which leaves few candidates: for
//   top_k the k-th largest of the blocks' maxima, for top_p the weight below which all tokens
//   together are less than what top_p may drop. Then exactly, by radix selection over the bits of
//   the candidates' values, 11 + 11 + 10, with fp64 sums per bin. Linear in the vocabulary always.
// Work split: rows.
// Bytes: logits * vocab * 4, two to four times, from L2 after the first.
// Bound: greedy: memory; else exp, about 1 ns a token, unless top_k leaves few.
#include "atlas/logits.h"
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

constexpr int32_t kInvalidToken = -1;
constexpr int32_t kPenalties = 2;  // bit of `adjust`, see adjust_logits.cpp

// First word of Philox-4x32-10 (Salmon et al., SC'11) for counter (counter, 0, 0, 0).
uint32_t philox(uint32_t counter, uint64_t key) {
  uint32_t c[4] = {counter, 0, 0, 0};
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(b);
    c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c[0];
}

// A number in (0, 1), the same for a request's seed and position wherever it runs.
double uniform(uint64_t seed, int32_t position) {
  return ((philox(static_cast<uint32_t>(position), seed) >> 8) + 0.5) * 0x1p-24;
}

// Id of the first logit equal to `value`, which occurs.
int32_t first_equal(const float* logits, int64_t vocab, float value) {
  int64_t v = 0;
  while (v + kLanes <= vocab && !any(load(logits + v) == splat(value))) v += kLanes;
  while (logits[v] != value) ++v;
  return static_cast<int32_t>(v);
}

// Order of floats as order of unsigned integers.
ATLAS_INLINE uint32_t key_of(float value) {
  const auto bits = bit_cast<uint32_t>(value == 0.0f ? 0.0f : value);  // -0 counts as 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
ATLAS_INLINE float value_of(uint32_t key) {
  return bit_cast<float>(key >> 31 ? key & 0x7fffffffu : ~key);
}

// The value at which the sum of amounts, taken from the largest value down, reaches `target`; the
// least value if it never does. amount(value) > 0.
template <class Amount>
float reach(double target, const float* values, int64_t count, Amount amount) {
  constexpr int kBits[] = {11, 11, 10};
  double bins[1 << 11];
  double above = 0.0;  // amounts of values known to be larger
  uint32_t prefix = 0;
  int known = 0;
  for (const int bits : kBits) {
    const int shift = 32 - known - bits;
    const uint32_t mask = (1u << bits) - 1;
    for (double& bin : bins) bin = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t key = key_of(values[i]);
      if (known == 0 || key >> (shift + bits) == prefix) {
        bins[key >> shift & mask] += amount(values[i]);
      }
    }
    uint32_t chosen = 0;
    double in_chosen = 0.0;
    for (uint32_t bin = mask + 1; bin-- > 0;) {
      if (bins[bin] == 0.0) continue;
      above += in_chosen;
      chosen = bin;
      in_chosen = bins[bin];
      if (above + in_chosen >= target) break;
    }
    prefix = prefix << bits | chosen;
    known += bits;
  }
  return value_of(prefix);
}

// Tokens that may be chosen, in id order. `value` holds logits, then weights: unnormalised
// probabilities, 1 for the largest.
struct Candidates {
  float* value;
  int32_t* id;
  int64_t count;

  // Leaves out those whose value is below `least`.
  void keep(float least) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      value[kept] = value[i];
      id[kept] = id[i];
      kept += !(value[i] < least);
    }
    count = kept;
  }

  // Takes those of `from` [n], which may be `value` itself, that are not below `least`.
  void take(const float* from, int64_t n, float least) {
    count = 0;
    const F32x16 bound = splat(least);
    for_lanes(n, [&](int64_t i, auto lanes) {
      const F32x16 x = load(from + i, lanes);
      if (!any((x > bound) | (x == bound))) return;
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const float each = from[i + lane];
        value[count] = each;
        id[count] = static_cast<int32_t>(i + lane);
        count += !(each < least);
      }
    });
  }
};

constexpr int64_t kBlock = 256;

double block_sum(const float* weights, int64_t count) {
  constexpr int kSums = 8;
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int j = 0; j < kSums; ++j) sums[j] += static_cast<double>(weights[i + j]);
  }
  for (; i < count; ++i) sums[0] += static_cast<double>(weights[i]);
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

// The sum of all weights, block by block as `draw` walks them.
double total_of(const float* weights, int64_t count) {
  double total = 0.0;
  for (int64_t i = 0; i < count; i += kBlock) {
    total += block_sum(weights + i, min64(kBlock, count - i));
  }
  return total;
}

// Index of the first weight at which the running sum exceeds u x the total.
int64_t draw(const float* weights, int64_t count, double u) {
  const double target = u * total_of(weights, count);
  double before = 0.0;
  int64_t last_positive = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = min64(begin + kBlock, count);
    const double sum = block_sum(weights + begin, end - begin);
    if (before + sum > target) {
      double walked = before;
      for (int64_t i = begin; i < end; ++i) {
        walked += static_cast<double>(weights[i]);
        if (weights[i] > 0.0f) last_positive = i;
        if (walked > target) return last_positive;
      }
      return last_positive;  // another order of additions came out an ulp lower
    }
    before += sum;
  }
  while (count > 1 && weights[count - 1] == 0.0f) --count;
  return count - 1;
}

// A bound that at least k logits reach: the k-th largest maximum of blocks of 64. `maxima`
// [ceil(vocab / 64)] is scratch.
float bound_of_top(const float* logits, int64_t vocab, int64_t k, float* maxima) {
  constexpr int64_t kGroup = 64;
  const int64_t groups = ceil_div(vocab, kGroup);
  if (k > groups) return -__builtin_inff();
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = group * kGroup;
    F32x16 top = splat(-__builtin_inff());
    for_lanes(min64(kGroup, vocab - begin), [&](int64_t i, auto count) {
      top = max(select(first_lanes(count), load(logits + begin + i, count), top), top);
    });
    maxima[group] = largest(top);
  }
  return reach(static_cast<double>(k), maxima, groups, [](float) { return 1.0; });
}

// How one row is sampled.
struct Choice {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
  double u;
};

int32_t choose(const float* logits, int64_t vocab, const Choice& how, float* values, int32_t* ids) {
  const float top = largest_or_nan(logits, vocab);
  if (!(top - top == 0.0f)) return kInvalidToken;  // NaN or infinite
  if (how.temperature <= 0.0f) return first_equal(logits, vocab, top);

  Candidates kept = {values, ids, vocab};
  const bool few = how.top_k > 0 && how.top_k < vocab;
  if (few) {
    kept.take(logits, vocab, bound_of_top(logits, vocab, how.top_k, values));
    const auto k = static_cast<double>(how.top_k);
    kept.keep(reach(k, values, kept.count, [](float) { return 1.0; }));
  }
  // Subtracting before dividing keeps the largest weight at 1 at any temperature above 0: the
  // smallest still gives the argmax.
  const float* from = few ? values : logits;
  for_lanes(kept.count, [&](int64_t i, auto count) {
    const F32x16 x = load(from + i, count) - splat(top);
    store(values + i, exp(x / splat(how.temperature)), count);
  });
  bool listed = few;  // ids[i] is the id of values[i]; else i is
  const auto keep = [&](float least) {
    if (listed) {
      kept.keep(least);
    } else {
      kept.take(values, kept.count, least);
      listed = true;
    }
  };
  if (how.top_p < 1.0f) {
    const double total = total_of(values, kept.count), p = static_cast<double>(how.top_p);
    // Tokens of less weight than this are together less than what may be dropped. Half of it, so
    // that no rounding matters; never 0, since a token of no weight has no part in the sums.
    const double droppable = (1.0 - p) * total / static_cast<double>(kept.count);
    const auto least = static_cast<float>(0.5 * droppable);
    keep(least > 0.0f ? least : __FLT_DENORM_MIN__);
    kept.keep(reach(p * total, values, kept.count,
                    [](float weight) { return static_cast<double>(weight); }));
  }
  if (how.min_p > 0.0f) keep(how.min_p);
  const int64_t drawn = draw(values, kept.count, how.u);
  return listed ? ids[drawn] : static_cast<int32_t>(drawn);
}

size_t sample_scratch(const CpuLaunch& launch) {
  return static_cast<size_t>(launch.integer(0)) * (sizeof(float) + sizeof(int32_t));
}

void sample(const CpuLaunch& launch) {
  const auto* logits = launch.operand<const float>(0);
  const auto* adjusted = launch.operand<const float>(1);
  const auto* adjust = launch.operand<const int32_t>(2);
  const auto* temperature = launch.operand<const float>(3);
  const auto* top_k = launch.operand<const int32_t>(4);
  const auto* top_p = launch.operand<const float>(5);
  const auto* min_p = launch.operand<const float>(6);
  const auto* seed = launch.operand<const uint64_t>(7);
  const auto* position = launch.operand<const int32_t>(8);
  const auto* slot = launch.operand<const int32_t>(9);
  auto* token = launch.operand<int32_t>(10);
  auto* last_token = launch.operand<int32_t>(11);
  auto* token_count = launch.operand<int32_t>(12);
  const int64_t vocab = launch.integer(0);
  auto* values = reinterpret_cast<float*>(launch.scratch);
  auto* ids = reinterpret_cast<int32_t*>(values + vocab);

  const Range part = partition(launch, launch.dims[0]);
  for (int64_t i = part.begin; i < part.end; ++i) {
    const Choice how = {temperature[i], top_k[i], top_p[i], min_p[i],
                        uniform(seed[i], position[i])};
    token[i] = choose((adjust[i] != 0 ? adjusted : logits) + i * vocab, vocab, how, values, ids);
    if (slot[i] < 0) continue;
    last_token[slot[i]] = token[i];
    if ((adjust[i] & kPenalties) != 0 && token[i] >= 0) ++token_count[slot[i] * vocab + token[i]];
  }
}

ATLAS_CPU_KERNEL("sample", sample, sample_scratch);

}  // namespace
}  // namespace atlas
