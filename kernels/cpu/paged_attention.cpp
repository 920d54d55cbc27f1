/* atlas
[levels]
also = ["avx512vnni"]
*/
// paged_attention: out[r, h] = softmax(q[r, h] . K / sqrt(head_dim)) V over positions
// 0..row_position[r] of the row's sequence.
//
// Layout: caches [blocks][n_kv_heads][16][head_dim]; block_table[seq] lists a sequence's blocks.
//   Only entries up to the row's position are read; tokens past it are masked.
// Shapes: any head_dim, any number of query heads per KV head, any context.
// Order: a context is cut into chunks of 128 positions. Within a chunk every score is one chain
// over
//   the columns, weights are relative to the chunk's largest score, and a weighted sum is one chain
//   over the tokens; chunks are then combined from the first on. All of it follows from the row's
//   own q, cache and position, so a row is computed alike alone, in a batch, in any chunk of its
//   prompt and by any number of workers.
// Arithmetic: fp32; at avx512vnni a bf16 cache is multiplied in pairs (weights rounded to bf16, the
//   sum of weights taken over the rounded ones).
// Tiles: consecutive rows of one sequence and the query heads of one KV head, up to 48 queries, go
//   through the blocks together: a block is read, and transposed for the scores, once for all.
// Work split: (row tile, KV head), weighted by the blocks that the tile's rows see. Where there are
//   few of them, (row tile, KV head, chunk): partial results go to memory that the workers share,
//   and after a barrier each worker combines a part of the rows and heads.
// Bytes: context * n_kv_heads * head_dim * 2 * size of the cache per row tile.
// Bound: FMA or dot-product units for tiles of several rows; memory for single rows.
#include "atlas/attention.h"

namespace atlas {
namespace {

// Positions of a chunk. 128: the scores of a tile, 24 KiB, stay in L1, and a decoding row of 200
// tokens already splits evenly over two workers; at 512 one row needs 3 times as long a context.
constexpr int64_t kChunk = 128;
constexpr int64_t kTileQueries = 48;
constexpr int64_t kTileHeads = 16;  // of one KV head at a time
// Partial results that the workers' shared memory holds: 32 heads by 262144 positions.
constexpr int64_t kPartials = 65536;

struct Heads {
  int64_t n_heads, n_kv_heads, dim;
  ATLAS_INLINE int64_t group() const { return n_heads / n_kv_heads; }
};

ATLAS_INLINE Heads heads_of(const CpuLaunch& launch) {
  return {launch.integer(0), launch.integer(1), launch.integer(2)};
}
ATLAS_INLINE int64_t padded_to(int64_t dim, int64_t padding) {
  return ceil_div(dim, padding) * padding;
}
// Wide enough for either arithmetic.
ATLAS_INLINE int64_t padded_dim(const Heads& heads) { return padded_to(heads.dim, 2 * kLanes); }

// The largest score, the sum of weights and the weighted sum of V of one query over some tokens;
// the two sums relative to the largest score.
struct Softmax {
  float* largest;
  float* total;
  float* sum;
};

// e^(score - reference), 0 where no score was larger than -inf.
ATLAS_INLINE float reference_of(float largest) {
  return largest == -__builtin_inff() ? 0.0f : largest;
}

// Takes `part`, of a later chunk, into `all`.
ATLAS_INLINE void combine(const Softmax& all, const Softmax& part, int64_t padded) {
  const float top = *part.largest > *all.largest ? *part.largest : *all.largest;
  const F32x16 keep = exp(splat(*all.largest - reference_of(top)));
  const F32x16 take = exp(splat(*part.largest - reference_of(top)));
  const F32x16 total = splat(*all.total) * keep + splat(*part.total) * take;
  for (int64_t i = 0; i < padded; i += kLanes) {
    store(all.sum + i, load(all.sum + i) * keep + load(part.sum + i) * take);
  }
  *all.largest = top;
  *all.total = total.part[0][0];
}

// Consecutive rows of one sequence, the first at `position`; query heads [head_begin, head_end).
struct Tile {
  int64_t begin, end, position, seq;
  int64_t head_begin, head_end;

  int64_t rows() const { return end - begin; }
  int64_t n_heads() const { return head_end - head_begin; }
  int64_t queries() const { return rows() * n_heads(); }
};

template <class Math, class T>
struct Attention {
  using Element = typename Math::Element;

  Heads heads;
  const T *q, *k_cache, *v_cache;
  const int32_t *row_position, *row_seq, *block_table;
  T* out;
  int64_t rows, max_blocks, window;
  float scale;
  int64_t padded;
  float* scratch;

  // ---- What rows see: positions [first_seen, row position].

  int64_t first_seen(int64_t position) const {
    return window > 0 ? max64(0, position + 1 - window) : 0;
  }
  int64_t first_chunk(int64_t position) const { return first_seen(position) / kChunk; }
  int64_t n_chunks(int64_t position) const { return position / kChunk - first_chunk(position) + 1; }

  // ---- Private memory.

  int64_t steps() const { return padded / Math::kPerStep; }
  Element* keys() const { return reinterpret_cast<Element*>(scratch); }
  Element* values() const { return keys() + kScoreBlocks * padded * kLanes; }
  Element* queries() const { return values() + kBlockSize * padded; }
  float* scores() const { return reinterpret_cast<float*>(queries() + kTileQueries * padded); }
  float* sums() const { return scores() + kTileQueries * kChunk; }
  float* running() const { return sums() + kTileQueries * padded; }
  float* largest() const { return running() + kTileQueries * padded; }
  float* totals() const { return largest() + kTileQueries; }
  float* running_largest() const { return totals() + kTileQueries; }
  float* running_totals() const { return running_largest() + kTileQueries; }
  static size_t scratch_floats(int64_t padded) {
    return static_cast<size_t>((kScoreBlocks * kLanes + kBlockSize + 3 * kTileQueries) * padded +
                               kTileQueries * kChunk + 4 * kTileQueries);
  }

  // ---- One tile.

  void load_queries(const Tile& tile) const {
    for (int64_t i = 0; i < tile.queries(); ++i) {
      const int64_t row = tile.begin + i / tile.n_heads();
      const int64_t head = tile.head_begin + i % tile.n_heads();
      Math::query(q + (row * heads.n_heads + head) * heads.dim, heads.dim, padded,
                  queries() + i * steps());
    }
  }

  // The cache offset of the tile's KV head in the block that holds `position`.
  int64_t block_at(const Tile& tile, int64_t position) const {
    const int64_t block = block_table[tile.seq * max_blocks + position / kBlockSize];
    return (block * heads.n_kv_heads + tile.head_begin / heads.group()) * kBlockSize * heads.dim;
  }

  // Rows of the tile, counted from its first, that see something of positions [begin, end).
  Range rows_that_see(const Tile& tile, int64_t begin, int64_t end) const {
    const int64_t first = max64(0, begin - tile.position);
    const int64_t last = window > 0 ? end - 1 + window - tile.position : tile.rows();
    return {min64(first, tile.rows()), max64(0, min64(last, tile.rows()))};
  }

  // Scores of all queries against positions [begin, end), multiples of 16 within a chunk.
  void score_chunk(const Tile& tile, int64_t begin, int64_t end) const {
    for (int64_t at = begin; at < end; at += kScoreBlocks * kBlockSize) {
      const int64_t stop = min64(end, at + kScoreBlocks * kBlockSize);
      for (int64_t p = at; p < stop; p += kBlockSize) {
        Math::keys(k_cache + block_at(tile, p), heads.dim,
                   keys() + (p - at) / kBlockSize * padded * kLanes);
      }
      const Range seeing = rows_that_see(tile, at, stop);
      float* to = scores() + at % kChunk;
      tiles_of<kScoreQueries>(
          seeing.begin * tile.n_heads(), seeing.end * tile.n_heads(), [&](int64_t i, auto n) {
            if (stop - at == kScoreBlocks * kBlockSize) {
              score<Math, decltype(n)::value, kScoreBlocks>(queries() + i * steps(), steps(),
                                                            keys(), padded * kLanes, steps(),
                                                            to + i * kChunk, kChunk);
            } else {
              score<Math, decltype(n)::value, 1>(queries() + i * steps(), steps(), keys(),
                                                 padded * kLanes, steps(), to + i * kChunk, kChunk);
            }
          });
    }
  }

  // Lanes of the block at `begin` that the row at `position` sees.
  Mask16 seen(int64_t begin, int64_t position) const {
    const Mask16 up_to = first_lanes(position + 1 - begin);
    Mask16 before = first_lanes(first_seen(position) - begin);
    for (int i = 0; i < kParts; ++i) before.part[i] = up_to.part[i] & ~before.part[i];
    return before;
  }

  // Scores of query `i` in the chunk at `begin` to weights, in place.
  void weigh(int64_t i, int64_t begin, int64_t position) const {
    float* row = scores() + i * kChunk;
    const int64_t first = max64(begin, first_seen(position)) / kBlockSize * kBlockSize;
    const int64_t last = min64(begin + kChunk, position + 1);
    F32x16 top = splat(-__builtin_inff());
    for (int64_t at = first; at < last; at += kBlockSize) {
      F32x16 s = load(row + at - begin) * splat(scale);
      s = select(seen(at, position), s, splat(-__builtin_inff()));
      store(row + at - begin, s);
      top = max(s, top);
    }
    const float most = atlas::largest(top);
    F32x16 total = zero();
    auto* weights = reinterpret_cast<Element*>(row);
    for (int64_t at = first; at < last; at += kBlockSize) {
      const F32x16 w = exp(load(row + at - begin) - splat(reference_of(most)));
      total = total + Math::weights(w, weights, (at - begin) / kBlockSize);
    }
    largest()[i] = most;
    totals()[i] = sum(total);
  }

  // Weighted sums of V over positions [begin, end), as in score_chunk.
  void sum_chunk(const Tile& tile, int64_t begin, int64_t end) const {
    const int64_t stride = kChunk, n_heads = tile.n_heads();
    for (int64_t at = begin; at < end; at += kBlockSize) {
      const T* block = v_cache + block_at(tile, at);
      const Range seeing = rows_that_see(tile, at, at + kBlockSize);
      const auto* weights =
          reinterpret_cast<const Element*>(scores()) + at % kChunk / Math::kPerStep;
      const auto add = [&](const Element* from, int64_t first, int64_t last) {
        tiles_of<kValueQueries>(first * n_heads, last * n_heads, [&](int64_t i, auto n) {
          add_values<Math, decltype(n)::value>(weights + i * stride, stride, from, padded,
                                               sums() + i * padded);
        });
      };
      // Rows that see all of the block, together. A row that sees a part of it must not meet the
      // rest, which may hold another row's NaN.
      const auto whole = [&](int64_t row) {
        const int64_t position = tile.position + row;
        return position >= at + kBlockSize - 1 && first_seen(position) <= at;
      };
      int64_t row = seeing.begin;
      for (; row < seeing.end && !whole(row); ++row) add_part(tile, row, at, block, add);
      int64_t last = row;
      while (last < seeing.end && whole(last)) ++last;
      if (last > row)
        add(Math::values(BlockRows<T>{block, heads.dim, 0, kBlockSize}, padded, values()), row,
            last);
      for (row = last; row < seeing.end; ++row) add_part(tile, row, at, block, add);
    }
  }
  template <class Add>
  void add_part(const Tile& tile, int64_t row, int64_t at, const T* block, const Add& add) const {
    const int64_t position = tile.position + row;
    const BlockRows<T> part = {block, heads.dim, first_seen(position) - at, position + 1 - at};
    add(Math::values(part, padded, values()), row, row + 1);
  }

  // One chunk of a tile whose queries are loaded: the softmax of each query that sees it.
  template <class Body>
  void attend_chunk(const Tile& tile, int64_t chunk, const Body& each_query) const {
    const int64_t begin = chunk * kChunk;
    const int64_t first = max64(begin, first_seen(tile.position) / kBlockSize * kBlockSize);
    const int64_t last = min64(begin + kChunk, tile.position + tile.rows());
    const Range seeing = rows_that_see(tile, begin, begin + kChunk);
    score_chunk(tile, first, ceil_div(last, kBlockSize) * kBlockSize);
    for (int64_t i = seeing.begin * tile.n_heads(); i < seeing.end * tile.n_heads(); ++i) {
      weigh(i, begin, tile.position + i / tile.n_heads());
      for (int64_t c = 0; c < padded; c += kLanes) store(sums() + i * padded + c, zero());
    }
    sum_chunk(tile, first, ceil_div(last, kBlockSize) * kBlockSize);
    for (int64_t i = seeing.begin * tile.n_heads(); i < seeing.end * tile.n_heads(); ++i) {
      each_query(i, Softmax{largest() + i, totals() + i, sums() + i * padded});
    }
  }

  void write(int64_t row, int64_t head, const Softmax& softmax) const {
    const F32x16 total = splat(*softmax.total);
    T* to = out + (row * heads.n_heads + head) * heads.dim;
    for_lanes(heads.dim,
              [&](int64_t i, auto count) { store(to + i, load(softmax.sum + i) / total, count); });
  }
  void clear(const Softmax& softmax) const {
    *softmax.largest = -__builtin_inff();
    *softmax.total = 0.0f;
    for (int64_t c = 0; c < padded; c += kLanes) store(softmax.sum + c, zero());
  }

  // All chunks of a tile, by one worker.
  void attend(const Tile& tile) const {
    const auto state = [&](int64_t i) {
      return Softmax{running_largest() + i, running_totals() + i, running() + i * padded};
    };
    load_queries(tile);
    for (int64_t i = 0; i < tile.queries(); ++i) clear(state(i));
    const int64_t last = (tile.position + tile.rows() - 1) / kChunk;
    for (int64_t chunk = first_chunk(tile.position); chunk <= last; ++chunk) {
      attend_chunk(tile, chunk,
                   [&](int64_t i, const Softmax& part) { combine(state(i), part, padded); });
    }
    for (int64_t i = 0; i < tile.queries(); ++i) {
      write(tile.begin + i / tile.n_heads(), tile.head_begin + i % tile.n_heads(), state(i));
    }
  }

  // ---- All tiles.

  int64_t slices() const { return ceil_div(heads.group(), kTileHeads); }
  // Tiles that begin at one row: one for each KV head, or for each slice of its heads.
  int64_t tiles_per_row() const { return heads.n_kv_heads * slices(); }
  int64_t tile_rows() const { return max64(1, kTileQueries / min64(heads.group(), kTileHeads)); }

  // The index-th tile of those that begin at `row`.
  Tile tile_at(int64_t row, int64_t end, int64_t index) const {
    const int64_t kv_head = index / slices(), slice = index % slices() * kTileHeads;
    return {row,
            end,
            row_position[row],
            row_seq[row],
            kv_head * heads.group() + slice,
            kv_head * heads.group() + min64(heads.group(), slice + kTileHeads)};
  }
  int64_t tile_end(int64_t row) const {
    int64_t end = row + 1;
    while (end < rows && end < row + tile_rows() && row_seq[end] == row_seq[row] &&
           row_position[end] == row_position[row] + end - row) {
      ++end;
    }
    return end;
  }
  // What a tile costs, in blocks and rows.
  int64_t cost(int64_t row, int64_t end) const {
    int64_t sum = 0;
    for (int64_t r = row; r < end; ++r) {
      sum += row_position[r] / kBlockSize - first_seen(row_position[r]) / kBlockSize + 1;
    }
    return sum;
  }

  // Whole tiles, laid end to end by their cost and cut into equal lengths. A tile belongs to the
  // worker in whose length it starts.
  void run_whole(const CpuLaunch& launch) const {
    int64_t total = 0;
    for (int64_t row = 0; row < rows; row = tile_end(row)) total += cost(row, tile_end(row));
    const Range mine = partition(launch, total * tiles_per_row());
    int64_t at = 0;
    for (int64_t row = 0, end; row < rows && at < mine.end; row = end) {
      end = tile_end(row);
      const int64_t each = cost(row, end);
      for (int64_t index = 0; index < tiles_per_row(); ++index, at += each) {
        if (mine.begin <= at && at < mine.end) attend(tile_at(row, end, index));
      }
    }
  }

  // Chunks of tiles. `shared` holds a partial result for each query and chunk that it sees: those
  // of row 0 first, its heads in order, each with all of its chunks in order.
  void run_split(const CpuLaunch& launch, float* shared) const {
    const int64_t stride = padded + 2 * kLanes;
    const auto partial = [&](int64_t index) {
      float* at = shared + index * stride;
      return Softmax{at, at + kLanes, at + 2 * kLanes};
    };
    int64_t units = 0;
    const auto chunks_of = [&](int64_t row, int64_t end) {
      return row_position[end - 1] / kChunk - first_chunk(row_position[row]) + 1;
    };
    for (int64_t row = 0; row < rows; row = tile_end(row)) units += chunks_of(row, tile_end(row));
    const Range mine = partition(launch, units * tiles_per_row());
    int64_t unit = 0, base = 0;  // of the tile: its first unit, and its first row's first partial
    for (int64_t row = 0, end; row < rows && unit < mine.end; row = end) {
      end = tile_end(row);
      const int64_t chunks = chunks_of(row, end);
      for (int64_t index = 0; index < tiles_per_row(); ++index, unit += chunks) {
        const int64_t from = max64(mine.begin, unit) - unit;
        const int64_t to = min64(mine.end, unit + chunks) - unit;
        if (from >= to) continue;
        const Tile tile = tile_at(row, end, index);
        load_queries(tile);
        for (int64_t c = from; c < to; ++c) {
          const int64_t chunk = first_chunk(tile.position) + c;
          attend_chunk(tile, chunk, [&](int64_t i, const Softmax& part) {
            const int64_t head = tile.head_begin + i % tile.n_heads();
            int64_t place = base;
            for (int64_t r = 0; r < i / tile.n_heads(); ++r) {
              place += heads.n_heads * n_chunks(tile.position + r);
            }
            const int64_t position = tile.position + i / tile.n_heads();
            place += head * n_chunks(position) + chunk - first_chunk(position);
            const Softmax to_store = partial(place);
            *to_store.largest = *part.largest;
            *to_store.total = *part.total;
            __builtin_memcpy(to_store.sum, part.sum, static_cast<size_t>(padded) * sizeof(float));
          });
        }
      }
      for (int64_t r = row; r < end; ++r) base += heads.n_heads * n_chunks(row_position[r]);
    }
    launch.wait_for_others();
    const Range outputs = partition(launch, rows * heads.n_heads);
    base = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t chunks = n_chunks(row_position[row]);
      for (int64_t head = 0; head < heads.n_heads; ++head) {
        const int64_t output = row * heads.n_heads + head;
        if (output < outputs.begin || output >= outputs.end) continue;
        const Softmax all = {running_largest(), running_totals(), running()};
        clear(all);
        for (int64_t c = 0; c < chunks; ++c)
          combine(all, partial(base + head * chunks + c), padded);
        write(row, head, all);
      }
      base += heads.n_heads * chunks;
    }
  }

  // Splitting costs a barrier and a round through memory: only where whole tiles cannot be shared
  // out evenly, and there is something to split.
  bool wants_split(const CpuLaunch& launch) const {
    if (launch.n_workers == 1 || launch.shared == nullptr) return false;
    int64_t tiles = 0, partials = 0, longest = 0;
    for (int64_t row = 0; row < rows; row = tile_end(row)) tiles += tiles_per_row();
    for (int64_t row = 0; row < rows; ++row) {
      partials += heads.n_heads * n_chunks(row_position[row]);
      longest = max64(longest, n_chunks(row_position[row]));
    }
    return tiles < 4 * launch.n_workers && longest > 1 && partials <= kPartials;
  }
};

template <class Math, class T>
void paged_attention(const CpuLaunch& launch) {
  const Heads heads = heads_of(launch);
  const Attention<Math, T> attention = {heads,
                                        launch.operand<const T>(0),
                                        launch.operand<const T>(1),
                                        launch.operand<const T>(2),
                                        launch.operand<const int32_t>(3),
                                        launch.operand<const int32_t>(4),
                                        launch.operand<const int32_t>(5),
                                        launch.operand<T>(6),
                                        launch.dims[0],
                                        launch.dims[2],
                                        0,
                                        1.0f / __builtin_sqrtf(static_cast<float>(heads.dim)),
                                        padded_to(heads.dim, Math::kPadding),
                                        reinterpret_cast<float*>(launch.scratch)};
  if (attention.wants_split(launch)) {
    attention.run_split(launch, reinterpret_cast<float*>(launch.shared));
  } else {
    attention.run_whole(launch);
  }
}

size_t scratch(const CpuLaunch& launch) {
  return Attention<Wide, float>::scratch_floats(padded_dim(heads_of(launch))) * sizeof(float);
}

size_t shared(const CpuLaunch& launch) {
  const int64_t each = padded_dim(heads_of(launch)) + 2 * kLanes;
  return static_cast<size_t>(kPartials * each) * sizeof(float);
}

#if defined(__AVX512BF16__)
using Bf16Math = Pairs;
#else
using Bf16Math = Wide;
#endif

ATLAS_CPU_KERNEL("paged_attention.q_f32.k_cache_f32.v_cache_f32.out_f32",
                 paged_attention<Wide, float>, scratch, shared);
ATLAS_CPU_KERNEL("paged_attention.q_bf16.k_cache_bf16.v_cache_bf16.out_bf16",
                 paged_attention<Bf16Math, Bf16>, scratch, shared);

}  // namespace
}  // namespace atlas
