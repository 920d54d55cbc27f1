/* atlas
[serves]
x = ["bf16"]
weight = ["nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m"]
[rows]
# A bound costs no kernel, since n and k are arguments: it chooses among tiles. 1,024, against any
# number, at 700 and 1,024 rows: qkv of Llama-3-8B 87 -> 74 us, down of Llama-3.2-1B 79 -> 45.
up_to = [128, 256, 512, 1024, 0]
[launch]
grid = ["BLOCKS", 1, 1]
block = 384
shared = "shared_memory_per_block"
pdl = true
arguments = ["n", "k"]
[limits]
same_bits = true
[knobs]
BLOCKS = "multiprocessors"
TOKENS = 256
GROUP = 8
[knobs.choices]
TOKENS = [256, 128, 64]
[cost]
# Rounds of tiles, weighed by their tokens: a k tile takes the tensor cores 4 cycles for each, and
# for 64 what two warps of a scheduler take to expand it. Any number of rows: all cost nothing.
launch = "ceil_div(ceil_div(n, 128) * ceil_div(max_rows, TOKENS), BLOCKS) * TOKENS"
[layouts]
x = "tiles"
weight = "frag4"
*/
// linear for prompts with weights of 4 bits: out[r, n] = sum over k of x[r, k] * weight[n, k] +
// bias[n], for any number of rows.
//
// x in `tiles`, weight in `frag4`; out row-major, f32 or bf16; bias [n] f32 or none, added to the
// finished sum. The product is gemm4.cuh's: one persistent block a multiprocessor, tiles of 128
// weight rows by TOKENS rows of x. From registers, eight lanes store 32 bytes of a row of out.
//
// Bytes: the weights once for every token tile and x once for every row block, both mostly from the
// L2, and rows x n outputs. At many rows the tensor cores bound it.
#include "atlas/convert.cuh"
#include "atlas/gemm4.cuh"
#include "atlas/instance.h"
#include "atlas/weights4.cuh"

namespace {

struct Cut {
  using Format = atlas::InstanceFormat;
  static constexpr int kGroup = knobs::GROUP;
  static constexpr int kTokens = knobs::TOKENS;
  static constexpr int kStages = atlas::gemm4_stages<Format>(launch::shared, kTokens);
};
using Gemm = atlas::Gemm4<Cut>;

extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ inline void store_tile(const types::bias* bias, types::out* out, int n,
                                  const atlas::Gemm4Tile& tile, const Gemm::Sums& sums) {
  const int lane = threadIdx.x % 32, token = lane % 4 * 2, left = tile.tokens - token;
  const int column = tile.block * atlas::kTileRows + threadIdx.x / 32 * 16 + lane / 4;
  float added[2] = {};
  if constexpr (HAS_BIAS) {
    if (column < n) added[0] = bias[column];
    if (column + 8 < n) added[1] = bias[column + 8];
  }
  types::out* to = out + static_cast<size_t>(tile.token + token) * n + column;
#pragma unroll
  for (int j = 0; j < Cut::kTokens / 8; ++j, to += 8 * n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * j + e >= left || column + 8 * i >= n) continue;
        to[e * n + 8 * i] = atlas::from_float<types::out>(sums[4 * j + 2 * i + e] + added[i]);
      }
    }
  }
}

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::out* out, const int* rows, int n, int k) {
  Gemm gemm(shared_memory, atlas::ceil_div(n, atlas::kTileRows), k);
  gemm.run(x, weight, rows, [&](const atlas::Gemm4Tile& tile, Gemm::Sums& sums) {
    store_tile(bias, out, n, tile, sums);
  });
}
