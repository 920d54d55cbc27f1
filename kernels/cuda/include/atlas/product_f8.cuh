// Operands of product_tile.cuh: rows in f8g128, weights in f8 or f8g128, all row-major. A step is a
// group of 128 columns: its products are summed by themselves, then scaled by the group's scales. A
// scale of a whole row of the weight (f8) multiplies the finished sum.
//
// Thread t of four takes columns 32 t .. 32 t + 31 of a step, of x and weight alike: the sum does
// not care about their order, and they are two loads of 16 bytes. Where there is no mma of E4M3
// (compute capability 8.0) codes become f16, which holds each of them, times 2^-8: the bits of a
// code moved to the places of f16.
#pragma once

#include <cuda_fp16.h>

#include "atlas/block_rows.cuh"
#include "atlas/product_tile.cuh"

namespace atlas::product {

struct F8Operands {
  static constexpr int kStep = 128;
#ifdef ATLAS_TYPE_WEIGHT_F8
  static constexpr bool kFactors = true;
#else
  static constexpr bool kFactors = false;
#endif
  static constexpr int kGroups = ceil_div(kK, kStep), kCodes = kGroups * kStep;
  static constexpr int kXStride = kCodes + kGroups * 4;
  static constexpr int kWeightStride = kCodes + (kFactors ? 1 : kGroups) * 4;

  struct alignas(16) Stage {
    unsigned char x[kM * kStep], weight[kN * kStep];
    float x_scale[kM], weight_scale[kFactors ? 1 : kN];
  };

  // Runs of 16 bytes of odd rows change places in twos, so that eight threads' loads, of two rows,
  // touch each bank once.
  struct Place {
    __device__ int operator()(int row, int byte) const {
      return row * kStep + (byte ^ row % 2 * 16);
    }
  };

  template <class RowOf>
  __device__ static void load_x(Stage& stage, const unsigned char* x, RowOf row_of, int step) {
    load_codes<kM, kXStride>(stage.x, x, row_of, step);
    load_scales<kM, kXStride>(stage.x_scale, x, row_of, step);
  }
  template <class RowOf>
  __device__ static void load_weight(Stage& stage, const unsigned char* weight, RowOf row_of,
                                     int step) {
    load_codes<kN, kWeightStride>(stage.weight, weight, row_of, step);
    if constexpr (!kFactors)
      load_scales<kN, kWeightStride>(stage.weight_scale, weight, row_of, step);
  }

  template <int kDown, int kAcross>
  __device__ static void multiply(const Stage& stage, int row, int column,
                                  float (&sum)[kDown][kAcross][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float partial[kDown][kAcross][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 a[kDown][2];
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) a[i][h] = run(stage.x, row + i * 16 + g + 8 * h, t, half);
      }
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        const uint4 b = run(stage.weight, column + j * kFragment + g, t, half);
#pragma unroll
        for (int i = 0; i < kDown; ++i) multiply(partial[i][j], a[i], b);
      }
    }
    float x_scale[kDown][2];
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) x_scale[i][h] = stage.x_scale[row + i * 16 + g + 8 * h];
    }
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float scale = kNative ? 1.0f : 0x1p16f;
        if constexpr (!kFactors) scale *= stage.weight_scale[column + j * kFragment + 2 * t + c];
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& total = sum[i][j][2 * h + c];
            total = fmaf(partial[i][j][2 * h + c] * scale, x_scale[i][h], total);
          }
        }
      }
    }
  }

  __device__ static float factor(const unsigned char* weight, int row) {
    return *reinterpret_cast<const float*>(weight + static_cast<size_t>(row) * kWeightStride +
                                           kCodes);
  }

 private:
  static constexpr bool kNative = knobs::NATIVE;

  template <int kRows, int kStride, class RowOf>
  __device__ static void load_codes(unsigned char* codes, const unsigned char* from, RowOf row_of,
                                    int step) {
    load_section<kRows, kStride, 0, kCodes, kStep>(codes, from, row_of, step, Place{});
  }
  template <int kRows, int kStride, class RowOf>
  __device__ static void load_scales(float* scales, const unsigned char* from, RowOf row_of,
                                     int step) {
    load_section<kRows, kStride, kCodes, kGroups * 4, 4>(reinterpret_cast<unsigned char*>(scales),
                                                         from, row_of, step, Contiguous<4>{});
  }
  // Half of a thread's 32 columns of a row.
  __device__ static uint4 run(const unsigned char* tile, int row, int t, int half) {
    return *reinterpret_cast<const uint4*>(tile + Place{}(row, 32 * t + 16 * half));
  }

  __device__ static void multiply(float (&sum)[4], const uint4 (&a)[2], const uint4& b) {
    if constexpr (kNative) {
      mma_m16n8k32_e4m3(sum, {a[0].x, a[1].x, a[0].y, a[1].y}, {b.x, b.y});
      mma_m16n8k32_e4m3(sum, {a[0].z, a[1].z, a[0].w, a[1].w}, {b.z, b.w});
    } else {
      multiply_word(sum, a[0].x, a[1].x, b.x);
      multiply_word(sum, a[0].y, a[1].y, b.y);
      multiply_word(sum, a[0].z, a[1].z, b.z);
      multiply_word(sum, a[0].w, a[1].w, b.w);
    }
  }
  __device__ static void multiply_word(float (&sum)[4], unsigned low, unsigned high, unsigned b) {
    mma_m16n8k16_f16(sum, {halves(low << 8), halves(high << 8), halves(low), halves(high)},
                     {or_nan(halves(b << 8)), or_nan(halves(b))});
  }
  // Bytes 1 and 3.
  __device__ static unsigned halves(unsigned word) {
    return (word & 0x80008000) | (word >> 1 & 0x3F803F80);
  }
  // The code of a NaN would be 480; only weights have it, rows have their NaNs in scales.
  __device__ static unsigned or_nan(unsigned pair) {
    const __half2 value = *reinterpret_cast<const __half2*>(&pair);
    return pair | __heq2_mask(__habs2(value), __float2half2_rn(480.0f / 256));
  }
};

}  // namespace atlas::product
