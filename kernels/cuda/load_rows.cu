/* atlas
[launch]
grid = ["rows", 1, 1]
# At most 8 quads of columns a thread, up to the longest row that a block of 1,024 holds so. Not
# measured: at 3.8 TB/s of device memory it would wait 40 times less than the host link needs.
block = "32 * min(32, ceil_div(k, 1024))"
[serves]
out = ["bf16", "f8"]
[layouts]
x = "row_major"
out = "operand"
*/
// load_rows: rows of a matrix as a checkpoint has them, in the format and layout of a weight.
//
// x [rows, k] f32 or bf16, row-major; out [rows, k] bf16 or f8 as products read it, rounded once;
// fault [1], or none, becomes 1 if a row has a value that is not finite. A block has a row in its
// registers, since the scale of f8 is of all of it. Bytes: k x (both elements) per row; bound by
// the host link that brings x.
#include "atlas/in_row.cuh"
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

namespace {

constexpr int kK = constants::k;
constexpr bool kF8 = atlas::same_type<types::out, unsigned char>;

#ifdef ATLAS_TYPE_OUT_F8
#ifdef ATLAS_LAYOUT_OUT_TILES
using Layout = atlas::TilesLayout<kK, atlas::Scales::kOfRow>;
#else
using Layout = atlas::RowMajorLayout<kK, atlas::Scales::kOfRow>;
#endif
constexpr int kQuads = Layout::kPaddedBytes / 4;
#else
using Out = atlas::OutRow<kK>;
constexpr int kQuads = Out::kQuads;
#endif
constexpr int kCount = atlas::ceil_div(kQuads, launch::block);

// Of all threads.
__device__ inline unsigned largest_magnitude(const float (&values)[kCount][4]) {
  __shared__ unsigned of_warp[launch::block / atlas::kWarp];
  unsigned largest = 0;
#pragma unroll
  for (const auto& quad : values) {
#pragma unroll
    for (float value : quad) largest = max(largest, atlas::magnitude_bits(value));
  }
  return atlas::block_reduce<launch::block>(largest, atlas::Max{}, of_warp);
}

}  // namespace

ATLAS_KERNEL(const types::x* x, types::out* out, types::fault* fault, const int* rows) {
  atlas::launch_dependents();
  atlas::wait_for_inputs();
  const int row = blockIdx.x, thread = threadIdx.x;
  if (row >= *rows) return;
  float values[kCount][4];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    atlas::load_row_quad<false, kK>(x, row, thread + i * launch::block, values[i]);
  }
  unsigned largest = 0;
  if constexpr (kF8 || HAS_FAULT) largest = largest_magnitude(values);
  if constexpr (HAS_FAULT) {
    if (thread == 0 && largest >= 0x7F800000u) *fault = 1;
  }
#ifdef ATLAS_TYPE_OUT_F8
  const atlas::F8Group group(largest);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int quad = thread + i * launch::block;
    if (quad < kQuads) {
      const auto& v = values[i];
      *reinterpret_cast<unsigned*>(out + Layout::at(row, 4 * quad)) =
          group.codes(v[0], v[1]) | group.codes(v[2], v[3]) << 16;
    }
  }
  if (thread == 0) *reinterpret_cast<float*>(out + Layout::scale_at(row)) = group.scale;
#else
  Out(out, row).store<kCount, launch::block>(thread, values);
#endif
}
