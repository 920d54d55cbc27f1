// paged_attention: out[r, h] = softmax(q[r, h] . K / sqrt(head_dim)) V over positions
// 0..row_position[r] of the row's sequence.
//
// Layout: caches [blocks][n_kv_heads][16][head_dim]; block_table[seq] lists a sequence's blocks.
//   Only entries up to the row's position are read; tokens past it are masked.
// Shapes: any head_dim, any number of query heads per KV head, any context.
// Order: online softmax over a sequence's 16-token blocks from position 0 on. A block's scores are
//   one vector (lane = token); its largest score, its weights and its share of the sum follow from
//   the row's own q and cache, so a row is computed alike alone, in a batch, or in any chunk.
// Tiles: up to 8 neighbouring rows of one sequence, and the query heads of one KV head, go through
//   the blocks together, so that a block is read (and widened from bf16) once for all of them.
// Work split: (row tile, query head), weighted by the blocks that the tile's rows see: rows at
//   different positions cost differently, and a single row is still shared by the workers.
// Bytes: context * n_kv_heads * head_dim * 2 * size of the cache per row tile.
// Bound: FMA units for tiles of several rows or heads; memory for a single row of many contexts.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

constexpr int64_t kBlockSize = 16;
static_assert(kBlockSize == kLanes, "a block's scores are one vector");
constexpr int64_t kTileRows = 8;
constexpr int64_t kTileHeads = 8;

struct Heads {
  int64_t n_heads, n_kv_heads, dim;
  int64_t padded;  // dim rounded up to whole vectors
};

// One query: a row's head, padded, and its online softmax.
struct Query {
  float* q;
  float* sum;            // weighted sum of V so far, relative to `largest`
  float largest;         // largest score so far
  F32x16 total;          // sum of weights so far, by place in a block
  float weight[kLanes];  // of the current block's tokens
};

// A block of K or V as fp32 rows of `padded`, zero beyond head_dim: itself, or a copy. Tokens that
// no row sees yet come along; whatever they hold is masked later.
template <class T>
ATLAS_INLINE const float* widened(const T* block, const Heads& heads, float* copy) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (heads.padded == heads.dim) return block;
  }
  for (int64_t t = 0; t < kBlockSize; ++t) {
    for_lanes(heads.dim, [&](int64_t i, auto count) {
      store(copy + t * heads.padded + i, load(block + t * heads.dim + i, count));
    });
  }
  return copy;
}

// Scores of one query against 16 tokens, not yet scaled.
ATLAS_INLINE F32x16 scores(const float* q, const float* keys, int64_t padded) {
  F32x16 partial[kBlockSize];
  for (int t = 0; t < kBlockSize; ++t) partial[t] = zero();
  for (int64_t i = 0; i < padded; i += kLanes) {
    const F32x16 v = load(q + i);
    for (int t = 0; t < kBlockSize; ++t) {
      partial[t] = partial[t] + v * load(keys + t * padded + i);
    }
  }
  return sum_each(partial);
}

// Scores of `tokens` tokens to weights relative to the largest score so far.
void weigh(Query& query, F32x16 scores, int64_t tokens, int64_t padded) {
  scores = select(first_lanes(tokens), scores, splat(-__builtin_inff()));
  const float top = largest(scores);
  if (top > query.largest) {
    const F32x16 shrink = exp(splat(query.largest - top));
    for (int64_t i = 0; i < padded; i += kLanes) store(query.sum + i, load(query.sum + i) * shrink);
    query.total = query.total * shrink;
    query.largest = top;
  }
  const F32x16 weights = exp(scores - splat(query.largest));
  query.total = query.total + weights;
  store(query.weight, weights);
}

// sum += weights . values, for `n` queries and `width` vectors of columns from `column` on.
template <int n, int width>
ATLAS_INLINE void add_columns(const Query* queries, const float* values, int64_t column,
                              int64_t tokens, int64_t padded) {
  F32x16 acc[n][width];
  for (int q = 0; q < n; ++q) {
    for (int i = 0; i < width; ++i) acc[q][i] = load(queries[q].sum + column + i * kLanes);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    F32x16 v[width];
    for (int i = 0; i < width; ++i) v[i] = load(values + t * padded + column + i * kLanes);
    for (int q = 0; q < n; ++q) {
      const F32x16 w = splat(queries[q].weight[t]);
      for (int i = 0; i < width; ++i) acc[q][i] = acc[q][i] + w * v[i];
    }
  }
  for (int q = 0; q < n; ++q) {
    for (int i = 0; i < width; ++i) store(queries[q].sum + column + i * kLanes, acc[q][i]);
  }
}

template <int n>
void add_values(const Query* queries, const float* values, int64_t tokens, int64_t padded) {
  constexpr int kWidth = 4;
  int64_t column = 0;
  for (; column + kWidth * kLanes <= padded; column += kWidth * kLanes) {
    add_columns<n, kWidth>(queries, values, column, tokens, padded);
  }
  for (; column < padded; column += kLanes) {
    add_columns<n, 1>(queries, values, column, tokens, padded);
  }
}

// Takes one block into the softmax of `n` queries that see its first `tokens` tokens. In phases, so
// that the queries' long chains of dependent instructions overlap.
void absorb(Query* queries, int64_t n, const float* keys, const float* values, int64_t tokens,
            float scale, int64_t padded) {
  F32x16 score[kTileHeads];
  for (int64_t i = 0; i < n; ++i) score[i] = scores(queries[i].q, keys, padded) * splat(scale);
  for (int64_t i = 0; i < n; ++i) weigh(queries[i], score[i], tokens, padded);
  constexpr int kTogether = kParts == 1 ? 2 : 1;  // queries whose sums fit the registers
  int64_t i = 0;
  for (; i + kTogether <= n; i += kTogether) {
    add_values<kTogether>(queries + i, values, tokens, padded);
  }
  for (; i < n; ++i) add_values<1>(queries + i, values, tokens, padded);
}

template <class Q, class Kv, class Out>
struct Attention {
  Heads heads;
  const Q* q;
  const Kv *k_cache, *v_cache;
  const int32_t *row_position, *row_seq, *block_table;
  Out* out;
  int64_t rows, max_blocks;
  float scale;
  float* scratch;

  // The end of the tile that begins at `row`: neighbours of the same sequence.
  int64_t tile_end(int64_t row) const {
    int64_t end = row + 1;
    while (end < rows && end < row + kTileRows && row_seq[end] == row_seq[row]) ++end;
    return end;
  }
  // What one head of a tile costs, in blocks.
  int64_t cost(Range tile) const {
    int64_t sum = 0;
    for (int64_t r = tile.begin; r < tile.end; ++r) sum += row_position[r] / kBlockSize + 1;
    return sum;
  }

  // Rows of a tile, query heads [begin, end) of one KV head, at most kTileHeads.
  void attend(Range tile, int64_t kv_head, Range head) {
    Query queries[kTileRows * kTileHeads];
    const int64_t n_heads = head.end - head.begin, padded = heads.padded;
    float* keys_copy = scratch;
    float* values_copy = keys_copy + kBlockSize * padded;
    float* state = values_copy + kBlockSize * padded;
    const auto at = [&](int64_t row, int64_t h) { return (row * heads.n_heads + h) * heads.dim; };
    int64_t last = 0;
    for (int64_t r = tile.begin; r < tile.end; ++r) {
      last = max64(last, row_position[r]);
      for (int64_t h = head.begin; h < head.end; ++h) {
        const int64_t index = (r - tile.begin) * n_heads + h - head.begin;
        float* own = state + index * 2 * padded;
        queries[index] = {own, own + padded, -__builtin_inff(), zero(), {}};
        const Q* from = q + at(r, h);
        for_lanes(heads.dim, [&](int64_t i, auto count) { store(own + i, load(from + i, count)); });
        for (int64_t i = 0; i < padded; i += kLanes) store(own + padded + i, zero());
      }
    }
    const int32_t* blocks = block_table + row_seq[tile.begin] * max_blocks;
    for (int64_t begin = 0; begin <= last; begin += kBlockSize) {
      const int64_t block = blocks[begin / kBlockSize];
      const int64_t offset = (block * heads.n_kv_heads + kv_head) * kBlockSize * heads.dim;
      const float* keys = widened(k_cache + offset, heads, keys_copy);
      const float* values = widened(v_cache + offset, heads, values_copy);
      for (int64_t r = tile.begin; r < tile.end; ++r) {
        const int64_t tokens = min64(kBlockSize, row_position[r] + 1 - begin);
        if (tokens <= 0) continue;
        absorb(queries + (r - tile.begin) * n_heads, n_heads, keys, values, tokens, scale, padded);
      }
    }
    for (int64_t r = tile.begin; r < tile.end; ++r) {
      for (int64_t h = head.begin; h < head.end; ++h) {
        const Query& query = queries[(r - tile.begin) * n_heads + h - head.begin];
        const F32x16 total = splat(sum(query.total));
        Out* to = out + at(r, h);
        for_lanes(heads.dim, [&](int64_t i, auto count) {
          store(to + i, load(query.sum + i) / total, count);
        });
      }
    }
  }

  // Heads [begin, end) of a tile, KV head by KV head.
  void attend_heads(Range tile, Range head) {
    const int64_t group = heads.n_heads / heads.n_kv_heads;
    for (int64_t h = head.begin; h < head.end;) {
      const int64_t kv_head = h / group;
      const int64_t next = min64(min64(head.end, (kv_head + 1) * group), h + kTileHeads);
      attend(tile, kv_head, {h, next});
      h = next;
    }
  }

  // This worker's share: (tile, head) pairs laid end to end by their cost, cut into equal lengths.
  void run(const CpuLaunch& launch) {
    int64_t total = 0;
    for (int64_t row = 0; row < rows; row = tile_end(row)) total += cost({row, tile_end(row)});
    const Range mine = partition(launch, total * heads.n_heads);
    int64_t begin = 0;  // of the tile, on that line
    for (int64_t row = 0; row < rows && begin < mine.end;) {
      const Range tile = {row, tile_end(row)};
      const int64_t each = cost(tile);
      // Heads whose start lies before a cut: a head belongs to the share in which it starts.
      const auto heads_before = [&](int64_t cut) {
        return max64(0, min64(heads.n_heads, ceil_div(max64(0, cut - begin), each)));
      };
      attend_heads(tile, {heads_before(mine.begin), heads_before(mine.end)});
      begin += each * heads.n_heads;
      row = tile.end;
    }
  }
};

Heads heads_of(const CpuLaunch& launch) {
  const int64_t dim = launch.integer(2);
  return {launch.integer(0), launch.integer(1), dim, ceil_div(dim, kLanes) * kLanes};
}

template <class Q, class Kv, class Out>
void paged_attention(const CpuLaunch& launch) {
  const Heads heads = heads_of(launch);
  Attention<Q, Kv, Out>{heads,
                        launch.operand<const Q>(0),
                        launch.operand<const Kv>(1),
                        launch.operand<const Kv>(2),
                        launch.operand<const int32_t>(3),
                        launch.operand<const int32_t>(4),
                        launch.operand<const int32_t>(5),
                        launch.operand<Out>(6),
                        launch.dims[0],
                        launch.dims[2],
                        1.0f / __builtin_sqrtf(static_cast<float>(heads.dim)),
                        reinterpret_cast<float*>(launch.scratch)}
      .run(launch);
}

// Copies of a block of K and V, and q and the weighted sum of each query of a tile.
size_t scratch(const CpuLaunch& launch) {
  const int64_t rows = 2 * kBlockSize + 2 * kTileRows * kTileHeads;
  return static_cast<size_t>(rows * heads_of(launch).padded) * sizeof(float);
}

ATLAS_CPU_KERNEL("paged_attention.q_f32.k_cache_f32.v_cache_f32.out_f32",
                 paged_attention<float, float, float>, scratch);
ATLAS_CPU_KERNEL("paged_attention.q_bf16.k_cache_bf16.v_cache_bf16.out_bf16",
                 paged_attention<Bf16, Bf16, Bf16>, scratch);

}  // namespace
}  // namespace atlas
