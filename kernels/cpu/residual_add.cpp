// residual_add: residual += scale * x, in fp32.
//
// Layout: both [rows, hidden], contiguous, so the arrays are one vector.
// Shapes: any hidden; the last vector may be partial.
// Work split: 16 elements.
// Bytes: rows * hidden * (size of x + 8). Bound: memory.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

template <class X>
void residual_add(const CpuLaunch& launch) {
  const Range part = partition(launch, launch.dims[0] * launch.integer(0), kLanes);
  const auto* x = launch.operand<const X>(0) + part.begin;
  auto* residual = launch.operand<float>(1) + part.begin;
  const F32x16 scale = splat(static_cast<float>(launch.real(1)));
  for_lanes(part.end - part.begin, [&](int64_t i, auto count) {
    store(residual + i, load(residual + i, count) + scale * load(x + i, count), count);
  });
}

ATLAS_CPU_KERNEL("residual_add.x_f32", residual_add<float>);

}  // namespace
}  // namespace atlas
