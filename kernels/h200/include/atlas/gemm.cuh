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
//
// Blocks do not share what they load: multicasts of plain bulk copies to a cluster of two ran at a
// third less (docs/kernels/ledger.md).
#pragma once

#include "atlas/async_copy.cuh"
#include "atlas/bulk_copy.cuh"
#include "atlas/pdl.cuh"
#include "atlas/tiles.cuh"
#include "atlas/wgmma.cuh"

namespace atlas {

constexpr int kGemmRows = 128, kGemmConsumers = 256;

// x and weight are bf16; or x is f8g128 and the weight f8 (a scale a row) or f8g128 too.
enum class GemmFormat { kBf16, kRowScales, kGroupScales };

__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int round_up(int a, int b) { return (a + b - 1) / b * b; }

// Scales of a tile's columns: of two tiles for each warpgroup, whose first warps fetch the next
// one's while its last still read.
constexpr int kGemmColumnScaleBytes = 2 * 2 * 256 * 4;

// Stages of the ring that `shared` bytes hold. More than 20 only lengthen the start.
__host__ __device__ constexpr int gemm_stages(int shared, int columns, GemmFormat format) {
  if (format == GemmFormat::kRowScales) shared -= kGemmColumnScaleBytes;
  const int row_bytes = kTileRowBytes + (format == GemmFormat::kBf16 ? 0 : 4);
  const int column_bytes = kTileRowBytes + (format == GemmFormat::kGroupScales ? 4 : 0);
  return least(20, shared / (kGemmRows * row_bytes + columns * column_bytes + 16));
}

// Where one tile lies; `rows` and `columns` are how many of it exist.
struct GemmTile {
  int row, column, rows, columns;
};

template <class Cut>
struct Gemm {
  static constexpr int kRows = kGemmRows, kColumns = Cut::kColumns, kStages = Cut::kStages;
  static constexpr int kTiles = Cut::kTiles;
  static constexpr bool kScaled = Cut::kFormat != GemmFormat::kBf16, kPaired = Cut::kPaired;
  static constexpr bool kRowScales = Cut::kFormat == GemmFormat::kRowScales;
  static constexpr bool kGroupScales = Cut::kFormat == GemmFormat::kGroupScales;
  static constexpr int kPadded = round_up(Cut::kWeightRows, kTileRows);  // rows that exist
  static constexpr int kPiece = !kScaled || kColumns <= 128 ? kColumns : kColumns / 2;
  static constexpr int kPieces = kColumns / kPiece;
  // Narrow products are over sooner than what surrounds them: k tiles of f8g128 that a warpgroup
  // starts together, and of bf16 that may still run when the next starts (128 rows by 32 columns,
  // k = 14,336: 31.4 us for 35.0, and 50.5 for 52.5).
  static constexpr int kSpan = kPieces == 1 && kPiece <= 64 ? (kPiece <= 32 ? 4 : 2) : 1;
  static constexpr int kLag = kColumns <= 64 ? 2 : 1;
  static constexpr int kStageBytes = (kRows + kColumns) * kTileRowBytes;
  static constexpr int kStageScales = kScaled ? kRows + (kGroupScales ? kColumns : 0) : 0;
  static constexpr int kColumnScaleBytes = kRowScales ? kGemmColumnScaleBytes : 0;
  static constexpr int kBytes = kStages * (kStageBytes + kStageScales * 4 + 16) + kColumnScaleBytes;
  // Each takes every kProducers-th k tile and waits for one use of its slot at a time: with fewer
  // slots than producers one would lap the barrier.
  static constexpr int kProducers = least(4, kStages);
  // Registers move from the producer to consumers that need more than an equal share.
  static constexpr bool kMoveRegisters = kColumns * (kScaled ? 2 : 1) > 128;
  static_assert(kColumns % 16 == 0 && kStages > kSpan + kLag,
                "operands are made of atoms of 8 rows");

  // Finished sums of a thread: piece, and there what Wgmma<kPiece> holds.
  using Sums = float[kPieces][kPiece / 2];

  unsigned char* stages;
  float* scales;
  float* column_scales;
  Barrier *full, *empty;
  int slot = 0;
  unsigned parity = 0, tiles_done = 0;

  __device__ explicit Gemm(unsigned char* shared)
      : stages(shared),
        scales(reinterpret_cast<float*>(shared + kStages * kStageBytes)),
        column_scales(scales + kStages * kStageScales),
        full(reinterpret_cast<Barrier*>(column_scales + kColumnScaleBytes / 4)),
        empty(full + kStages) {}

  __device__ unsigned char* x_stage() const { return stages + slot * kStageBytes; }
  __device__ unsigned char* weight_stage() const { return x_stage() + kRows * kTileRowBytes; }
  __device__ float* x_scales() const { return scales + slot * kStageScales; }
  __device__ float* weight_scales() const { return x_scales() + kRows; }
  __device__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }

  // Calls visit(tile) for every tile of this block: column by column through groups of kGroup row
  // tiles.
  template <class Visit>
  __device__ static void walk(int rows, Visit visit) {
    constexpr int kAcross = (Cut::kWeightRows + kColumns - 1) / kColumns;
    const int down = (rows + kRows - 1) / kRows;
    for (int i = blockIdx.x; i < down * kAcross; i += gridDim.x) {
      const int first = i / (Cut::kGroup * kAcross) * Cut::kGroup;
      const int height = min(Cut::kGroup, down - first);
      const int inside = i - first * kAcross;
      GemmTile tile;
      tile.row = (first + inside % height) * kRows;
      tile.column = inside / height * kColumns;
      tile.rows = min(kRows, rows - tile.row);
      tile.columns = min(kColumns, kPadded - tile.column);
      visit(tile);
    }
  }

  // Offset of a k tile of the weight.
  __device__ static size_t weight_offset(int row_block, int k_tile) {
    if constexpr (kRowScales) {
      return static_cast<size_t>(row_block) * (kTiles * kTileBytes + kTileScaleBytes) +
             static_cast<size_t>(k_tile) * kTileBytes;
    } else {
      return tile_offset<kScaled>(row_block, k_tile, kTiles);
    }
  }

  // Rows first .. first + count of a k tile, from their place in memory to the stage.
  template <bool kWeight>
  __device__ void load(const unsigned char* matrix, int first, int count, int k_tile,
                       unsigned char* codes, float* row_scales) const {
    while (count > 0) {
      const int inside = first % kTileRows, n = min(count, kTileRows - inside);
      const unsigned char* tile =
          matrix + (kWeight ? weight_offset(first / kTileRows, k_tile)
                            : tile_offset<kScaled>(first / kTileRows, k_tile, kTiles));
      bulk_load(codes, tile + inside * kTileRowBytes, n * kTileRowBytes, full[slot]);
      codes += n * kTileRowBytes;
      if constexpr (kWeight ? kGroupScales : kScaled) {
        bulk_load(row_scales, tile + kTileBytes + inside * 4, n * 4, full[slot]);
        row_scales += n;
      }
      first += n;
      count -= n;
    }
  }
  // Rows of x come in fours: 16 bytes of scales.
  __device__ static int loaded_rows(const GemmTile& tile) { return round_up(tile.rows, 4); }
  __device__ void load_x(const unsigned char* x, const GemmTile& tile, int k_tile) const {
    load<false>(x, tile.row, loaded_rows(tile), k_tile, x_stage(), x_scales());
  }
  __device__ void load_weight(const unsigned char* weight, const GemmTile& tile, int k_tile) const {
    load<true>(weight, tile.column, tile.columns, k_tile, weight_stage(), weight_scales());
  }

  // A producer, one thread: every kProducers-th stage. Weights of the first stages travel
  // before the inputs are there.
  __device__ void feed(int producer, const unsigned char* x, const unsigned char* weight,
                       int rows) {
    constexpr int kEarly = least(kStages, kTiles);
    bool first = true;
    int turn = 0;
    walk(rows, [&](const GemmTile& tile) {
      const unsigned bytes = loaded_rows(tile) * (kTileRowBytes + (kScaled ? 4 : 0)) +
                             tile.columns * (kTileRowBytes + (kGroupScales ? 4 : 0));
      int k_tile = 0;
      if (first) {
        first = false;
        for (slot = producer; slot < kEarly; slot += kProducers) {
          full[slot].arrive_expect(bytes);
          load_weight(weight, tile, slot);
        }
        wait_for_inputs();
        for (slot = producer; slot < kEarly; slot += kProducers) load_x(x, tile, slot);
        k_tile = kEarly;
        turn = kEarly % kProducers;
        slot = kEarly % kStages;
        parity = kEarly / kStages;
      }
      for (; k_tile < kTiles; ++k_tile) {
        if (turn == producer) {
          empty[slot].wait(parity ^ 1);
          full[slot].arrive_expect(bytes);
          load_weight(weight, tile, k_tile);
          load_x(x, tile, k_tile);
        }
        turn = (turn + 1) % kProducers;
        advance();
      }
    });
    wait_for_inputs();
  }

  // Gives a slot back to its producer: once per warp of consumers.
  __device__ void release(int released) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[released].arrive();
  }

  // A consumer's half of a tile. Rows that do not exist are not computed.
  __device__ void multiply(const GemmTile& tile, int group, Sums& sums) {
    if (tile.rows <= group * 64) {
      for (int k = 0; k < kTiles; ++k) {
        full[slot].wait(parity);
        release(slot);
        advance();
      }
    } else if constexpr (kScaled) {
      multiply_scaled(group, sums);
    } else {
      multiply_bf16(group, sums[0]);
    }
  }

  __device__ unsigned long long a_descriptor(int group) const {
    return wgmma_descriptor(x_stage() + group * 64 * kTileRowBytes);
  }
  __device__ unsigned long long b_descriptor(int piece) const {
    return wgmma_descriptor(weight_stage() + piece * kPiece * kTileRowBytes);
  }

  __device__ void multiply_bf16(int group, float (&sum)[kColumns / 2]) {
    int done = slot;  // the next slot to give back
#pragma unroll 1
    for (int k = 0; k < kTiles; ++k) {
      full[slot].wait(parity);
      const auto a = a_descriptor(group), b = b_descriptor(0);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        Wgmma<kColumns>::template bf16_ss<0>(sum, a + 2 * slice, b + 2 * slice, k + slice);
      }
      wgmma_commit();
      wgmma_wait<kLag>();
      if (k >= kLag) release_next(done);
      advance();
    }
    wgmma_wait<0>();
    wgmma_hold(sum);
    for (int i = 0; i < least(kLag, kTiles); ++i) release_next(done);
  }
  __device__ void release_next(int& done) const {
    release(done);
    if (++done == kStages) done = 0;
  }

  __device__ void multiply_scaled(int group, Sums& sums) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int i = 0; i < kPiece / 2; ++i) sums[p][i] = 0.0f;
    }
    constexpr int kWhole = kTiles / kSpan * kSpan;
#pragma unroll 1
    for (int k = 0; k < kWhole; k += kSpan) {
      if constexpr (kSpan == 1) {
        add_tile(group, sums);
      } else {
        add_tiles<kSpan>(group, sums[0]);
      }
    }
    if constexpr (kWhole < kTiles) add_tiles<kTiles - kWhole>(group, sums[0]);
  }

  // One k tile, piece by piece.
  __device__ void add_tile(int group, Sums& sums) {
    full[slot].wait(parity);
    const auto a = a_descriptor(group);
    const float* row_scales = x_scales() + thread_row(group);
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
        add_rows(sums[p], part, scales_of_rows);
      } else {
        const float* column_scales = weight_scales() + p * kPiece;
        float halves[2];
        const bool shared = kPiece == 128 && shares_scales(column_scales, halves);
        wgmma_wait<0>();
        wgmma_hold(part);
        if (shared) {
          add_shared(sums[p], part, scales_of_rows, halves);
        } else {
          add_scaled(sums[p], part, scales_of_rows, column_scales);
        }
      }
    }
    release(slot);
    advance();
  }

  // sum += part * scale of the row.
  __device__ static void add_rows(float (&sum)[kPiece / 2], const float (&part)[kPiece / 2],
                                  const float (&row_scales)[2]) {
#pragma unroll
    for (int at = 0; at < kPiece / 2; ++at) {
      sum[at] = fmaf(part[at], row_scales[at / 2 % 2], sum[at]);
    }
  }

  // Whether 128 columns have one scale in each half: of 64 columns, or, paired, of those of the
  // gate and of those of the up. Blocks of 64 and more rows do.
  __device__ static bool shares_scales(const float* column_scales, float (&halves)[2]) {
    const int lane = threadIdx.x % 32;
    const float4 own = reinterpret_cast<const float4*>(column_scales)[lane];
    halves[0] = column_scales[0];
    halves[1] = column_scales[kPaired ? 8 : 64];
    const float expected = (kPaired ? lane / 2 % 2 : lane / 16) ? halves[1] : halves[0];
    return __all_sync(0xFFFFFFFFu, own.x == expected && own.y == expected && own.z == expected &&
                                       own.w == expected);
  }
  // As add_scaled, bit for bit.
  __device__ static void add_shared(float (&sum)[kPiece / 2], const float (&part)[kPiece / 2],
                                    const float (&row_scales)[2], const float (&halves)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scales[2] = {row_scales[i] * halves[0], row_scales[i] * halves[1]};
#pragma unroll
      for (int j = 0; j < kPiece / 8; ++j) {
        const float scale = scales[kPaired ? j % 2 : j / 8 % 2];
        const int at = 4 * j + 2 * i;
        sum[at] = fmaf(part[at], scale, sum[at]);
        sum[at + 1] = fmaf(part[at + 1], scale, sum[at + 1]);
      }
    }
  }

  // kCount k tiles, whose products run while those before are added.
  template <int kCount>
  __device__ void add_tiles(int group, float (&sum)[kPiece / 2]) {
    float parts[kCount][kPiece / 2];
    const float* scales_of[kCount];
    int slots[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      full[slot].wait(parity);
      const auto a = a_descriptor(group), b = b_descriptor(0);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) {
        Wgmma<kPiece>::e4m3_ss(parts[i], a + 2 * slice, b + 2 * slice, slice);
      }
      wgmma_commit();
      scales_of[i] = x_scales();
      slots[i] = slot;
      advance();
    }
    const auto add = [&](int i) {
      wgmma_hold(parts[i]);
      const float* row_scales = scales_of[i] + thread_row(group);
      const float scales_of_rows[2] = {row_scales[0], row_scales[8]};
      if constexpr (kRowScales) {
        add_rows(sum, parts[i], scales_of_rows);
      } else {
        add_scaled(sum, parts[i], scales_of_rows, scales_of[i] + kRows);
      }
      release(slots[i]);
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

  // sum += part * scale of the row * scale of the column.
  __device__ static void add_scaled(float (&sum)[kPiece / 2], const float (&part)[kPiece / 2],
                                    const float (&row_scales)[2], const float* column_scales) {
    const auto* pairs = reinterpret_cast<const float2*>(column_scales) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kPiece / 8; ++j) {
      const float2 scale = pairs[j * 4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * j + 2 * i;
        sum[at] = fmaf(part[at], row_scales[i] * scale.x, sum[at]);
        sum[at + 1] = fmaf(part[at + 1], row_scales[i] * scale.y, sum[at + 1]);
      }
    }
  }

  // Element (row 64 * group + 16 * warp + lane / 4 + 8 * i, column 8 * j + 2 * (lane % 4) + e) of
  // the tile.
  __device__ static float& element(Sums& sums, int j, int i, int e) {
    return sums[j / (kPiece / 8)][j % (kPiece / 8) * 4 + 2 * i + e];
  }

  // The scales of f8 belong to the tile's columns. They are on their way while it is multiplied.
  __device__ float* scales_of_tile(int group) const {
    return column_scales + (2 * group + tiles_done % 2) * 256;
  }
  __device__ void fetch_column_scales(const unsigned char* weight, const GemmTile& tile,
                                      int group) const {
    const int column = threadIdx.x % 128 * 4, row = tile.column + column;
    if (column < tile.columns) {
      copy_async_16(scales_of_tile(group) + column,
                    weight + weight_offset(row / kTileRows, kTiles) + row % kTileRows * 4, true);
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
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        full[i].init(1);
        empty[i].init(kGemmConsumers / 32);
      }
      publish_barriers();
    }
    __syncthreads();
    const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);  // known to be warp-uniform
    if (group == kGemmConsumers / 128) {
      if constexpr (kMoveRegisters) give_registers<24>();
      const int producer = threadIdx.x / 32 % 4;
      if (producer < kProducers && elect_one()) {
        feed(producer, static_cast<const unsigned char*>(x),
             static_cast<const unsigned char*>(weight), *rows);
      }
    } else {
      if constexpr (kMoveRegisters) take_registers<240>();
      wait_for_inputs();
      Sums sums;
      walk(*rows, [&](const GemmTile& tile) {
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
