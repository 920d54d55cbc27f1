/* atlas
[layouts]
weight = "panel16"
*/
// linear: out[r, n] = sum over k of x[r, k] * weight[n, k], accumulated in fp32, rounded once.
//
// Layout: the weight is stored in panels of 16 output columns, [ceil(n / 16)][k][16], zero padded,
//   so that one k of a panel is one vector and a panel streams through memory in order.
// Shapes: any rows, n and k.
// Order: every output element is one chain of fused multiply-adds over k = 0, 1, 2, .., whichever
//   tile computes it; partial sums that are set aside between two stretches of k stay fp32. So a
//   row's result depends neither on the other rows, nor on tiles, chunks or workers.
// Tiles: rows x panels of accumulators in registers. A chain is as slow as the latency of an FMA
//   (4 cycles), so 4 chains keep a unit busy; more rows save loads.
// Work split: (block of up to 64 rows, panel), rows outermost, in contiguous ranges.
// Bytes: n * k weights once per row block and worker; a block's x stays in L2, and a stretch of
//   1024 k of P panels is reused from L2 by all row tiles of a block.
// Bound: memory (weights) up to some 16 rows, FMA units above.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

// Register tiles. "Wide" ones are for blocks of few rows, where more panels give enough chains.
struct TileShape {
  int rows, panels;
};
#if defined(__AVX512F__)  // 32 registers of 16 lanes
constexpr TileShape kWide = {3, 4}, kTall = {8, 2};
#elif defined(__AVX2__)     // 16 registers of 8 lanes
constexpr TileShape kWide = {3, 2}, kTall = {6, 1};
#elif defined(__aarch64__)  // 32 registers of 4 lanes
constexpr TileShape kWide = {2, 2}, kTall = {5, 1};
#else                       // 16 registers of 4 lanes
constexpr TileShape kWide = {1, 2}, kTall = {2, 1};
#endif

constexpr int64_t kBlockRows = 64;
constexpr int64_t kStretch = 1024;
constexpr int64_t kSumsStride = kWide.panels * kLanes;  // the wider of the two

// What a tile works on: `k` columns of x from `x`, and of each panel. Partial sums of earlier
// columns are in `sums`, kSumsStride floats a row, unless `first`.
template <class Weight>
struct Tile {
  const float* x;
  int64_t x_stride;
  const Weight* panel[kWide.panels];
  int64_t k;
  float* sums;
  bool first;
};

template <int rows, int panels, class Weight>
void accumulate(const Tile<Weight>& tile) {
  F32x16 sum[rows][panels];
  const float* x[rows];
  const Weight* weight[panels];
  for (int r = 0; r < rows; ++r) {
    x[r] = tile.x + r * tile.x_stride;
    for (int p = 0; p < panels; ++p) {
      sum[r][p] = tile.first ? zero() : load(tile.sums + r * kSumsStride + p * kLanes);
    }
  }
  for (int p = 0; p < panels; ++p) weight[p] = tile.panel[p];
  for (int64_t k = 0; k < tile.k; ++k) {
    F32x16 w[panels];
    for (int p = 0; p < panels; ++p) w[p] = load(weight[p] + k * kLanes);
    for (int r = 0; r < rows; ++r) {
      const F32x16 v = splat(x[r][k]);
      for (int p = 0; p < panels; ++p) sum[r][p] = sum[r][p] + v * w[p];
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int p = 0; p < panels; ++p) store(tile.sums + r * kSumsStride + p * kLanes, sum[r][p]);
  }
}

// accumulate() with `rows` as a compile-time constant, 1..max_rows.
template <int max_rows, int panels, class Weight>
ATLAS_INLINE void accumulate_rows(int64_t rows, const Tile<Weight>& tile) {
  if (rows == max_rows) return accumulate<max_rows, panels>(tile);
  if constexpr (max_rows > 1) accumulate_rows<max_rows - 1, panels>(rows, tile);
}

// One block of rows times panels [begin, end): for each group of panels, each stretch of k, all row
// tiles. The rows are spread evenly over the tiles.
template <TileShape const& shape, class Weight, class Out>
void multiply_block(const float* x, int64_t rows, const Weight* weight, Range panels, int64_t n,
                    int64_t k, float* sums, Out* out) {
  Tile<Weight> tile;
  tile.x_stride = k;
  for (int64_t first = panels.begin; first < panels.end; first += shape.panels) {
    for (int64_t from = 0; from < k; from += kStretch) {
      for (int p = 0; p < shape.panels; ++p) {
        // Past the end the last panel stands in; its sums are not stored.
        tile.panel[p] = weight + (min64(first + p, panels.end - 1) * k + from) * kLanes;
      }
      tile.k = min64(kStretch, k - from);
      tile.first = from == 0;
      int64_t tiles = ceil_div(rows, shape.rows);
      for (int64_t r = 0; r < rows;) {
        const int64_t count = ceil_div(rows - r, tiles--);
        tile.x = x + r * k + from;
        tile.sums = sums + r * kSumsStride;
        accumulate_rows<shape.rows, shape.panels>(count, tile);
        r += count;
      }
    }
    const int64_t column = first * kLanes, last = min64(n, panels.end * kLanes);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = sums + r * kSumsStride;
      Out* to = out + r * n + column;
      for_lanes(min64(shape.panels * kLanes, last - column),
                [&](int64_t i, auto count) { store(to + i, load(from + i, count), count); });
    }
  }
}

// x of a block of rows as fp32: x itself, or a widened copy.
ATLAS_INLINE const float* widened(const float* x, int64_t, float*) { return x; }
ATLAS_INLINE const float* widened(const Bf16* x, int64_t n, float* to) {
  for_lanes(n, [&](int64_t i, auto count) { store(to + i, load(x + i, count), count); });
  return to;
}

// Rows of a block: fewer where the widened copy of x would exceed a share of L3.
ATLAS_INLINE int64_t block_rows(int64_t k) {
  constexpr int64_t kCopyFloats = int64_t{1} << 20;
  return max64(kTall.rows, min64(kBlockRows, kCopyFloats / k));
}

// Partial sums of a block and, for bf16, its x as fp32.
template <class X>
size_t scratch(const CpuLaunch& launch) {
  const int64_t k = launch.integer(1), sums = kBlockRows * kSumsStride;
  const int64_t copy = sizeof(X) == sizeof(float) ? 0 : block_rows(k) * k;
  return static_cast<size_t>(sums + copy) * sizeof(float);
}

template <class X, class Weight, class Out>
void linear(const CpuLaunch& launch) {
  const auto* x = launch.operand<const X>(0);
  const auto* weight = launch.operand<const Weight>(1);
  auto* out = launch.operand<Out>(2);
  const int64_t rows = launch.dims[0], n = launch.integer(0), k = launch.integer(1);
  if (rows == 0) return;

  auto* sums = reinterpret_cast<float*>(launch.scratch);
  float* x_copy = sums + kBlockRows * kSumsStride;
  // Blocks of equal height.
  const int64_t height = ceil_div(rows, ceil_div(rows, block_rows(k)));

  partition_2d(launch, ceil_div(rows, height), ceil_div(n, kLanes), 1,
               [&](int64_t block, int64_t begin, int64_t end) {
                 const int64_t first = block * height, count = min64(height, rows - first);
                 const float* from = widened(x + first * k, count * k, x_copy);
                 const Range panels = {begin, end};
                 if (count <= kWide.rows) {
                   multiply_block<kWide>(from, count, weight, panels, n, k, sums, out + first * n);
                 } else {
                   multiply_block<kTall>(from, count, weight, panels, n, k, sums, out + first * n);
                 }
               });
}

ATLAS_CPU_KERNEL("linear.x_f32.weight_f32.out_f32", linear<float, float, float>, scratch<float>);
ATLAS_CPU_KERNEL("linear.x_bf16.weight_bf16.out_bf16", linear<Bf16, Bf16, Bf16>, scratch<Bf16>);
ATLAS_CPU_KERNEL("linear.x_bf16.weight_bf16.out_f32", linear<Bf16, Bf16, float>, scratch<Bf16>);

}  // namespace
}  // namespace atlas
