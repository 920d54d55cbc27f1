// The units of a warp in a decode step's attention, and the ring that brings their pages.
//
// For paged_attention.decode.cu.
#pragma once

#include "atlas/bulk_copy.cuh"
#include "atlas/decode_list.cuh"

namespace decode {

constexpr int kPageBytes = knobs::PAGE, kPieces = knobs::PIECES;

static_assert(kPageBytes == atlas::kv_page_bytes(head_dim), "the declaration knows a page's size");
static_assert(kPieces >= 2, "V of both pages is there at once");
static_assert(kPieces < atlas::kWarp - 8, "a warp knows the units of all its pieces");

// Where one stands in a ring of slots that are filled and emptied in turn.
template <int kSlots>
struct Turn {
  int slot = 0, parity = 0;

  __device__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

// A warp's units, and its ring: K of each unit's pages, then V. The warp copies them itself, as far
// ahead as there are slots.
struct Ring {
  atlas::Barrier* full;
  unsigned char* slots;
  const unsigned char *k_cache, *v_cache;
  const int* block_table;
  const Rows& rows;
  const Stretch& stretch;
  int max_blocks, warp, lane;
  // Lane i: of the warp's unit `known` + i its row and group, its first page in the sequence, and
  // where both pages are in the caches; -1: nowhere.
  int place, page, first, second;
  int known = 0, read = 0, copied = 0;  // units before that of the next read, of the next copy
  int one, other;                       // the pages of the unit of the next copy
  int piece = 0;                        // of the next copy: K, K, V, V
  Turn<kPieces> from = {}, to = {};
  int early = kPieces;  // pieces from the next one on that were copied before the inputs were there

  __device__ void look_ahead() {
    Walk walk(rows, stretch);
    walk.skip(warp + kWarps * (read + lane));
    known = read;
    first = second = -1;
    if (walk.left <= 0) return;
    place = walk.at.row * kGroups + walk.at.group;
    page = walk.page();
    const size_t sequence = rows.sequence[walk.at.row];
    const int* table = block_table + sequence * max_blocks + page;
    first = table[0] * n_kv_heads + walk.at.group / kGroupsPerKv;
    if (walk.two()) second = table[1] * n_kv_heads + walk.at.group / kGroupsPerKv;
  }
  __device__ int of(int what, int unit) const {
    return __shfl_sync(atlas::kAllLanes, what, unit - known);
  }
  // Fills the ring. What this step computes of it may not be there yet.
  __device__ void begin() {
    look_ahead();
    // Each lane has a piece, and the first that finds no slot the next copy's.
    const unsigned twos = __ballot_sync(atlas::kAllLanes, second >= 0);
    int unit = 0, index = lane;
    for (int pieces; index >= (pieces = twos >> unit & 1 ? 4 : 2) && unit < atlas::kWarp - 1;) {
      index -= pieces;
      ++unit;
    }
    if (!(twos >> unit & 1)) index *= 2;
    const int of_first = of(first, unit), of_second = of(second, unit);
    const int source = index % 2 == 0 ? of_first : of_second;
    if (lane < kPieces && source >= 0) fetch(lane, index, source);
    copied = __shfl_sync(atlas::kAllLanes, unit, kPieces);
    piece = __shfl_sync(atlas::kAllLanes, index, kPieces);
    find_pages();
  }
  __device__ void fetch(int slot, int kind, int source) {
    full[slot].arrive_expect(kPageBytes);
    // Otherwise the cache's stream throws what products exchange out of the L2 cache.
    atlas::bulk_load(slots + slot * kPageBytes,
                     (kind < 2 ? k_cache : v_cache) + static_cast<size_t>(source) * kPageBytes,
                     kPageBytes, full[slot], atlas::evict_first_policy());
  }
  // Before a unit: the next copies' units are known, too. Reading it copies four pieces.
  __device__ void look_on() {
    if (copied - known > atlas::kWarp - 4) look_ahead();
  }
  __device__ void find_pages() { one = of(first, copied), other = of(second, copied); }
  __device__ void copy() {
    if (one < 0) return;
    if (lane == 0) fetch(to.slot, piece, piece % 2 == 0 ? one : other);
    to.advance();
    piece += other < 0 ? 2 : 1;
    if (piece < 4) return;
    piece = 0;
    ++copied;
    find_pages();
  }
  // The next piece, or the one behind it, once it is there.
  __device__ unsigned char* wait(bool behind = false) const {
    Turn<kPieces> at = from;
    if (behind) at.advance();
    full[at.slot].wait(at.parity);
    return slots + at.slot * kPageBytes;
  }
  // Lays the keys of the next unit that this step computes, those from `fresh` on, over what was
  // copied before they were there. `token` is its first, `two` whether it has two pages.
  __device__ void renew(int token, int fresh, int position, bool two) {
    constexpr int kChunks = kPageBytes / (atlas::kPageTokens * 16);  // of a key
    const int pages = two ? 2 : 1, end = min(position + 1, token + pages * atlas::kPageTokens);
#pragma unroll 1  // rarely more than one
    for (int key = max(token, fresh); key < end; ++key) {
      const int n = (key - token) / atlas::kPageTokens;
      const size_t page = of(n == 0 ? first : second, read);
#pragma unroll 1
      for (int i = lane; i < 2 * kChunks; i += atlas::kWarp) {
        const int piece = n + i / kChunks * pages;
        if (piece >= early) continue;
        const int at = atlas::in_page(key % atlas::kPageTokens, i % kChunks * 8);
        const unsigned char* cache = i < kChunks ? k_cache : v_cache;
        const uint4 chunk = *reinterpret_cast<const uint4*>(cache + page * kPageBytes + at);
        const int slot = from.slot + piece;
        full[slot].wait(0);
        *reinterpret_cast<uint4*>(slots + slot * kPageBytes + at) = chunk;
      }
    }
    early -= 2 * pages;
    atlas::publish_to_async_proxy();  // another copy will follow
    __syncwarp();
  }
  // It has been read: another takes its place.
  __device__ void release() {
    __syncwarp();
    from.advance();
    copy();
  }
};

}  // namespace decode
