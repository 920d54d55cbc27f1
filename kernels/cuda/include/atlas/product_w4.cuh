// Operands of product_tile.cuh: bf16 rows, weights of 4 bits (row_codes4.cuh), both row-major.
//
// Thread t of four takes columns 32 t .. 32 t + 31 of a step of 128, of x and weight alike: the sum
// does not care about their order. So its codes are one load of 16 bytes, it needs the scales of 32
// columns of a weight row, and expands them in registers, between shared memory and mma.
#pragma once

#include "atlas/block_rows.cuh"
#include "atlas/product_tile.cuh"
#include "atlas/row_codes4.cuh"

namespace atlas::product {

#if defined(ATLAS_TYPE_WEIGHT_NVFP4)
using Format = Nvfp4Row;
#elif defined(ATLAS_TYPE_WEIGHT_I4G32B)
using Format = I4g32bRow;
#elif defined(ATLAS_TYPE_WEIGHT_I4G32)
using Format = I4g32Row<false>;
#elif defined(ATLAS_TYPE_WEIGHT_I4G32Z)
using Format = I4g32Row<true>;
#elif defined(ATLAS_TYPE_WEIGHT_I4G32M)
using Format = I4g32mRow;
#else
#error "no format of 4 bits"
#endif

struct W4Operands {
  static constexpr int kStep = 128;
  static constexpr bool kFactors = Format::kRowScale > 0;
  static constexpr int kGroups = ceil_div(kK, Format::kGroup);
  // Sections of a row, and bytes of a step in each.
  static constexpr int kCodes = kGroups * Format::kGroup / 2;
  static constexpr int kScales = kGroups * Format::kScale;
  static constexpr int kOffsets = kGroups * Format::kOffset;
  static constexpr int kStride = kCodes + kScales + kOffsets + Format::kRowScale;
  static constexpr int kStepCodes = kStep / 2;
  static constexpr int kStepScales = kStep / Format::kGroup * Format::kScale;
  static constexpr int kStepOffsets = kStep / Format::kGroup * Format::kOffset;

  struct alignas(16) Stage {
    __nv_bfloat16 x[kM * kStep];
    unsigned char codes[kN * kStepCodes], scales[kN * kStepScales];
    unsigned char offsets[kStepOffsets ? kN * kStepOffsets : 1];
  };

  template <class RowOf>
  __device__ static void load_x(Stage& stage, const __nv_bfloat16* x, RowOf row_of, int step) {
    constexpr int kVector = kK % 8 == 0 ? 8 : 1;  // other sizes of k have unaligned rows
    constexpr int kVectors = kStep / kVector;
    for (int i = threadIdx.x; i < kM * kVectors; i += launch::block) {
      const int row = i / kVectors, column = i % kVectors * kVector, k = step * kStep + column;
      const int from = row_of(row);
      const bool valid = from >= 0 && k < kK;
      const size_t element = valid ? static_cast<size_t>(from) * kK + k : 0;
      __nv_bfloat16* target = stage.x + x_run(row, column / 8) + column % 8;
      if constexpr (kVector == 8) {
        copy_async_16(target, x + element, valid);
      } else {
        *target = valid ? x[element] : __float2bfloat16_rn(0.0f);
      }
    }
  }

  template <class RowOf>
  __device__ static void load_weight(Stage& stage, const unsigned char* weight, RowOf row_of,
                                     int step) {
    load_section<kN, kStride, 0, kCodes, kStepCodes>(stage.codes, weight, row_of, step,
                                                     Contiguous<kStepCodes>{});
    load_section<kN, kStride, kCodes, kScales, kStepScales>(stage.scales, weight, row_of, step,
                                                            Contiguous<kStepScales>{});
    if constexpr (kOffsets > 0) {
      load_section<kN, kStride, kCodes + kScales, kOffsets, kStepOffsets>(
          stage.offsets, weight, row_of, step, Contiguous<kStepOffsets>{});
    }
  }

  template <int kDown, int kAcross>
  __device__ static void multiply(const Stage& stage, int row, int column,
                                  float (&sum)[kDown][kAcross][4]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float partial[kDown][kAcross][4] = {};
    uint4 codes[kAcross];
    Format formats[kAcross];
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
      const int from = column + j * kFragment + g;
      codes[j] = *reinterpret_cast<const uint4*>(stage.codes + from * kStepCodes + 16 * t);
      formats[j] = Format(stage.scales + from * kStepScales + t * (kStepScales / 4),
                          stage.offsets + from * kStepOffsets + t * (kStepOffsets / 4));
    }
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      unsigned a[kDown][2][4];
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = x_run(row + i * 16 + g + 8 * h, 4 * t + run);
          const uint4 x = *reinterpret_cast<const uint4*>(stage.x + at);
          a[i][h][0] = __byte_perm(x.x, x.z, 0x5410);  // columns p and p + 4, as codes expand
          a[i][h][1] = __byte_perm(x.x, x.z, 0x7632);
          a[i][h][2] = __byte_perm(x.y, x.w, 0x5410);
          a[i][h][3] = __byte_perm(x.y, x.w, 0x7632);
        }
      }
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        unsigned b[4];
        formats[j].expand((&codes[j].x)[run], run, b);
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
          const auto& x = a[i];
          mma_m16n8k16(partial[i][j], {x[0][0], x[1][0], x[0][1], x[1][1]}, {b[0], b[1]});
          mma_m16n8k16(partial[i][j], {x[0][2], x[1][2], x[0][3], x[1][3]}, {b[2], b[3]});
        }
      }
    }
    add(sum, partial);
  }

  template <class F = Format>  // compiled only where rows have a scale
  __device__ static float factor(const unsigned char* weight, int row) {
    const unsigned char* at = weight + static_cast<size_t>(row) * kStride + kStride - 4;
    if constexpr (kStride % 4 == 0) return F::factor(*reinterpret_cast<const float*>(at));
    // Rows of an odd number of groups are not aligned.
    const unsigned bits = at[0] | at[1] << 8 | at[2] << 16 | static_cast<unsigned>(at[3]) << 24;
    return F::factor(__uint_as_float(bits));
  }

 private:
  // Where run `run` of 8 columns of a row of x stands. Runs change places so that eight threads'
  // loads, of two rows, touch each bank once.
  __device__ static int x_run(int row, int run) {
    return row * kStep + 8 * (run ^ run / 8 % 2 ^ row % 2 * 2);
  }
};

}  // namespace atlas::product
