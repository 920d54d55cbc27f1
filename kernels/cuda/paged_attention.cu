/* atlas
[launch]
grid = ["rows", "n_kv_heads * ceil_div(n_heads // n_kv_heads, HEADS)", 1]
block = "WARPS * 32"
pdl = true
[serves]
out = ["f32", "bf16"]
[knobs]
# A row of a decode step waits for its keys: at 1,024 of them 8 warps take half the time of 4, on an
# H200 and for three models (bench/results/tune_h200_*.json).
HEADS = 8
WARPS = 8
[knobs.choices]
HEADS = [1, 2, 4, 8]
WARPS = [4, 8, 16]
*/
// paged_attention: out[r, h] = softmax(q[r, h] . K * scale) V over positions 0..row_position[r], or
// the last `window` of them.
//
// q, out [rows, n_heads * head_dim]; caches [blocks, n_kv_heads, 16, head_dim]; f32 or bf16 each.
// One block a row and KV head: the query heads that share the KV head (HEADS of them at most, more
// take further blocks) share every key and value that is read. Keys are cut into fixed tiles of 32,
// tile t belonging to warp t % WARPS. A warp keeps a running maximum, sum and weighted sum of
// values per head (online softmax), lane l holding elements l, l + 32, ... of the head; the warps'
// shares are put together at the end in order. So a row sees the same arithmetic alone, in a batch,
// or in any chunk. Keys after the row's position, KV blocks wholly before its window, and the block
// table's entries for these are never read: they may be garbage. Bytes: 2 x head_dim elements per
// visible key and KV head; bound by bandwidth at long contexts.
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/pdl.cuh"
#include "atlas/reduce.cuh"

namespace {

using namespace constants;

constexpr int kLanes = atlas::kWarp, kTile = 32, kWarps = knobs::WARPS;
constexpr int kGroup = n_heads / n_kv_heads;
constexpr int kHeads = kGroup < knobs::HEADS ? kGroup : knobs::HEADS;
constexpr int kChunks = atlas::ceil_div(kGroup, knobs::HEADS);
constexpr int kPieces = atlas::ceil_div(head_dim, kLanes);  // elements of a head per lane
constexpr int kBlockSize = layout::kv_block_size;
static_assert(kTile == kLanes, "a lane keeps the score of one key of a tile");
static_assert(kTile % kBlockSize == 0, "tiles hold whole KV blocks");

__device__ inline float minus_infinity() { return __uint_as_float(0xFF800000u); }

// A lane's elements of one head; those beyond head_dim are zero.
template <class T>
__device__ inline void load(float (&piece)[kPieces], const T* head, int lane) {
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int element = lane + i * kLanes;
    const bool inside = head_dim % kLanes == 0 || element < head_dim;
    piece[i] = inside ? atlas::to_float(head[element]) : 0.0f;
  }
}

}  // namespace

ATLAS_KERNEL(const types::q* q, const types::k_cache* k_cache, const types::v_cache* v_cache,
             const types::row_position* row_position, const types::row_seq* row_seq,
             const types::block_table* block_table, types::out* out, const int* rows,
             const int* /*seqs*/, const int* max_blocks, const int* /*blocks*/) {
  static_assert(n_heads % n_kv_heads == 0, "every KV head serves the same number of query heads");
  __shared__ float shared_max[kWarps], shared_total[kWarps];
  __shared__ float shared_values[kWarps][head_dim];
  const int row = blockIdx.x;
  atlas::launch_dependents();
  atlas::wait_for_inputs();
  if (row >= *rows) return;
  const int kv_head = blockIdx.y / kChunks;
  const int first_in_group = blockIdx.y % kChunks * kHeads;
  const int n_mine = kGroup - first_in_group < kHeads ? kGroup - first_in_group : kHeads;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int position = row_position[row];
  const int* table = block_table + static_cast<size_t>(row_seq[row]) * *max_blocks;
  const size_t first_head = static_cast<size_t>(row) * n_heads + kv_head * kGroup + first_in_group;
  // The first position that the row sees, and the tile that holds it.
  const int begin = window > 0 && position >= window ? position - window + 1 : 0;
  const int first_tile = begin / kTile;

  float query[kHeads][kPieces], values[kHeads][kPieces], maximum[kHeads], total[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    // The last chunk of a group may be short: its spare heads repeat the first one, unused.
    load(query[h], q + (first_head + (h < n_mine ? h : 0)) * head_dim, lane);
    maximum[h] = minus_infinity();
    total[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) values[h][i] = 0.0f;
  }

  // This warp's first tile from that one on.
  const int my_tile = first_tile + (warp + kWarps - first_tile % kWarps) % kWarps;
  for (int first = my_tile * kTile; first <= position; first += kWarps * kTile) {
    const int n_keys = position + 1 - first < kTile ? position + 1 - first : kTile;
    const int hidden =
        window > 0 ? begin - first : 0;  // leading keys outside the window, if above 0
    // Where the tile's KV blocks lie; one of no visible key stays unread.
    size_t base[kTile / kBlockSize];
#pragma unroll
    for (int b = 0; b < kTile / kBlockSize; ++b) {
      const bool used = b * kBlockSize < n_keys && (b + 1) * kBlockSize > hidden;
      const size_t kv_block = used ? table[first / kBlockSize + b] : 0;
      base[b] = (kv_block * n_kv_heads + kv_head) * kBlockSize * head_dim;
    }

    float score[kHeads];  // of key `lane` of the tile
#pragma unroll
    for (int h = 0; h < kHeads; ++h) score[h] = minus_infinity();
#pragma unroll
    for (int b = 0; b < kTile / kBlockSize; ++b) {
#pragma unroll 4
      for (int j = 0; j < kBlockSize; ++j) {
        if (b * kBlockSize + j >= n_keys) break;
        if (window > 0 && b * kBlockSize + j < hidden) continue;
        float key[kPieces];
        load(key, k_cache + base[b] + j * head_dim, lane);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          float dot = 0.0f;
#pragma unroll
          for (int i = 0; i < kPieces; ++i) dot = fmaf(query[h][i], key[i], dot);
          dot = atlas::warp_reduce(dot, atlas::Sum());
          if (lane == b * kBlockSize + j) score[h] = dot * constants::scale;
        }
      }
    }

    float weight[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float tile_max = atlas::warp_reduce(score[h], atlas::Max());
      const float new_max = maximum[h] > tile_max ? maximum[h] : tile_max;
      const float correction = expf(maximum[h] - new_max);
      weight[h] = expf(score[h] - new_max);  // 0 for lanes without a visible key
      total[h] = total[h] * correction + atlas::warp_reduce(weight[h], atlas::Sum());
      maximum[h] = new_max;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) values[h][i] *= correction;
    }
#pragma unroll
    for (int b = 0; b < kTile / kBlockSize; ++b) {
#pragma unroll 4
      for (int j = 0; j < kBlockSize; ++j) {
        if (b * kBlockSize + j >= n_keys) break;
        if (window > 0 && b * kBlockSize + j < hidden) continue;
        float value[kPieces];
        load(value, v_cache + base[b] + j * head_dim, lane);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float w = __shfl_sync(atlas::kAllLanes, weight[h], b * kBlockSize + j);
#pragma unroll
          for (int i = 0; i < kPieces; ++i) values[h][i] = fmaf(w, value[i], values[h][i]);
        }
      }
    }
  }

  // Put the warps' shares together. Some warp has a key, so the largest maximum is finite; a warp
  // that saw none has maximum -inf and weighs exp(-inf) = 0.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (lane == 0) {
      shared_max[warp] = maximum[h];
      shared_total[warp] = total[h];
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int element = lane + i * kLanes;
      if (element < head_dim) shared_values[warp][element] = values[h][i];
    }
    __syncthreads();
    float highest = shared_max[0];
    for (int w = 1; w < kWarps; ++w) {
      highest = shared_max[w] > highest ? shared_max[w] : highest;
    }
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += shared_total[w] * expf(shared_max[w] - highest);
    for (int element = threadIdx.x; element < head_dim && h < n_mine; element += launch::block) {
      float result = 0.0f;
      for (int w = 0; w < kWarps; ++w) {
        result = fmaf(shared_values[w][element], expf(shared_max[w] - highest), result);
      }
      out[(first_head + h) * head_dim + element] = atlas::from_float<types::out>(result / sum);
    }
    __syncthreads();
  }
}
