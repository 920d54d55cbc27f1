// Products of many rows with weights of 4 bits: as gemm.cuh, but the weights are wgmma's A, whose
// registers each consumer expands from codes (four_bit.cuh), and rows of x (tokens) are its N.
//
// A block computes tiles of 128 weight rows by Cut::kTokens tokens, one after the other. A stage of
// the ring is one k tile (64 columns) of both: codes and scales as they lie in `frag4`, tokens in
// the swizzle of `tiles`. Two warpgroups of consumers take 64 weight rows each; while the tensor
// cores have the registers of one k tile, the next one's are made, so that with 256 tokens a
// warpgroup expands for about 150 of the 1,024 cycles that both need for a k tile.
//
// Every element is summed over k in ascending order by the tensor cores: its bits depend neither on
// kTokens nor on the other rows.
//
// The file of an op gives `Cut`:
//   Format   of four_bit.cuh
//   kTokens  of a tile
//   kGroup   token tiles that are walked together, so that the L2 serves both operands
//   kStages  of the ring
// and the matrix's size when it runs: one kernel serves all shapes that are cut alike.
#pragma once

#include "atlas/bulk_copy.cuh"
#include "atlas/convert.cuh"
#include "atlas/four_bit.cuh"
#include "atlas/pdl.cuh"
#include "atlas/tiles.cuh"
#include "atlas/wgmma.cuh"

namespace atlas {

constexpr int kGemm4Consumers = 256;

// Stages of the ring that `shared` bytes hold.
template <class Format>
__host__ __device__ constexpr int gemm4_stages(int shared, int tokens) {
  const int stages = shared / (tokens * kTileRowBytes + Format::kTile + 16);
  return stages < 12 ? stages : 12;
}

// Where one tile lies; `tokens` is how many of it exist.
struct Gemm4Tile {
  int block, token, tokens;
};

template <class Cut>
struct Gemm4 {
  using Format = typename Cut::Format;
  static constexpr int kTokens = Cut::kTokens, kStages = Cut::kStages;
  static constexpr int kTokenBytes = kTokens * kTileRowBytes;
  static constexpr int kBytes = kStages * (kTokenBytes + Format::kTile + 16);
  // Registers move from the producer to consumers that need more than an equal share.
  static constexpr bool kMoveRegisters = kTokens > 128;
  static_assert(kStages >= 2, "the ring has at least two stages");

  // What wgmma.cuh's D holds, of weight rows 64 * warpgroup...
  using Sums = float[kTokens / 2];

  int blocks, k_tiles;
  unsigned char *tokens_, *weights_;
  Barrier *full, *empty;
  int slot = 0;
  unsigned parity = 0;

  // shared: aligned to 1,024 bytes. blocks: of 128 rows of the weight. k: in elements.
  __device__ Gemm4(unsigned char* shared, int blocks, int k)
      : blocks(blocks),
        k_tiles(ceil_div(k, 64)),
        tokens_(shared),
        weights_(shared + kStages * kTokenBytes),
        full(reinterpret_cast<Barrier*>(weights_ + kStages * Format::kTile)),
        empty(full + kStages) {}

  __device__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }

  // Calls visit(tile) for every tile of this block: block by block through groups of kGroup token
  // tiles.
  template <class Visit>
  __device__ void walk(int rows, Visit visit) const {
    const int across = ceil_div(rows, kTokens);
    const int of_group = Cut::kGroup * blocks;
    int first = 0;  // token tile of the group
    for (int inside = blockIdx.x;; inside += gridDim.x) {
      for (; inside >= of_group; inside -= of_group) first += Cut::kGroup;
      const int width = min(Cut::kGroup, across - first);
      if (inside >= width * blocks) break;
      const int token = (first + inside % width) * kTokens;
      visit(Gemm4Tile{inside / width, token, min(kTokens, rows - token)});
    }
  }

  // The producer: one thread. Weights of the first stages travel before the inputs are there.
  __device__ void feed(const unsigned char* x, const unsigned char* weight, int rows) {
    const int early = min(kStages, k_tiles);
    bool first = true;
    walk(rows, [&](const Gemm4Tile& tile) {
      int k = 0;
      if (first) {
        first = false;
        for (; k < early; ++k) {
          load_weight(weight, tile, k);
          advance();
        }
        wait_for_inputs();
        slot = 0;
        parity = 0;
        for (k = 0; k < early; ++k) {
          load_tokens(x, tile, k);
          advance();
        }
      }
      for (; k < k_tiles; ++k) {
        empty[slot].wait(parity ^ 1);
        load_weight(weight, tile, k);
        load_tokens(x, tile, k);
        advance();
      }
    });
    wait_for_inputs();
  }

  // A consumer warpgroup's tile.
  __device__ void multiply(const unsigned char* weight, const Gemm4Tile& tile, Sums& sums) {
    unsigned fragments[2][4][4];
    int last = -1;
#pragma unroll 1
    for (int k = 0;;) {
      step(k > 0, last, fragments[0], sums);
      if (++k == k_tiles) break;
      step(true, last, fragments[1], sums);
      if (++k == k_tiles) break;
    }
    wgmma_wait<0>();
    wgmma_hold(sums);
    release(last);
    RowFactors4<Format>(weight + (tile.block + 1) * block_bytes() - Format::kTail).apply(sums);
  }

  // The whole kernel; `rows` is a word of the step block. `store(tile, sums)` is called by each
  // consumer warpgroup for its part of a tile.
  template <class Store>
  __device__ void run(const void* x, const void* weight, const int* rows, Store store) {
    launch_dependents();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        full[i].init(1);
        empty[i].init(kGemm4Consumers / 32);
      }
      publish_barriers();
    }
    __syncthreads();
    const auto* weights = static_cast<const unsigned char*>(weight);
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // known to be warp-uniform
    if (warp >= kGemm4Consumers / 32) {
      if constexpr (kMoveRegisters) give_registers<40>();
      if (warp == kGemm4Consumers / 32 && elect_one()) {
        feed(static_cast<const unsigned char*>(x), weights, *rows);
      }
    } else {
      if constexpr (kMoveRegisters) take_registers<232>();
      wait_for_inputs();
      Sums sums;
      walk(*rows, [&](const Gemm4Tile& tile) {
        multiply(weights, tile, sums);
        store(tile, sums);
      });
    }
  }

 private:
  __device__ size_t block_bytes() const {
    return static_cast<size_t>(k_tiles) * Format::kTile + Format::kTail;
  }
  // Announces all of the stage's bytes.
  __device__ void load_weight(const unsigned char* weight, const Gemm4Tile& tile, int k) const {
    full[slot].arrive_expect(Format::kTile + tile.tokens * kTileRowBytes);
    bulk_load(weights_ + slot * Format::kTile,
              weight + tile.block * block_bytes() + k * Format::kTile, Format::kTile, full[slot]);
  }
  __device__ void load_tokens(const unsigned char* x, const Gemm4Tile& tile, int k) const {
    for (int done = 0; done < tile.tokens; done += kTileRows) {
      const int row = tile.token + done, count = min(kTileRows, tile.tokens - done);
      bulk_load(tokens_ + slot * kTokenBytes + done * kTileRowBytes,
                x + tile_offset(row / kTileRows, k, k_tiles) + row % kTileRows * kTileRowBytes,
                count * kTileRowBytes, full[slot]);
    }
  }

  // One k tile. The one before has been multiplied when it returns, and its slot is given back.
  __device__ void step(bool accumulate, int& last, unsigned (&a)[4][4], Sums& sums) {
    full[slot].wait(parity);
    const auto packed = Format::load(weights_ + slot * Format::kTile);
    const auto b = wgmma_descriptor(tokens_ + slot * kTokenBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) Format::expand(packed, i, a[i]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma<kTokens>::bf16_rs(sums, a[i], b + 2 * i, accumulate || i > 0);
    wgmma_commit();
    if (last >= 0) {
      wgmma_wait<1>();
      release(last);
    }
    last = slot;
    advance();
  }

  __device__ void release(int released) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[released].arrive();
  }
};

}  // namespace atlas
