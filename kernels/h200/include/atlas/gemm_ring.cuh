// The ring of a product of many rows (gemm.cuh): which tiles of the product a block has, and who
// brings their operands. One stage holds a k tile (128 bytes of k) of both; since the operands lie
// in the swizzle that wgmma reads, filling it takes a few plain bulk copies.
//
// Blocks do not share what they load: multicasts of plain bulk copies to a cluster of two ran at a
// third less (docs/kernels/ledger.md).
#pragma once

#include "atlas/bulk_copy.cuh"
#include "atlas/convert.cuh"
#include "atlas/gemm_format.cuh"
#include "atlas/mbarrier.cuh"
#include "atlas/pdl.cuh"
#include "atlas/tiles.cuh"

namespace atlas {

constexpr int kGemmRows = 128, kGemmConsumers = 256;

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
struct GemmRing {
  static constexpr int kRows = kGemmRows, kColumns = Cut::kColumns, kStages = Cut::kStages;
  static constexpr int kTiles = Cut::kTiles;
  static constexpr bool kScaled = Cut::kFormat != GemmFormat::kBf16;
  static constexpr bool kRowScales = Cut::kFormat == GemmFormat::kRowScales;
  static constexpr bool kGroupScales = Cut::kFormat == GemmFormat::kGroupScales;
  static constexpr int kStageBytes = (kRows + kColumns) * kTileRowBytes;
  static constexpr int kStageScales = kScaled ? kRows + (kGroupScales ? kColumns : 0) : 0;
  static constexpr int kColumnScaleBytes = kRowScales ? kGemmColumnScaleBytes : 0;
  static constexpr int kBytes = kStages * (kStageBytes + kStageScales * 4 + 16) + kColumnScaleBytes;
  // Each takes every kProducers-th k tile and waits for one use of its slot at a time: with fewer
  // slots than producers one would lap the barrier.
  static constexpr int kProducers = least(4, kStages);

  unsigned char* stages;
  float* scales;
  float* column_scales;
  Barrier *full, *empty;
  int slot = 0;
  unsigned parity = 0;

  __device__ explicit GemmRing(unsigned char* shared)
      : stages(shared),
        scales(reinterpret_cast<float*>(shared + kStages * kStageBytes)),
        column_scales(scales + kStages * kStageScales),
        full(reinterpret_cast<Barrier*>(column_scales + kColumnScaleBytes / 4)),
        empty(full + kStages) {}

  // One thread, before any other uses the ring.
  __device__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kGemmConsumers / 32);
    }
    publish_barriers();
  }

  __device__ unsigned char* x_stage() const { return stages + slot * kStageBytes; }
  __device__ unsigned char* weight_stage() const { return x_stage() + kRows * kTileRowBytes; }
  __device__ float* x_scales() const { return scales + slot * kStageScales; }
  __device__ float* weight_scales() const { return x_scales() + kRows; }
  // Until the slot's operands are there.
  __device__ void wait() const { full[slot].wait(parity); }
  __device__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }

  // Calls visit(tile) for every tile of this block: column by column through groups of kGroup row
  // tiles.
  template <class Visit>
  __device__ static void walk(int rows, Visit visit) {
    constexpr int kAcross = ceil_div(Cut::kWeightRows, kColumns);
    constexpr int kPadded = round_up(Cut::kWeightRows, kTileRows);  // rows that exist
    const int down = ceil_div(rows, kRows);
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
};

}  // namespace atlas
