// Products of row blocks of 128 weight rows by a step's tokens, by the format of the weights: what
// decode_product.cuh asks of a format.
//
// Two warpgroups share a block, 64 rows each; tokens are wgmma's N. A format is a class with
//   kTokens    N
//   kTogether  row blocks whose sums a thread has
//   kSides     times two warpgroups, with as many row blocks each, that share a tile of tokens
//   kTile      bytes of 128 weight rows by one tile of tokens (128 bytes of k), as in memory
//   kTail      bytes of a row block behind its tiles
//   kSpan      tiles of each row block that one slot of the ring holds, side by side
//   kUnit      tiles, a multiple of kSpan, at whose multiples ranges of k begin
//   kScaled    whether tokens are f8g128: a scale a row behind the codes of each tile
//   kTokensByLanes  whether tokens are copied by all lanes of a warp
//   kLag       slots whose products may still run when multiply() returns: 0 or 1
//   kStarts    whether there is start(slot): multiply() of a whole slot that runs until finish()
//   kMovesRegisters  whether a whole warpgroup copies, and gives its registers up
//   kReadySlots  of the first slots of a range, those whose weights go to registers before inputs
//              are there: prepare<n>(slot), then multiply_ready<n>(slot) in place of multiply()
//   sum        fp32, for each row block as wgmma.cuh has D: thread (warp w, g, t) holds rows 16 w +
//              g + 8 i of its warpgroup, tokens 8 j + 2 t + e in sum[block][4 j + 2 i + e]; where
//              tokens are wgmma's M (kByToken), tokens and rows the other way round
//   begin(tails), multiply(slot, tiles) for the first `tiles` of a slot, finish(tails)
//
// kUnit must not depend on N, nor the order of the arithmetic: every N gives the same bits.
#pragma once

#include "atlas/tiles.cuh"
#include "atlas/wgmma.cuh"

namespace atlas {

// One slot of the ring: weights (of further row blocks at multiples of 1,024), scales of the tokens
// (or nothing), tiles of N tokens.
struct Slot {
  const unsigned char* weights;
  const float* token_scales;
  const unsigned char* tokens;
};

__host__ __device__ constexpr int align_up(int bytes, int unit) {
  return (bytes + unit - 1) / unit * unit;
}

constexpr int kWarpgroup = 128;
__device__ inline int warpgroup() { return threadIdx.x / kWarpgroup; }

// bf16 by bf16: wgmma adds up the whole of k. kByToken: see F8Weights.
template <int kN, int kTogether_, bool kByToken_ = false>
struct Bf16Weights {
  static constexpr bool kByToken = kByToken_;
  static_assert(!kByToken || kN == 128, "two warpgroups have 64 tokens each");
  static constexpr int kTokens = kN, kTogether = kTogether_, kSides = 1;
  static constexpr bool kTokensByLanes = false;
  static constexpr int kReadySlots = 0;
  static constexpr int kTile = kTileBytes, kTail = 0, kSpan = 1, kUnit = 1;
  // Few tokens: the ring is short of data, so a slot is given back at once. Many: products overlap.
  static constexpr int kLag = kN < 64 ? 0 : 1;
  static constexpr bool kScaled = false, kMovesRegisters = kN * kTogether == 256, kStarts = true;
  float sum[kTogether][kN / 2];

  __device__ void begin(const unsigned char* const (& /*tails*/)[kTogether]) {
#pragma unroll
    for (auto& block : sum) {
#pragma unroll
      for (float& value : block) value = 0.0f;
    }
  }
  __device__ void multiply(const Slot& slot, int /*tiles*/) {
    start(slot);
    wgmma_wait<kLag>();
  }
  __device__ void start(const Slot& slot) {
    const int mine = warpgroup() * (kTileBytes / 2);
    const auto weights = wgmma_descriptor(slot.weights + (kByToken ? 0 : mine));
    const auto tokens = wgmma_descriptor(slot.tokens + (kByToken ? mine : 0));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        const auto rows = weights + block * (kTile / 16);
        Wgmma<kN>::bf16_ss(sum[block], (kByToken ? tokens : rows) + 2 * i,
                           (kByToken ? rows : tokens) + 2 * i, 1);
      }
    }
    wgmma_commit();
  }
  __device__ void finish(const unsigned char* const (& /*tails*/)[kTogether]) {
    wgmma_wait<0>();
#pragma unroll
    for (auto& block : sum) wgmma_hold(block);
  }
};

// E4M3 by f8g128: the tensor cores' sum of E4M3 products is short of fp32, so each tile, which is
// one group of the tokens' scales, is summed by itself and added in fp32. Weights are f8 (a scale a
// row, behind the row block) or f8g128 (a scale a row and tile, behind the tile).
//
// kByToken: 128 tokens are wgmma's M, 64 a warpgroup, and weights its N. A thread has two tokens:
// two of their scales a tile instead of 32, and at the end four lanes have all of a token. Of
// gate_up of Llama-3-8B alone on an H200 the stream goes from 3.60 to 3.74 TB/s, and what it takes
// besides from 5.5 to 1.7 us.
template <int kN, int kTogether_, bool kRowScales, bool kByToken_ = false>
struct F8Weights {
  static constexpr bool kByToken = kByToken_;
  static constexpr int kTokens = kN, kTogether = kTogether_, kSides = 1;
  static_assert(!kByToken || (kN == 128 && kTogether <= 2), "two warpgroups have 64 tokens each");
  static constexpr bool kTokensByLanes = false;
  static constexpr int kReadySlots = 0;
  static constexpr int kTile = kTileStride<!kRowScales>, kTail = kRowScales ? kTileScaleBytes : 0;
  static constexpr int kSpan = 1, kUnit = 1, kLag = 0, kStride = align_up(kTile, 1024);
  static constexpr bool kScaled = true, kMovesRegisters = kN * kTogether == 256, kStarts = false;
  float sum[kTogether][kN / 2];
  float row_scale;  // by token: of the threadIdx.x-th row of all row blocks together

  __device__ void begin(const unsigned char* const (&tails)[kTogether]) {
    if constexpr (kByToken && kRowScales) {
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        const float* from = reinterpret_cast<const float*>(tails[block]) + threadIdx.x % kWarpgroup;
        if (block != warpgroup()) continue;
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(row_scale) : "l"(from));
      }
    }
#pragma unroll
    for (int block = 0; block < kTogether; ++block) {
#pragma unroll
      for (float& value : sum[block]) value = 0.0f;
      if constexpr (kRowScales && !kByToken) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float* from = reinterpret_cast<const float*>(tails[block]) + row() + 8 * i;
          asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale_[block][i]) : "l"(from));
        }
      }
    }
  }
  __device__ void multiply(const Slot& slot, int /*tiles*/) {
#pragma unroll
    for (int block = 0; block < kTogether; ++block) {
      const unsigned char* const weights = slot.weights + block * kStride;
      const int mine = warpgroup() * (kTileBytes / 2);
      const auto a = wgmma_descriptor(kByToken ? slot.tokens + mine : weights + mine);
      const auto b = wgmma_descriptor(kByToken ? weights : slot.tokens);
      float tile[kN / 2];
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) Wgmma<kN>::e4m3_ss(tile, a + 2 * i, b + 2 * i, i > 0);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_hold(tile);
      if constexpr (kByToken) {
        add_by_token(tile, slot.token_scales, weights + kTileBytes, sum[block]);
      } else {
        add(tile, slot.token_scales, weights + kTileBytes, sum[block]);
      }
    }
  }
  __device__ void finish(const unsigned char* const (& /*tails*/)[kTogether]) {
    if constexpr (kRowScales && !kByToken) {  // whoever takes them by token multiplies them
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) sum[block][i] *= scale_[block][i / 2 % 2];
      }
    }
  }

 private:
  float scale_[kTogether][2];  // of rows, if they have one

  __device__ static int row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

  // `row_scales`: of the tile, if its weights have them.
  __device__ static void add(const float (&tile)[kN / 2], const float* token_scales,
                             const unsigned char* row_scales, float (&sums)[kN / 2]) {
    float scale[2];
    if constexpr (!kRowScales) {
      const float* rows = reinterpret_cast<const float*>(row_scales) + row();
      scale[0] = rows[0];
      scale[1] = rows[8];
    }
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 tokens =
          *reinterpret_cast<const float2*>(token_scales + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 by = tokens;
        if constexpr (!kRowScales) {
          by.x *= scale[i];
          by.y *= scale[i];
        }
        float* const to = sums + 4 * j + 2 * i;
        to[0] = fmaf(tile[4 * j + 2 * i], by.x, to[0]);
        to[1] = fmaf(tile[4 * j + 2 * i + 1], by.y, to[1]);
      }
    }
  }
  __device__ static void add_by_token(const float (&tile)[kN / 2], const float* token_scales,
                                      const unsigned char* row_scales, float (&sums)[kN / 2]) {
    const float scale[2] = {token_scales[row()], token_scales[row() + 8]};
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      float2 rows = make_float2(1.0f, 1.0f);
      if constexpr (!kRowScales) {
        rows = reinterpret_cast<const float2*>(row_scales)[4 * j + threadIdx.x % 4];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 by = kRowScales ? make_float2(scale[i], scale[i])
                                     : make_float2(scale[i] * rows.x, scale[i] * rows.y);
        float* const to = sums + 4 * j + 2 * i;
        to[0] = fmaf(tile[4 * j + 2 * i], by.x, to[0]);
        to[1] = fmaf(tile[4 * j + 2 * i + 1], by.y, to[1]);
      }
    }
  }
};

}  // namespace atlas
