/* atlas
[launch]
grid = ["ceil_div(rows, 16)", 1, 1]
# Not tuned: the host link brings rows 20 times slower than they could be read.
block = 256
arguments = ["k"]
[serves]
out = ["nvfp4", "i4g32b"]
[layouts]
x = "row_major"
out = "weights4"
*/
// load_rows: rows of a matrix as a checkpoint has them, in a format of 4 bits.
//
// x [rows, k] f32 or bf16, row-major; out [rows, k] in nvfp4 or i4g32b, row-major or in `frag4`
// (atlas/weights/fragments.py), rounded as round4.cuh says; fault [1], or none, becomes 1 if a row
// has a value that is not finite, or a scale that its type does not hold.
//
// A block has 16 rows, a warp 16 columns of them at a time (a step), as mma's threads hold an A
// operand, which is how `frag4` stores it. nvfp4 needs the largest magnitude of a row first: rows
// are read twice, the second time from the cache. Bytes: 2.6 k a row; bound by the host link.
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/pdl.cuh"
#include "atlas/round4.cuh"

namespace {

using atlas::ceil_div;

constexpr int kRows = 16, kWarps = launch::block / atlas::kWarp;

#if defined(ATLAS_TYPE_OUT_NVFP4)
using Rounding = atlas::Nvfp4Rounding;
#elif defined(ATLAS_TYPE_OUT_I4G32B)
using Rounding = atlas::I4g32bRounding;
#else
#error "out in a format of 4 bits with a rounding"
#endif
using Scale = Rounding::Scale;
constexpr int kSteps = Rounding::kSteps, kGroup = Rounding::kGroup;

// What follows writes a group of columns of a block's rows: of the calling lane, codes of rows g
// and g + 8 (first index), g = lane / 4, and the scales of both.
#ifdef ATLAS_LAYOUT_OUT_FRAG4
struct Writer {
  static constexpr int kColumns = 64, kCodeBytes = 4096;
  static constexpr int kOfTile = kColumns / kGroup;
  static constexpr int kTogether = kOfTile;  // groups that a warp has one after the other
  static constexpr int kTile = kCodeBytes + 128 * kOfTile * static_cast<int>(sizeof(Scale));

  int tiles;                    // of a row
  unsigned char* block;         // of 128 rows
  int strip;                    // of 16 rows
  unsigned scales[2] = {0, 0};  // of the tile's groups so far, of a lane's two rows

  __device__ Writer(unsigned char* out, int first, int rows, int k)
      : tiles(ceil_div(k, kColumns)),
        block(out + first / 128 * (scales_at() + (Rounding::kRowScale ? 512 : 0))),
        strip(first % 128 / kRows) {}

  __device__ size_t scales_at() const { return static_cast<size_t>(kTile) * tiles; }
  __device__ int groups() const { return tiles * kOfTile; }  // padding too

  __device__ void group(int group, const unsigned (&code)[2][kSteps][4], const Scale (&scale)[2]) {
    const int lane = threadIdx.x % 32, column = group * kGroup;
    unsigned char* tile = block + static_cast<size_t>(column / kColumns) * kTile;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int step = column % kColumns / 16 + s;
      unsigned word = 0;
#pragma unroll
      for (int p = 0; p < 4; ++p) {
#pragma unroll
        for (int e = 0; e < 2; ++e) word |= placed(code[p % 2][s][p / 2 * 2 + e], p, e);
      }
      *reinterpret_cast<unsigned*>(tile + (strip * 32 + lane) * 16 + step * 4) = word;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] |= stored(scale[i], group % kOfTile);
      if (group % kOfTile < kOfTile - 1) continue;
      const int row = (strip * 8 + lane / 4) * 2 + i;
      if (lane % 4 == 0) reinterpret_cast<unsigned*>(tile + kCodeBytes)[row] = scales[i];
      scales[i] = 0;
    }
  }
  __device__ void row_scale(int row, float scale) const {
    reinterpret_cast<float*>(block + scales_at())[strip * kRows + row] = scale;
  }

 private:
  // A code of register p, low or high half e, where fragments.py has it.
  __device__ static unsigned placed(unsigned code, int p, int e) {
    if constexpr (sizeof(Scale) == 2) {
      const unsigned steps = code ^ (code < 8 ? 15 : 8);
      const int at = 4 - p % 2 * 4 + p / 2 * 8, sign = 15 - p % 2 * 4 - p / 2 * 8;
      return ((steps & 7) << at | steps >> 3 << sign) << 16 * e;
    }
    const unsigned low =
        p < 3 ? (code & 7) << (6 + 3 * p) | code >> 3 << (15 + 3 * p) : (code & 3) << 3 | code >> 2;
    return __funnelshift_l(low, low, 16 * e);
  }
  // The scale of a tile's group, where a row's four bytes have it. Of E4M3 a number of 5 exponent
  // and 3 mantissa bits, turned to where fragments.py has it.
  __device__ static unsigned stored(Scale scale, int group) {
    if constexpr (sizeof(Scale) == 2) return static_cast<unsigned>(scale) << 16 * group;
    if (scale == 0) return 0;
    const float value = __half2float(__half(__nv_cvt_fp8_to_halfraw(scale, __NV_E4M3)));
    const unsigned number = (__float_as_uint(value) >> 20) - ((127 - 10) << 3);
    return __funnelshift_l(number, number, 16 * (group % 2) + (group < 2 ? 4 : 28));
  }
};
#else
struct Writer {
  static constexpr int kTogether = 1;

  unsigned char* out;
  int first, rows, k;

  __device__ Writer(unsigned char* out, int first, int rows, int k)
      : out(out), first(first), rows(rows), k(k) {}

  __device__ int groups() const { return ceil_div(k, kGroup); }
  __device__ int code_bytes() const { return groups() * kGroup / 2; }
  __device__ int stride() const {
    return code_bytes() + groups() * static_cast<int>(sizeof(Scale)) +
           (Rounding::kRowScale ? 4 : 0);
  }

  __device__ void group(int group, const unsigned (&code)[2][kSteps][4],
                        const Scale (&scale)[2]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane / 4 + 8 * i;
      if (row >= rows) continue;
      unsigned char* to = out + static_cast<size_t>(row) * stride();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          to[group * (kGroup / 2) + 8 * s + 4 * half + lane % 4] =
              static_cast<unsigned char>(code[i][s][2 * half] | code[i][s][2 * half + 1] << 4);
        }
      }
      if (lane % 4 != 0) continue;
      memcpy(to + code_bytes() + group * sizeof(Scale), &scale[i], sizeof(Scale));
    }
  }
  __device__ void row_scale(int row, float scale) const {
    if (first + row >= rows) return;
    memcpy(out + static_cast<size_t>(first + row + 1) * stride() - 4, &scale, 4);
  }
};
#endif

// Of rows from `first` on, the values that the calling lane has of row g + 8 i in a step of
// columns; zeros past the matrix.
__device__ inline void load_step(const types::x* x, int k, int row, int rows, int column,
                                 float (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = column + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    values[i] = row < rows && at < k ? atlas::to_float(x[static_cast<size_t>(row) * k + at]) : 0.0f;
  }
}

}  // namespace

ATLAS_KERNEL(const types::x* x, types::out* out, types::fault* fault, const int* n_rows, int k) {
  atlas::launch_dependents();
  atlas::wait_for_inputs();
  __shared__ float largest_of[kWarps][kRows];
  const int rows = *n_rows, first = blockIdx.x * kRows;
  if (first >= rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bool faulty = false;
  float row_scale[2] = {1.0f, 1.0f};
  if constexpr (Rounding::kRowScale) {
    float largest[2] = {0.0f, 0.0f};
    for (int step = warp; step < ceil_div(k, 16); step += kWarps) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float values[4];
        load_step(x, k, first + lane / 4 + 8 * i, rows, 16 * step, values);
#pragma unroll
        for (float value : values) {
          faulty = faulty || !isfinite(value);
          largest[i] = fmaxf(largest[i], fabsf(value));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest_of[warp][lane / 4 + 8 * i] = atlas::reduce_four_lanes(largest[i], atlas::Max{});
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = 0.0f;
      for (int w = 0; w < kWarps; ++w) most = fmaxf(most, largest_of[w][lane / 4 + 8 * i]);
      row_scale[i] = Rounding::row_scale(most);
    }
  }
  Writer writer(out, first, rows, k);
  if (Rounding::kRowScale && warp == 0 && lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + 8 * i;
      writer.row_scale(row, first + row < rows ? row_scale[i] : 0.0f);
    }
  }
  constexpr int kTogether = Writer::kTogether;
  for (int start = warp * kTogether; start < writer.groups(); start += kWarps * kTogether) {
#pragma unroll 1
    for (int group = start; group < start + kTogether; ++group) {
      unsigned code[2][kSteps][4];
      Scale scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float values[kSteps][4];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          load_step(x, k, first + lane / 4 + 8 * i, rows, group * kGroup + 16 * s, values[s]);
#pragma unroll
          for (float value : values[s]) faulty = faulty || !isfinite(value);
        }
        scale[i] = Rounding::group(values, row_scale[i], code[i], faulty);
      }
      writer.group(group, code, scale);
    }
  }
  if constexpr (HAS_FAULT) {
    if (faulty) *fault = 1;
  }
}
