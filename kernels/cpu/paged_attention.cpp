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
#include "atlas/attention_tile.h"

namespace atlas {
namespace {

constexpr int64_t kTileHeads = 16;  // of one KV head at a time
// Partial results that the workers' shared memory holds: 32 heads by 262144 positions.
constexpr int64_t kPartials = 65536;

// All tiles, and the worker's share of them.
template <class Math, class T>
struct Attention : TileAttention<Math, T> {
  using Worker = TileAttention<Math, T>;
  using Worker::attend, Worker::attend_chunk, Worker::clear, Worker::first_chunk;
  using Worker::first_seen, Worker::heads, Worker::load_queries, Worker::n_chunks, Worker::padded;
  using Worker::row_position, Worker::row_seq, Worker::rows, Worker::running;
  using Worker::running_largest, Worker::running_totals, Worker::write;

  int64_t kv_together = 1;

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
  Attention<Math, T> attention = {
      {heads, launch.operand<const T>(0), launch.operand<const T>(1), launch.operand<const T>(2),
       launch.operand<const int32_t>(3), launch.operand<const int32_t>(4),
       launch.operand<const int32_t>(5), launch.operand<T>(6), launch.dims[0], launch.dims[2],
       launch.integer(3), static_cast<float>(launch.real(4)), padded_to(heads.dim, Math::kPadding),
       reinterpret_cast<float*>(launch.scratch)}};
  attention.run(launch);
}

size_t scratch(const CpuLaunch& launch) {
  return TileAttention<Wide, float>::scratch_floats(padded_dim(heads_of(launch))) * sizeof(float);
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
