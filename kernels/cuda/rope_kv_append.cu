/* atlas
[launch]
grid = ["rows", 1, 1]
block = "THREADS"
[knobs]
THREADS = 128
*/
// rope_kv_append: rotates a row's q and k heads and appends k and v to its sequence's KV blocks.
//
// qkv [rows, (n_heads + 2 n_kv_heads) * head_dim] is [q heads | k heads | v heads]; q_out [rows,
// n_heads * head_dim]; caches [blocks, n_kv_heads, 16, head_dim]; f32 or bf16 each. Element i of a
// head is paired with i + head_dim / 2 and turned by position * inv_freq[i], a product rounded to
// fp32. One block a row: the row's sines and cosines are computed once and shared by its heads.
// Bytes: two times the row of qkv; bound by memory latency.
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/sincos.cuh"

using namespace constants;

constexpr int kHalf = head_dim / 2;

ATLAS_KERNEL(const types::qkv* __restrict__ qkv, const types::inv_freq* __restrict__ inv_freq,
             const types::row_position* __restrict__ row_position,
             const types::row_seq* __restrict__ row_seq,
             const types::block_table* __restrict__ block_table, types::q_out* __restrict__ q_out,
             types::k_cache* __restrict__ k_cache, types::v_cache* __restrict__ v_cache,
             const int* rows, const int* /*seqs*/, const int* max_blocks, const int* /*blocks*/) {
  static_assert(head_dim % 2 == 0, "RoPE turns pairs of elements");
  __shared__ float sines[kHalf], cosines[kHalf];
  const int row = blockIdx.x;
  if (row >= *rows) return;
  const int position = row_position[row];
  for (int i = threadIdx.x; i < kHalf; i += launch::block) {
    const atlas::SinCos turn = atlas::sincos(static_cast<float>(position) * inv_freq[i]);
    sines[i] = turn.sin;
    cosines[i] = turn.cos;
  }
  __syncthreads();

  constexpr int kBlockSize = layout::kv_block_size;
  const size_t table_entry =
      static_cast<size_t>(row_seq[row]) * *max_blocks + position / kBlockSize;
  const size_t kv_block = block_table[table_entry];
  qkv += static_cast<size_t>(row) * (n_heads + 2 * n_kv_heads) * head_dim;
  q_out += static_cast<size_t>(row) * n_heads * head_dim;
  const auto cache_offset = [&](int kv_head) {
    return ((kv_block * n_kv_heads + kv_head) * kBlockSize + position % kBlockSize) * head_dim;
  };

  for (int pair = threadIdx.x; pair < (n_heads + n_kv_heads) * kHalf; pair += launch::block) {
    const int head = pair / kHalf, i = pair % kHalf;
    const float first = atlas::to_float(qkv[head * head_dim + i]);
    const float second = atlas::to_float(qkv[head * head_dim + kHalf + i]);
    const float turned_first = first * cosines[i] - second * sines[i];
    const float turned_second = second * cosines[i] + first * sines[i];
    if (head < n_heads) {
      types::q_out* target = q_out + head * head_dim;
      target[i] = atlas::from_float<types::q_out>(turned_first);
      target[kHalf + i] = atlas::from_float<types::q_out>(turned_second);
    } else {
      types::k_cache* target = k_cache + cache_offset(head - n_heads);
      target[i] = atlas::from_float<types::k_cache>(turned_first);
      target[kHalf + i] = atlas::from_float<types::k_cache>(turned_second);
    }
  }
  const types::qkv* values = qkv + (n_heads + n_kv_heads) * head_dim;
  for (int element = threadIdx.x; element < n_kv_heads * head_dim; element += launch::block) {
    v_cache[cache_offset(element / head_dim) + element % head_dim] =
        atlas::from_float<types::v_cache>(atlas::to_float(values[element]));
  }
}
