// Transposition of 16 x 16 blocks of 32-bit elements in registers.
#pragma once

#include "atlas/simd.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

template <int... i>
ATLAS_INLINE void deinterleave(NativeF32* a, NativeF32* b, std::integer_sequence<int, i...>) {
  const NativeF32 even = ATLAS_SHUFFLE(NativeI32, *a, *b, half_index(i, 1, false)...);
  *b = ATLAS_SHUFFLE(NativeI32, *a, *b, half_index(i, 1, true)...);
  *a = even;
}

// One machine vector per row, square. Deinterleaving rows that differ in bit j of their number
// moves the lowest bit of the column number there, and bit j to the top of the column number; after
// one such step for each bit, row and column numbers have changed places. By templates, because GCC
// keeps an array that it cannot unroll all loops over in memory.
template <int bit, int... pair>
ATLAS_INLINE void transpose_square(NativeF32* rows, std::integer_sequence<int, pair...> pairs) {
  const auto lanes = std::make_integer_sequence<int, kNativeLanes>();
  (deinterleave(rows + pair / bit * 2 * bit + pair % bit,
                rows + pair / bit * 2 * bit + pair % bit + bit, lanes),
   ...);
  if constexpr (bit * 2 < kNativeLanes) transpose_square<bit * 2>(rows, pairs);
}

// rows[i] lane j becomes rows[j] lane i. Only moves bits: the elements may be any 32-bit type.
ATLAS_INLINE void transpose(F32x16* rows) {
  F32x16 result[kLanes];
  for (int from = 0; from < kParts; ++from) {
    for (int to = 0; to < kParts; ++to) {
      NativeF32 square[kNativeLanes];
      for (int i = 0; i < kNativeLanes; ++i) square[i] = rows[from * kNativeLanes + i].part[to];
      transpose_square<1>(square, std::make_integer_sequence<int, kNativeLanes / 2>());
      for (int i = 0; i < kNativeLanes; ++i) result[to * kNativeLanes + i].part[from] = square[i];
    }
  }
  for (int i = 0; i < kLanes; ++i) rows[i] = result[i];
}

}  // namespace
}  // namespace atlas
