/* atlas
[serves]
x = ["bf16"]
weight = ["nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m"]
out = ["bf16"]
[rows]
up_to = [64, 128, 256, 512, 1024, 0]
[launch]
grid = ["BLOCKS", 1, 1]
block = 384
shared = "shared_memory_per_block"
pdl = true
[limits]
same_bits = true
[knobs]
BLOCKS = "multiprocessors"
TOKENS = 0
GROUP = 8
[layouts]
x = "tiles"
weight = "frag4_paired"
out = "tiles"
*/
// gated_linear for prompts with weights of 4 bits: out[r, i] = act(gate) * up, rounded once, with
// gate[r, i] = sum over k of x[r, k] * weight[i, k] + bias[i] and up the same of rows
// intermediate + i.
//
// x and out in `tiles`, weight in `frag4_paired`: of a block of 128 weight rows a thread has gates
// and their ups, 64 columns of out, which are one tile wide. So a tile of the product is whole
// tiles of out: they are put together in shared memory and leave as bulk copies, while the next
// product runs. Bias [2 * intermediate] f32 or none. The product is gemm4.cuh's.
//
// Bytes: as linear.w4.prefill.cu, and rows x intermediate outputs of 2 bytes.
#include "atlas/activation.cuh"
#include "atlas/convert.cuh"
#include "atlas/gemm4.cuh"
#include "atlas/instance.h"
#include "atlas/weights4.cuh"

namespace {

using atlas::ceil_div;

constexpr int kColumns = constants::intermediate, kBlockColumns = atlas::kTileRows / 2;

struct Cut {
  using Format = atlas::InstanceFormat;
  static constexpr int kBlocks = ceil_div(kColumns, kBlockColumns);
  static constexpr int kTiles = ceil_div(constants::k, 64);
  static constexpr int kGroup = knobs::GROUP;
  static constexpr int kTokens =
      knobs::TOKENS ? knobs::TOKENS
                    : atlas::tokens_of_tile(kBlocks, launch::max_rows, knobs::BLOCKS);
  static constexpr int kOutBytes = kTokens * atlas::kTileRowBytes;
  static constexpr int kStages = atlas::gemm4_stages<Format>(launch::shared - kOutBytes, kTokens);
};
using Gemm = atlas::Gemm4<Cut>;
static_assert(sizeof(types::out) == 2, "rows of out in bf16");
constexpr int kPairBarrier = 1;

extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ inline float gated(const types::bias* bias, int column, float gate, float up) {
  if constexpr (HAS_BIAS) {
    if (column >= kColumns) return 0.0f;
    gate += bias[column];
    up += bias[kColumns + column];
  }
  return atlas::activate<constants::activation>(gate) * up;
}

// Both warpgroups: the tile of out in shared memory, then one thread sends it off.
__device__ inline void store_tile(const types::bias* bias, types::out* out, unsigned char* rounded,
                                  const atlas::Gemm4Tile& tile, const Gemm::Sums& sums) {
  const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * 8 + lane / 4;
  // What was there has been read.
  if (threadIdx.x == 0) atlas::bulk_wait_read<0>();
  atlas::named_barrier(kPairBarrier, atlas::kGemm4Consumers);
#pragma unroll
  for (int j = 0; j < Cut::kTokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = 8 * j + lane % 4 * 2 + e;
      const float value =
          gated(bias, tile.block * kBlockColumns + column, sums[4 * j + e], sums[4 * j + 2 + e]);
      *reinterpret_cast<types::out*>(rounded + atlas::in_tile(token, 2 * column)) =
          atlas::from_float<types::out>(value);
    }
  }
  atlas::publish_to_async_proxy();
  atlas::named_barrier(kPairBarrier, atlas::kGemm4Consumers);
  if (threadIdx.x == 0) {
    for (int done = 0; done < tile.tokens; done += atlas::kTileRows) {
      const int row = tile.token + done, count = min(atlas::kTileRows, tile.tokens - done);
      atlas::bulk_store(reinterpret_cast<unsigned char*>(out) +
                            atlas::tile_offset(row / atlas::kTileRows, tile.block, Cut::kBlocks) +
                            row % atlas::kTileRows * atlas::kTileRowBytes,
                        rounded + done * atlas::kTileRowBytes, count * atlas::kTileRowBytes);
    }
    atlas::bulk_commit();
  }
}

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::out* out, const int* rows) {
  // The ring begins where the swizzle's atoms do, behind the tile of out.
  Gemm gemm(shared_memory + Cut::kOutBytes);
  gemm.run(
      x, weight, rows,
      [&](const atlas::Gemm4Tile& tile, Gemm::Sums& sums) {
        store_tile(bias, out, shared_memory, tile, sums);
      },
      [] {
        if (threadIdx.x == 0) atlas::bulk_wait<0>();
      });
}
