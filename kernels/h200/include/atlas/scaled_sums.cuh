// Sums of k tiles of f8g128, taken into fp32 sums with their scales (gemm.cuh): what a thread holds
// of kPiece columns, as wgmma.cuh has it.
#pragma once

namespace atlas {

template <int kPiece, bool kPaired>
struct ScaledSums {
  using Sum = float[kPiece / 2];

  // sum += part * scale of the row.
  __device__ static void add_rows(Sum& sum, const Sum& part, const float (&row_scales)[2]) {
#pragma unroll
    for (int at = 0; at < kPiece / 2; ++at) {
      sum[at] = fmaf(part[at], row_scales[at / 2 % 2], sum[at]);
    }
  }

  // Whether 128 columns have one scale in each half: of 64 columns, or, paired, of those of the
  // gate and of those of the up. Blocks of 64 and more rows do.
  __device__ static bool shares_scales(const float* column_scales, float (&halves)[2]) {
    const int lane = threadIdx.x % 32;
    const float4 own = reinterpret_cast<const float4*>(column_scales)[lane];
    halves[0] = column_scales[0];
    halves[1] = column_scales[kPaired ? 8 : 64];
    const float expected = (kPaired ? lane / 2 % 2 : lane / 16) ? halves[1] : halves[0];
    return __all_sync(0xFFFFFFFFu, own.x == expected && own.y == expected && own.z == expected &&
                                       own.w == expected);
  }
  // As add_scaled, bit for bit.
  __device__ static void add_shared(Sum& sum, const Sum& part, const float (&row_scales)[2],
                                    const float (&halves)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scales[2] = {row_scales[i] * halves[0], row_scales[i] * halves[1]};
#pragma unroll
      for (int j = 0; j < kPiece / 8; ++j) {
        const float scale = scales[kPaired ? j % 2 : j / 8 % 2];
        const int at = 4 * j + 2 * i;
        sum[at] = fmaf(part[at], scale, sum[at]);
        sum[at + 1] = fmaf(part[at + 1], scale, sum[at + 1]);
      }
    }
  }

  // sum += part * scale of the row * scale of the column.
  __device__ static void add_scaled(Sum& sum, const Sum& part, const float (&row_scales)[2],
                                    const float* column_scales) {
    const auto* pairs = reinterpret_cast<const float2*>(column_scales) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kPiece / 8; ++j) {
      const float2 scale = pairs[j * 4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * j + 2 * i;
        sum[at] = fmaf(part[at], row_scales[i] * scale.x, sum[at]);
        sum[at + 1] = fmaf(part[at + 1], row_scales[i] * scale.y, sum[at + 1]);
      }
    }
  }
};

}  // namespace atlas
