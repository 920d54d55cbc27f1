/* atlas
[rows]
up_to = [4, 8, 256]
[launch]
grid = ["GRID", 1, 1]
block = "(WARPS + ADDERS) * 32"
shared = "WARPS * (PIECES * PAGE + RESULTS * RESULT)"
resident = "RESIDENT"
pdl = true
[serves]
q = ["bf16"]
k_cache = ["bf16"]
v_cache = ["bf16"]
out = ["bf16", "f8g128"]
# A thread writes four columns; 128 columns of f8g128 are of one group of query heads.
where = [
    "head_dim % 4 == 0",
    "n_heads // n_kv_heads * head_dim % 128 * (1 - min(1, size_out)) == 0",
    "(n_heads // n_kv_heads - 1) // 8 * (head_dim % 128) * (1 - min(1, size_out)) == 0",
]
[limits]
# Of 16 heads of 128 that leave f8g128, outside of the loop.
spills = 64
[scratch]
bytes = "GRID * SPLITS * HEADS * (WIDTH + 2) * 4"
[layouts]
k_cache = "kv_tiles"
v_cache = "kv_tiles"
out = "tiles"
[knobs]
# Query heads of a KV head that a block computes together. More take further groups, which read the
# KV head again: of long heads the accumulators of 16 do not fit into the registers.
GROUP = "n_heads // n_kv_heads"
HEADS = "ceil_div(GROUP, ceil_div(GROUP, 8 + 8 * min(1, 128 // head_dim)))"
# Elements of a padded head.
WIDTH = "ceil_div(head_dim, 16) * 16"
# H200, 32 / 8 heads of 128, us at 1, 8, 32, 128 rows x 640 keys: eight computing warps and four
# that add up 6.1, 9.7, 24.0, 82.0, two that add up 7.3, 11.0, 25.9, 84.8. Up to four rows have a
# small block, which can be resident beside a product's: against two warps that add up, four are
# 0.8 us a layer faster at one row; with it 8 and 32 rows are 1.1 and 0.6 slower. Eight rows have it
# where a KV head has two query heads: Qwen3-0.6B takes 1.6 us a layer less, Llama-3-8B would take
# 0.4 less with equal contexts, 0.7 more with others.
FEW = "1 - min(1, max_rows // (5 + 4 * min(1, 2 // HEADS) * min(1, 8 // n_kv_heads)))"
WARPS = "8 - 4 * FEW"
ADDERS = 4
# Of small blocks half again as many as multiprocessors are resident together, beside a product of
# half of them: at 4 rows 1.2 and 1.6 us a layer less in the same two models.
MORE = "FEW * min(1, 8 // n_kv_heads) * min(1, 512 // (HEADS * WIDTH))"
GRID = "multiprocessors + MORE * (multiprocessors // 2)"
RESIDENT = "1 + MORE"
# Bytes of all rings: 96 KB take 84.1, 128 KB 85.4 us (128 rows, 80 registers); in a small block 64
# KB leave a product room.
RING = "98304 - 32768 * FEW"
# Splits of a group at most, which one block adds up, and the units of the shortest: two instead of
# four take 8.7 us at one row, 87.8 at 128 (85.4).
SPLITS = 32
SPLIT = 4
# Bytes of a page.
PAGE = "ceil_div(head_dim, 64) * 2048"
# Pages of K and V in a warp's ring.
PIECES = "max(2, RING // (WARPS * PAGE))"
# Bytes of a unit's result, and how many a warp may leave.
RESULT = "HEADS * (WIDTH + 4) * 4"
RESULTS = "max(1, min(2, 49152 // (WARPS * RESULT)))"
*/
// paged_attention, rows of generated tokens: out[r, h] = softmax(q[r, h] . K * scale) V over
// positions 0..row_position[r], or the last `window` of them.
//
// q [rows, n_heads * head_dim] row-major; caches in `kv_tiles`, a page being 16 tokens of a KV
// head; all bf16; out in `tiles`, bf16 or f8g128. Up to 256 rows, each at its own position, several
// may be of one sequence.
//
// Work. The query heads of a row that share a KV head are a *group*: the columns of mma.m16n8k16,
// in eights, whose 16 rows are a page's keys, then elements of V. Two pages of a group are a
// *unit*, and a group's units form at most SPLITS *splits* of equal length, a multiple of SPLIT.
// A unit's result is computed by itself; units are added up in order within a split, splits within
// a group. What is a unit and a split depends on the row's position alone: so do a row's bits,
// whoever computes what.
//
// The grid is constant. The units of all groups stand in one list, of which each block takes an
// equal stretch, in whole splits, found by a scan over the rows' positions. Its computing warps
// take the stretch's units in turn and leave their results in shared memory; other warps add them
// up in the stretch's order. No two warps meet at a barrier: each runs as far ahead as its ring or
// its results' slots allow. A group that lies in one stretch is finished there. Of one that crosses
// blocks the splits' results go through scratch to the block that has the last split, which takes
// them before its own last group, word by word as they come, without a flag or a fence, and leaves
// the scratch empty for the next launch. A block begins with what it has of a group that the next
// one ends. It waits only for blocks of lower index, which were started before it.
//
// Memory. Each computing warp copies its pages of K and V into a ring of its own (a bulk copy each)
// as slots come free. The ring is filled before the inputs are there. Of the keys that it then
// holds those are not to be used which this step writes: from the lowest position on that it
// computes of their sequence. They are fetched again once they are there, beside the query, and
// laid over the others. All other keys are of earlier steps, which have ended. Block table,
// positions and counts are of the step block.
//
// Keys after the row's position or before its window have no weight, were they NaN; pages of which
// the row sees no key, and their entries of the table, are not read. Bytes: 4 * head_dim per
// visible key and KV head; bound by bandwidth, at few rows by the latencies between blocks.
#include "atlas/decode_list.cuh"
#include "atlas/decode_page.cuh"
#include "atlas/decode_ring.cuh"
#include "atlas/decode_sum.cuh"
#include "atlas/instance.h"
#include "atlas/out_row.cuh"
#include "atlas/pdl.cuh"

namespace {

using namespace decode;

constexpr int kResults = knobs::RESULTS;
constexpr int kTogether = kPasses > 2 ? 2 : knobs::SPLIT;  // units' results added up at once

static_assert(4 * kResult == knobs::RESULT, "the declaration's sizes are the headers'");
static_assert(kTogether <= kWarps * kResults, "what is added up at once is there at once");
static_assert(atlas::same_type<types::q, __nv_bfloat16> &&
                  atlas::same_type<types::k_cache, __nv_bfloat16> &&
                  atlas::same_type<types::v_cache, __nv_bfloat16>,
              "what is read is bf16");
static_assert(head_dim % 4 == 0 && (!atlas::same_type<types::out, unsigned char> ||
                                    (kHeads * head_dim % 128 == 0 && kWidth == head_dim &&
                                     kHeadsPerKv * head_dim % 128 == 0)),
              "a thread writes quads, a warp groups of f8g128 that share a scale");

// Where a warp leaves its units' results.
struct Results {
  atlas::Barrier full[kResults], empty[kResults];
};

// Waits for the inputs, and computes the results of a warp's units.
__device__ inline void compute(Ring& ring, const types::q* q, Results& results, float* sums,
                               int lane) {
  Turn<kResults> result;
  Query query;
  constexpr unsigned kNone = ~0u;
  unsigned loaded = kNone;
  for (; ring.of(ring.first, ring.read) >= 0; ++ring.read) {
    ring.look_on();
    const unsigned place = ring.of(ring.place, ring.read);
    const int row = place / kGroups, group = place % kGroups;
    if (place != loaded) {
      const int in_kv = group % kGroupsPerKv * kHeads;
      const int head = group / kGroupsPerKv * kHeadsPerKv + in_kv;
      const types::q* source = Query::source(q, static_cast<size_t>(row) * n_heads + head, lane);
      if (loaded == kNone) {
        asm volatile("" : "+l"(source));  // known before the wait
        atlas::wait_for_inputs();
      }
      query.load(source, kHeadsPerKv - in_kv, lane);
      loaded = place;
    }
    const Cut cut = Cut::of(ring.rows.position[row]);
    const int token = ring.of(ring.page, ring.read) * atlas::kPageTokens;
    const bool two = ring.of(ring.second, ring.read) >= 0;

    if (ring.early > 0) ring.renew(token, ring.rows.fresh(row), cut.position, two);

    const auto first = [&](int n) { return token + n * atlas::kPageTokens; };
    const auto partly = [&](int n) {  // seen
      return first(n) < cut.begin || first(n) + atlas::kPageTokens - 1 > cut.position;
    };
    float score[kUnitPages][kHalves][4];
#pragma unroll
    for (int n = 0; n < kUnitPages; ++n) {
      if (n == 0 || two) {
        score_page(score[n], query, atlas::shared_address(ring.wait()), lane);
        ring.release();
      }
      if (partly(n)) hide(score[n], first(n), cut.begin, cut.position, lane);
    }
    const Weights weights(score);
    results.empty[result.slot].wait(result.parity ^ 1);
    unsigned values[kUnitPages];
#pragma unroll
    for (int n = 0; n < kUnitPages; ++n) {
      unsigned char* page = ring.wait(n > 0 && two);
      if (partly(n) && (n == 0 || two)) blank(page, first(n), cut.begin, cut.position, lane);
      values[n] = atlas::shared_address(page);
    }
    sum_unit(sums + result.slot * kResult, weights, values, two, lane);
    __syncwarp();  // every lane has written
    if (lane == 0) results.full[result.slot].arrive();
    ring.release();
    if (two) ring.release();
    result.advance();
  }
  if (loaded == kNone) atlas::wait_for_inputs();
}

// Writes a group's rows; the last group's writer also fills the row up to whole tiles.
__device__ inline void write_out(const Part& sum, types::out* out, int row, int group) {
  constexpr int kRowQuads = n_heads * head_dim / 4;
  const atlas::OutRow<n_heads * head_dim> to(out, row);
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
    const int in_kv = group % kGroupsPerKv * kHeads + Part::head(p);
    const int head = group / kGroupsPerKv * kHeadsPerKv + in_kv;
    if (!Part::used(p) || Part::column(p) >= head_dim || in_kv >= kHeadsPerKv) continue;
    const float scale = 1.0f / sum.total[p];
    float values[1][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[0][i] = sum.values[p][i] * scale;
    to.template store<1, 1>((head * head_dim + Part::column(p)) / 4, values);
  }
  const int padding = kRowQuads + Part::index();
  if (group == kGroups - 1 && padding < to.kQuads) {
    constexpr float kZeros[1][4] = {};
    to.template store<1, 1>(padding, kZeros);
  }
}

// Adds up the results of the stretch's units, and ends the groups that end here.
__device__ inline void add_up(Walk walk, Results* results, const float* sums, Part& last,
                              unsigned char* scratch, types::out* out) {
  const Stretch& stretch = walk.stretch;
  const int lane = threadIdx.x % atlas::kWarp;
  unsigned units = 0;  // before the next one
  // Takes the next `count` units' results, kTogether at most.
  const auto take = [&](Part& sum, int count) {
    Part parts[kTogether];
#pragma unroll
    for (unsigned i = 0; i < kTogether; ++i) {
      parts[i].clear();
      if (i >= count) continue;
      const unsigned warp = (units + i) % kWarps, turn = (units + i) / kWarps;
      results[warp].full[turn % kResults].wait(turn / kResults % 2);
      parts[i].load(sums + (warp * kResults + turn % kResults) * kResult);
    }
    __syncwarp();
    if (lane < count) {
      const unsigned warp = (units + lane) % kWarps, turn = (units + lane) / kWarps;
      results[warp].empty[turn % kResults].arrive();
    }
    units += count;
    sum.add_up(parts);
  };
  // A group that crosses blocks has the scratch of the block with its first split.
  const auto partial = [&](int slot, int split) {
    return reinterpret_cast<uint2*>(scratch) +
           (static_cast<size_t>(slot) * knobs::SPLITS + split) * kPartial;
  };
  // Whose last group it is: the last block whose equal part begins no later.
  const int group_begin = stretch.begin - stretch.first.unit;
  int other = blockIdx.x;
  while (part_begin(stretch.total, other) > group_begin) --other;
  atlas::wait_for_inputs();
  constexpr int kBatch = kPasses > 2 ? 1 : 4 / kPasses;
  int splits = 0;  // of the group that this block ends, those before the `last`
  for (;;) {
    // Before the last group, if there are others: then their splits have long been there.
    if (splits > 0 && walk.left <= walk.here()) {
      Part group;
      group.clear();
      for (int first = 0; first < splits; first += kBatch) {
        Part parts[kBatch];
        bool complete;
        do {
          complete = true;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {  // beyond the last it is the last again: no branch
            complete &= parts[i].receive(partial(other, min(first + i, splits - 1)));
          }
        } while (!complete);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i < splits) group.append(parts[i]);
        }
      }
      group.append(last);
      write_out(group, out, stretch.first.row, stretch.first.group);
      atlas::named_barrier(1, kAddThreads);  // all have taken what others take, too
      uint2* const taken = partial(other, 0);
      for (int i = Part::index(); i < splits * kPartial; i += kAddThreads) taken[i] = {0, 0};
      splits = 0;
    }
    if (walk.left <= 0) return;
    const int first = walk.at.unit, end = first + walk.here();
    const bool whole = first == 0 && end == walk.cut.units;
    Part group;
    group.clear();
    int unit = first;
    for (int split = quotient(first, walk.cut.split_units); unit < end; ++split) {
      const int stop = min(unit + walk.cut.split_units, end);
      Part sum;
      take(sum, min(stop - unit, kTogether));
      while ((unit += kTogether) < stop) {
        Part next;
        take(next, min(stop - unit, kTogether));
        sum.append(next);
      }
      unit = stop;
      if (whole) {
        group.append(sum);
      } else if (stop == walk.cut.units) {
        last = sum;
      } else {
        sum.send(partial(first == 0 ? blockIdx.x : other, split));
      }
    }
    if (whole) {
      write_out(group, out, walk.at.row, walk.at.group);
    } else if (end == walk.cut.units) {
      splits = walk.cut.splits() - 1;
    }
    walk.skip(end - first);
  }
}

}  // namespace

ATLAS_KERNEL(const types::q* q, const types::k_cache* k_cache, const types::v_cache* v_cache,
             const types::row_position* row_position, const types::row_seq* row_seq,
             const types::block_table* block_table, types::out* out, const int* n_rows,
             const int* /*seqs*/, const int* max_blocks, const int* /*blocks*/,
             unsigned char* scratch) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ atlas::Barrier full[kWarps][kPieces];
  __shared__ Results results[kWarps];
  __shared__ Rows rows;
  __shared__ Stretch stretch;
  __shared__ Part last[kAddThreads];
  atlas::launch_dependents();
  const int warp = threadIdx.x / atlas::kWarp, lane = threadIdx.x % atlas::kWarp;
  const int row = threadIdx.x, row_count = *n_rows, table_width = *max_blocks;
  const bool has_row = row < row_count;
  const int position = has_row ? row_position[row] : 0, sequence = has_row ? row_seq[row] : 0;
  if (warp < kWarps) {
    if (lane < kPieces) full[warp][lane].init(1);
    if (lane < kResults) {
      results[warp].full[lane].init(1);
      results[warp].empty[lane].init(kAdders);
    }
  }
  atlas::publish_barriers();
  stretch.find(rows, has_row, position, sequence, row_count);

  float* sums = reinterpret_cast<float*>(shared + kWarps * kPieces * kPageBytes);
  if (warp >= kWarps) {
    add_up(Walk(rows, stretch), results, sums, last[Part::index()], scratch, out);
    return;
  }
  Ring ring = {full[warp],
               shared + warp * kPieces * kPageBytes,
               reinterpret_cast<const unsigned char*>(k_cache),
               reinterpret_cast<const unsigned char*>(v_cache),
               block_table,
               rows,
               stretch,
               table_width,
               warp,
               lane};
  ring.begin();
  compute(ring, q, results[warp], sums + warp * kResults * kResult, lane);
}
