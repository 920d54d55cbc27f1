// Rows of an operand, four columns (a quad) a thread, row-major or in tiles.
#pragma once

#include "atlas/operand_layout.cuh"
#include "atlas/quad.cuh"

namespace atlas {

// Columns 4 * quad .. 4 * quad + 3 of row `row` of a matrix with kColumns columns; zeros past them.
template <bool kTiles, int kColumns, class T>
__device__ inline void load_row_quad(const T* matrix, int row, int quad, float (&values)[4]) {
  if constexpr (kTiles) {
    // Four columns are one run of a tile, which is padded with zeros.
    using Layout = TilesLayout<kColumns* static_cast<int>(sizeof(T)), Scales::kNone>;
    const int byte = 4 * quad * static_cast<int>(sizeof(T));
    const char* run = reinterpret_cast<const char*>(matrix) + Layout::at(row, byte);
    load_quad<4>(reinterpret_cast<const T*>(run), byte < Layout::kPaddedBytes ? 0 : 1, values);
  } else {
    load_quad<kColumns>(matrix + static_cast<size_t>(row) * kColumns, quad, values);
  }
}

}  // namespace atlas
