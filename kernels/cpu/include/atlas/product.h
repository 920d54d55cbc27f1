// Products of rows with a weight in panels of 16 columns ("panel16"), on register tiles.
//
// An output element is one chain of fused multiply-adds over k, whichever tile computes it: a row's
// result depends neither on the other rows nor on how rows and panels are divided.
#pragma once

#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

// Rows and panels of the register tile, by the registers of the level.
#if defined(__AVX512F__)  // of 32 with 16 lanes, 24 hold sums
constexpr int kTileRows = 6, kTilePanels = 4;
#elif defined(__AVX2__)     // of 16 with 8 lanes, 12
constexpr int kTileRows = 3, kTilePanels = 2;
#elif defined(__aarch64__)  // of 32 with 4 lanes, 16
constexpr int kTileRows = 2, kTilePanels = 2;
#else                       // of 16 with 4 lanes, 8
constexpr int kTileRows = 2, kTilePanels = 1;
#endif

constexpr int64_t kBlockRows = 64;
constexpr int64_t kStretch = 1024;
constexpr int64_t kSumsStride = kTilePanels * kLanes;

// Two consecutive bf16 of a row: what one lane of a bf16 panel is multiplied by.
struct Pair {
  uint32_t bits;
};

// x as tiles read it. A step is what a tile does at a time: one k, or two where the level has
// dot products of bf16 pairs.
#if defined(__AVX512BF16__)
template <class X>
using TileX = std::conditional_t<std::is_same<X, Bf16>::value, Pair, float>;
#else
template <class X>
using TileX = float;
#endif
template <class X>
constexpr int64_t kStepK = std::is_same<X, Pair>::value ? 2 : 1;

// k as panels have it: bf16 weights lie two k to a lane.
template <class Weight>
constexpr int64_t kLaneK = sizeof(float) / sizeof(Weight);

// The weights of step `step` of a panel.
ATLAS_INLINE F32x16 load_step(const float* panel, int64_t step, const float*) {
  return load(panel + step * kLanes);
}
ATLAS_INLINE F32x16 load_step(const Bf16* panel, int64_t step, const float*) {
  F32x16 r;
  for (int i = 0; i < kParts; ++i) {
    NativeU32 words;  // an even k is the lower half of a lane
    __builtin_memcpy(&words, panel + step / 2 * 2 * kLanes + i * 2 * kNativeLanes, sizeof(words));
    r.part[i] = bit_cast<NativeF32>(step % 2 == 0 ? words << 16 : words & 0xffff0000);
  }
  return r;
}
ATLAS_INLINE F32x16 add_step(F32x16 sum, float x, F32x16 weight) { return sum + splat(x) * weight; }

#if defined(__AVX512BF16__)
struct Pairs16 {
  __m512bh lanes;
};
ATLAS_INLINE Pairs16 load_step(const Bf16* panel, int64_t step, const Pair*) {
  return {bit_cast<__m512bh>(_mm512_loadu_si512(panel + step * 2 * kLanes))};
}
// Adds both products of a lane, in fp32; denormal factors and sums count as zero.
ATLAS_INLINE F32x16 add_step(F32x16 sum, Pair x, Pairs16 weight) {
  const auto pair = bit_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(x.bits)));
  return {{_mm512_dpbf16_ps(sum.part[0], weight.lanes, pair)}};
}
#endif

// What a tile works on: `steps` of x from `x`, and of each panel. Partial sums of earlier
// steps are in `sums`, kSumsStride floats a row, unless `first`.
template <class X, class Weight>
struct Tile {
  const X* x;
  int64_t x_stride;
  const Weight* panel[kTilePanels];
  int64_t steps;
  float* sums;
  bool first;
};

template <int rows, class X, class Weight>
void accumulate(const Tile<X, Weight>& tile) {
  constexpr int panels = kTilePanels;
  F32x16 sum[rows][panels];
  const X* x[rows];
  const Weight* weight[panels];
  for (int r = 0; r < rows; ++r) {
    x[r] = tile.x + r * tile.x_stride;
    for (int p = 0; p < panels; ++p) {
      sum[r][p] = tile.first ? zero() : load(tile.sums + r * kSumsStride + p * kLanes);
    }
  }
  for (int p = 0; p < panels; ++p) weight[p] = tile.panel[p];
  const auto step = [&](int64_t k) {
    decltype(load_step(weight[0], k, tile.x)) w[panels];
    for (int p = 0; p < panels; ++p) w[p] = load_step(weight[p], k, tile.x);
    for (int r = 0; r < rows; ++r) {
      for (int p = 0; p < panels; ++p) sum[r][p] = add_step(sum[r][p], x[r][k], w[p]);
    }
  };
  int64_t k = 0;
  if constexpr (kLaneK<Weight> == 2 && kStepK<X> == 1) {
    for (; k + 2 <= tile.steps; k += 2) {  // both halves of a lane: which one is known here
      step(k);
      step(k + 1);
    }
  }
  for (; k < tile.steps; ++k) step(k);
  for (int r = 0; r < rows; ++r) {
    for (int p = 0; p < panels; ++p) store(tile.sums + r * kSumsStride + p * kLanes, sum[r][p]);
  }
}

// accumulate() with `rows` as a compile-time constant, 1..max_rows.
template <int max_rows, class X, class Weight>
ATLAS_INLINE void accumulate_rows(int64_t rows, const Tile<X, Weight>& tile) {
  if (rows == max_rows) return accumulate<max_rows>(tile);
  if constexpr (max_rows > 1) accumulate_rows<max_rows - 1>(rows, tile);
}

// All rows of a block, spread evenly over tiles; `tile` is the first one's place.
template <class X, class Weight>
void accumulate_block(int64_t rows, Tile<X, Weight> tile) {
  int64_t tiles = ceil_div(rows, kTileRows);
  while (rows > 0) {
    const int64_t count = ceil_div(rows, tiles--);
    accumulate_rows<kTileRows>(count, tile);
    tile.x += count * tile.x_stride;
    tile.sums += count * kSumsStride;
    rows -= count;
  }
}

// A block of rows as tiles read it: x itself, or a copy.
ATLAS_INLINE const float* tile_x(const float* x, int64_t, int64_t, float*) { return x; }
[[maybe_unused]] ATLAS_INLINE const float* tile_x(const Bf16* x, int64_t rows, int64_t k,
                                                  float* copy) {
  for_lanes(rows * k, [&](int64_t i, auto count) { store(copy + i, load(x + i, count), count); });
  return copy;
}
[[maybe_unused]] ATLAS_INLINE const Pair* tile_x(const Bf16* x, int64_t rows, int64_t k,
                                                 Pair* copy) {
  if (k % 2 == 0) return reinterpret_cast<const Pair*>(x);
  for (int64_t r = 0; r < rows; ++r, x += k, copy += (k + 1) / 2) {
    copy[k / 2].bits = 0;
    __builtin_memcpy(copy, x, static_cast<size_t>(k) * sizeof(Bf16));
  }
  return copy - rows * ((k + 1) / 2);
}

// Where registers are few, widening bf16 weights anew for each row tile takes as long as using
// them: blocks of more than 3 tiles then work from a copy, by the same arithmetic.
constexpr bool kCopiesWeights = kParts > 1;
constexpr int64_t kWeightCopy = kCopiesWeights ? kTilePanels * kStretch * kLanes : 0;

template <class Weight>
void accumulate_block_widened(int64_t rows, const Tile<float, Weight>& tile, float* copy) {
  Tile<float, float> wide = {tile.x, tile.x_stride, {}, tile.steps, tile.sums, tile.first};
  for (int p = 0; p < kTilePanels; ++p, copy += kStretch * kLanes) {
    for (int64_t k = 0; k < tile.steps; ++k) {
      store(copy + k * kLanes, load_step(tile.panel[p], k, tile.x));
    }
    wide.panel[p] = copy;
  }
  accumulate_block(rows, wide);
}

// A worker's scratch.
struct Scratch {
  float* sums;         // kBlockRows * kSumsStride
  float* weight_copy;  // kWeightCopy, only for bf16
  float* x_copy;       // a block of rows, only for bf16
};

// One block of rows times panels [begin, end): for each group of panels, each stretch of k.
template <class X, class Weight, class Out>
void multiply_block(const X* x, int64_t rows, const Weight* weight, const float* bias, Range panels,
                    int64_t n, int64_t k, const Scratch& scratch, Out* out) {
  constexpr bool may_copy = kCopiesWeights && sizeof(Weight) < sizeof(float);
  const int64_t steps = ceil_div(k, kStepK<X>);
  const int64_t panel_elements = ceil_div(k, kLaneK<Weight>) * kLaneK<Weight> * kLanes;
  for (int64_t first = panels.begin; first < panels.end; first += kTilePanels) {
    for (int64_t from = 0; from < steps; from += kStretch) {
      Tile<X, Weight> tile = {x + from,     steps,    {}, min64(kStretch, steps - from),
                              scratch.sums, from == 0};
      for (int p = 0; p < kTilePanels; ++p) {
        // Past the end the last panel stands in; its sums are not stored.
        tile.panel[p] =
            weight + min64(first + p, panels.end - 1) * panel_elements + from * kStepK<X> * kLanes;
      }
      if constexpr (may_copy) {
        if (rows > 3 * kTileRows) {
          accumulate_block_widened(rows, tile, scratch.weight_copy);
          continue;
        }
      }
      accumulate_block(rows, tile);
    }
    const int64_t column = first * kLanes, last = min64(n, panels.end * kLanes);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = scratch.sums + r * kSumsStride;
      Out* to = out + r * n + column;
      for_lanes(min64(kTilePanels * kLanes, last - column), [&](int64_t i, auto count) {
        F32x16 sum = load(from + i, count);
        if (bias != nullptr) sum = sum + load(bias + column + i, count);
        store(to + i, sum, count);
      });
    }
  }
}

// Rows of a block: fewer where the widened copy of x would exceed a share of L3.
ATLAS_INLINE int64_t block_rows(int64_t k) {
  constexpr int64_t kCopyFloats = int64_t{1} << 20;
  return max64(kTileRows, min64(kBlockRows, kCopyFloats / k));
}

}  // namespace
}  // namespace atlas
