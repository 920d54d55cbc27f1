// Rows four columns (a quad) a thread: one load or store of 8 or 16 bytes where rows allow it.
#pragma once

#include "atlas/convert.cuh"

namespace atlas {

template <int kBytes>
struct Bits;
template <>
struct Bits<4> {
  using type = unsigned;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<16> {
  using type = uint4;
};

// Columns 4 * quad .. 4 * quad + 3 of a row of kColumns; zeros past its end.
template <int kColumns, class T>
__device__ inline void load_quad(const T* row, int quad, float (&values)[4]) {
  if constexpr (kColumns % 4 == 0) {
    union {
      typename Bits<4 * sizeof(T)>::type bits;
      T elements[4];
    } loaded{};
    if (4 * quad < kColumns) {
      loaded.bits = reinterpret_cast<const typename Bits<4 * sizeof(T)>::type*>(row)[quad];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = to_float(loaded.elements[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = 4 * quad + i < kColumns ? to_float(row[4 * quad + i]) : 0.0f;
    }
  }
}

// The same columns of a row-major fp32 row, which ends at kColumns.
template <int kColumns>
__device__ inline void store_quad(const float (&values)[4], int quad, float* row) {
  if constexpr (kColumns % 4 == 0) {
    if (4 * quad < kColumns) {
      reinterpret_cast<float4*>(row)[quad] =
          make_float4(values[0], values[1], values[2], values[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * quad + i < kColumns) row[4 * quad + i] = values[i];
    }
  }
}

}  // namespace atlas
