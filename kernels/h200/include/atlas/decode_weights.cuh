// Products of a block of 128 weight rows by a step's tokens, by the format of the weights: what
// decode_product.cuh asks of a format.
//
// Two warpgroups share a block, 64 rows each; tokens are wgmma's N. A format is a class template of
// N with
//   kTile    bytes of 128 weight rows by one tile of tokens (128 bytes of k), as in memory
//   kTail    bytes of a row block behind its tiles
//   kSpan    tiles that one slot of the ring holds, side by side
//   kUnit    tiles, a multiple of kSpan, at whose multiples ranges of k begin
//   kScaled  whether tokens are f8g128: a scale a row behind the codes of each tile
//   kLag     slots whose products may still run when multiply() returns: 0 or 1
//   sum      fp32, where wgmma.cuh has D: thread (warp w, g, t) holds rows 16 w + g + 8 i of its
//            warpgroup, tokens 8 j + 2 t + e in sum[4 j + 2 i + e]
//   clear(), multiply(slot, tiles) for the first `tiles` of a slot, finish(tail)
//
// kUnit must not depend on N, nor the order of the arithmetic: every N gives the same bits.
#pragma once

#include "atlas/tiles.cuh"
#include "atlas/wgmma.cuh"

namespace atlas {

// One slot of the ring: weights, scales of the tokens (or nothing), tiles of N tokens.
struct Slot {
  const unsigned char* weights;
  const float* token_scales;
  const unsigned char* tokens;
};

constexpr int kWarpgroup = 128;
__device__ inline int warpgroup() { return threadIdx.x / kWarpgroup; }

// bf16 by bf16: wgmma adds up the whole of k.
template <int kN>
struct Bf16Weights {
  static constexpr int kTile = kTileBytes, kTail = 0, kSpan = 1, kUnit = 1;
  // Few tokens: the ring is short of data, so a slot is given back at once. Many: products overlap.
  static constexpr int kLag = kN < 64 ? 0 : 1;
  static constexpr bool kScaled = false;
  float sum[kN / 2];

  __device__ void clear() {
#pragma unroll
    for (float& value : sum) value = 0.0f;
  }
  __device__ void multiply(const Slot& slot, int /*tiles*/) {
    const auto a = wgmma_descriptor(slot.weights + warpgroup() * (kTileBytes / 2));
    const auto b = wgmma_descriptor(slot.tokens);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma<kN>::bf16_ss(sum, a + 2 * i, b + 2 * i, 1);
    wgmma_commit();
    wgmma_wait<kLag>();
  }
  __device__ void finish(const unsigned char* /*tail*/) {
    if constexpr (kLag != 0) wgmma_wait<0>();
    wgmma_hold(sum);
  }
};

// f8g128 by f8g128: the tensor cores' sum of E4M3 products is short of fp32, so each tile, which is
// one group of both scales, is summed by itself and added in fp32.
template <int kN>
struct F8Weights {
  static constexpr int kTile = kTileStride<true>, kTail = 0, kSpan = 1, kUnit = 1, kLag = 0;
  static constexpr bool kScaled = true;
  // Tokens whose tile sums are in registers at a time.
  static constexpr int kPart = kN < 64 ? kN : kN < 256 ? 64 : 32;
  float sum[kN / 2];

  __device__ void clear() {
#pragma unroll
    for (float& value : sum) value = 0.0f;
  }
  __device__ void multiply(const Slot& slot, int /*tiles*/) {
    const auto a = wgmma_descriptor(slot.weights + warpgroup() * (kTileBytes / 2));
    const float* row_scales = reinterpret_cast<const float*>(slot.weights + kTileBytes);
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
    const float scale[2] = {row_scales[row], row_scales[row + 8]};
#pragma unroll
    for (int part = 0; part < kN; part += kPart) {
      const auto b = wgmma_descriptor(slot.tokens + part * kTileRowBytes);
      float tile[kPart / 2];
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) Wgmma<kPart>::e4m3_ss(tile, a + 2 * i, b + 2 * i, i > 0);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_hold(tile);
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
        const float2 tokens =
            *reinterpret_cast<const float2*>(slot.token_scales + part + 8 * j + token);
        float* to = sum + part / 2 + 4 * j;
        to[0] = fmaf(tile[4 * j], scale[0] * tokens.x, to[0]);
        to[1] = fmaf(tile[4 * j + 1], scale[0] * tokens.y, to[1]);
        to[2] = fmaf(tile[4 * j + 2], scale[1] * tokens.x, to[2]);
        to[3] = fmaf(tile[4 * j + 3], scale[1] * tokens.y, to[3]);
      }
    }
  }
  __device__ void finish(const unsigned char* /*tail*/) {}
};

}  // namespace atlas
