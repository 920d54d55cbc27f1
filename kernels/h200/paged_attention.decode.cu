/* atlas
[rows]
up_to = [256]
[launch]
grid = ["multiprocessors", 1, 1]
block = "(WARPS + 1) * 32"
shared = "WARPS * (PIECES * PAGE + HEADS * (COLUMNS + 4) * 4)"
pdl = true
[serves]
q = ["bf16"]
k_cache = ["bf16"]
v_cache = ["bf16"]
out = ["bf16"]
[scratch]
bytes = "multiprocessors * SPLITS * HEADS * (WIDTH + 2) * 4"
[layouts]
k_cache = "kv_tiles"
v_cache = "kv_tiles"
out = "tiles"
[knobs]
# H200, 32 / 8 heads of 128, 128 rows x 640 keys, eight warps: 64, 96 and 128 KB take 92, 92 and 91
# us; seven warps with 86 and 57 KB 99 and 109. Neighbours' rings need the rest.
RING = 98304
# Query heads of a KV head that a block computes together. More take further groups, which read the
# KV head again: of long heads the accumulators of 16 do not fit into the registers.
GROUP = "n_heads // n_kv_heads"
HEADS = "ceil_div(GROUP, ceil_div(GROUP, 8 + 8 * min(1, 128 // head_dim)))"
# With the feeder nine warps have 168 registers each, eight 255: long heads and many need them.
WARPS = "8 - min(1, max(0, head_dim - 128) + max(0, HEADS - 8))"
# Splits of a group at most: one block merges them.
SPLITS = 32
# Bytes of a page, elements of a padded head.
PAGE = "ceil_div(head_dim, 64) * 2048"
WIDTH = "ceil_div(head_dim, 16) * 16"
# Pages of K and V in a warp's ring.
PIECES = "max(2, RING // (WARPS * PAGE))"
# The merge takes so many columns of all heads at a time that a thread has at most two.
COLUMNS = "min(WIDTH, WARPS * 64 // HEADS // 16 * 16)"
*/
// paged_attention, rows of generated tokens: out[r, h] = softmax(q[r, h] . K * scale) V over
// positions 0..row_position[r], or the last `window` of them.
//
// q [rows, n_heads * head_dim] row-major; caches in `kv_tiles`, a page being 16 tokens of a KV
// head; out in `tiles`; all bf16. Up to 256 rows, each at its own position, several may be of one
// sequence.
//
// Work. The query heads of a row that share a KV head are a *group*: the columns of mma.m16n8k16,
// in eights, whose 16 rows are a page's keys, then elements of V. A group's pages are taken in
// *rounds* of WARPS pages, one a warp, and its rounds in at most SPLITS *splits* of equal length.
// Which page goes to which warp and split depends on the row's position alone, and sums run in the
// order of pages within a warp, warps within a split, splits within a group: a row's bits do not
// depend on the load.
//
// The grid is constant. The rounds of all groups stand in one list, of which each block takes an
// equal stretch, in whole splits, found by a scan over the rows' positions. A group that lies in
// one stretch is finished there. Of one that crosses blocks the splits' results go through scratch
// to the block that has the last: it takes them when its own stretch is done, word by word as they
// come, without a flag or a fence, and leaves the scratch empty for the next launch. A block waits
// only for blocks of lower index, which were started before it.
//
// Memory. One more warp, of which lane w feeds warp w, copies pages of K and V into the warps'
// rings (a bulk copy each) as slots come free: ahead across splits, groups and rows. The other
// warps meet only at the merge of a split. Before the inputs are there the ring takes pages that no
// kernel of this step writes: those of the stretch's first row before the page of the lowest
// position that this step computes of its sequence. rope_kv_append writes at the positions of the
// step's rows and nowhere else, and earlier steps have ended. Block table, positions and counts are
// of the step block.
//
// Keys after the row's position or before its window have no weight, were they NaN; pages of which
// the row sees no key, and their entries of the table, are not read. Bytes: 4 * head_dim per
// visible key and KV head; bound by bandwidth, at few rows by the latencies between blocks.
#include "atlas/bulk_copy.cuh"
#include "atlas/decode_list.cuh"
#include "atlas/decode_softmax.cuh"
#include "atlas/instance.h"
#include "atlas/kv_tiles.cuh"
#include "atlas/pdl.cuh"
#include "atlas/tiles.cuh"

namespace {

using namespace decode;

constexpr int kPageBytes = knobs::PAGE, kPieces = knobs::PIECES;
constexpr int kFeeder = kWarps;  // the warp that feeds the others

static_assert(kPageBytes == atlas::kv_page_bytes(head_dim), "the declaration knows a page's size");
static_assert(kWarps <= atlas::kWarp, "the feeder has a lane for each warp");
static_assert(atlas::same_type<types::q, __nv_bfloat16> &&
                  atlas::same_type<types::k_cache, __nv_bfloat16> &&
                  atlas::same_type<types::v_cache, __nv_bfloat16> &&
                  atlas::same_type<types::out, __nv_bfloat16>,
              "operands are bf16");

// A warp's ring of pieces: K and V of each of its pages, one after the other.
struct Ring {
  atlas::Barrier full[kPieces], empty[kPieces];
};

// Fills one warp's ring; a lane's own.
struct Feeder {
  Stretch next;  // the round of the next copy
  Ring& ring;
  unsigned char* slots;
  const unsigned char *k_cache, *v_cache;
  const int* block_table;
  int max_blocks, warp;
  bool values = false;       // whether the next copy is of the page's V
  int block = 0;             // the page's KV block
  int slot = 0, parity = 1;  // the first time round all slots are free

  // Moves on to a page of the warp, and asks for its block long before the copy.
  __device__ void find(const Rows& rows) {
    while (next.left > 0 && !next.has_page(warp)) next.advance(rows);
    if (next.left == 0) return;
    const size_t sequence = rows.sequence[next.row];
    block = block_table[sequence * max_blocks + next.page(warp)];
  }
  __device__ void feed(const Rows& rows) {
    const size_t page =
        atlas::kv_page_offset(block, next.group / kGroupsPerKv, n_kv_heads, kPageBytes);
    ring.empty[slot].wait(parity);
    ring.full[slot].arrive_expect(kPageBytes);
    // Otherwise the cache's stream throws what products exchange out of the L2 cache.
    atlas::bulk_load(slots + slot * kPageBytes, (values ? v_cache : k_cache) + page, kPageBytes,
                     ring.full[slot], atlas::evict_first_policy());
    if (++slot == kPieces) slot = 0, parity ^= 1;
    if (values) {
      next.advance(rows);
      find(rows);
    }
    values = !values;
  }
};

// Reads one warp's ring.
struct Reader {
  Ring& ring;
  unsigned slots;
  int slot = 0, parity = 0;

  // The address of the next piece, once it is there.
  __device__ unsigned wait() {
    ring.full[slot].wait(parity);
    return slots + slot * kPageBytes;
  }
  __device__ void release(int lane) {
    __syncwarp();  // every lane has read it
    if (lane == 0) ring.empty[slot].arrive();
    if (++slot == kPieces) slot = 0, parity ^= 1;
  }
};

__device__ inline void write_out(const Share& share, unsigned char* out, int row, int group) {
  constexpr int kRow = n_heads * head_dim;
  constexpr int kTiles = atlas::ceil_div(2 * kRow, atlas::kTileRowBytes);
  const int in_kv = group % kGroupsPerKv * kHeads + Share::head();
  const int head = group / kGroupsPerKv * kHeadsPerKv + in_kv;
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
    const int element = p * kColumns + Share::column();
    if (!Share::used(p) || element >= head_dim || in_kv >= kHeadsPerKv) continue;
    const int byte = 2 * (head * head_dim + element);
    *reinterpret_cast<__nv_bfloat162*>(out + atlas::tiles_offset(row, byte, kTiles)) =
        __floats2bfloat162_rn(share.values[p].x / share.total, share.values[p].y / share.total);
  }
  // The last group's writer fills the row up to whole tiles.
  constexpr int kPadding = kTiles * atlas::kTileRowBytes / 4 - kRow / 2;  // pairs
  if (kPadding > 0 && group == kGroups - 1 && threadIdx.x < kPadding) {
    const int byte = 2 * kRow + 4 * threadIdx.x;
    *reinterpret_cast<unsigned*>(out + atlas::tiles_offset(row, byte, kTiles)) = 0;
  }
}

// A group that other blocks have begun and this one ends.
struct Pending {
  int row, group, splits, slot;
};

}  // namespace

ATLAS_KERNEL(const types::q* q, const types::k_cache* k_cache, const types::v_cache* v_cache,
             const types::row_position* row_position, const types::row_seq* row_seq,
             const types::block_table* block_table, types::out* out, const int* n_rows,
             const int* /*seqs*/, const int* max_blocks, const int* /*blocks*/,
             unsigned char* scratch) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Ring rings[kWarps];
  __shared__ Rows rows;
  __shared__ Search search;
  __shared__ Merge merge;
  __shared__ int lowest_page;
  atlas::launch_dependents();
  const int warp = threadIdx.x / atlas::kWarp, lane = threadIdx.x % atlas::kWarp;
  for (int row = threadIdx.x; row < *n_rows; row += launch::block) {
    rows.position[row] = row_position[row];
    rows.sequence[row] = row_seq[row];
  }
  if (warp < kWarps && lane < kPieces) {
    rings[warp].full[lane].init(1);
    rings[warp].empty[lane].init(1);
  }
  if (threadIdx.x == 0) lowest_page = 0x7FFFFFFF;
  atlas::publish_barriers();
  __syncthreads();
  Stretch stretch = find_stretch(rows, *n_rows, search);
  for (int row = threadIdx.x; row < *n_rows && stretch.left > 0; row += launch::block) {
    if (rows.sequence[row] == rows.sequence[stretch.row]) {
      atomicMin(&lowest_page, rows.position[row] / atlas::kPageTokens);
    }
  }
  __syncthreads();

  if (warp == kFeeder) {
    Feeder feeder = {stretch,
                     rings[lane % kWarps],
                     shared + lane % kWarps * kPieces * kPageBytes,
                     reinterpret_cast<const unsigned char*>(k_cache),
                     reinterpret_cast<const unsigned char*>(v_cache),
                     block_table,
                     *max_blocks,
                     lane};
    if (lane < kWarps) {
      feeder.find(rows);
      for (int piece = 0; piece < kPieces; ++piece) {
        const bool early = feeder.next.left > 0 && feeder.next.row == stretch.row &&
                           feeder.next.page(lane) < lowest_page;
        if (!early) break;
        feeder.feed(rows);
      }
    }
    __syncwarp();
    atlas::wait_for_inputs();
    while (lane < kWarps && feeder.next.left > 0) feeder.feed(rows);
    return;
  }

  atlas::wait_for_inputs();
  Reader reader = {rings[warp], atlas::shared_address(shared + warp * kPieces * kPageBytes)};
  float* buffer = reinterpret_cast<float*>(shared + kWarps * kPieces * kPageBytes);
  const auto results = [&](int slot, int split) {
    return reinterpret_cast<float*>(scratch) +
           (static_cast<size_t>(slot) * knobs::SPLITS + split) * kPartial;
  };
  Pending pending = {};
  const int begin = stretch.begin, end = begin + stretch.left;
  while (stretch.left > 0) {
    // A group, or what of it is in this stretch.
    const int row = stretch.row, group = stretch.group;
    const Cut cut = stretch.cut;
    const int splits = cut.splits(), first_split = stretch.round / cut.rounds_per_split;
    const bool whole = stretch.round == 0 && stretch.left >= cut.rounds;
    const int in_kv = group % kGroupsPerKv * kHeads;
    const int head = group / kGroupsPerKv * kHeadsPerKv + in_kv;
    Query query;
    query.load(q + (static_cast<size_t>(row) * n_heads + head) * head_dim, kHeadsPerKv - in_kv,
               lane);
    // A group that crosses blocks has the scratch of the block with its first split, whose last
    // group it is: the last block whose equal part begins no later.
    const int group_begin = end - stretch.left - stretch.round;
    const int slot = (static_cast<long long>(group_begin + 1) * gridDim.x - 1) / stretch.total;

    Share result;
    int split = first_split;
    for (; split < splits && stretch.left > 0; ++split) {
      Softmax softmax;
      softmax.clear();
      const int split_end = (split + 1) * cut.rounds_per_split;
      do {
        if (stretch.has_page(warp)) {
          const int token = stretch.page(warp) * atlas::kPageTokens;
          float score[kHalves][4];
          unsigned weights[kHalves][2], keep[2] = {0xFFFFFFFFu, 0xFFFFFFFFu};
          score_page(score, query, reader.wait(), lane);
          reader.release(lane);
          if (token < cut.begin || token + atlas::kPageTokens - 1 > cut.position) {
            hide(score, keep, token, cut.begin, cut.position, lane);
          }
          softmax.weigh(score, weights);
          add_page(softmax, weights, keep, reader.wait(), lane);
          reader.release(lane);
        }
        stretch.advance(rows);
      } while (stretch.round != 0 && stretch.round < split_end);
      const Share share = merge(softmax, buffer, warp, lane);
      if (whole) {
        result.absorb(share);
      } else {
        share.send(results(slot, split));
      }
    }

    if (whole) {
      write_out(result, reinterpret_cast<unsigned char*>(out), row, group);
    } else if (split == splits) {
      pending = {row, group, splits, slot};  // it is the stretch's first
    }
  }

  if (pending.splits == 0) return;
  Share result;
  constexpr int kBatch = kPasses < 8 ? 12 / kPasses : 1;
  for (int first = 0; first < pending.splits; first += kBatch) {
    Share shares[kBatch];
    bool complete;
    do {
      complete = true;
#pragma unroll
      for (int i = 0; i < kBatch;
           ++i) {  // beyond the last it is the last again: no branch, all at once
        const int split = first + i < pending.splits ? first + i : pending.splits - 1;
        complete &= shares[i].receive(results(pending.slot, split));
      }
    } while (!complete);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < pending.splits) result.absorb(shares[i]);
    }
  }
  write_out(result, reinterpret_cast<unsigned char*>(out), pending.row, pending.group);
  join_warps();  // maximum and total are read by many threads
  for (int split = 0; split < pending.splits; ++split) result.empty(results(pending.slot, split));
}
