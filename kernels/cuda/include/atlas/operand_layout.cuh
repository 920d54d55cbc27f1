// Where the rows of a product's operand lie in memory: row-major, as the contract has it, or in
// `tiles` (tiles.cuh), which the kernel's declaration and its hardware decide.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/tiles.cuh"

namespace atlas {

// Both are of rows of kRowBytes bytes. kScaled: E4M3 codes with one f32 scale for each group of 128
// (format f8g128), whose last group is stored whole. The writer of a row fills kPaddedBytes, from
// kRowBytes on with zeros. A run of kRun bytes from a multiple of kRun on is one run in memory.

template <int kRowBytes, bool kScaled>
struct RowMajorLayout {
  static constexpr int kPaddedBytes = kScaled ? ceil_div(kRowBytes, 128) * 128 : kRowBytes;
  static constexpr int kStride = kScaled ? kPaddedBytes / 128 * (128 + 4) : kPaddedBytes;
  static constexpr int kRun = kStride % 16 == 0  ? 16
                              : kStride % 8 == 0 ? 8
                              : kStride % 4 == 0 ? 4
                                                 : 2;

  __device__ static size_t at(int row, int byte) {
    return static_cast<size_t>(row) * kStride + byte;
  }
  // The scales of a row follow its codes.
  __device__ static size_t scale_at(int row, int group) {
    return static_cast<size_t>(row) * kStride + kPaddedBytes + 4 * group;
  }
};

template <int kRowBytes, bool kScaled>
struct TilesLayout {
  static constexpr int kTiles = ceil_div(kRowBytes, kTileRowBytes);
  static constexpr int kPaddedBytes = kTiles * kTileRowBytes;
  static constexpr int kRun = 16;

  __device__ static size_t at(int row, int byte) {
    return tiles_offset<kScaled>(row, byte, kTiles);
  }
  // The scales of a tile stand behind its codes.
  __device__ static size_t scale_at(int row, int group) {
    return tile_offset<kScaled>(row / kTileRows, group, kTiles) + kTileBytes +
           4 * (row % kTileRows);
  }
};

}  // namespace atlas
