/* atlas
[launch]
grid = ["rows", 1, 1]
block = "THREADS"
pdl = true
[limits]
# With one set of frequencies there is nothing to choose.
unread = ["seq_rope"]
[knobs]
THREADS = 128
*/
// rope_kv_append: norms each head of a row's q and k where weights are given, rotates them, and
// appends k and v to the row's sequence's KV blocks.
//
// qkv [rows, (n_heads + 2 n_kv_heads) * head_dim] is [q heads | k heads | v heads]; q_out [rows,
// n_heads * head_dim]; caches [blocks, n_kv_heads, 16, head_dim]; f32 or bf16 each. Of the leading
// rotary_dim elements of a head, i is paired with i + rotary_dim / 2 and turned by position *
// inv_freq[seq_rope[seq], i], a product rounded to fp32. One block a row: the row's sines and
// cosines are computed once and shared by its heads. The norms' factors are found first, a warp a
// head: squares summed per lane, then over the warp, so they depend on the head alone.
// Bytes: two times the row of qkv, whose heads with a norm are read a second time from cache; bound
// by memory latency.
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/pdl.cuh"
#include "atlas/reduce.cuh"
#include "atlas/sincos.cuh"

using namespace constants;

constexpr int kHalf = rotary_dim / 2;
constexpr int kTurned = n_heads + n_kv_heads;  // heads of q and k
constexpr bool kNorms = HAS_Q_NORM || HAS_K_NORM;

ATLAS_KERNEL(const types::qkv* qkv, const types::q_norm* q_norm, const types::k_norm* k_norm,
             const types::inv_freq* inv_freq, const types::seq_rope* seq_rope,
             const types::row_position* row_position, const types::row_seq* row_seq,
             const types::block_table* block_table, types::q_out* q_out, types::k_cache* k_cache,
             types::v_cache* v_cache, const int* rows, const int* /*seqs*/, const int* max_blocks,
             const int* /*blocks*/) {
  static_assert(rotary_dim % 2 == 0 && rotary_dim <= head_dim,
                "RoPE turns pairs of a head's elements");
  __shared__ float sines[kHalf], cosines[kHalf];
  __shared__ float factors[kNorms ? kTurned : 1];  // 1 / sqrt(mean(head^2) + eps)
  atlas::launch_dependents();
  const int row = blockIdx.x;
  if (row >= *rows) {
    atlas::wait_for_inputs();
    return;
  }
  const int position = row_position[row], seq = row_seq[row];
  if constexpr (rope_sets > 1) inv_freq += seq_rope[seq] * kHalf;
  for (int i = threadIdx.x; i < kHalf; i += launch::block) {
    const atlas::SinCos turn = atlas::sincos(static_cast<float>(position) * inv_freq[i]);
    sines[i] = turn.sin * rope_scale;
    cosines[i] = turn.cos * rope_scale;
  }
  atlas::wait_for_inputs();
  qkv += static_cast<size_t>(row) * (n_heads + 2 * n_kv_heads) * head_dim;
  if constexpr (kNorms) {
    const int lane = threadIdx.x % atlas::kWarp;
    for (int head = threadIdx.x / atlas::kWarp; head < kTurned;
         head += launch::block / atlas::kWarp) {
      float squares = 0.0f;
      for (int i = lane; i < head_dim; i += atlas::kWarp) {
        const float value = atlas::to_float(qkv[head * head_dim + i]);
        squares = fmaf(value, value, squares);
      }
      squares = atlas::warp_reduce(squares, atlas::Sum());
      if (lane == 0) factors[head] = 1.0f / sqrtf(squares / static_cast<float>(head_dim) + eps);
    }
  }
  __syncthreads();

  constexpr int kBlockSize = layout::kv_block_size;
  const size_t table_entry = static_cast<size_t>(seq) * *max_blocks + position / kBlockSize;
  const size_t kv_block = block_table[table_entry];
  q_out += static_cast<size_t>(row) * n_heads * head_dim;
  const auto cache_offset = [&](int kv_head) {
    return ((kv_block * n_kv_heads + kv_head) * kBlockSize + position % kBlockSize) * head_dim;
  };
  // Element i of a q or k head, after its norm.
  const auto element = [&](int head, int i) {
    float value = atlas::to_float(qkv[head * head_dim + i]);
    if constexpr (HAS_Q_NORM) {
      if (head < n_heads) value = value * factors[head] * q_norm[i];
    }
    if constexpr (HAS_K_NORM) {
      if (head >= n_heads) value = value * factors[head] * k_norm[i];
    }
    return value;
  };
  const auto store = [&](int head, int i, float value) {
    if (head < n_heads) {
      q_out[head * head_dim + i] = atlas::from_float<types::q_out>(value);
    } else {
      k_cache[cache_offset(head - n_heads) + i] = atlas::from_float<types::k_cache>(value);
    }
  };

  for (int pair = threadIdx.x; pair < kTurned * kHalf; pair += launch::block) {
    const int head = pair / kHalf, i = pair % kHalf;
    const float first = element(head, i), second = element(head, kHalf + i);
    store(head, i, first * cosines[i] - second * sines[i]);
    store(head, kHalf + i, second * cosines[i] + first * sines[i]);
  }
  // The elements that do not turn; often there are none.
  constexpr int kRest = head_dim - rotary_dim, kDivisor = kRest > 0 ? kRest : 1;
  for (int rest = threadIdx.x; rest < kTurned * kRest; rest += launch::block) {
    const int head = rest / kDivisor, i = rotary_dim + rest % kDivisor;
    store(head, i, element(head, i));
  }
  const types::qkv* values = qkv + kTurned * head_dim;
  for (int i = threadIdx.x; i < n_kv_heads * head_dim; i += launch::block) {
    v_cache[cache_offset(i / head_dim) + i % head_dim] =
        atlas::from_float<types::v_cache>(atlas::to_float(values[i]));
  }
}
