// moe_route: the top_k experts of each row by its router logits, and their softmax weights; ties go
// to the lower index.
//
// Layout: logits [rows, n_experts] fp32; expert_id, expert_weight [rows, top_k], largest first.
// Shapes: any n_experts, top_k up to it.
// Order: a row's exponentials are summed in vectors of 16 from expert 0 on, then by halves.
// Work split: rows. Bytes: a row of logits, read top_k + 2 times, all but the first from L1.
// Bound: latency of a row's scans, about (top_k + 2) * n_experts steps.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

// The best expert after (value, index) in the order of falling logits and rising indices.
int64_t next_best(const float* logits, int64_t n, float value, int64_t index) {
  int64_t best = -1;
  for (int64_t e = 0; e < n; ++e) {
    if (logits[e] > value || (logits[e] == value && e <= index)) continue;
    if (best < 0 || logits[e] > logits[best]) best = e;
  }
  return best;
}

void moe_route(const CpuLaunch& launch) {
  const auto* logits = launch.operand<const float>(0);
  auto* expert_id = launch.operand<int32_t>(1);
  auto* expert_weight = launch.operand<float>(2);
  const int64_t n = launch.integer(0), top_k = launch.integer(1);
  const bool normalise = launch.integer(2) != 0;

  const Range part = partition(launch, launch.dims[0]);
  for (int64_t row = part.begin; row < part.end; ++row) {
    const float* from = logits + row * n;
    int32_t* ids = expert_id + row * top_k;
    float* weights = expert_weight + row * top_k;
    float largest = from[0];
    for (int64_t e = 1; e < n; ++e) largest = from[e] > largest ? from[e] : largest;
    F32x16 partial = zero();
    for_lanes(n, [&](int64_t i, auto count) {
      const F32x16 e = exp(load(from + i, count) - splat(largest));
      partial = partial + select(first_lanes(count), e, zero());
    });
    const float total = sum(partial);
    // A NaN or an infinite largest logit; with a finite one the sum is at least 1.
    const bool broken = !(total >= 0.5f);
    float value = __builtin_inff(), chosen = 0.0f;
    int64_t index = -1;
    for (int64_t j = 0; j < top_k; ++j) {
      index = broken ? j : next_best(from, n, value, index);
      value = broken ? __builtin_nanf("") : from[index];
      ids[j] = static_cast<int32_t>(index);
      weights[j] = exp(splat(value - largest)).part[0][0];
      chosen += weights[j];
    }
    const float divisor = normalise ? chosen : total;
    for (int64_t j = 0; j < top_k; ++j) weights[j] /= divisor;
  }
}

ATLAS_CPU_KERNEL("moe_route", moe_route);

}  // namespace
}  // namespace atlas
