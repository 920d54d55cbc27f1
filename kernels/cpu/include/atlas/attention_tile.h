// Attention of one tile of queries by one worker: scores, weights and weighted sums of a chunk of
// positions, and the chunks of a context combined. paged_attention.cpp says which tiles there are,
// whose they are, and why a row is computed alike in all of them.
#pragma once

#include "atlas/attention.h"
#include "atlas/kernel.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

// Positions of a chunk. 128: the scores of a tile, 24 KiB, stay in L1, and a decoding row of 200
// tokens already splits evenly over two workers; at 512 one row needs 3 times as long a context.
constexpr int64_t kChunk = 128;
constexpr int64_t kTileQueries = 48;

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

// A worker's part of attention: the softmax of the queries of one tile over chunks of its context.
template <class Math, class T>
struct TileAttention {
  using Element = typename Math::Element;

  Heads heads;
  const T *q, *k_cache, *v_cache;
  const int32_t *row_position, *row_seq, *block_table;
  T* out;
  int64_t rows, max_blocks, window;
  float scale;
  int64_t padded;
  float* scratch;

  // Rows see positions [first_seen, row position].
  int64_t first_seen(int64_t position) const {
    return window > 0 ? max64(0, position + 1 - window) : 0;
  }
  int64_t first_chunk(int64_t position) const { return first_seen(position) / kChunk; }
  int64_t n_chunks(int64_t position) const { return position / kChunk - first_chunk(position) + 1; }

  // The worker's private memory.
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
};

}  // namespace
}  // namespace atlas
