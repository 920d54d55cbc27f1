// sample: one token per row of logits: the first argmax at temperature 0, else the inverse CDF of
// softmax(logits / temperature), cut by top_k and top_p, in id order. A row with a NaN, or without
// a finite largest logit, gives -1. The token is also remembered in the row's slot.
//
// Layout: logits [logits, vocab] fp32.
// Shapes: any vocab; no scratch: weights are computed anew in every pass.
// Order: weights fp32, all sums fp64 in id order, so that ids map to one interval each.
// Thresholds: the k-th largest logit and the top-p weight are found by radix selection over the
//   bits of the values, 11 + 11 + 10, with fp64 sums per bin: exact, and linear in the vocabulary.
// Work split: rows.
// Bytes: logits * vocab * 4, at most 10 times, from L2 after the first.
// Bound: greedy: memory; else the chain of fp64 additions, 3 cycles a token and pass.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

constexpr int32_t kInvalidToken = -1;

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

// The largest logit, or NaN if any is NaN.
float largest_or_nan(const float* logits, int64_t vocab) {
  F32x16 top = splat(-__builtin_inff());
  Mask16 nan = top != top;
  for_lanes(vocab, [&](int64_t v, auto count) {
    F32x16 x = load(logits + v, count);
    x = select(first_lanes(count), x, splat(-__builtin_inff()));
    nan = nan | (x != x);
    top = max(x, top);
  });
  return any(nan) ? __builtin_nanf("") : largest(top);
}

// Id of the first logit equal to `value`, which occurs.
int32_t first_equal(const float* logits, float value) {
  int32_t v = 0;
  while (logits[v] != value) ++v;
  return v;
}

// The distribution of one row. Weights are unnormalised, 1 for the largest logit. Subtracting
// before dividing keeps them so at any temperature above 0: the smallest still gives the argmax.
struct Distribution {
  const float* logits;
  int64_t vocab;
  float temperature;
  float largest;
  float least_logit;   // tokens below are left out (top_k)
  float least_weight;  // tokens of less weight are left out (top_p)

  // Calls body(v, weight) for every token in id order until it returns false.
  template <class Body>
  ATLAS_INLINE void each(Body body) const {
    bool more = true;
    for (int64_t v = 0; v < vocab && more; v += kLanes) {
      const int64_t count = min64(kLanes, vocab - v);
      const F32x16 x = count == kLanes ? load(logits + v) : load(logits + v, count);
      F32x16 w = exp((x - splat(largest)) / splat(temperature));
      w = select(x < splat(least_logit), zero(), w);
      w = select(w < splat(least_weight), zero(), w);
      float lanes[kLanes];
      store(lanes, w);
      for (int64_t i = 0; i < count && more; ++i) more = body(v + i, lanes[i]);
    }
  }
};

// Order of floats as order of unsigned integers.
ATLAS_INLINE uint32_t key_of(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
ATLAS_INLINE float value_of(uint32_t key) {
  return bit_cast<float>(key >> 31 ? key & 0x7fffffffu : ~key);
}

// The value at which the sum of amounts, taken from the largest value down, reaches `target`; the
// least value if it never does. each(body) calls body(value, amount) for all; amounts are > 0.
template <class Each>
float reach(double target, Each each) {
  constexpr int kBits[] = {11, 11, 10};
  double bins[1 << 11];
  double above = 0.0;  // amounts of values known to be larger
  uint32_t prefix = 0;
  int known = 0;
  for (const int bits : kBits) {
    const int shift = 32 - known - bits;
    const uint32_t mask = (1u << bits) - 1;
    for (double& bin : bins) bin = 0.0;
    each([&](float value, double amount) {
      const uint32_t key = key_of(value);
      if (known == 0 || key >> (shift + bits) == prefix) bins[key >> shift & mask] += amount;
    });
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

int32_t draw(const Distribution& distribution, double u) {
  double total = 0.0;
  distribution.each([&](int64_t, float weight) {
    total += static_cast<double>(weight);
    return true;
  });
  const double target = u * total;
  double sum = 0.0;
  auto token = kInvalidToken;
  distribution.each([&](int64_t v, float weight) {
    sum += static_cast<double>(weight);
    token = static_cast<int32_t>(v);
    return !(sum > target);
  });
  return token;
}

int32_t choose(const float* logits, int64_t vocab, float temperature, int64_t top_k, float top_p,
               double u) {
  const float top = largest_or_nan(logits, vocab);
  if (!(top - top == 0.0f)) return kInvalidToken;  // NaN or infinite
  if (temperature <= 0.0f) return first_equal(logits, top);

  Distribution distribution = {logits, vocab, temperature, top, -__builtin_inff(), 0.0f};
  if (top_k > 0 && top_k < vocab) {
    distribution.least_logit = reach(static_cast<double>(top_k), [&](auto body) {
      for (int64_t v = 0; v < vocab; ++v) body(logits[v], 1.0);
    });
  }
  if (top_p < 1.0f) {
    double total = 0.0;
    distribution.each([&](int64_t, float weight) {
      total += static_cast<double>(weight);
      return true;
    });
    distribution.least_weight = reach(static_cast<double>(top_p) * total, [&](auto body) {
      distribution.each([&](int64_t, float weight) {
        if (weight > 0.0f) body(weight, static_cast<double>(weight));
        return true;
      });
    });
  }
  return draw(distribution, u);
}

void sample(const CpuLaunch& launch) {
  const auto* logits = launch.operand<const float>(0);
  const auto* temperature = launch.operand<const float>(1);
  const auto* top_k = launch.operand<const int32_t>(2);
  const auto* top_p = launch.operand<const float>(3);
  const auto* seed = launch.operand<const uint64_t>(4);
  const auto* position = launch.operand<const int32_t>(5);
  const auto* slot = launch.operand<const int32_t>(6);
  auto* token = launch.operand<int32_t>(7);
  auto* last_token = launch.operand<int32_t>(8);
  const int64_t vocab = launch.integer(0);

  const Range part = partition(launch, launch.dims[0]);
  for (int64_t i = part.begin; i < part.end; ++i) {
    token[i] = choose(logits + i * vocab, vocab, temperature[i], top_k[i], top_p[i],
                      uniform(seed[i], position[i]));
    if (slot[i] >= 0) last_token[slot[i]] = token[i];
  }
}

ATLAS_CPU_KERNEL("sample", sample);

}  // namespace
}  // namespace atlas
