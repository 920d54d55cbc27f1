// What several ops ask of one row of logits.
#pragma once

#include "atlas/simd.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

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

}  // namespace
}  // namespace atlas
