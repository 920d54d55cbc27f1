// Rows of block formats, row-major (atlas/targets/formats.py): each row is sections of codes,
// scales and offsets, one after the other.
#pragma once

#include "atlas/async_copy.cuh"
#include "atlas/instance.h"

namespace atlas {

// Largest power of two up to 16 that divides all three.
__host__ __device__ constexpr int common_alignment(int a, int b, int c) {
  int unit = 16;
  while (a % unit || b % unit || c % unit) unit /= 2;
  return unit;
}

// Starts copying what step `step`, of kBytes, has of a section: kLength bytes from kBegin on in
// rows of kStride bytes. Byte b of row r goes to target + place(r, b), which keeps runs of 16
// whole. Rows `row_of(r)` that are -1 and bytes past the section become zero.
template <int kRows, int kStride, int kBegin, int kLength, int kBytes, class RowOf, class Place>
__device__ inline void load_section(unsigned char* target, const unsigned char* source,
                                    RowOf row_of, int step, Place place) {
  constexpr int kUnit = common_alignment(kStride, kBegin, kBytes), kUnits = kBytes / kUnit;
  for (int i = threadIdx.x; i < kRows * kUnits; i += launch::block) {
    const int row = i / kUnits, byte = i % kUnits * kUnit, at = step * kBytes + byte;
    const int from = row_of(row);
    const int valid = from < 0 ? 0 : min(max(kLength - at, 0), kUnit);
    const size_t offset = valid > 0 ? static_cast<size_t>(from) * kStride + kBegin + at : 0;
    copy_async<kUnit>(target + place(row, byte), source + offset, valid);
  }
}

// Where bytes of rows of kWidth stand that follow one another.
template <int kWidth>
struct Contiguous {
  __device__ int operator()(int row, int byte) const { return row * kWidth + byte; }
};

}  // namespace atlas
