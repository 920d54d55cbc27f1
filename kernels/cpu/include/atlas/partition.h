// Dividing work among the workers of a launch.
#pragma once

#include "atlas/kernel.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

struct Range {
  int64_t begin, end;
};

ATLAS_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
ATLAS_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
ATLAS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// This worker's part of [0, total), equal to within one `granule`; boundaries are its multiples.
ATLAS_INLINE Range partition(const CpuLaunch& launch, int64_t total, int64_t granule = 1) {
  const int64_t units = ceil_div(total, granule);
  const int64_t begin = units * launch.worker / launch.n_workers;
  const int64_t end = units * (launch.worker + 1) / launch.n_workers;
  return {min64(begin * granule, total), min64(end * granule, total)};
}

// Calls body(row, column_begin, column_end) for this worker's part of a [rows, columns] array:
// for element-wise work, where one row alone may be worth dividing. Column boundaries are multiples
// of `granule`, and a row is divided no finer than that.
template <class Body>
ATLAS_INLINE void partition_2d(const CpuLaunch& launch, int64_t rows, int64_t columns,
                               int64_t granule, Body body) {
  const int64_t per_row = ceil_div(columns, granule);
  const Range part = partition(launch, rows * per_row);
  for (int64_t unit = part.begin; unit < part.end;) {
    const int64_t row = unit / per_row, first = unit % per_row;
    const int64_t last = min64(per_row, first + part.end - unit);
    body(row, first * granule, min64(last * granule, columns));
    unit += last - first;
  }
}

}  // namespace
}  // namespace atlas
