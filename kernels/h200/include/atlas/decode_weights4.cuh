// Formats of 4 bits for decode_product.cuh: A operands expanded in registers (four_bit.cuh).
#pragma once

#include "atlas/decode_weights.cuh"
#include "atlas/four_bit.cuh"

namespace atlas {

// While the tensor cores have one tile's registers, the next tile's are made.
template <int kN, class Format>
struct FourBitWeights {
  static constexpr int kTile = Format::kTile, kTail = Format::kTail;
  static constexpr int kSpan = kN <= 32 ? 4 : 2, kUnit = 4, kLag = 1;
  static constexpr bool kScaled = false;
  float sum[kN / 2];

  __device__ void clear() {
#pragma unroll
    for (float& value : sum) value = 0.0f;
  }
  __device__ void multiply(const Slot& slot, int tiles) {
    typename Format::Packed packed = Format::load(slot.weights);
    const auto tokens = wgmma_descriptor(slot.tokens);
#pragma unroll
    for (int tile = 0; tile < kSpan; ++tile) {
      if (tile >= tiles) break;
      unsigned(&a)[4][4] = fragments_[tile % 2];
#pragma unroll
      for (int step = 0; step < 4; ++step) Format::expand(packed, step, a[step]);
      if (tile + 1 < tiles) packed = Format::load(slot.weights + (tile + 1) * kTile);
      const auto b = tokens + tile * kN * kTileRowBytes / 16;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) Wgmma<kN>::bf16_rs(sum, a[step], b + 2 * step, 1);
      wgmma_commit();
      wgmma_wait<1>();
    }
  }
  __device__ void finish(const unsigned char* tail) {
    wgmma_wait<0>();
    wgmma_hold(sum);
    Format::finish(tail, sum);
  }

 private:
  unsigned fragments_[2][4][4];
};

}  // namespace atlas
