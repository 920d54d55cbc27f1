/* atlas
[serves]
x = ["bf16", "f8g128"]
weight = ["bf16", "f8", "f8g128"]
[rows]
up_to = [64, 128, 256, 512, 1024, 2048, 0]
[launch]
grid = ["BLOCKS", 1, 1]
block = 384
shared = "shared_memory_per_block"
pdl = true
[limits]
same_bits = true
# FP8 with a bias and bf16 outputs (Qwen2.5) 24 to 40 bytes, of narrow matrices with f32 outputs 16
# to 20; the other kernels of the dense models none.
spills = 40
[knobs]
BLOCKS = "multiprocessors"
COLUMNS = 256
GROUP = 16
[knobs.choices]
COLUMNS = [256, 192, 128, 96, 64, 48, 32]
[cost]
# Rounds of tiles, weighed by a tile's time: its columns and 24, which narrow tiles lose in reuse
# and between tiles (measured choices of 128 to 2,048 rows agree). Any number: all cost nothing.
launch = "ceil_div(ceil_div(n, COLUMNS) * ceil_div(max_rows, 128), BLOCKS) * (COLUMNS + 24)"
[layouts]
x = "tiles"
weight = "tiles"
*/
// linear for prompts: out[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n], for any number of
// rows.
//
// x and weight in `tiles` (tiles.cuh): both bf16, or x f8g128 and weight f8 or f8g128; out
// row-major, f32 or bf16; bias [n] f32 or none, added to the finished sum. The product is
// gemm.cuh's: one persistent block a multiprocessor, tiles of 128 rows by COLUMNS columns, which
// this file stores. A thread's sums lie in pieces of 2 columns over 16
// rows, and storing those takes one pass of the store unit for each row's 32 bytes. bf16 outputs
// are laid out in shared memory, from where a copy a row takes them while the next tile is
// multiplied; f32 outputs, for which there is no room, are turned round there by each warp, 32
// columns at a time, and stored in whole lines.
//
// Bytes: n x k weights and rows x k inputs (again from the L2 for every tile), rows x n outputs. At
// many rows the tensor cores bound it; up to 128 rows the weights are read once, and tiles are as
// narrow as it takes to keep every multiprocessor reading.
#include "atlas/convert.cuh"
#include "atlas/gemm.cuh"
#include "atlas/gemm_format.cuh"
#include "atlas/instance.h"
#include "atlas/ldmatrix.cuh"

namespace {

using atlas::ceil_div;

constexpr int kN = constants::n;
// A warp turns 16 rows of 32 fp32 columns round; rows are 8 banks apart, so that neither the 8
// bytes of a thread nor the 16 it reads back meet others in a bank.
constexpr int kTurnedColumns = 32, kTurnedStride = 40, kTurnedFloats = 16 * kTurnedStride;
constexpr int kTurnedBytes = atlas::kGemmConsumers / 32 * kTurnedFloats * 4;

constexpr int kColumns = knobs::COLUMNS;
// Rows of bf16 outputs are copies of multiples of 16 bytes. A warpgroup stages its 64, 4 banks
// apart, so that the eight rows that stmatrix writes at a time meet in no bank.
constexpr bool kStaged = sizeof(types::out) == 2 && kN % 8 == 0;
constexpr int kStagedStride = 2 * kColumns + 16, kStagedBytes = 64 * kStagedStride;

struct Cut {
  static constexpr auto kFormat = atlas::kInstanceFormat;
  static constexpr bool kPaired = false;
  static constexpr int kWeightRows = kN;
  static constexpr int kTiles =
      ceil_div(constants::k, kFormat == atlas::GemmFormat::kBf16 ? 64 : 128);
  static constexpr int kGroup = knobs::GROUP;
  static constexpr int kColumns = ::kColumns;
  static constexpr int kStages = atlas::gemm_stages(
      launch::shared - (kStaged ? 2 * kStagedBytes : kTurnedBytes), kColumns, kFormat);
};
using Gemm = atlas::Gemm<Cut>;

extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ inline void store_four(types::out* target, const float4& value) {
  if constexpr (sizeof(types::out) == 4) {
    *reinterpret_cast<float4*>(target) = value;
  } else {
    const __nv_bfloat162 low = __floats2bfloat162_rn(value.x, value.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(value.z, value.w);
    *reinterpret_cast<uint2*>(target) = {reinterpret_cast<const unsigned&>(low),
                                         reinterpret_cast<const unsigned&>(high)};
  }
}

// Rounds a warpgroup's sums, and starts a copy for each of its rows, once those of the tile before
// have been read: which the threads that started them know.
__device__ inline void stage_tile(const types::bias* bias, types::out* out, unsigned char* staged,
                                  const atlas::GemmTile& tile, int group, Gemm::Sums& sums) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  if (thread < 64) atlas::bulk_wait_read<0>();
  atlas::named_barrier(1 + group, 128);
  const unsigned target = atlas::shared_address(
      staged + (thread / 32 * 16 + lane % 16) * kStagedStride + lane / 16 * 16);
#pragma unroll
  for (int block = 0; block < kColumns / 8; block += 2) {
    unsigned packed[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float low = Gemm::element(sums, block + m / 2, m % 2, 0);
      float high = Gemm::element(sums, block + m / 2, m % 2, 1);
      if constexpr (HAS_BIAS) {
        const int column = tile.column + 8 * (block + m / 2) + lane % 4 * 2;
        if (column < kN) low += bias[column], high += bias[column + 1];
      }
      const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
      packed[m] = reinterpret_cast<const unsigned&>(both);
    }
    atlas::stmatrix_x4(target + 16 * block, packed);
  }
  atlas::publish_to_async_proxy();
  atlas::named_barrier(1 + group, 128);
  const int row = group * 64 + thread;
  if (thread < 64 && row < tile.rows) {
    atlas::bulk_store(out + static_cast<size_t>(tile.row + row) * kN + tile.column,
                      staged + thread * kStagedStride, 2 * min(kColumns, kN - tile.column));
    atlas::bulk_commit();
  }
}

__device__ inline void store_tile(const types::bias* bias, types::out* out, float* turned,
                                  const atlas::GemmTile& tile, int group, Gemm::Sums& sums) {
  const int lane = threadIdx.x % 32, first = group * 64 + threadIdx.x / 32 % 4 * 16;
  const int rows = tile.rows - first;
  if (rows <= 0) return;
  types::out* target = out + static_cast<size_t>(tile.row + first) * kN;
#pragma unroll
  for (int begin = 0; begin < Cut::kColumns; begin += kTurnedColumns) {
    const int width = Cut::kColumns - begin;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kTurnedColumns / 8; ++j) {
      if (8 * j >= width) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(turned + (lane / 4 + 8 * i) * kTurnedStride + 8 * j +
                                   lane % 4 * 2) = {Gemm::element(sums, begin / 8 + j, i, 0),
                                                    Gemm::element(sums, begin / 8 + j, i, 1)};
      }
    }
    __syncwarp();
    if constexpr (kN % 4 == 0) {
      const int column = tile.column + begin + lane % 8 * 4;
      if (column >= kN || lane % 8 * 4 >= width) continue;
      float4 added = {};
      if constexpr (HAS_BIAS) added = *reinterpret_cast<const float4*>(bias + column);
#pragma unroll
      for (int row = lane / 8; row < 16; row += 4) {
        float4 value =
            *reinterpret_cast<const float4*>(turned + row * kTurnedStride + lane % 8 * 4);
        if constexpr (HAS_BIAS) {
          value = {value.x + added.x, value.y + added.y, value.z + added.z, value.w + added.w};
        }
        if (row < rows) store_four(target + static_cast<size_t>(row) * kN + column, value);
      }
    } else {
      const int column = tile.column + begin + lane;
      if (column >= kN || lane >= width) continue;
      float added = 0.0f;
      if constexpr (HAS_BIAS) added = bias[column];
      for (int row = 0; row < min(16, rows); ++row) {
        float value = turned[row * kTurnedStride + lane];
        if constexpr (HAS_BIAS) value += added;
        target[static_cast<size_t>(row) * kN + column] = atlas::from_float<types::out>(value);
      }
    }
  }
}

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::out* out, const int* rows) {
  Gemm gemm(shared_memory);
  float* turned =
      reinterpret_cast<float*>(shared_memory + Gemm::kBytes) + threadIdx.x / 32 * kTurnedFloats;
  gemm.run(
      x, weight, rows,
      [&](const atlas::GemmTile& tile, int group, Gemm::Sums& sums) {
        if constexpr (kStaged) {
          stage_tile(bias, out, shared_memory + Gemm::kBytes + group * kStagedBytes, tile, group,
                     sums);
        } else {
          store_tile(bias, out, turned, tile, group, sums);
        }
      },
      [] {
        if constexpr (kStaged) atlas::bulk_wait<0>();
      });
}
