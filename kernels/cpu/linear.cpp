/* atlas
[layouts]
weight = "panel16"
[levels]
also = ["avx512vnni"]
*/
// linear: out[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n], accumulated in fp32, rounded
// once.
//
// Layout: the weight is stored in panels of 16 output columns, zero padded ("panel16"): f32 as
//   [ceil(n / 16)][k][16], bf16 as [ceil(n / 16)][ceil(k / 2)][16][2]. So one vector of a panel is
//   one k or one pair of them, and a panel streams through memory in order.
// Shapes: any rows, n and k.
// Order: every output element is one chain of fused multiply-adds over k = 0, 1, 2, .., whichever
//   tile computes it; partial sums that are set aside between two stretches of k stay fp32. A bias
//   is added to the finished sum. So a row's result depends neither on the other rows, nor on
//   tiles, chunks or workers. At level avx512vnni a link of a bf16 chain is a pair of k (vdpbf16ps:
//   fp32 sums, denormals are zero).
// Tiles: rows x panels of accumulators in registers. A chain is as slow as the latency of an FMA
//   (4 cycles), so 4 chains keep a unit busy; more rows save loads.
// Work split: (block of up to 64 rows, panel), rows outermost, in contiguous ranges.
// Bytes: n * k weights once per row block. A stretch of 1024 k of a tile's panels is reused from L2
//   by all row tiles of a block, and a row tile's x from L1.
// Bound: memory (weights) up to about 7 rows of f32 or 4 of bf16 weights on Zen 4, FMA units above.
#include "atlas/product.h"

namespace atlas {
namespace {

template <class X>
size_t scratch(const CpuLaunch& launch) {
  const int64_t k = launch.integer(1), sums = kBlockRows * kSumsStride;
  const int64_t copies = sizeof(X) == sizeof(float) ? 0 : kWeightCopy + block_rows(k) * k;
  return static_cast<size_t>(sums + copies) * sizeof(float);
}

template <class X, class Weight, class Out>
void linear(const CpuLaunch& launch) {
  const auto* x = launch.operand<const X>(0);
  const auto* weight = launch.operand<const Weight>(1);
  const auto* bias = launch.operand<const float>(2);  // may be null
  auto* out = launch.operand<Out>(3);
  const int64_t rows = launch.dims[0], n = launch.integer(0), k = launch.integer(1);
  if (rows == 0) return;

  auto* sums = reinterpret_cast<float*>(launch.scratch);
  float* weight_copy = sums + kBlockRows * kSumsStride;
  const Scratch scratch = {sums, weight_copy, weight_copy + kWeightCopy};
  // Blocks of equal height.
  const int64_t height = ceil_div(rows, ceil_div(rows, block_rows(k)));

  partition_2d(launch, ceil_div(rows, height), ceil_div(n, kLanes), 1,
               [&](int64_t block, int64_t begin, int64_t end) {
                 const int64_t first = block * height, count = min64(height, rows - first);
                 auto* copy = reinterpret_cast<TileX<X>*>(scratch.x_copy);
                 const auto* from = tile_x(x + first * k, count, k, copy);
                 multiply_block(from, count, weight, bias, {begin, end}, n, k, scratch,
                                out + first * n);
               });
}

ATLAS_CPU_KERNEL("linear.x_f32.weight_f32.out_f32", linear<float, float, float>, scratch<float>);
ATLAS_CPU_KERNEL("linear.x_f32.weight_bf16.out_f32", linear<float, Bf16, float>, scratch<Bf16>);
ATLAS_CPU_KERNEL("linear.x_bf16.weight_bf16.out_f32", linear<Bf16, Bf16, float>, scratch<Bf16>);
ATLAS_CPU_KERNEL("linear.x_f32.weight_f32.bias_f32.out_f32", linear<float, float, float>,
                 scratch<float>);
ATLAS_CPU_KERNEL("linear.x_f32.weight_bf16.bias_f32.out_f32", linear<float, Bf16, float>,
                 scratch<Bf16>);
ATLAS_CPU_KERNEL("linear.x_bf16.weight_bf16.bias_f32.out_f32", linear<Bf16, Bf16, float>,
                 scratch<Bf16>);

}  // namespace
}  // namespace atlas
