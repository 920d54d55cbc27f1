// logprobs: for each row with n_top >= 0, log-softmax at one token, the token's rank, and the n_top
// largest logits with their ids, equals in the order of ids. NaN and rank 0 where there is no
// answer: no token, a NaN among the logits, no finite maximum.
//
// Layout: logits [logits, vocab] fp32; top_token and top_logprob [logits, max_top].
// Shapes: any vocab; max_top up to kMaxTop.
// Order: exp in fp32, summed in fp64 lanes, 8 at a time, in id order; log in fp64.
// Work split: rows.
// Bytes: vocab * 4 three times per row that asks, from L2 after the first; nothing for others.
// Bound: exp, about 1 ns a token.
#include "atlas/logits.h"
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

constexpr int kMaxTop = 64;

struct Sums {
  float top;       // the largest logit, NaN if any is
  double log_sum;  // log of the sum of exp(logit - top)
};

Sums sums_of(const float* logits, int64_t vocab) {
  const float top = largest_or_nan(logits, vocab);
  if (!(top - top == 0.0f)) return {__builtin_nanf(""), 0.0};
  double lanes[8] = {};
  for_lanes(vocab, [&](int64_t v, auto count) {
    const F32x16 weight = exp(load(logits + v, count) - splat(top));
    float weights[kLanes];
    store(weights, select(first_lanes(count), weight, zero()));
    for (int half = 0; half < kLanes; half += 8) {
      for (int i = 0; i < 8; ++i) lanes[i] += static_cast<double>(weights[half + i]);
    }
  });
  double total = 0.0;
  for (const double lane : lanes) total += lane;
  return {top, __builtin_log(total)};
}

// The n largest, in order; n <= vocab.
void largest_n(const float* logits, int64_t vocab, int64_t n, int32_t* ids) {
  float values[kMaxTop];
  int64_t found = 0;
  const auto insert = [&](int64_t v) {
    // After its equals: ids come in ascending order.
    int64_t at = found < n ? found++ : n - 1;
    for (; at > 0 && values[at - 1] < logits[v]; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = logits[v];
    ids[at] = static_cast<int32_t>(v);
  };
  if (n == 0) return;
  for (int64_t v = 0; v < n; ++v) insert(v);
  for_lanes(vocab - n, [&](int64_t i, auto count) {
    const float* from = logits + n + i;
    // Lanes past the end are zeros, which the test below may take for candidates; the loop is not.
    if (!any(load(from, count) > splat(values[n - 1]))) return;
    for (int64_t lane = 0; lane < count; ++lane) {
      if (from[lane] > values[n - 1]) insert(n + i + lane);
    }
  });
}

int32_t rank_of(const float* logits, int64_t vocab, int64_t token) {
  const float value = logits[token];
  int32_t above = 0;
  for (int64_t v = 0; v < token; ++v) above += logits[v] >= value;
  for (int64_t v = token + 1; v < vocab; ++v) above += logits[v] > value;
  return above + 1;
}

void logprobs(const CpuLaunch& launch) {
  const auto* all_logits = launch.operand<const float>(0);
  const auto* n_top = launch.operand<const int32_t>(1);
  const auto* target = launch.operand<const int32_t>(2);
  const auto* sampled = launch.operand<const int32_t>(3);
  auto* logprob = launch.operand<float>(4);
  auto* rank = launch.operand<int32_t>(5);
  auto* top_token = launch.operand<int32_t>(6);
  auto* top_logprob = launch.operand<float>(7);
  const int64_t vocab = launch.integer(0), max_top = launch.integer(1);

  const Range part = partition(launch, launch.dims[0]);
  for (int64_t i = part.begin; i < part.end; ++i) {
    if (n_top[i] < 0) continue;
    const float* logits = all_logits + i * vocab;
    const Sums sums = sums_of(logits, vocab);
    const bool valid = sums.top == sums.top;
    const auto logprob_of = [&](int64_t id) {
      return static_cast<float>(static_cast<double>(logits[id]) - static_cast<double>(sums.top) -
                                sums.log_sum);
    };
    const int64_t token = target[i] >= 0 ? target[i] : sampled[i];
    const bool answered = valid && token >= 0 && token < vocab;
    logprob[i] = answered ? logprob_of(token) : __builtin_nanf("");
    rank[i] = answered ? rank_of(logits, vocab, token) : 0;

    int32_t ids[kMaxTop];
    const int64_t wanted = min64(min64(n_top[i], max_top), kMaxTop);
    const int64_t count = valid ? min64(wanted, vocab) : 0;
    largest_n(logits, vocab, count, ids);
    for (int64_t j = 0; j < wanted; ++j) {
      top_token[i * max_top + j] = j < count ? ids[j] : -1;
      top_logprob[i * max_top + j] = j < count ? logprob_of(ids[j]) : __builtin_nanf("");
    }
  }
}

ATLAS_CPU_KERNEL("logprobs", logprobs);

}  // namespace
}  // namespace atlas
