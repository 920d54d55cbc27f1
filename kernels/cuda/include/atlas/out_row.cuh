// Rows of the kernel's operand `out`, four columns (a quad) a thread, written as a product reads
// them: in any element type or format f8g128, row-major or in tiles.
#pragma once

#include "atlas/f8_group.cuh"
#include "atlas/instance.h"
#include "atlas/operand_layout.cuh"
#include "atlas/quad.cuh"
#include "atlas/reduce.cuh"

namespace atlas {

// Writes a row of kColumns of the kernel's operand `out`. Its bytes are of format f8g128 where its
// type is unsigned char.
template <int kColumns, class T = types::out>  // a parameter, so that branches can be dropped by it
class OutRow {
  static constexpr bool kF8 = same_type<T, unsigned char>;
  static constexpr int kSize = sizeof(T);
  static constexpr Scales kScales = kF8 ? Scales::kOfGroups : Scales::kNone;
#ifdef ATLAS_LAYOUT_OUT_TILES
  using Layout = TilesLayout<kColumns * kSize, kScales>;
#else
  using Layout = RowMajorLayout<kColumns * kSize, kScales>;
#endif
  static constexpr int kPadded = Layout::kPaddedBytes / kSize;

 public:
  // Quads to write: the layout's padding too.
  static constexpr int kQuads = ceil_div(kPadded, 4);

  __device__ OutRow(T* out, int row) : out_(reinterpret_cast<char*>(out)), row_(row) {}

  // Rounds once and writes quads `first`, `first` + kStride, ..., as far as the row has them; past
  // kColumns `values` must be zeros. The lanes of a warp call it together, with 32 consecutive
  // `first` from a multiple of 32 on: for f8g128 they share a scale.
  template <int kCount, int kStride>
  __device__ void store(int first, const float (&values)[kCount][4]) const {
    if constexpr (kF8) {
      store_f8<kCount, kStride>(first, values);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (first + i * kStride < kQuads) store_quad(first + i * kStride, values[i]);
      }
    }
  }

 private:
  __device__ void store_quad(int quad, const float (&values)[4]) const {
    if constexpr (Layout::kRun >= 4 * kSize) {
      union {
        typename Bits<4 * kSize>::type bits;
        T elements[4];
      } rounded{};
#pragma unroll
      for (int i = 0; i < 4; ++i) rounded.elements[i] = from_float<T>(values[i]);
      *reinterpret_cast<typename Bits<4 * kSize>::type*>(
          out_ + Layout::at(row_, 4 * quad * kSize)) = rounded.bits;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 4 * quad + i;
        if (column >= kPadded) break;
        *reinterpret_cast<T*>(out_ + Layout::at(row_, column * kSize)) = from_float<T>(values[i]);
      }
    }
  }

  // All groups' magnitudes come first: one's reduction over the warp runs during another's.
  template <int kCount, int kStride>
  __device__ void store_f8(int first, const float (&values)[kCount][4]) const {
    unsigned largest[kCount] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) largest[i] = max(largest[i], magnitude_bits(values[i][j]));
      largest[i] = __reduce_max_sync(kAllLanes, largest[i]);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int quad = first + i * kStride;
      if (quad >= kQuads) continue;
      const F8Group group(largest[i]);
      *reinterpret_cast<unsigned*>(out_ + Layout::at(row_, 4 * quad)) = group.codes(values[i]);
      if (quad % kWarp == 0) {
        *reinterpret_cast<float*>(out_ + Layout::scale_at(row_, quad / kWarp)) = group.scale;
      }
    }
  }

  char* out_;
  int row_;
};

}  // namespace atlas
