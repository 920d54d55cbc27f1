// The feeding warpgroup of prompt attention (paged_attention.prefill.cu): finds tiles of query
// rows, copies keys, values and queries to shared memory, and takes hidden values that are not
// finite out of the way.
#pragma once

#include "atlas/async_copy.cuh"
#include "atlas/bulk_copy.cuh"
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/kv_tiles.cuh"
#include "atlas/reduce.cuh"

namespace prefill {

using namespace constants;
using bf16 = __nv_bfloat16;

static_assert(n_heads % n_kv_heads == 0, "every KV head serves the same number of query heads");
static_assert(head_dim % 16 == 0 && head_dim <= 256, "a head is 1 to 16 slices of 16 columns");

constexpr int kGroups = knobs::WARPGROUPS, kRows = 64 * kGroups;  // that consume; query rows
constexpr int kKeys = knobs::KEYS, kStages = knobs::STAGES;
constexpr int kHalves = atlas::ceil_div(head_dim, 64), kColumns = kHalves * 64;
constexpr int kPage = layout::kv_block_size, kPages = kKeys / kPage;
constexpr int kPageBytes = atlas::kv_page_bytes(head_dim), kStageBytes = kPages * kPageBytes;
constexpr int kQueryBytes = kHalves * kRows * 128;
static_assert(kPage == atlas::kPageTokens, "a page is a slice of 16 keys");
static_assert(kKeys % kPage == 0 && kPages <= atlas::kWarp, "a lane copies a page");

__host__ __device__ constexpr int greatest_divisor(int n, int limit) {
  while (n % limit != 0) --limit;
  return limit;
}
constexpr int kGroupHeads = n_heads / n_kv_heads;
constexpr int kHeads = greatest_divisor(kGroupHeads, knobs::HEADS);  // query heads of a tile
constexpr int kPositions = kRows / kHeads;
constexpr int kUnits = n_heads / kHeads;  // tiles that share their rows

constexpr int kHelpers = 64;  // threads of warps 2 and 3
constexpr int kTokenBarrier = 1, kHelperBarrier = kTokenBarrier + kGroups;  // named barriers

// A tile of work. n_rows 0: there is no more.
struct Work {
  int row, n_rows, position, seq, unit;
  int broken;  // a visible value of a partly hidden key tile is not finite

  __device__ int last() const { return position + n_rows - 1; }
  __device__ int begin() const { return window > 0 ? max(position - window + 1, 0) : 0; }
  __device__ int first_tile() const { return begin() / kKeys; }
  __device__ int last_tile() const { return last() / kKeys; }
  __device__ int kv_head() const { return unit * kHeads / kGroupHeads; }
  // Is a key of the tile hidden from a row?
  __device__ bool partly_hidden(int tile) const {
    return (tile + 1) * kKeys > position + 1 || (window > 0 && tile * kKeys < last() - window + 1);
  }
};

struct Control {
  atlas::Barrier work_full[2], work_empty[2], query_full, query_empty;
  atlas::Barrier key_full[kStages], key_empty[kStages];
  // Values that need a check arrive at value_raw; the helpers complete value_full.
  atlas::Barrier value_raw[kStages], value_full[kStages], value_empty[kStages];
  Work work[2];
  int drawn_first;  // the first item that is drawn, for one thread

  __device__ void init() {
    constexpr int kConsumers = 4 * kGroups;  // warps; 3 others read the work
    for (int i = 0; i < 2; ++i) {
      work_full[i].init(1);
      work_empty[i].init(kConsumers + 3);
    }
    query_full.init(kHelpers / atlas::kWarp);
    query_empty.init(kConsumers);
    for (int i = 0; i < kStages; ++i) {
      key_full[i].init(1);
      key_empty[i].init(kConsumers);
      value_raw[i].init(1);
      value_full[i].init(1);
      value_empty[i].init(kConsumers);
    }
    atlas::publish_barriers();
  }
};
static_assert(sizeof(Control) <= 512, "the declaration leaves 512 bytes");

// Position in a ring of kStages slots.
struct Ring {
  int slot = 0;
  unsigned phase = 0;
  __device__ void next() {
    if (++slot == kStages) slot = 0, phase ^= 1;
  }
};

struct Arguments {
  const bf16* q;
  const char *k_cache, *v_cache;
  const int *row_position, *row_seq, *block_table;
  char* out;
  unsigned* drawn;  // items beyond each block's first one, and blocks that are done; zeros between
                    // launches
  int n_rows, max_blocks;

  __device__ const int* table(const Work& work) const {
    return block_table + static_cast<size_t>(work.seq) * max_blocks;
  }
};

struct Shared {
  char *query, *keys, *values;
  Control* control;
};

__device__ inline int lane() { return threadIdx.x % atlas::kWarp; }

// The first row in [row, end) that starts a tile, or `end`.
__device__ inline int next_start(const Arguments& a, int row, int end) {
#pragma unroll 1
  for (; row < end; row += atlas::kWarp) {
    const int r = row + lane();
    bool start = false;
    if (r < end) {
      const int position = a.row_position[r];
      start = r == 0 || position % kPositions == 0 || a.row_seq[r] != a.row_seq[r - 1] ||
              a.row_position[r - 1] + 1 != position;
    }
    const unsigned starts = __ballot_sync(atlas::kAllLanes, start);
    if (starts != 0) return row + __ffs(starts) - 1;
  }
  return end;
}

// A warp's part in a tile of work: keys (or values) of its key tiles, the last one first. Pages
// that no row sees are not copied, and their entries of the table not followed.
template <bool kIsKeys>
__device__ inline void copy_tiles(const Arguments& a, const Shared& shared, const Work& work,
                                  Ring& ring) {
  Control& control = *shared.control;
  const int* table = a.table(work);
  const int first_page = work.begin() / kPage, last_page = work.last() / kPage;
  const auto page_of = [&](int tile) {  // of this lane, -1 if no row sees it
    const int page = tile * kPages + lane();
    const bool used = lane() < kPages && page >= first_page && page <= last_page;
    return used ? table[page] : -1;
  };
  int page = page_of(work.last_tile());
  for (int tile = work.last_tile(); tile >= work.first_tile(); --tile, ring.next()) {
    const unsigned used = __ballot_sync(atlas::kAllLanes, page >= 0);
    const char* source = (kIsKeys ? a.k_cache : a.v_cache) +
                         atlas::kv_page_offset(page, work.kv_head(), n_kv_heads, kPageBytes);
    const bool copies = page >= 0;
    if (tile > work.first_tile()) page = page_of(tile - 1);  // comes while the slot is waited for

    atlas::Barrier& empty = kIsKeys ? control.key_empty[ring.slot] : control.value_empty[ring.slot];
    atlas::Barrier& full = kIsKeys                    ? control.key_full[ring.slot]
                           : work.partly_hidden(tile) ? control.value_raw[ring.slot]
                                                      : control.value_full[ring.slot];
    empty.wait(ring.phase ^ 1);
    if (lane() == 0) full.arrive_expect(__popc(used) * kPageBytes);
    __syncwarp();
    if (!copies) continue;
    if constexpr (kIsKeys) {  // [half][key][128 bytes]
      char* place = shared.keys + ring.slot * kStageBytes + lane() * kPage * 128;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        atlas::bulk_load(place + half * kKeys * 128, source + half * kPage * 128, kPage * 128,
                         full);
      }
    } else {  // [page][half][token][128 bytes]
      atlas::bulk_load(shared.values + ring.slot * kStageBytes + lane() * kPageBytes, source,
                       kPageBytes, full);
    }
  }
}

// Warp 0: draws items, which are tiles that start in kPositions rows, for one unit; announces the
// tiles and copies their keys.
__device__ inline void feed_work_and_keys(const Arguments& a, const Shared& shared) {
  Control& control = *shared.control;
  int n_works = 0;
  Ring ring;
  const auto announce = [&](const Work& work) {
    const int slot = n_works % 2;
    control.work_empty[slot].wait((n_works / 2 + 1) % 2);
    if (lane() == 0) {
      control.work[slot] = work;
      control.work_full[slot].arrive();
    }
    __syncwarp();
    ++n_works;
  };
  const int n_items = atlas::ceil_div(a.n_rows, kPositions) * kUnits;
  // In shared memory, since a feeding thread has 32 registers.
  if (lane() == 0) control.drawn_first = n_items - 1 - static_cast<int>(gridDim.x);
  for (int item = n_items - 1 - static_cast<int>(blockIdx.x); item >= 0;) {
    const int unit = item % kUnits, first = item / kUnits * kPositions;
    const int stop = min(first + kPositions, a.n_rows);
    if (lane() == 0)
      item = control.drawn_first - atomicAdd(a.drawn, 1);  // comes while this one is fed
    for (int row = next_start(a, first, stop); row < stop;) {
      const int end = next_start(a, row + 1, min(row + kPositions, a.n_rows));
      const Work work = {row, end - row, a.row_position[row], a.row_seq[row], unit, 0};
      announce(work);
      copy_tiles<true>(a, shared, work, ring);
      row = end;
    }
    item = __shfl_sync(atlas::kAllLanes, item, 0);
  }
  announce({0, 0, 0, 0, 0, 0});
  // The last one resets the counters: all have drawn their last item.
  if (lane() == 0 && atomicAdd(a.drawn + 1, 1) == gridDim.x - 1) a.drawn[0] = a.drawn[1] = 0;
}

// Warp 1.
__device__ inline void feed_values(const Arguments& a, const Shared& shared) {
  Control& control = *shared.control;
  Ring ring;
  for (int n = 0;; ++n) {
    const int slot = n % 2;
    control.work_full[slot].wait(n / 2 % 2);
    const Work work = control.work[slot];
    if (work.n_rows == 0) return;
    __syncwarp();
    if (lane() == 0) control.work_empty[slot].arrive();
    copy_tiles<false>(a, shared, work, ring);
  }
}

// Halves of a word that hold a bf16 infinity or NaN: their highest bits.
__device__ inline unsigned not_finite(unsigned word) {
  return (word & 0x7F807F80u) + 0x00800080u & 0x80008000u;
}

__device__ inline unsigned not_finite(uint4 v) {
  return not_finite(v.x) | not_finite(v.y) | not_finite(v.z) | not_finite(v.w);
}

// Zeroes what is not finite in a tile of values; true if one of those belongs to a key in
// [begin, last].
__device__ inline bool zero_broken(char* values, int first_key, int begin, int last) {
  constexpr int kChunks = kStageBytes / 16, kBatch = 8;  // loads in flight
  uint4* chunks = reinterpret_cast<uint4*>(values) + (threadIdx.x - 2 * atlas::kWarp);
  bool broken = false;
  for (int first = 0; first < kChunks; first += kBatch * kHelpers) {
    unsigned bad = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kHelpers < kChunks) bad |= not_finite(chunks[first + i * kHelpers]);
    }
    if (bad == 0) continue;
#pragma unroll 1
    for (int i = first; i < first + kBatch * kHelpers && i < kChunks; i += kHelpers) {
      const uint4 v = chunks[i];
      if (not_finite(v) == 0) continue;
      const auto zeroed = [](unsigned word) {
        return word & ~((not_finite(word) >> 15) * 0xFFFFu);
      };
      chunks[i] = {zeroed(v.x), zeroed(v.y), zeroed(v.z), zeroed(v.w)};
      const int chunk = i + threadIdx.x - 2 * atlas::kWarp;
      const int key = first_key + chunk / (kPageBytes / 16) * kPage + chunk / 8 % kPage;
      broken |= key >= begin && key <= last;
    }
  }
  return broken;
}
static_assert(kStageBytes / 16 % kHelpers == 0, "each helper checks as many chunks");

// Rows head * kPositions + position of a tile, [half][row][128 bytes] in the swizzle of wgmma.
__device__ inline void copy_queries(const Arguments& a, char* query, const Work& work) {
  constexpr int kChunks = head_dim / 8, kPass = kHelpers / kChunks;  // rows at a time
  const int thread = threadIdx.x - 2 * atlas::kWarp, chunk = thread % kChunks;
  const bf16* q =
      a.q + (static_cast<size_t>(work.row) * n_heads + work.unit * kHeads) * head_dim + chunk * 8;
  char* place = query + chunk / 8 * kRows * 128;
  if (thread / kChunks < kPass) {
#pragma unroll kGroups == 2 ? 4 : 1
    for (int r = thread / kChunks; r < kRows; r += kPass) {
      const int head = r / kPositions, p = r % kPositions;
      const bool inside = p < work.n_rows && head < kHeads;
      atlas::copy_async_16(place + r * 128 + (chunk % 8 ^ r % 8) * 16,
                           inside ? q + (p * n_heads + head) * head_dim : a.q, inside);
    }
  }
  atlas::commit_copies();
  atlas::wait_copies<0>();
  atlas::publish_to_async_proxy();
}

// Warps 2 and 3: queries of each tile, and the check of values of partly hidden key tiles.
__device__ inline void feed_queries(const Arguments& a, const Shared& shared) {
  Control& control = *shared.control;
  Ring ring;
  unsigned raw_phases = 0;  // bit s: the phase of value_raw[s]
  for (int n = 0;; ++n) {
    const int slot = n % 2;
    control.work_full[slot].wait(n / 2 % 2);
    const Work work = control.work[slot];
    control.query_empty.wait((n + 1) % 2);
    if (work.n_rows > 0) copy_queries(a, shared.query, work);
    __syncwarp();
    if (lane() == 0) control.query_full.arrive();
    if (work.n_rows == 0) return;

    for (int tile = work.last_tile(); tile >= work.first_tile(); --tile, ring.next()) {
      if (!work.partly_hidden(tile)) continue;
      control.value_raw[ring.slot].wait(raw_phases >> ring.slot & 1);
      raw_phases ^= 1u << ring.slot;
      if (zero_broken(shared.values + ring.slot * kStageBytes, tile * kKeys, work.begin(),
                      work.last())) {
        control.work[slot].broken = 1;
      }
      atlas::publish_to_async_proxy();
      atlas::named_barrier(kHelperBarrier, kHelpers);
      if (threadIdx.x == 2 * atlas::kWarp) control.value_full[ring.slot].arrive();
    }
    __syncwarp();
    if (lane() == 0) control.work_empty[slot].arrive();
  }
}

}  // namespace prefill
