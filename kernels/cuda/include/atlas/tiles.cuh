// Layout `tiles` (atlas/weights/layouts.py): matrices in blocks of 128 rows by 128 bytes, as wgmma
// reads them, so that one bulk copy brings one block.
//
// Order: [row block][k tile][row in block][128 bytes]. The eight 16-byte chunks of a row are
// permuted: chunk c of row r stands at c ^ (r % 8), the 128-byte swizzle of the matrix
// instructions.
#pragma once

namespace atlas {

constexpr int kTileRows = 128, kTileRowBytes = 128, kTileBytes = kTileRows * kTileRowBytes;
constexpr int kTileScaleBytes = kTileRows * 4;  // f32 scales, one a row: f8g128's after each tile

// Bytes of one tile in memory: formats with scales keep them behind the codes.
template <bool kScaled>
constexpr int kTileStride = kScaled ? kTileBytes + kTileScaleBytes : kTileBytes;

// Where byte `column` of row `row` of a tile stands (both within the tile).
__host__ __device__ constexpr int in_tile(int row, int column) {
  return row * kTileRowBytes + ((column / 16 ^ row % 8) * 16 + column % 16);
}

// Offset of a tile in a matrix of `k_tiles` tiles per row block.
template <bool kScaled = false>
__host__ __device__ constexpr size_t tile_offset(int row_block, int k_tile, int k_tiles) {
  return (static_cast<size_t>(row_block) * k_tiles + k_tile) * kTileStride<kScaled>;
}

// Offset of byte `column` of row `row` of the whole matrix.
template <bool kScaled = false>
__host__ __device__ constexpr size_t tiles_offset(int row, int column, int k_tiles) {
  return tile_offset<kScaled>(row / kTileRows, column / kTileRowBytes, k_tiles) +
         in_tile(row % kTileRows, column % kTileRowBytes);
}

}  // namespace atlas
