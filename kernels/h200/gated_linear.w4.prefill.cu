/* atlas
like = "linear.w4.prefill.cu"
[serves]
out = ["bf16"]
[launch]
arguments = ["intermediate", "k"]
[cost]
launch = "ceil_div(ceil_div(intermediate, 64) * ceil_div(max_rows, TOKENS), BLOCKS) * TOKENS"
[layouts]
weight = "frag4_paired"
out = "tiles"
*/
// gated_linear for prompts with weights of 4 bits: out[r, i] = act(gate) * up, rounded once, with
// gate[r, i] = sum over k of x[r, k] * weight[i, k] + bias[i] and up the same of rows
// intermediate + i.
//
// x and out in `tiles`, weight in `frag4_paired`: of a block of 128 weight rows a thread has gates
// and their ups, 64 columns of out, which are one tile wide. Each warpgroup puts its half of the
// tile together in shared memory and stores whole sectors. Bias [2 * intermediate] f32 or none. The
// product is gemm4.cuh's.
//
// Bytes: as linear.w4.prefill.cu, and rows x intermediate outputs of 2 bytes.
#include "atlas/activation.cuh"
#include "atlas/convert.cuh"
#include "atlas/gemm4.cuh"
#include "atlas/instance.h"
#include "atlas/weights4.cuh"

namespace {

constexpr int kBlockColumns = atlas::kTileRows / 2;

struct Cut {
  using Format = atlas::InstanceFormat;
  static constexpr int kGroup = knobs::GROUP;
  static constexpr int kTokens = knobs::TOKENS;
  static constexpr int kOutBytes = kTokens * atlas::kTileRowBytes;
  static constexpr int kStages = atlas::gemm4_stages<Format>(launch::shared - kOutBytes, kTokens);
};
using Gemm = atlas::Gemm4<Cut>;
static_assert(sizeof(types::out) == 2, "rows of out in bf16");

extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ inline float gated(const types::bias* bias, int inner, int column, float gate,
                              float up) {
  if constexpr (HAS_BIAS) {
    if (column >= inner) return 0.0f;
    gate += bias[column];
    up += bias[inner + column];
  }
  return atlas::activate<constants::activation>(gate) * up;
}

// A warpgroup's half of the tile of out: 32 columns, 4 chunks of 16 bytes a token, put together in
// shared memory of its own. The other warpgroup multiplies meanwhile.
__device__ inline void store_tile(const types::bias* bias, types::out* out, unsigned char* shared,
                                  int inner, const atlas::Gemm4Tile& tile, const Gemm::Sums& sums) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const int column = tile.block * kBlockColumns + threadIdx.x / 32 * 8 + lane / 4;
  unsigned char* half = shared + group * (Cut::kOutBytes / 2);
  // Two tokens in a row have their chunks in other places than the next two: no bank meets twice.
  const auto place = [&](int token, int chunk) {
    return half + token * 64 + (chunk ^ token / 2 % 4) * 16;
  };
#pragma unroll
  for (int j = 0; j < Cut::kTokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float value = gated(bias, inner, column, sums[4 * j + e], sums[4 * j + 2 + e]);
      const int token = 8 * j + lane % 4 * 2 + e;
      *reinterpret_cast<types::out*>(place(token, thread / 32) + lane / 4 * 2) =
          atlas::from_float<types::out>(value);
    }
  }
  atlas::named_barrier(1 + group, 128);
  const int blocks = atlas::ceil_div(inner, kBlockColumns);
#pragma unroll 4
  for (int i = thread; i < 4 * tile.tokens; i += 128) {
    const int row = tile.token + i / 4;
    auto* to = reinterpret_cast<unsigned char*>(out) +
               atlas::tile_offset(row / atlas::kTileRows, tile.block, blocks) +
               atlas::in_tile(row % atlas::kTileRows, 64 * group + i % 4 * 16);
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(place(i / 4, i % 4));
  }
  // Before the next tile's.
  atlas::named_barrier(1 + group, 128);
}

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::out* out, const int* rows, int intermediate, int k) {
  // Behind the tile of out, which is a multiple of the swizzle's atoms.
  Gemm gemm(shared_memory + Cut::kOutBytes, atlas::ceil_div(intermediate, kBlockColumns), k);
  gemm.run(x, weight, rows, [&](const atlas::Gemm4Tile& tile, Gemm::Sums& sums) {
    store_tile(bias, out, shared_memory, intermediate, tile, sums);
  });
}
