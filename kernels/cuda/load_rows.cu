/* atlas
[launch]
grid = ["rows", 1, 1]
# Not measured: at 3.8 TB/s of device memory it would wait 40 times less than the host link needs.
block = "32 * min(8, ceil_div(k, 512))"
[serves]
out = ["bf16", "f8"]
[layouts]
x = "row_major"
out = "operand"
*/
// load_rows: rows of a matrix as a checkpoint has them, in the format and layout of a weight.
//
// x [rows, k] f32 or bf16, row-major; out [rows, k] bf16 or f8 as products read it, rounded once;
// fault [1], or none, becomes 1 if a row has a value that is not finite. A block has one row, since
// the scale of f8 is of all of it; it reads the row twice then, the second time from the cache.
// Bytes: k x (both elements) per row; bound by the host link that brings x.
#include "atlas/in_row.cuh"
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

namespace {

constexpr int kK = constants::k;
constexpr bool kF8 = atlas::same_type<types::out, unsigned char>;

#ifdef ATLAS_LAYOUT_OUT_TILES
using F8Layout = atlas::TilesLayout<kK, atlas::Scales::kOfRow>;
#else
using F8Layout = atlas::RowMajorLayout<kK, atlas::Scales::kOfRow>;
#endif

__device__ inline unsigned largest_magnitude(const types::x* x, int row) {
  __shared__ unsigned of_warp[launch::block / atlas::kWarp];
  unsigned largest = 0;
#pragma unroll 4
  for (int quad = threadIdx.x; 4 * quad < kK; quad += launch::block) {
    float values[4];
    atlas::load_row_quad<false, kK>(x, row, quad, values);
#pragma unroll
    for (float value : values) largest = max(largest, atlas::magnitude_bits(value));
  }
  return atlas::block_reduce<launch::block>(largest, atlas::Max{}, of_warp);
}

template <class T>
__device__ inline void store_row(const types::x* x, T* out, int row, unsigned largest) {
  using Out = atlas::OutRow<kK, T>;
  constexpr int kQuads = kF8 ? F8Layout::kPaddedBytes / 4 : Out::kQuads;
  const atlas::F8Group group(largest);
#pragma unroll 4
  for (int quad = threadIdx.x; quad < kQuads; quad += launch::block) {
    float values[1][4];
    atlas::load_row_quad<false, kK>(x, row, quad, values[0]);
    if constexpr (kF8) {
      *reinterpret_cast<unsigned*>(out + F8Layout::at(row, 4 * quad)) = group.codes(values[0]);
    } else {
      Out(out, row).template store<1, 1>(quad, values);
    }
  }
  if (kF8 && threadIdx.x == 0) {
    *reinterpret_cast<float*>(out + F8Layout::scale_at(row)) = group.scale;
  }
}

}  // namespace

ATLAS_KERNEL(const types::x* x, types::out* out, types::fault* fault, const int* rows) {
  atlas::launch_dependents();
  atlas::wait_for_inputs();
  const int row = blockIdx.x;
  if (row >= *rows) return;
  const unsigned largest = kF8 || HAS_FAULT ? largest_magnitude(x, row) : 0;
  if constexpr (HAS_FAULT) {
    if (threadIdx.x == 0 && largest >= 0x7F800000u) *fault = 1;
  }
  store_row(x, out, row, largest);
}
