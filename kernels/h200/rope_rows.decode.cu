/* atlas
[launch]
grid = ["rows", 1, 1]
block = "ceil_div(rotary_dim // 2, 32) * 32"
pdl = true
[limits]
# With one set of frequencies there is nothing to choose.
unread = ["seq_rope"]
*/
// rope_rows: turns[r, i] = rope_scale * (cos, sin) of position * inv_freq[seq_rope[seq], i], a
// product rounded to fp32, and places[r] = the row's slot among all slots of the KV cache.
//
// turns [rows, rotary_dim / 2, 2] f32, places [rows] i32: what every layer's normed_qkv_append
// would work out again for each of its heads. A block a row; all but the stores is done before the
// inputs are there. Once a step; bound by the launch.
#include "atlas/instance.h"
#include "atlas/kv_tiles.cuh"
#include "atlas/pdl.cuh"
#include "atlas/sincos.cuh"

ATLAS_KERNEL(const types::inv_freq* inv_freq, const types::seq_rope* seq_rope,
             const types::row_position* row_position, const types::row_seq* row_seq,
             const types::block_table* block_table, types::turns* turns, types::places* places,
             const int* rows, const int* /*seqs*/, const int* max_blocks) {
  atlas::launch_dependents();
  constexpr int kHalf = constants::rotary_dim / 2;
  const int row = blockIdx.x, i = threadIdx.x;
  if (row >= *rows) {
    atlas::wait_for_inputs();
    return;
  }
  const int position = row_position[row], seq = row_seq[row];
  if constexpr (constants::rope_sets > 1) inv_freq += seq_rope[seq] * kHalf;
  const float frequency = i < kHalf ? inv_freq[i] : 0.0f;
  const atlas::SinCos angle = atlas::sincos(static_cast<float>(position) * frequency);
  const int block =
      block_table[static_cast<size_t>(seq) * *max_blocks + position / atlas::kPageTokens];
  atlas::wait_for_inputs();
  if (i == 0) places[row] = block * atlas::kPageTokens + position % atlas::kPageTokens;
  if (i < kHalf) {
    reinterpret_cast<float2*>(turns)[static_cast<size_t>(row) * kHalf + i] =
        make_float2(angle.cos * constants::rope_scale, angle.sin * constants::rope_scale);
  }
}
