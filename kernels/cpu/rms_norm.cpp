// rms_norm: out = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once.
//
// Layout: rows of `hidden` elements, contiguous.
// Shapes: any hidden; the last vector may be partial.
// Work split: rows. One row is too little work to be worth dividing.
// Order: 4 vectors of partial sums, then by halves; it depends on `hidden` alone.
// Bytes: rows * hidden * (4 + size of out); the row is read twice, the second time from L1.
// Bound: memory for many rows, latency for one.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

ATLAS_INLINE float sum_of_squares(const float* x, int64_t n) {
  constexpr int kChains = 4;  // hides the latency of the additions
  F32x16 partial[kChains] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) {
      const F32x16 v = load(x + i + c * kLanes);
      partial[c] = partial[c] + v * v;
    }
  }
  for (; i < n; i += kLanes) {
    const F32x16 v = i + kLanes <= n ? load(x + i) : load(x + i, n - i);
    partial[0] = partial[0] + v * v;
  }
  return sum((partial[0] + partial[1]) + (partial[2] + partial[3]));
}

template <class Out>
void rms_norm(const CpuLaunch& launch) {
  const auto* x = launch.operand<const float>(0);
  const auto* weight = launch.operand<const float>(1);
  auto* out = launch.operand<Out>(2);
  const int64_t hidden = launch.integer(0);
  const auto eps = static_cast<float>(launch.real(1));

  const Range part = partition(launch, launch.dims[0]);
  for (int64_t row = part.begin; row < part.end; ++row) {
    const float* from = x + row * hidden;
    const float mean = sum_of_squares(from, hidden) / static_cast<float>(hidden);
    const F32x16 scale = splat(1.0f / __builtin_sqrtf(mean + eps));
    for_lanes(hidden, [&](int64_t i, auto count) {
      const F32x16 y = load(from + i, count) * scale * load(weight + i, count);
      store(out + row * hidden + i, y, count);
    });
  }
}

ATLAS_CPU_KERNEL("rms_norm.out_f32", rms_norm<float>);
ATLAS_CPU_KERNEL("rms_norm.out_bf16", rms_norm<Bf16>);

}  // namespace
}  // namespace atlas
