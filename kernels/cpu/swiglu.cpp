// swiglu: out = gate / (1 + exp(-gate)) * up, in fp32, rounded once.
//
// Layout: a row of gate_up is [gate | up], each `intermediate` long.
// Shapes: any intermediate; the last vector may be partial.
// Work split: (row, 16 columns); a single row is shared by all workers.
// Bytes: rows * intermediate * (2 * size of gate_up + size of out).
// Bound: compute (about 25 vector operations per 16 outputs) from L2, memory for many rows.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

template <class GateUp, class Out>
void swiglu(const CpuLaunch& launch) {
  const auto* gate_up = launch.operand<const GateUp>(0);
  auto* out = launch.operand<Out>(1);
  const int64_t n = launch.integer(0);

  partition_2d(launch, launch.dims[0], n, kLanes, [&](int64_t row, int64_t begin, int64_t end) {
    const GateUp* gate = gate_up + row * 2 * n + begin;
    const GateUp* up = gate + n;
    Out* to = out + row * n + begin;
    for_lanes(end - begin, [&](int64_t i, auto count) {
      const F32x16 g = load(gate + i, count);
      store(to + i, g / (splat(1.0f) + exp(zero() - g)) * load(up + i, count), count);
    });
  });
}

ATLAS_CPU_KERNEL("swiglu.gate_up_f32.out_f32", swiglu<float, float>);
ATLAS_CPU_KERNEL("swiglu.gate_up_f32.out_bf16", swiglu<float, Bf16>);

}  // namespace
}  // namespace atlas
