/* atlas
[serves]
x = ["bf16", "f8g128"]
weight = ["bf16", "f8", "f8g128"]
out = ["bf16", "f8g128"]
[launch]
grid = ["BLOCKS", 1, 1]
block = 384
shared = "shared_memory_per_block"
pdl = true
[knobs]
BLOCKS = "multiprocessors"
GROUP = 16
[layouts]
x = "tiles"
weight = "tiles_paired"
out = "tiles"
*/
// gated_linear for prompts: out = act(x Wg^T + bg) * (x Wu^T + bu), rounded once, for any number of
// rows.
//
// x in `tiles`, weight in `tiles_paired` (8 rows of Wg, then the 8 of Wu for the same outputs):
// both bf16, or x f8g128 and weight f8 or f8g128; out in `tiles`, bf16 or f8g128; bias [bg; bu] f32
// or none. The product is gemm.cuh's in tiles of 128 rows by 256 columns: a thread holds gate and
// up of its outputs, and a row's group of 128 outputs, which f8g128 scales together, lies in one
// warpgroup. Outputs go through shared memory, in the order of `tiles`, so that a tile leaves in a
// few bulk copies while the next is computed; columns past the last are stored as zeros.
//
// Bytes: the weights and inputs (again from the L2 for every tile), rows x intermediate outputs:
// the products in f32, 8 x more, never reach memory. Bound by the tensor cores, up to 128 rows by
// the weights' bytes.
#include "atlas/convert.cuh"
#include "atlas/f8_group.cuh"
#include "atlas/gemm.cuh"
#include "atlas/gemm_format.cuh"
#include "atlas/instance.h"

namespace {

using atlas::ceil_div;

#ifdef ATLAS_TYPE_OUT_F8G128
constexpr bool kScaledOut = true;
#else
static_assert(atlas::same_type<types::out, __nv_bfloat16>, "out is bf16 or f8g128");
constexpr bool kScaledOut = false;
#endif

constexpr int kInner = constants::intermediate, kColumns = 256;
constexpr int kOutTileColumns = kScaledOut ? 128 : 64;
constexpr int kOutTiles = ceil_div(kInner, kOutTileColumns);
// What a warpgroup stages: its half of the output tiles that a tile of products becomes.
constexpr int kHalfBytes = 64 * atlas::kTileRowBytes;
constexpr int kHalves = kColumns / 2 / kOutTileColumns;
constexpr int kStagedBytes = kHalves * kHalfBytes + (kScaledOut ? 64 * 4 : 0);

struct Cut {
  static constexpr auto kFormat = atlas::kInstanceFormat;
  static constexpr bool kPaired = true;
  static constexpr int kWeightRows = 2 * atlas::round_up(kInner, 64);
  static constexpr int kTiles =
      ceil_div(constants::k, kFormat == atlas::GemmFormat::kBf16 ? 64 : 128);
  static constexpr int kGroup = knobs::GROUP;
  static constexpr int kColumns = ::kColumns;
  static constexpr int kStages =
      atlas::gemm_stages(launch::shared - 2 * kStagedBytes, kColumns, kFormat);
};
using Gemm = atlas::Gemm<Cut>;

extern __shared__ __align__(1024) unsigned char shared_memory[];

// e^x and a quotient within 2 ulp: both are far below the rounding of the output.
__device__ inline float quotient(float x, float y) {
  // rcp flushes what 1 / y would leave for y = inf or beyond 2^126: zero, as it should be.
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
  return x * inverse;
}
__device__ inline float exponential(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
  return power;
}
__device__ inline float activate(float x) {
  if constexpr (constants::activation == 0) {
    return quotient(x, 1.0f + exponential(-x));
  } else if constexpr (constants::activation == 1) {
    // x / 2 * (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
    return quotient(x, 1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x)));
  } else {
    return 0.5f * x * erfcf(-0.707106781f * x);
  }
}

struct Epilogue {
  const types::bias* bias;
  unsigned char* out;
  unsigned char* staged;  // this warpgroup's
  bool issuer;            // the thread of it that starts copies

  // Output 8 j + 2 (lane % 4) + e of block `block` and row i of the thread's: `tiles_paired` has 8
  // gate rows, then the 8 up rows of the same outputs.
  __device__ float value(const atlas::GemmTile& tile, Gemm::Sums& sums, int block, int j, int i,
                         int e) const {
    const int column = tile.column / 2 + block * 64 + 8 * j + threadIdx.x % 4 * 2 + e;
    if (kInner % kOutTileColumns != 0 && column >= kInner) return 0.0f;  // padding
    float gate = Gemm::element(sums, 16 * block + 2 * j, i, e);
    float up = Gemm::element(sums, 16 * block + 2 * j + 1, i, e);
    if constexpr (HAS_BIAS) {
      gate += bias[column];
      up += bias[kInner + column];
    }
    return activate(gate) * up;
  }

  __device__ void store(const atlas::GemmTile& tile, int group, Gemm::Sums& sums) const {
    if (issuer) atlas::bulk_wait_read<0>();
    atlas::named_barrier(1 + group, 128);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    if constexpr (kScaledOut) {
      stage_scaled(tile, sums, row, lane);
    } else {
#pragma unroll
      for (int block = 0; block < kHalves; ++block) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            *reinterpret_cast<__nv_bfloat162*>(staged + block * kHalfBytes +
                                               atlas::in_tile(row + 8 * i, 16 * j + lane % 4 * 4)) =
                __floats2bfloat162_rn(value(tile, sums, block, j, i, 0),
                                      value(tile, sums, block, j, i, 1));
          }
        }
      }
    }
    atlas::publish_to_async_proxy();
    atlas::named_barrier(1 + group, 128);
    if (issuer && tile.rows > group * 64) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int k_tile = tile.column / 2 / kOutTileColumns + half;
        if (k_tile >= kOutTiles) break;
        unsigned char* target =
            out + atlas::tile_offset<kScaledOut>(tile.row / atlas::kTileRows, k_tile, kOutTiles);
        atlas::bulk_store(target + group * kHalfBytes, staged + half * kHalfBytes, kHalfBytes);
        if constexpr (kScaledOut) {
          atlas::bulk_store(target + atlas::kTileBytes + group * 64 * 4, staged + kHalfBytes,
                            64 * 4);
        }
      }
      atlas::bulk_commit();
    }
  }

  // Rounds to f8g128. A row's group of 128 outputs lies in four lanes.
  __device__ void stage_scaled(const atlas::GemmTile& tile, Gemm::Sums& sums, int row,
                               int lane) const {
    float* row_scales = reinterpret_cast<float*>(staged + kHalfBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned largest = 0;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& gate = Gemm::element(sums, 16 * block + 2 * j, i, e);
            gate = value(tile, sums, block, j, i, e);
            largest = max(largest, atlas::magnitude_bits(gate));
          }
        }
      }
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
      const atlas::F8Group rounding(largest);
      if (lane % 4 == 0) row_scales[row + 8 * i] = rounding.scale;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          *reinterpret_cast<unsigned short*>(
              staged + atlas::in_tile(row + 8 * i, 64 * block + 8 * j + lane % 4 * 2)) =
              rounding.codes(Gemm::element(sums, 16 * block + 2 * j, i, 0),
                             Gemm::element(sums, 16 * block + 2 * j, i, 1));
        }
      }
    }
  }
};

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::out* out, const int* rows) {
  Gemm gemm(shared_memory);
  const int group = threadIdx.x / 128;
  const Epilogue epilogue{bias, reinterpret_cast<unsigned char*>(out),
                          shared_memory + Gemm::kBytes + group * kStagedBytes,
                          threadIdx.x % 128 == 0};
  gemm.run(
      x, weight, rows,
      [&](const atlas::GemmTile& tile, int of, Gemm::Sums& sums) {
        epilogue.store(tile, of, sums);
      },
      [&] {
        if (epilogue.issuer) atlas::bulk_wait<0>();
      });
}
