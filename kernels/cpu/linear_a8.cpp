/* atlas
[layouts]
weight = "panel16"
[levels]
also = ["amx", "avx512vnni", "i8mm"]
*/
// linear_a8: out[r, n] = sum over groups of 32 k of xs * (ws * dot(qx, qw) + m * sum(qx)) for
// weights in an integer block format; x is rounded to int8 per row and group first (round_int8.h).
//
// Layout: panels of 16 output columns, one block of codes, scales and offsets per group (blocks.h).
// Shapes: any rows, n and k; the last group may be short.
// Order: the integer dot product of a group is exact, and the groups of an output element are one
//   chain of fp32 operations over k, whichever tile computes it; a bias is added to the finished
//   sum. So a row's result depends neither on the other rows, nor on tiles, chunks or workers.
// Tiles: up to kTileRows rows by one panel. Codes are unpacked once per tile; a row's four
//   activations are broadcast from the rounded copy of the tile, which lies group by group. At
//   level amx 13 to 16 rows are one AMX tile of 32 bytes a row, so that a group's sums come out by
//   themselves: half of a tile's k. Fewer rows go by VNNI; the sums are exact, so a row has the
//   same bits either way.
// Work split: (block of rows, panel), rows outermost, in contiguous ranges. Each worker rounds the
//   rows of its blocks itself: a few hundred cycles a row, less than another barrier.
// Bytes: per 512 weights a block of 256 to 544; all blocks once per block of rows.
// Bound: memory up to about 3 rows (prefetches only slow the stream down); above it 8 multiply-adds
//   per row and block, and 2 to 3 for the scales on the same units: at most 8/11 (with offsets) or
//   8/10 of the peak.
#include "atlas/amx.h"
#include "atlas/blocks.h"
#include "atlas/partition.h"
#include "atlas/round_int8.h"

namespace atlas {
namespace {

// Integer and fp32 sums of a tile stay in registers. Zen 4, i4g32m, 3072 x 576, many rows: with
// VNNI 10 to 14 rows are alike; AVX-512 without it does 125, 113 and 81 GMAC/s at 4, 6 and 12 rows;
// AVX2 76, 80 and 76 at 2, 4 and 6.
#if defined(__AVX512VNNI__)
constexpr int kVectorRows = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kVectorRows = 4;
#else
constexpr int kVectorRows = 2;
#endif
// An AMX tile has 16 rows. Xeon of the fifth generation, 3072 x 576: 8 and 12 rows are 5 to 25 %
// slower by tiles than by VNNI, 16 rows 11 to 25 % faster.
constexpr int kTileRows = kHasTiles ? 16 : kVectorRows;
constexpr int kFewestTileRows = 13;

// Rows of a block: their rounded copy stays within a share of L2.
constexpr int64_t kBlockRows = 4 * kTileRows;
constexpr int64_t kCopyBytes = int64_t{512} << 10;
constexpr int64_t kRowGroupBytes = sizeof(RoundedGroup<1, float>);

// The sum of a group's q is needed as fp32 where it multiplies offsets, else as an integer.
template <class Format>
using Sum = std::conditional_t<Format::kHasOffset, float, int32_t>;

// sum[r] += xs * (ws * dot(r) + m * sum(qx)), where dot(r) is what the codes' bias is taken off.
template <class Format, int rows, class Dot>
ATLAS_INLINE void add_scaled(const uint8_t* block, const RoundedGroup<rows, Sum<Format>>& x,
                             F32x16* sum, const Dot& dot) {
  const F32x16 scale = Format::scales(block), minimum = Format::minimums(block, scale);
  for (int r = 0; r < rows; ++r) {
    F32x16 value = to_float(dot(r)) * scale;
    if constexpr (Format::kHasOffset) {
      value = fma(minimum, splat(x.sum[r]), value);
    }
    sum[r] = fma(splat(x.scale[r]), value, sum[r]);
  }
}
template <class Format, class Group>
ATLAS_INLINE int32_t first_value(const Group& x, int r) {
  return Format::kHasOffset ? 0 : -Format::kBias * static_cast<int32_t>(x.sum[r]);
}

template <class Format, int rows>
ATLAS_INLINE void add_group(const uint8_t* block, const RoundedGroup<rows, Sum<Format>>& x,
                            F32x16* sum) {
  Dots<Format::kBits> dots[rows];
  for (int r = 0; r < rows; ++r) dots[r].start(first_value<Format>(x, r));
#pragma GCC unroll 8
  for (int i = 0; i < Format::kLoads; ++i) {
    const Codes codes = load_codes(block + i * kStepBytes);
    if constexpr (Format::kBits == 8) {
      for (int r = 0; r < rows; ++r) dots[r].add(codes, x.q[r] + i * kStepK);
    } else {
      const Codes low = low_nibbles(codes), high = high_nibbles(codes);
      for (int r = 0; r < rows; ++r) dots[r].add(low, x.q[r] + i * kStepK);
      for (int r = 0; r < rows; ++r) dots[r].add(high, x.q[r] + (i + Format::kLoads) * kStepK);
    }
  }
  add_scaled<Format, rows>(block, x, sum, [&](int r) { return dots[r].finish(); });
}

// The AMX tiles of even and odd groups, so that two products are under way. All have the rows of a
// block's highest tile of rows; one that is a row lower loads what follows its last row, and the
// sums of that are not used.
constexpr int kSumTiles = 0, kRowTiles = 2, kCodeTiles = 4;
ATLAS_INLINE void configure(int64_t rows) {
  TileConfig config;
  for (int i = 0; i < 2; ++i) {
    config.set(kSumTiles + i, rows, kLanes * 4);
    config.set(kRowTiles + i, rows, kGroup);
    config.set(kCodeTiles + i, kGroup / kStepK, kStepBytes);
  }
  configure_tiles(config);
}

// The codes of a panel as AMX multiplies them, 512 bytes a group: signed, without their bias.
template <class Format>
ATLAS_INLINE void unpack(const uint8_t* panel, int64_t groups, int8_t* to) {
  using Bytes64 = uint8_t __attribute__((vector_size(kStepBytes)));
  const auto put = [&](int step, Codes codes) {
    const Bytes64 code = bit_cast<Bytes64>(codes) - static_cast<uint8_t>(Format::kBias);
    __builtin_memcpy(to + step * kStepBytes, &code, kStepBytes);
  };
  for (int64_t g = 0; g < groups; ++g, panel += Format::kBytes, to += kGroup * kLanes) {
    for (int i = 0; i < Format::kLoads; ++i) {
      const Codes codes = load_codes(panel + i * kStepBytes);
      put(i, Format::kBits == 8 ? codes : low_nibbles(codes));
      if (Format::kBits == 4) put(i + Format::kLoads, high_nibbles(codes));
    }
  }
}

// multiply() by AMX tiles, kAhead groups at a time: products first, because what a tile has stored
// is slow to come back at once. 64 rows as above, i8g32 and i4g32m: 482 and 496 GOP/s with 2, 474
// and 464 with 4, 473 and 482 with 8 groups.
constexpr int kAhead = 2;
template <class Format, int rows>
ATLAS_INLINE void add_groups_by_tile(const RoundedGroup<rows, Sum<Format>>* x, const int8_t* codes,
                                     const uint8_t* panel, int64_t groups, F32x16* sum) {
  static_assert(sizeof(*x) >= (rows + 1) * kGroup, "a tile may load a row more");
  alignas(64) I32x16 dots[kAhead][rows + 1];
  const auto product = [&](auto odd, int64_t g, I32x16* to) {
    constexpr int sums = kSumTiles + odd, q = kRowTiles + odd, code = kCodeTiles + odd;
    zero_tile<sums>();
    load_tile<q>(x[g].q, kGroup);
    load_tile<code>(codes + g * kGroup * kLanes, kStepBytes);
    multiply_tiles<sums, q, code>();
    store_tile<sums>(to, sizeof(I32x16));
  };
  for (int64_t g = 0; g < groups; g += kAhead) {
    const int64_t count = min64(kAhead, groups - g);
    for (int64_t i = 0; i < count; i += 2) {
      product(std::integral_constant<int, 0>(), g + i, dots[i]);
      if (i + 1 < count) product(std::integral_constant<int, 1>(), g + i + 1, dots[i + 1]);
    }
    for (int64_t i = 0; i < count; ++i, panel += Format::kBytes) {
      add_scaled<Format, rows>(panel, x[g + i], sum, [&](int r) { return dots[i][r]; });
    }
  }
}

// One tile of rows times one panel.
template <class Format, int rows>
void multiply(const std::byte* rounded, const int8_t* codes, const uint8_t* panel, int64_t groups,
              const float* bias, float* out, int64_t stride, int64_t columns) {
  const auto* x = reinterpret_cast<const RoundedGroup<rows, Sum<Format>>*>(rounded);
  F32x16 sum[rows];
  for (int r = 0; r < rows; ++r) sum[r] = zero();
  if constexpr (kHasTiles && rows >= kFewestTileRows) {
    add_groups_by_tile<Format, rows>(x, codes, panel, groups, sum);
  } else {
    for (int64_t g = 0; g < groups; ++g) {
      add_group<Format, rows>(panel, x[g], sum);
      panel += Format::kBytes;
    }
  }
  if (bias != nullptr) {
    const F32x16 added = load(bias, columns);
    for (int r = 0; r < rows; ++r) sum[r] = sum[r] + added;
  }
  for (int r = 0; r < rows; ++r) {
    if (columns == kLanes) {
      store(out + r * stride, sum[r]);
    } else {
      store(out + r * stride, sum[r], columns);
    }
  }
}

// A tile whose number of rows becomes a compile-time constant, 1..max_rows.
template <class Format, int max_rows>
ATLAS_INLINE void multiply_rows(int64_t rows, const std::byte* rounded, const int8_t* codes,
                                const uint8_t* panel, int64_t groups, const float* bias, float* out,
                                int64_t stride, int64_t columns) {
  if (rows == max_rows) {
    return multiply<Format, max_rows>(rounded, codes, panel, groups, bias, out, stride, columns);
  }
  if constexpr (max_rows > 1) {
    multiply_rows<Format, max_rows - 1>(rows, rounded, codes, panel, groups, bias, out, stride,
                                        columns);
  }
}

// Rows of a tile beside each other, group by group: what RoundedGroup<rows> says, for any `rows`.
template <class Sum, class X>
void round_tile(const X* x, int64_t rows, int64_t k, std::byte* to) {
  Unit<X, Sum> units[kUnits];
  int count = 0;
  for (int64_t g = 0; g * kGroup < k; ++g, to += rows * kRowGroupBytes) {
    auto* q = reinterpret_cast<int8_t*>(to);
    auto* scale = reinterpret_cast<float*>(to + rows * kGroup);
    auto* sum = reinterpret_cast<Sum*>(scale + rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = g * kGroup;
      units[count++] = {x + r * k + from, min64(kGroup, k - from), q + r * kGroup, scale + r,
                        sum + r};
      if (count == kUnits) {
        round_units(units, count);
        count = 0;
      }
    }
  }
  if (count > 0) round_units(units, count);
}

ATLAS_INLINE int64_t block_rows(int64_t k) {
  const int64_t fit = kCopyBytes / (ceil_div(k, kGroup) * kRowGroupBytes);
  return max64(kTileRows, min64(kBlockRows, fit / kTileRows * kTileRows));
}

size_t scratch(const CpuLaunch& launch) {
  const int64_t k = launch.integer(1);
  const int64_t row_bytes = block_rows(k) * kRowGroupBytes;
  const int64_t unpacked = kHasTiles ? kGroup * kLanes : 0;  // codes of a panel
  return static_cast<size_t>(ceil_div(k, kGroup) * (row_bytes + unpacked));
}

// Calls body(first, count) for the tiles of `rows`, which are spread evenly over them.
template <class Body>
ATLAS_INLINE void for_tiles(int64_t rows, Body body) {
  int64_t tiles = ceil_div(rows, kTileRows);
  for (int64_t first = 0; first < rows;) {
    const int64_t count = ceil_div(rows - first, tiles--);
    body(first, count);
    first += count;
  }
}

template <class X, class Format>
void linear_a8(const CpuLaunch& launch) {
  const auto* x = launch.operand<const X>(0);
  const auto* weight = launch.operand<const uint8_t>(1);
  const auto* bias = launch.operand<const float>(2);  // may be null
  auto* out = launch.operand<float>(3);
  const int64_t rows = launch.dims[0], n = launch.integer(0), k = launch.integer(1);
  if (rows == 0) return;
  const int64_t groups = ceil_div(k, kGroup), panel_bytes = Format::panel_bytes(k);
  auto* unpacked =
      reinterpret_cast<int8_t*>(launch.scratch + block_rows(k) * groups * kRowGroupBytes);
  // Blocks of equal height.
  const int64_t height = ceil_div(rows, ceil_div(rows, block_rows(k)));

  partition_2d(launch, ceil_div(rows, height), ceil_div(n, kLanes), 1,
               [&](int64_t block, int64_t begin, int64_t end) {
                 const int64_t first_row = block * height, count = min64(height, rows - first_row);
                 const auto rounded = [&](int64_t row) {
                   return launch.scratch + row * groups * kRowGroupBytes;
                 };
                 for_tiles(count, [&](int64_t first, int64_t tile) {
                   round_tile<Sum<Format>>(x + (first_row + first) * k, tile, k, rounded(first));
                 });
                 const int64_t most = ceil_div(count, ceil_div(count, kTileRows));
                 const bool by_tiles = kHasTiles && most >= kFewestTileRows;
                 if (by_tiles) configure(most);
                 for (int64_t panel = begin; panel < end; ++panel) {
                   const float* added = bias == nullptr ? nullptr : bias + panel * kLanes;
                   const uint8_t* from = weight + panel * panel_bytes;
                   if (by_tiles) unpack<Format>(from, groups, unpacked);
                   for_tiles(count, [&](int64_t first, int64_t tile) {
                     float* to = out + (first_row + first) * n + panel * kLanes;
                     multiply_rows<Format, kTileRows>(tile, rounded(first), unpacked, from, groups,
                                                      added, to, n,
                                                      min64(kLanes, n - panel * kLanes));
                   });
                 }
               });
  if (kHasTiles) release_tiles();
}

ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i8g32", linear_a8<float, I8g32>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i8g32f", linear_a8<float, I8g32f>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i4g32", linear_a8<float, I4g32>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i4g32z", linear_a8<float, I4g32z>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i4g32m", linear_a8<float, I4g32m>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i4g32f", linear_a8<float, I4g32f>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i8g32", linear_a8<Bf16, I8g32>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i8g32f", linear_a8<Bf16, I8g32f>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i4g32", linear_a8<Bf16, I4g32>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i4g32z", linear_a8<Bf16, I4g32z>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i4g32m", linear_a8<Bf16, I4g32m>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i4g32f", linear_a8<Bf16, I4g32f>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i8g32.bias_f32", linear_a8<float, I8g32>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i8g32f.bias_f32", linear_a8<float, I8g32f>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i4g32.bias_f32", linear_a8<float, I4g32>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i4g32z.bias_f32", linear_a8<float, I4g32z>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i4g32m.bias_f32", linear_a8<float, I4g32m>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_f32.weight_i4g32f.bias_f32", linear_a8<float, I4g32f>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i8g32.bias_f32", linear_a8<Bf16, I8g32>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i8g32f.bias_f32", linear_a8<Bf16, I8g32f>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i4g32.bias_f32", linear_a8<Bf16, I4g32>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i4g32z.bias_f32", linear_a8<Bf16, I4g32z>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i4g32m.bias_f32", linear_a8<Bf16, I4g32m>, scratch);
ATLAS_CPU_KERNEL("linear_a8.x_bf16.weight_i4g32f.bias_f32", linear_a8<Bf16, I4g32f>, scratch);

}  // namespace
}  // namespace atlas
