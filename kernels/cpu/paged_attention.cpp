/* atlas
[levels]
also = ["avx512vnni"]
[serves]
out = ["f32", "bf16"]
*/
// paged_attention: out[r, h] = softmax(q[r, h] . K * scale) V over positions 0..row_position[r] of
// the row's sequence, or the last `window` of them.
//
// Layout: caches [blocks][n_kv_heads][16][head_dim]; block_table[seq] lists a sequence's blocks.
//   Only entries of blocks that some row of a tile sees are read; what a row does not see is
//   masked.
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
//   A single row takes several KV heads together, which lie side by side in a block (bf16, cache in
//   memory, a core: 3 heads of 64 131 -> 114 us, 8 of 128 2.53 -> 2.17 ms); prefetching won
//   nothing.
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
  int64_t kv_together = 1;

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
      const int64_t row = tile.begin + tile.row_of(i);
      Math::query(q + (row * heads.n_heads + tile.head_of(i)) * heads.dim, heads.dim, padded,
                  queries() + i * steps());
    }
  }

  // The cache offset of the tile's kv-th KV head in the block that holds `position`.
  int64_t block_at(const Tile& tile, int64_t kv, int64_t position) const {
    const int64_t block = block_table[tile.seq * max_blocks + position / kBlockSize];
    return (block * heads.n_kv_heads + tile.kv_begin + kv) * kBlockSize * heads.dim;
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
      const Range seeing = rows_that_see(tile, at, stop);
      float* to = scores() + at % kChunk;
      for (int64_t kv = 0; kv < tile.n_kv; ++kv) {
        for (int64_t p = at; p < stop; p += kBlockSize) {
          Math::keys(k_cache + block_at(tile, kv, p), heads.dim,
                     keys() + (p - at) / kBlockSize * padded * kLanes);
        }
        const auto score_queries = [&](int64_t i, auto n) {
          const Element* from = queries() + i * steps();
          if (stop - at == kScoreBlocks * kBlockSize) {
            score<Math, decltype(n)::value, kScoreBlocks>(from, steps(), keys(), padded * kLanes,
                                                          steps(), to + i * kChunk, kChunk);
          } else {
            score<Math, decltype(n)::value, 1>(from, steps(), keys(), padded * kLanes, steps(),
                                               to + i * kChunk, kChunk);
          }
        };
        tiles_of<kScoreQueries>(tile.first_query(kv, seeing.begin),
                                tile.first_query(kv, seeing.end), score_queries);
      }
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
    for (int64_t at = begin; at < end; at += kBlockSize) {
      const Range seeing = rows_that_see(tile, at, at + kBlockSize);
      const auto* weights =
          reinterpret_cast<const Element*>(scores()) + at % kChunk / Math::kPerStep;
      // Rows that see all of the block, together. A row that sees a part of it must not meet the
      // rest, which may hold another row's NaN.
      const auto whole = [&](int64_t row) {
        const int64_t position = tile.position + row;
        return position >= at + kBlockSize - 1 && first_seen(position) <= at;
      };
      for (int64_t kv = 0; kv < tile.n_kv; ++kv) {
        const T* block = v_cache + block_at(tile, kv, at);
        for (int64_t row = seeing.begin, next; row < seeing.end; row = next) {
          BlockRows<T> seen = {block, heads.dim, 0, kBlockSize};
          next = row + 1;
          if (whole(row)) {
            while (next < seeing.end && whole(next)) ++next;
          } else {
            seen.begin = first_seen(tile.position + row) - at;
            seen.end = tile.position + row + 1 - at;
          }
          const Element* from = Math::values(seen, padded, values());
          tiles_of<kValueQueries>(
              tile.first_query(kv, row), tile.first_query(kv, next), [&](int64_t i, auto n) {
                add_values<Math, decltype(n)::value>(weights + i * kChunk, kChunk, from, padded,
                                                     sums() + i * padded);
              });
        }
      }
    }
  }

  // One chunk of a tile whose queries are loaded: the softmax of each query that sees it.
  template <class Body>
  void attend_chunk(const Tile& tile, int64_t chunk, const Body& each_query) const {
    const int64_t begin = chunk * kChunk;
    const int64_t first = max64(begin, first_seen(tile.position) / kBlockSize * kBlockSize);
    const int64_t last = min64(begin + kChunk, tile.position + tile.rows());
    const int64_t end = ceil_div(last, kBlockSize) * kBlockSize;
    const Range seeing = rows_that_see(tile, begin, begin + kChunk);
    const auto each = [&](auto body) {
      for (int64_t i = 0; i < tile.queries(); ++i) {
        const int64_t row = tile.row_of(i);
        if (seeing.begin <= row && row < seeing.end) body(i, row);
      }
    };
    score_chunk(tile, first, end);
    each([&](int64_t i, int64_t row) {
      weigh(i, begin, tile.position + row);
      for (int64_t c = 0; c < padded; c += kLanes) store(sums() + i * padded + c, zero());
    });
    sum_chunk(tile, first, end);
    each([&](int64_t i, int64_t row) {
      each_query(i, row, Softmax{largest() + i, totals() + i, sums() + i * padded});
    });
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
      attend_chunk(tile, chunk, [&](int64_t i, int64_t, const Softmax& part) {
        combine(state(i), part, padded);
      });
    }
    for (int64_t i = 0; i < tile.queries(); ++i) {
      write(tile.begin + tile.row_of(i), tile.head_of(i), state(i));
    }
  }

  // ---- All tiles.

  int64_t slices() const { return ceil_div(heads.group(), kTileHeads); }
  int64_t tile_rows() const { return max64(1, kTileQueries / min64(heads.group(), kTileHeads)); }

  // Tiles that begin at one row, `kv_together` KV heads (or one slice of one) in each.
  int64_t tiles_per_row() const { return ceil_div(heads.n_kv_heads, kv_together) * slices(); }

  // The index-th of them.
  Tile tile_at(int64_t row, int64_t end, int64_t index) const {
    const int64_t kv = index / slices() * kv_together, slice = index % slices() * kTileHeads;
    return {row,
            end,
            row_position[row],
            row_seq[row],
            kv,
            min64(kv_together, heads.n_kv_heads - kv),
            kv * heads.group() + slice,
            min64(heads.group() - slice, kTileHeads)};
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
          attend_chunk(tile, chunk, [&](int64_t i, int64_t of_tile, const Softmax& part) {
            int64_t place = base;
            for (int64_t r = 0; r < of_tile; ++r) {
              place += heads.n_heads * n_chunks(tile.position + r);
            }
            const int64_t position = tile.position + of_tile;
            place += tile.head_of(i) * n_chunks(position) + chunk - first_chunk(position);
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

  // How the launch is shared out; all that is decided here leaves the results alone.
  void run(const CpuLaunch& launch) {
    int64_t row_tiles = 0, chunks = 0, partials = 0, longest = 0;
    for (int64_t row = 0, end; row < rows; row = end) {
      end = tile_end(row);
      ++row_tiles;
      chunks += row_position[end - 1] / kChunk - first_chunk(row_position[row]) + 1;
      longest = max64(longest, end - row);
    }
    for (int64_t row = 0; row < rows; ++row)
      partials += heads.n_heads * n_chunks(row_position[row]);
    // Splitting costs a barrier and a round through memory: only where there are too few whole
    // tiles to share them out evenly, and there is something to split.
    const bool splits = launch.n_workers > 1 &&
                        row_tiles * heads.n_kv_heads < 4 * launch.n_workers && chunks > row_tiles &&
                        partials <= kPartials;
    // The KV heads of a block lie side by side in memory: a single row takes as many together as
    // its queries allow, if that leaves enough pieces for the workers.
    const int64_t pieces = splits ? chunks : row_tiles;
    if (slices() == 1 && longest == 1 &&
        pieces >= (launch.n_workers > 1 ? 4 * launch.n_workers : 1)) {
      kv_together = max64(1, min64(heads.n_kv_heads, kTileQueries / heads.group()));
    }
    if (splits) {
      run_split(launch, reinterpret_cast<float*>(launch.shared));
    } else {
      run_whole(launch);
    }
  }
};

template <class Math, class T>
void paged_attention(const CpuLaunch& launch) {
  const Heads heads = heads_of(launch);
  Attention<Math, T> attention = {heads,
                                  launch.operand<const T>(0),
                                  launch.operand<const T>(1),
                                  launch.operand<const T>(2),
                                  launch.operand<const int32_t>(3),
                                  launch.operand<const int32_t>(4),
                                  launch.operand<const int32_t>(5),
                                  launch.operand<T>(6),
                                  launch.dims[0],
                                  launch.dims[2],
                                  launch.integer(3),
                                  static_cast<float>(launch.real(4)),
                                  padded_to(heads.dim, Math::kPadding),
                                  reinterpret_cast<float*>(launch.scratch)};
  attention.run(launch);
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
