// Products of many rows: out[r, c] = sum over k of x[r, k] * weight[c, k], both in layout `tiles`,
// as persistent blocks of specialised warps around a ring of shared memory (sm_90a).
//
// A block computes tiles of 128 rows by Cut::kColumns columns, one after the other. One thread
// feeds the ring: a stage holds one k tile (128 bytes of k) of both operands, and since the
// operands lie in the swizzle that wgmma reads, a stage is a few plain bulk copies. Two warpgroups
// of consumers take 64 rows each.
//
// bf16 accumulates all of k in the tensor cores. With x in f8g128 (E4M3 codes, a scale per row and
// 128 columns) a k tile is summed there from zero, then added to an fp32 sum with its scales:
// tensor cores keep too few bits of long E4M3 sums. A tile is cut into pieces of at most 128
// columns, because sums and pieces share the registers; while one warpgroup adds, the other's
// products run. Weights in f8 have one scale a row, which multiplies finished sums. Weights in
// f8g128 have one for every k tile, too: that costs a quarter of the rate, so blocks of them that
// share one are added without looking at the others.
//
// Every element is summed over k in ascending order from zero by one warpgroup in one way: its bits
// depend neither on the cut nor on the other rows.
//
// The file of an op gives `Cut` and what happens to finished tiles:
//   kFormat             of the operands
//   kPaired             the weight is `tiles_paired`
//   kWeightRows, kTiles rows of the weight; k tiles
//   kColumns            of a tile
//   kGroup              row tiles that are walked together, so that the L2 serves both operands
//   kStages             of the ring
#pragma once

#include "atlas/async_copy.cuh"
#include "atlas/gemm_ring.cuh"
#include "atlas/pdl.cuh"
#include "atlas/scaled_sums.cuh"
#include "atlas/tiles.cuh"
#include "atlas/wgmma.cuh"

namespace atlas {

template <class Cut>
struct Gemm {
  using Ring = GemmRing<Cut>;
  static constexpr int kColumns = Cut::kColumns, kBytes = Ring::kBytes;
  static constexpr bool kScaled = Ring::kScaled, kPaired = Cut::kPaired;
  static constexpr bool kRowScales = Ring::kRowScales;
  static constexpr int kPiece = !kScaled || kColumns <= 128 ? kColumns : kColumns / 2;
  static constexpr int kPieces = kColumns / kPiece;
  // Narrow products are over sooner than what surrounds them: k tiles of f8g128 that a warpgroup
  // starts together, and of bf16 that may still run when the next starts (128 rows by 32 columns,
  // k = 14,336: 31.4 us for 35.0, and 50.5 for 52.5).
  static constexpr int kSpan = kPieces == 1 && kPiece <= 64 ? (kPiece <= 32 ? 4 : 2) : 1;
  static constexpr int kLag = kColumns <= 64 ? 2 : 1;
  // Registers move from the producer to consumers that need more than an equal share.
  static constexpr bool kMoveRegisters = kColumns * (kScaled ? 2 : 1) > 128;
  static_assert(kColumns % 16 == 0 && Ring::kStages > kSpan + kLag,
                "operands are made of atoms of 8 rows");

  // Finished sums of a thread: piece, and there what Wgmma<kPiece> holds.
  using Sums = float[kPieces][kPiece / 2];
  using Scaled = ScaledSums<kPiece, kPaired>;

  Ring ring;
  unsigned tiles_done = 0;

  __device__ explicit Gemm(unsigned char* shared) : ring(shared) {}

  // A consumer's half of a tile. Rows that do not exist are not computed.
  __device__ void multiply(const GemmTile& tile, int group, Sums& sums) {
    if (tile.rows <= group * 64) {
      for (int k = 0; k < Ring::kTiles; ++k) {
        ring.wait();
        ring.release(ring.slot);
        ring.advance();
      }
    } else if constexpr (kScaled) {
      multiply_scaled(group, sums);
    } else {
      multiply_bf16(group, sums[0]);
    }
  }

  __device__ unsigned long long a_descriptor(int group) const {
    return wgmma_descriptor(ring.x_stage() + group * 64 * kTileRowBytes);
  }
  __device__ unsigned long long b_descriptor(int piece) const {
    return wgmma_descriptor(ring.weight_stage() + piece * kPiece * kTileRowBytes);
  }

  __device__ void multiply_bf16(int group, float (&sum)[kColumns / 2]) {
    int done = ring.slot;  // the next slot to give back
#pragma unroll 1
    for (int k = 0; k < Ring::kTiles; ++k) {
      ring.wait();
      const auto a = a_descriptor(group), b = b_descriptor(0);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        Wgmma<kColumns>::template bf16_ss<0>(sum, a + 2 * slice, b + 2 * slice, k + slice);
      }
      wgmma_commit();
      wgmma_wait<kLag>();
      if (k >= kLag) release_next(done);
      ring.advance();
    }
    wgmma_wait<0>();
    wgmma_hold(sum);
    for (int i = 0; i < least(kLag, Ring::kTiles); ++i) release_next(done);
  }
  __device__ void release_next(int& done) const {
    ring.release(done);
    if (++done == Ring::kStages) done = 0;
  }

  __device__ void multiply_scaled(int group, Sums& sums) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int i = 0; i < kPiece / 2; ++i) sums[p][i] = 0.0f;
    }
    constexpr int kWhole = Ring::kTiles / kSpan * kSpan;
#pragma unroll 1
    for (int k = 0; k < kWhole; k += kSpan) {
      if constexpr (kSpan == 1) {
        add_tile(group, sums);
      } else {
        add_tiles<kSpan>(group, sums[0]);
      }
    }
    if constexpr (kWhole < Ring::kTiles) add_tiles<Ring::kTiles - kWhole>(group, sums[0]);
  }

  // One k tile, piece by piece.
  __device__ void add_tile(int group, Sums& sums) {
    ring.wait();
    const auto a = a_descriptor(group);
    const float* row_scales = ring.x_scales() + thread_row(group);
    const float scales_of_rows[2] = {row_scales[0], row_scales[8]};
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      float part[kPiece / 2];
      const auto b = b_descriptor(p);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        Wgmma<kPiece>::e4m3_ss(part, a + 2 * slice, b + 2 * slice, slice);
      }
      wgmma_commit();
      if constexpr (kRowScales) {
        wgmma_wait<0>();
        wgmma_hold(part);
        Scaled::add_rows(sums[p], part, scales_of_rows);
      } else {
        const float* column_scales = ring.weight_scales() + p * kPiece;
        float halves[2];
        const bool shared = kPiece == 128 && Scaled::shares_scales(column_scales, halves);
        wgmma_wait<0>();
        wgmma_hold(part);
        if (shared) {
          Scaled::add_shared(sums[p], part, scales_of_rows, halves);
        } else {
          Scaled::add_scaled(sums[p], part, scales_of_rows, column_scales);
        }
      }
    }
    ring.release(ring.slot);
    ring.advance();
  }

  // kCount k tiles, whose products run while those before are added.
  template <int kCount>
  __device__ void add_tiles(int group, float (&sum)[kPiece / 2]) {
    float parts[kCount][kPiece / 2];
    const float* scales_of[kCount];
    int slots[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ring.wait();
      const auto a = a_descriptor(group), b = b_descriptor(0);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        Wgmma<kPiece>::e4m3_ss(parts[i], a + 2 * slice, b + 2 * slice, slice);
      }
      wgmma_commit();
      scales_of[i] = ring.x_scales();
      slots[i] = ring.slot;
      ring.advance();
    }
    const auto add = [&](int i) {
      wgmma_hold(parts[i]);
      const float* row_scales = scales_of[i] + thread_row(group);
      const float scales_of_rows[2] = {row_scales[0], row_scales[8]};
      if constexpr (kRowScales) {
        Scaled::add_rows(sum, parts[i], scales_of_rows);
      } else {
        Scaled::add_scaled(sum, parts[i], scales_of_rows, scales_of[i] + kGemmRows);
      }
      ring.release(slots[i]);
    };
    if constexpr (kCount > 3) wgmma_wait<3>(), add(kCount - 4);
    if constexpr (kCount > 2) wgmma_wait<2>(), add(kCount - 3);
    if constexpr (kCount > 1) wgmma_wait<1>(), add(kCount - 2);
    wgmma_wait<0>(), add(kCount - 1);
  }

  // The first row of a thread's, within the tile.
  __device__ static int thread_row(int group) {
    return group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  // Element (row 64 * group + 16 * warp + lane / 4 + 8 * i, column 8 * j + 2 * (lane % 4) + e) of
  // the tile.
  __device__ static float& element(Sums& sums, int j, int i, int e) {
    return sums[j / (kPiece / 8)][j % (kPiece / 8) * 4 + 2 * i + e];
  }

  // The scales of f8 belong to the tile's columns. They are on their way while it is multiplied.
  __device__ float* scales_of_tile(int group) const {
    return ring.column_scales + (2 * group + tiles_done % 2) * 256;
  }
  __device__ void fetch_column_scales(const unsigned char* weight, const GemmTile& tile,
                                      int group) const {
    const int column = threadIdx.x % 128 * 4, row = tile.column + column;
    if (column < tile.columns) {
      copy_async_16(
          scales_of_tile(group) + column,
          weight + ring.weight_offset(row / kTileRows, Ring::kTiles) + row % kTileRows * 4, true);
    }
    commit_copies();
  }
  __device__ void scale_columns(int group, Sums& sums) {
    wait_copies<0>();
    named_barrier(3 + group, 128);
    const auto* pairs = reinterpret_cast<const float2*>(scales_of_tile(group)) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 scale = pairs[j * 4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        element(sums, j, i, 0) *= scale.x;
        element(sums, j, i, 1) *= scale.y;
      }
    }
    ++tiles_done;
  }

  // The whole kernel; `rows` is a word of the step block, which each role reads for itself.
  // `store(tile, group, sums)` is called by a consumer warpgroup for each of its tiles, `flush()`
  // after the last.
  template <class Store, class Flush>
  __device__ void run(const void* x, const void* weight, const int* rows, Store store,
                      Flush flush) {
    launch_dependents();
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);  // known to be warp-uniform
    if (group == kGemmConsumers / 128) {
      if constexpr (kMoveRegisters) give_registers<24>();
      const int producer = threadIdx.x / 32 % 4;
      if (producer < Ring::kProducers && elect_one()) {
        ring.feed(producer, static_cast<const unsigned char*>(x),
                  static_cast<const unsigned char*>(weight), *rows);
      }
    } else {
      if constexpr (kMoveRegisters) take_registers<240>();
      wait_for_inputs();
      Sums sums;
      ring.walk(*rows, [&](const GemmTile& tile) {
        if constexpr (kRowScales) {
          fetch_column_scales(static_cast<const unsigned char*>(weight), tile, group);
        }
        multiply(tile, group, sums);
        if constexpr (kRowScales) scale_columns(group, sums);
        store(tile, group, sums);
      });
      flush();
    }
  }
};

}  // namespace atlas
