// Operands of product_tile.cuh: rows and weights both bf16, row-major.
#pragma once

#include "atlas/product_tile.cuh"

namespace atlas::product {

// A tile of kHeight rows by kWidth elements of k, as bf16. A row of kStride elements is 4 banks off
// the one before, so the fragment loads below, 8 rows by 4 words, touch each bank once.
template <int kHeight, int kWidth>
struct alignas(16) Bf16Tile {
  static constexpr int kStride = kWidth + 8;
  __nv_bfloat16 data[kHeight * kStride];

  // Starts copying rows `row_of(0..)` of source from k on; rows that are -1 and columns from kK on
  // become zero.
  template <class RowOf>
  __device__ void load(const __nv_bfloat16* source, RowOf row_of, int k) {
    constexpr int kVector = kK % 8 == 0 ? 8 : 1;  // other sizes of k have unaligned rows
    constexpr int kVectors = kHeight * kWidth / kVector;
    for (int i = threadIdx.x; i < kVectors; i += launch::block) {
      const int row = i / (kWidth / kVector), column = i % (kWidth / kVector) * kVector;
      const int from = row_of(row);
      const bool valid = from >= 0 && k + column < kK;
      const size_t element = static_cast<size_t>(from) * kK + k + column;
      __nv_bfloat16* target = data + row * kStride + column;
      if constexpr (kVector == 8) {
        copy_async_16(target, valid ? source + element : source, valid);
      } else {
        *target = valid ? source[element] : __float2bfloat16_rn(0.0f);
      }
    }
  }

  // Elements [row, column..column+1] in one register.
  __device__ unsigned pair(int row, int column) const {
    return *reinterpret_cast<const unsigned*>(data + row * kStride + column);
  }
};

struct Bf16Operands {
  static constexpr int kStep = 64;
  static constexpr bool kFactors = false;

  struct Stage {
    Bf16Tile<kM, kStep> x;
    Bf16Tile<kN, kStep> weight;
  };

  template <class RowOf>
  __device__ static void load_x(Stage& stage, const __nv_bfloat16* x, RowOf row_of, int step) {
    stage.x.load(x, row_of, step * kStep);
  }
  template <class RowOf>
  __device__ static void load_weight(Stage& stage, const __nv_bfloat16* weight, RowOf row_of,
                                     int step) {
    stage.weight.load(weight, row_of, step * kStep);
  }

  template <int kDown, int kAcross>
  __device__ static void multiply(const Stage& stage, int row, int column,
                                  float (&sum)[kDown][kAcross][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float partial[kDown][kAcross][4] = {};
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      unsigned a[kDown][4], b[kAcross][2];
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
        a[i][0] = stage.x.pair(row + i * 16 + g, k + 2 * t);
        a[i][1] = stage.x.pair(row + i * 16 + g + 8, k + 2 * t);
        a[i][2] = stage.x.pair(row + i * 16 + g, k + 2 * t + 8);
        a[i][3] = stage.x.pair(row + i * 16 + g + 8, k + 2 * t + 8);
      }
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        b[j][0] = stage.weight.pair(column + j * kFragment + g, k + 2 * t);
        b[j][1] = stage.weight.pair(column + j * kFragment + g, k + 2 * t + 8);
      }
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kAcross; ++j) mma_m16n8k16(partial[i][j], a[i], b[j]);
      }
    }
    add(sum, partial);
  }
};

}  // namespace atlas::product
