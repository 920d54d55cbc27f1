/* atlas
[launch]
grid = ["ceil_div(rows, TILE_M)", "ceil_div(n, TILE_N)", 1]
block = "WARPS * 32"
shared = "STAGES * (TILE_M + TILE_N) * 144"
pdl = true
[limits]
same_bits = true
[knobs]
TILE_M = 32
TILE_N = 64
WARPS = 4
STAGES = 3
legal = [
  # Warps form ceil_div(TILE_M, 64) rows; each owns 16 x 8 fragments, at most 32 columns of them.
  "WARPS % ceil_div(TILE_M, 64) == 0",
  "TILE_N % (WARPS // ceil_div(TILE_M, 64) * 8) == 0",
  "TILE_N <= WARPS // ceil_div(TILE_M, 64) * 32",
  # 64 accumulators a thread, and as many for a step's own sum, is what registers hold.
  "TILE_M * TILE_N <= WARPS * 2048",
  # Deep pipelines hide latency at few rows; at many they only take shared memory from others.
  "(STAGES - 3) * TILE_M <= 96",
  "STAGES * (TILE_M + TILE_N) * 144 <= shared_memory_per_block",
  # The fp32 way shares its tile out over rows of 16 threads.
  "TILE_M % (WARPS * 2) == 0",
]
[knobs.choices]
TILE_M = [16, 32, 64, 128]
TILE_N = [16, 32, 64, 128]
WARPS = [2, 4, 8]
STAGES = [3, 6]
[cost]
bytes = "(TILE_M + TILE_N) * k * size_weight"
flops = "2 * TILE_M * TILE_N * k"
trips = "1 + ceil_div(ceil_div(k, 64), STAGES - 1)"
steps = "ceil_div(k, 64)"
memory = "n * k * size_weight"
*/
// linear: out[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n], accumulated in fp32, rounded
// once.
//
// x [rows, k], weight [n, k], out [rows, n], all row-major, f32 or bf16 each; bias [n] f32, or
// none, is added to the finished sum. A block computes TILE_M rows by TILE_N columns, walking k in
// steps from 0 up. Two ways through a step:
// - x and weight both bf16: tensor cores (mma.m16n8k16). STAGES tiles in flight by cp.async; warps
//   share a tile out in ceil(TILE_M / 64) rows and as many columns as that leaves.
// - anything else: fp32 FMA, one after the other over k.
// Rows beyond `rows`, columns beyond n and the tail of k enter as zeros. Each step is summed by
// itself and then added: sums stay short, and the tensor cores' truncation of long ones stays below
// fp32 rounding. A row's arithmetic depends on that row alone: never on the others, on their
// number, or on where in a tile it lies; nor on the knobs, since the steps over k are the same in
// every tile. Bytes: n x k weights once per TILE_M rows; bound by weight bandwidth at few rows, by
// latency at one.
#include "atlas/async_copy.cuh"
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/mma.cuh"
#include "atlas/pdl.cuh"

namespace {

using atlas::ceil_div;

constexpr int kM = knobs::TILE_M, kN = knobs::TILE_N, kWarps = knobs::WARPS;
constexpr int kK = constants::k, kColumns = constants::n;

extern __shared__ __align__(16) unsigned char shared_memory[];

// Where results go; `bias` is null in instances without one.
struct Out {
  types::out* data;
  const types::bias* bias;
};

__device__ inline void store(Out out, int rows, int row, int column, float value) {
  if (row >= rows || column >= kColumns) return;
  if constexpr (HAS_BIAS) value += out.bias[column];
  out.data[static_cast<size_t>(row) * kColumns + column] = atlas::from_float<types::out>(value);
}

// A tile of kHeight rows by kWidth elements of k, as bf16. A row of kStride elements is 4 banks off
// the one before, so the fragment loads below, 8 rows by 4 words, touch each bank once.
template <int kHeight, int kWidth>
struct alignas(16) Bf16Tile {
  static constexpr int kStride = kWidth + 8;
  __nv_bfloat16 data[kHeight * kStride];

  // Starts copying source[first_row.., k..]; rows from `height` on and k from kK on become zero.
  __device__ void load(const __nv_bfloat16* source, int first_row, int height, int k) {
    constexpr int kVector = kK % 8 == 0 ? 8 : 1;  // other sizes of k have unaligned rows
    constexpr int kVectors = kHeight * kWidth / kVector;
    for (int i = threadIdx.x; i < kVectors; i += launch::block) {
      const int row = i / (kWidth / kVector), column = i % (kWidth / kVector) * kVector;
      const bool valid = first_row + row < height && k + column < kK;
      const size_t element = static_cast<size_t>(first_row + row) * kK + k + column;
      __nv_bfloat16* target = data + row * kStride + column;
      if constexpr (kVector == 8) {
        atlas::copy_async_16(target, valid ? source + element : source, valid);
      } else {
        *target = valid ? source[element] : __float2bfloat16_rn(0.0f);
      }
    }
  }

  // Elements [row, column..column+1] in one register.
  __device__ unsigned pair(int row, int column) const {
    return *reinterpret_cast<const unsigned*>(data + row * kStride + column);
  }
};

template <class X, class Weight>
__device__ inline void tensor_core_tile(const X* x, const Weight* weight, Out out, int rows,
                                        int first_row, int first_column) {
  constexpr int kStep = 64, kStages = knobs::STAGES;
  constexpr int kSteps = ceil_div(kK, kStep);
  constexpr int kDown = ceil_div(kM, 64), kAcross = kWarps / kDown;
  constexpr int kWarpM = kM / kDown, kWarpN = kN / kAcross;
  static_assert(kWarps % kDown == 0 && kWarpM % 16 == 0,
                "a warp's share is made of 16-row fragments");
  static_assert(kN % (kAcross * 8) == 0, "a warp's share is made of 8-column fragments");
  struct Stage {
    Bf16Tile<kM, kStep> x;
    Bf16Tile<kN, kStep> weight;
  };
  static_assert(sizeof(Stage) == (kM + kN) * 144, "the launch asks for this much shared memory");
  Stage* stages = reinterpret_cast<Stage*>(shared_memory);

  const auto load_weight = [&](int step) {
    if (step < kSteps) {
      stages[step % kStages].weight.load(weight, first_column, kColumns, step * kStep);
    }
  };
  const auto load_x = [&](int step) {
    if (step < kSteps) stages[step % kStages].x.load(x, first_row, rows, step * kStep);
    atlas::commit_copies();  // an empty group at the end keeps the count below the same
  };
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_row = threadIdx.x / 32 / kAcross * kWarpM;
  const int warp_column = threadIdx.x / 32 % kAcross * kWarpN;

  float sum[kWarpM / 16][kWarpN / 8][4] = {};
  for (int step = 0; step < kStages - 1; ++step) load_weight(step);
  atlas::wait_for_inputs();
  for (int step = 0; step < kStages - 1; ++step) load_x(step);
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    atlas::wait_copies<kStages - 2>();
    __syncthreads();  // this step's tile is whole, and everybody has left the one loaded next
    load_weight(step + kStages - 1);
    load_x(step + kStages - 1);
    const auto& x_tile = stages[step % kStages].x;
    const auto& weight_tile = stages[step % kStages].weight;
    float partial[kWarpM / 16][kWarpN / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      unsigned a[kWarpM / 16][4], b[kWarpN / 8][2];
#pragma unroll
      for (int i = 0; i < kWarpM / 16; ++i) {
        a[i][0] = x_tile.pair(warp_row + i * 16 + g, k + 2 * t);
        a[i][1] = x_tile.pair(warp_row + i * 16 + g + 8, k + 2 * t);
        a[i][2] = x_tile.pair(warp_row + i * 16 + g, k + 2 * t + 8);
        a[i][3] = x_tile.pair(warp_row + i * 16 + g + 8, k + 2 * t + 8);
      }
#pragma unroll
      for (int j = 0; j < kWarpN / 8; ++j) {
        b[j][0] = weight_tile.pair(warp_column + j * 8 + g, k + 2 * t);
        b[j][1] = weight_tile.pair(warp_column + j * 8 + g, k + 2 * t + 8);
      }
#pragma unroll
      for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpN / 8; ++j) atlas::mma_m16n8k16(partial[i][j], a[i], b[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kWarpN / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[i][j][c] += partial[i][j][c];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        store(out, rows, first_row + warp_row + i * 16 + g + c / 2 * 8,
              first_column + warp_column + j * 8 + 2 * t + c % 2, sum[i][j][c]);
      }
    }
  }
}

// A thread owns rows y, y + kDown, ... and columns z, z + 16, ... of the tile.
template <class X, class Weight>
__device__ inline void fma_tile(const X* x, const Weight* weight, Out out, int rows, int first_row,
                                int first_column) {
  constexpr int kStep = 32, kAcross = 16, kDown = kWarps * 32 / kAcross;
  constexpr int kStride = kStep + 1;  // 16 columns' worth of loads touch 16 different banks
  static_assert(kM % kDown == 0 && kN % kAcross == 0, "the tile is made of whole threads' shares");
  float* x_tile = reinterpret_cast<float*>(shared_memory);
  float* weight_tile = x_tile + kM * kStride;
  static_assert((kM + kN) * kStride * 4 <= knobs::STAGES * (kM + kN) * 144,
                "the launch asks for enough");
  const int z = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
  atlas::wait_for_inputs();

  float sum[kM / kDown][kN / kAcross] = {};
  for (int step = 0; step < kK; step += kStep) {
    __syncthreads();  // everybody has left the last step's tiles
    for (int i = threadIdx.x; i < (kM + kN) * kStep; i += launch::block) {
      const int row = i / kStep, column = i % kStep;
      const bool inside = step + column < kK;
      const size_t k = step + column;
      if (row < kM) {
        const bool valid = inside && first_row + row < rows;
        const size_t at = static_cast<size_t>(first_row + row) * kK + k;
        x_tile[row * kStride + column] = valid ? atlas::to_float(x[at]) : 0.0f;
      } else {
        const bool valid = inside && first_column + row - kM < kColumns;
        const size_t at = static_cast<size_t>(first_column + row - kM) * kK + k;
        weight_tile[(row - kM) * kStride + column] = valid ? atlas::to_float(weight[at]) : 0.0f;
      }
    }
    __syncthreads();
    float partial[kM / kDown][kN / kAcross] = {};
    for (int k = 0; k < kStep; ++k) {
#pragma unroll
      for (int i = 0; i < kM / kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kN / kAcross; ++j) {
          partial[i][j] = fmaf(x_tile[(y + i * kDown) * kStride + k],
                               weight_tile[(z + j * kAcross) * kStride + k], partial[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kM / kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kN / kAcross; ++j) sum[i][j] += partial[i][j];
    }
  }
#pragma unroll
  for (int i = 0; i < kM / kDown; ++i) {
#pragma unroll
    for (int j = 0; j < kN / kAcross; ++j) {
      store(out, rows, first_row + y + i * kDown, first_column + z + j * kAcross, sum[i][j]);
    }
  }
}

// All three are templates so that the way not taken is not compiled.
template <class X, class Weight>
__device__ inline void tile(const X* x, const Weight* weight, Out out, int rows) {
  const int first_row = blockIdx.x * kM, first_column = blockIdx.y * kN;
  if (first_row >= rows) {
    atlas::wait_for_inputs();
    return;
  }
  if constexpr (atlas::same_type<X, __nv_bfloat16> && atlas::same_type<Weight, __nv_bfloat16>) {
    tensor_core_tile(x, weight, out, rows, first_row, first_column);
  } else {
    fma_tile(x, weight, out, rows, first_row, first_column);
  }
}

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* __restrict__ weight,
             const types::bias* __restrict__ bias, types::out* out, const int* rows) {
  atlas::launch_dependents();
  tile(x, weight, Out{out, bias}, *rows);
}
