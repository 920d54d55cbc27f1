/* atlas
[rows]
up_to = [256, 0]
[launch]
grid = ["ceil_div(n_heads + 2 * n_kv_heads, HEADS)", "ceil_div(rows, WARPS)", 1]
block = "WARPS * 32"
pdl = true
[serves]
qkv = ["f32", "bf16"]
q_out = ["bf16"]
k_cache = ["bf16"]
v_cache = ["bf16"]
[limits]
# With one set of frequencies there is nothing to choose.
unread = ["seq_rope"]
[layouts]
k_cache = "kv_tiles"
v_cache = "kv_tiles"
[knobs]
# A warp has all its heads in flight at once. Few rows are done sooner by more warps; many share the
# sines and cosines (H200, 32 / 8 heads of 128, us at 1, 128, 8192 rows: 8 heads 1.41, 2.91, 74.7;
# 4 heads 0.99, 2.59, 76.2; 2 heads 0.85, 2.55, 89.0).
HEADS = "8 - 6 * min(1, max_rows)"
WARPS = 4
*/
// rope_kv_append: norms each head of a row's q and k where weights are given, rotates them, and
// appends k and v to the row's sequence's KV blocks.
//
// qkv [rows, (n_heads + 2 n_kv_heads) * head_dim] f32 or bf16 is [q heads | k heads | v heads];
// q_out [rows, n_heads * head_dim] bf16, both row-major; caches bf16 in `kv_tiles`. Of the leading
// rotary_dim elements of a head, i is paired with i + rotary_dim / 2 and turned by position *
// inv_freq[seq_rope[seq], i], a product rounded to fp32.
//
// A warp takes HEADS heads of one row; the block's warps take rows. A lane has the same elements of
// each head, so its sines and cosines, computed before the inputs are there, serve all of them.
// A norm's squares are summed per lane, then over the warp: a head's bits depend on nothing else.
// Bytes: a row of qkv read, 2 bytes for each of its elements written; bound by bandwidth for
// prompts, by latency for a few rows.
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/kv_tiles.cuh"
#include "atlas/pdl.cuh"
#include "atlas/reduce.cuh"
#include "atlas/sincos.cuh"

namespace {

using namespace constants;

constexpr int kHalf = rotary_dim / 2, kRest = head_dim - rotary_dim;
constexpr int kAllHeads = n_heads + 2 * n_kv_heads;
// Neighbouring elements that a lane takes at once: as many as leave no lane without.
constexpr int kVector = kHalf % 128 == 0 ? 4 : kHalf % 64 == 0 ? 2 : 1;
constexpr int kPairs = atlas::ceil_div(kHalf, atlas::kWarp* kVector);  // vectors of a lane
constexpr int kRests = atlas::ceil_div(kRest, atlas::kWarp);           // elements that do not turn
constexpr int kPageBytes = atlas::kv_page_bytes(head_dim);

static_assert(rotary_dim % 2 == 0 && rotary_dim > 0 && rotary_dim <= head_dim,
              "RoPE turns pairs of a head's elements");
static_assert(kVector == 1 || head_dim % kVector == 0, "a head's vectors are aligned");
static_assert(atlas::same_type<types::q_out, __nv_bfloat16> &&
                  atlas::same_type<types::k_cache, __nv_bfloat16> &&
                  atlas::same_type<types::v_cache, __nv_bfloat16>,
              "what attention reads is bf16");

template <class T>
struct alignas(kVector * sizeof(T)) Vector {
  T at[kVector];
};

// A lane's elements of a head: pair j of vectors begins at element(j) and kHalf after it, then
// those that do not turn, a warp's width apart.
struct Elements {
  float first[kPairs][kVector], second[kPairs][kVector], rest[kRests > 0 ? kRests : 1];

  __device__ static int element(int j, int lane) { return (j * atlas::kWarp + lane) * kVector; }
  __device__ static bool turns(int j, int lane) {
    return kHalf % (atlas::kWarp * kVector) == 0 || element(j, lane) < kHalf;
  }
  __device__ static bool stays(int j, int lane) { return j * atlas::kWarp + lane < kRest; }

  template <class T>
  __device__ void load(const T* head, int lane) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      Vector<T> a = {}, b = {};
      if (turns(j, lane)) {
        a = *reinterpret_cast<const Vector<T>*>(head + element(j, lane));
        b = *reinterpret_cast<const Vector<T>*>(head + kHalf + element(j, lane));
      }
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        first[j][v] = atlas::to_float(a.at[v]);
        second[j][v] = atlas::to_float(b.at[v]);
      }
    }
#pragma unroll
    for (int j = 0; j < kRests; ++j) {
      rest[j] = stays(j, lane) ? atlas::to_float(head[rotary_dim + j * atlas::kWarp + lane]) : 0.0f;
    }
  }
  // Calls visit(this element, that element of `other`) for each.
  template <class Visit>
  __device__ void with(const Elements& other, Visit visit) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j)
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        visit(first[j][v], other.first[j][v]);
        visit(second[j][v], other.second[j][v]);
      }
#pragma unroll
    for (int j = 0; j < kRests; ++j) visit(rest[j], other.rest[j]);
  }
  __device__ void norm(const Elements& weight) {
    float squares = 0.0f;
    with(*this, [&](float& x, float) { squares = fmaf(x, x, squares); });
    squares = atlas::warp_reduce(squares, atlas::Sum());
    const float factor = 1.0f / sqrtf(squares / static_cast<float>(head_dim) + eps);
    with(weight, [&](float& x, float w) { x = x * factor * w; });
  }
  // `turn` has the cosines in `first` and the sines in `second`.
  __device__ void rotate(const Elements& turn) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j)
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        const float a = first[j][v], b = second[j][v];
        first[j][v] = a * turn.first[j][v] - b * turn.second[j][v];
        second[j][v] = b * turn.first[j][v] + a * turn.second[j][v];
      }
  }
  // `at(i)` is where element i goes; a vector's are neighbours there too.
  template <class At>
  __device__ void store(At at, int lane) const {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      Vector<__nv_bfloat16> a, b;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        a.at[v] = __float2bfloat16_rn(first[j][v]);
        b.at[v] = __float2bfloat16_rn(second[j][v]);
      }
      if (!turns(j, lane)) continue;
      *reinterpret_cast<Vector<__nv_bfloat16>*>(at(element(j, lane))) = a;
      *reinterpret_cast<Vector<__nv_bfloat16>*>(at(kHalf + element(j, lane))) = b;
    }
#pragma unroll
    for (int j = 0; j < kRests; ++j) {
      if (stays(j, lane)) *at(rotary_dim + j * atlas::kWarp + lane) = __float2bfloat16_rn(rest[j]);
    }
  }
};

}  // namespace

ATLAS_KERNEL(const types::qkv* qkv, const types::q_norm* q_norm, const types::k_norm* k_norm,
             const types::inv_freq* inv_freq, const types::seq_rope* seq_rope,
             const types::row_position* row_position, const types::row_seq* row_seq,
             const types::block_table* block_table, types::q_out* q_out, types::k_cache* k_cache,
             types::v_cache* v_cache, const int* rows, const int* /*seqs*/, const int* max_blocks,
             const int* /*blocks*/) {
  atlas::launch_dependents();
  const int lane = threadIdx.x % atlas::kWarp;
  const int row = blockIdx.y * knobs::WARPS + threadIdx.x / atlas::kWarp;
  if (row >= *rows) {
    atlas::wait_for_inputs();
    return;
  }
  const int position = row_position[row], seq = row_seq[row];
  if constexpr (rope_sets > 1) inv_freq += seq_rope[seq] * kHalf;
  const size_t block =
      block_table[static_cast<size_t>(seq) * *max_blocks + position / atlas::kPageTokens];
  Elements turn, q_weight, k_weight;
#pragma unroll
  for (int j = 0; j < kPairs; ++j)
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const float frequency =
          Elements::turns(j, lane) ? inv_freq[Elements::element(j, lane) + v] : 0.0f;
      const atlas::SinCos angle = atlas::sincos(static_cast<float>(position) * frequency);
      turn.first[j][v] = angle.cos * rope_scale;
      turn.second[j][v] = angle.sin * rope_scale;
    }
  if constexpr (HAS_Q_NORM) q_weight.load(q_norm, lane);
  if constexpr (HAS_K_NORM) k_weight.load(k_norm, lane);
  atlas::wait_for_inputs();

  const int first_head = blockIdx.x * knobs::HEADS;
  qkv += (static_cast<size_t>(row) * kAllHeads + first_head) * head_dim;
  Elements heads[knobs::HEADS];
#pragma unroll
  for (int h = 0; h < knobs::HEADS; ++h) {
    if (first_head + h < kAllHeads) heads[h].load(qkv + h * head_dim, lane);
  }
#pragma unroll
  for (int h = 0; h < knobs::HEADS; ++h) {
    const int head = first_head + h;
    if (head >= kAllHeads) break;
    if (head < n_heads) {
      if constexpr (HAS_Q_NORM) heads[h].norm(q_weight);
      heads[h].rotate(turn);
      __nv_bfloat16* target = q_out + (static_cast<size_t>(row) * n_heads + head) * head_dim;
      heads[h].store([&](int i) { return target + i; }, lane);
      continue;
    }
    const bool is_key = head < n_heads + n_kv_heads;
    if (is_key) {
      if constexpr (HAS_K_NORM) heads[h].norm(k_weight);
      heads[h].rotate(turn);
    }
    const int kv_head = is_key ? head - n_heads : head - n_heads - n_kv_heads;
    unsigned char* page = reinterpret_cast<unsigned char*>(is_key ? k_cache : v_cache) +
                          atlas::kv_page_offset(block, kv_head, n_kv_heads, kPageBytes);
    const auto at = [&](int i) {
      return reinterpret_cast<__nv_bfloat16*>(page +
                                              atlas::in_page(position % atlas::kPageTokens, i));
    };
    heads[h].store(at, lane);
    constexpr int kPadded =
        atlas::ceil_div(head_dim, atlas::kPageRowElements) * atlas::kPageRowElements;
    for (int i = head_dim + lane; i < kPadded; i += atlas::kWarp)
      *at(i) = __float2bfloat16_rn(0.0f);
  }
}
