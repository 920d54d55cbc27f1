// Where the rows of a product's operand lie in memory: row-major, as the contract has it, or in
// `tiles` (tiles.cuh), which the kernel's declaration and its hardware decide.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/tiles.cuh"

namespace atlas {

// f32 scales of a row of E4M3 codes: none (the row is of plain elements), one for each 128 columns
// (format f8g128), or one (format f8).
enum class Scales { kNone, kOfGroups, kOfRow };

// Both are of rows of kRowBytes bytes; E4M3 codes are stored filled up to 128. The writer of a row
// fills kPaddedBytes, from kRowBytes on with zeros. A run of kRun bytes from a multiple of kRun on
// is one run in memory.

template <int kRowBytes, Scales kScales>
struct RowMajorLayout {
  static constexpr int kPaddedBytes =
      kScales == Scales::kNone ? kRowBytes : ceil_div(kRowBytes, 128) * 128;
  static constexpr int kScaleBytes = kScales == Scales::kNone       ? 0
                                     : kScales == Scales::kOfGroups ? kPaddedBytes / 128 * 4
                                                                    : 4;
  static constexpr int kStride = kPaddedBytes + kScaleBytes;
  static constexpr int kRun = kStride % 16 == 0  ? 16
                              : kStride % 8 == 0 ? 8
                              : kStride % 4 == 0 ? 4
                                                 : 2;

  __device__ static size_t at(int row, int byte) {
    return static_cast<size_t>(row) * kStride + byte;
  }
  // The scales of a row follow its codes.
  __device__ static size_t scale_at(int row, int group = 0) {
    return static_cast<size_t>(row) * kStride + kPaddedBytes + 4 * group;
  }
};

template <int kRowBytes, Scales kScales>
struct TilesLayout {
  static constexpr int kTiles = ceil_div(kRowBytes, kTileRowBytes);
  static constexpr int kPaddedBytes = kTiles * kTileRowBytes;
  static constexpr int kRun = 16;

  __device__ static size_t at(int row, int byte) {
    return tiles_offset<kInTiles>(row, byte, kTiles) + before(row);
  }
  // The scales of groups stand behind the codes of their tile, those of rows behind the last tile.
  __device__ static size_t scale_at(int row, int group = kTiles - 1) {
    return tile_offset<kInTiles>(row / kTileRows, group, kTiles) + before(row) + kTileBytes +
           4 * (row % kTileRows);
  }

 private:
  static constexpr bool kInTiles = kScales == Scales::kOfGroups;

  // Bytes of the scales behind earlier blocks of rows.
  __device__ static size_t before(int row) {
    return kScales == Scales::kOfRow ? static_cast<size_t>(row / kTileRows) * kTileScaleBytes : 0;
  }
};

}  // namespace atlas
