// gather_rows: out[i] = x[index[i]], the rows whose logits are wanted.
//
// Layout: rows of `hidden` fp32, contiguous.
// Work split: rows of the output. Bytes: 2 * logits * hidden * 4. Bound: memory.
#include "atlas/partition.h"

namespace atlas {
namespace {

void gather_rows(const CpuLaunch& launch) {
  const auto* x = launch.operand<const float>(0);
  const auto* index = launch.operand<const int32_t>(1);
  auto* out = launch.operand<float>(2);
  const int64_t hidden = launch.integer(0);

  const Range part = partition(launch, launch.dims[1]);
  for (int64_t i = part.begin; i < part.end; ++i) {
    __builtin_memcpy(out + i * hidden, x + index[i] * hidden, hidden * sizeof(float));
  }
}

ATLAS_CPU_KERNEL("gather_rows", gather_rows);

}  // namespace
}  // namespace atlas
