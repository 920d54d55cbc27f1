// gated_activation: out = act(gate) * up, in fp32, rounded once; act is SiLU, GELU by tanh or exact
// GELU.
//
// Layout: a row of gate_up is [gate | up], each `intermediate` long.
// Shapes: any intermediate; the last vector may be partial.
// Work split: (row, 16 columns); a single row is shared by all workers.
// Bytes: rows * intermediate * (2 * size of gate_up + size of out).
// Bound: compute (25 to 40 vector operations per 16 outputs) from L2, memory for many rows.
#include "atlas/activation.h"
#include "atlas/partition.h"

namespace atlas {
namespace {

template <class GateUp, class Out>
void gated_activation(const CpuLaunch& launch) {
  const auto* gate_up = launch.operand<const GateUp>(0);
  auto* out = launch.operand<Out>(1);
  const int64_t n = launch.integer(0);

  with_activation(launch.integer(1), [&](auto activate) {
    partition_2d(launch, launch.dims[0], n, kLanes, [&](int64_t row, int64_t begin, int64_t end) {
      const GateUp* gate = gate_up + row * 2 * n + begin;
      const GateUp* up = gate + n;
      Out* to = out + row * n + begin;
      for_lanes(end - begin, [&](int64_t i, auto count) {
        store(to + i, activate(load(gate + i, count)) * load(up + i, count), count);
      });
    });
  });
}

ATLAS_CPU_KERNEL("gated_activation.gate_up_f32.out_f32", gated_activation<float, float>);
ATLAS_CPU_KERNEL("gated_activation.gate_up_f32.out_bf16", gated_activation<float, Bf16>);

}  // namespace
}  // namespace atlas
