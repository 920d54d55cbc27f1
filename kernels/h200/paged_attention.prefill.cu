/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = "(WARPGROUPS + 1) * 128"
shared = "WARPGROUPS * 64 * 128 * ceil_div(head_dim, 64) + STAGES * 2 * KEYS * 128 * ceil_div(head_dim, 64) + 512"
pdl = true
[layouts]
k_cache = "kv_tiles"
v_cache = "kv_tiles"
out = "tiles"
[knobs]
WARPGROUPS = 2
KEYS = 128
STAGES = 2
HEADS = 1
*/
// paged_attention of prompt rows: out[r, h] = softmax(q[r, h] . K * scale) V over positions
// 0..row_position[r], or the last `window` of them. FlashAttention-3's division of labour.
//
// q [rows, n_heads * head_dim] bf16; caches in layout `kv_tiles` (per KV block and head: groups of
// 64 columns, each 16 tokens by 128 swizzled bytes); out in layout `tiles`, padding columns zero.
//
// Tiles: kRows query rows, HEADS query heads of one KV head by kPositions positions of one
// sequence, cut where a position is a multiple of kPositions, where a sequence ends, and where rows
// of the step do not follow each other. A block per multiprocessor walks over (tile, heads), the
// step's last rows (of the longest tiles in a prompt) first. Its first warpgroup feeds the others:
// warp 0 finds the tiles and copies keys and values into two rings, warps 1 to 3 load queries and
// check values (below). Each other warpgroup owns 64 query rows: scores of key tile n and values of
// tile n - 1 are multiplied while the softmax of another warpgroup runs; a token passed around by
// named barriers keeps them apart.
//
// Keys are cut into tiles at multiples of KEYS, walked from the last to the first. A tile that a row
// does not see changes nothing of it, to the bit: so its bits depend on its position and sequence,
// not on how rows were cut into chunks or tiles.
//
// Hidden keys: their scores are replaced, their values weighted 0. But 0 x NaN is NaN: in tiles that
// are hidden from some row, values that are not finite (or were never written) are set to zero by
// warps 1 to 3 before they are multiplied, and added at the end to the rows that see them.
//
// Flops: 4 x head_dim per query head and visible key; bound by the tensor cores at head_dim 128 and
// 256, by exponentials as much at 64.
#include "atlas/async_copy.cuh"
#include "atlas/bulk_copy.cuh"
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/pdl.cuh"
#include "atlas/reduce.cuh"
#include "atlas/tiles.cuh"
#include "atlas/wgmma.cuh"

namespace {

using namespace constants;
using bf16 = __nv_bfloat16;

static_assert(atlas::same_type<types::q, bf16> && atlas::same_type<types::k_cache, bf16> &&
                  atlas::same_type<types::v_cache, bf16> && atlas::same_type<types::out, bf16>,
              "queries, caches and outputs are bf16");
static_assert(n_heads % n_kv_heads == 0, "every KV head serves the same number of query heads");
static_assert(head_dim % 16 == 0 && head_dim <= 256, "a head is 1 to 16 slices of 16 columns");
static_assert(scale > 0.0f, "the largest score is found before scaling");

constexpr int kGroups = knobs::WARPGROUPS, kRows = 64 * kGroups;
constexpr int kKeys = knobs::KEYS, kStages = knobs::STAGES;
constexpr int kHalves = atlas::ceil_div(head_dim, 64), kColumns = kHalves * 64;
constexpr int kPage = layout::kv_block_size, kPages = kKeys / kPage;
constexpr int kPageBytes = kHalves * kPage * 128, kStageBytes = kPages * kPageBytes;
constexpr int kQueryBytes = kHalves * kRows * 128;
static_assert(kKeys % kPage == 0 && kPage == 16, "a slice of 16 keys is a page");

__host__ __device__ constexpr int greatest_divisor(int n, int limit) {
  while (n % limit != 0) --limit;
  return limit;
}
constexpr int kGroupHeads = n_heads / n_kv_heads;
constexpr int kHeads = greatest_divisor(kGroupHeads, knobs::HEADS);  // query heads of a tile
constexpr int kPositions = kRows / kHeads;
constexpr int kUnits = n_heads / kHeads;  // tiles that share their rows

constexpr int kHelpers = 96;  // threads of warps 1 to 3
constexpr int kTokenBarrier = 1, kHelperBarrier = kTokenBarrier + kGroups;
// Of the file's 65,536, as two or three consuming warpgroups leave them.
constexpr int kConsumerRegisters = kGroups == 2 ? 224 : 160;
constexpr int kFeederRegisters = kGroups == 2 ? 56 : 32;
constexpr float kScaleLog2 = scale * 1.44269504088896341f;

// A tile of work. n_rows 0: there is no more.
struct Work {
  int row, n_rows, position, seq, unit;
  int broken;  // a visible value of a partly hidden tile is not finite

  __device__ int last() const { return position + n_rows - 1; }
  __device__ int begin() const { return window > 0 ? max(position - window + 1, 0) : 0; }
  __device__ int first_tile() const { return begin() / kKeys; }
  __device__ int last_tile() const { return last() / kKeys; }
  // Is a key of the tile hidden from a row?
  __device__ bool partly_hidden(int tile) const {
    return (tile + 1) * kKeys > position + 1 ||
           (window > 0 && tile * kKeys < last() - window + 1);
  }
};

struct Control {
  atlas::Barrier work_full[2], work_empty[2], query_full, query_empty;
  atlas::Barrier key_full[kStages], key_empty[kStages];
  // Values that need a check arrive at value_raw; the helpers complete value_full.
  atlas::Barrier value_raw[kStages], value_full[kStages], value_empty[kStages];
  Work work[2];
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
  int n_rows, max_blocks;

  __device__ size_t page_offset(int page, int kv_head) const {
    return (static_cast<size_t>(page) * n_kv_heads + kv_head) * kPageBytes;
  }
};

struct Shared {
  char *query, *keys, *values;
  Control* control;
};

__device__ inline int lane() { return threadIdx.x % atlas::kWarp; }

// The first row in [row, end) that starts a tile, or `end`; row + kPositions >= end.
__device__ inline int next_start(const Arguments& a, int row, int end) {
  constexpr int kBallots = atlas::ceil_div(kPositions, atlas::kWarp);
  unsigned starts[kBallots];
#pragma unroll
  for (int i = 0; i < kBallots; ++i) {
    const int r = row + i * atlas::kWarp + lane();
    bool start = false;
    if (r < end) {
      const int position = a.row_position[r];
      start = r == 0 || position % kPositions == 0 || a.row_seq[r] != a.row_seq[r - 1] ||
              a.row_position[r - 1] + 1 != position;
    }
    starts[i] = __ballot_sync(atlas::kAllLanes, start);
  }
#pragma unroll
  for (int i = 0; i < kBallots; ++i) {
    if (starts[i] != 0) return row + i * atlas::kWarp + __ffs(starts[i]) - 1;
  }
  return end;
}

// Blocks draw items in order. The last block to have drawn its last one resets the counters for the
// next launch, which reads them after this one has ended.
__device__ unsigned next_ticket, blocks_done;

// Warp 0: finds this block's tiles and keeps the rings full.
__device__ inline void produce(const Arguments& a, const Shared& shared) {
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
  int ticket = blockIdx.x;
  while (ticket < n_items) {
    const int item = n_items - 1 - ticket;
    if (lane() == 0) ticket = gridDim.x + atomicAdd(&next_ticket, 1);
    const int unit = item % kUnits, kv_head = unit * kHeads / kGroupHeads;
    const int first = item / kUnits * kPositions;
    const int stop = min(first + kPositions, a.n_rows);
    for (int row = next_start(a, first, stop); row < stop;) {
      const int end = min(next_start(a, row + 1, min(row + kPositions, a.n_rows)),
                          a.n_rows);
      const Work work = {row, end - row, a.row_position[row], a.row_seq[row], unit, 0};
      announce(work);
      const int* table = a.block_table + static_cast<size_t>(work.seq) * a.max_blocks;
      const int first_page = work.begin() / kPage, last_page = work.last() / kPage;
      const auto page_of = [&](int tile) {  // of this lane, -1 if no row sees it
        const int page = tile * kPages + lane();
        const bool used = lane() < kPages && page >= first_page && page <= last_page;
        return used ? table[page] : -1;
      };
      int page = page_of(work.last_tile());
      for (int tile = work.last_tile(); tile >= work.first_tile(); --tile) {
        const unsigned used = __ballot_sync(atlas::kAllLanes, page >= 0);
        const size_t source = a.page_offset(page, kv_head);
        const int next_page = tile > work.first_tile() ? page_of(tile - 1) : -1;
        const unsigned bytes = __popc(used) * kPageBytes;

        atlas::Barrier& key_full = control.key_full[ring.slot];
        control.key_empty[ring.slot].wait(ring.phase ^ 1);
        if (lane() == 0) key_full.arrive_expect(bytes);
        __syncwarp();
        char* keys = shared.keys + ring.slot * kStageBytes + lane() * kPage * 128;
        if (page >= 0) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            atlas::bulk_load(keys + half * kKeys * 128, a.k_cache + source + half * kPage * 128,
                             kPage * 128, key_full);
          }
        }

        atlas::Barrier& value_full =
            work.partly_hidden(tile) ? control.value_raw[ring.slot] : control.value_full[ring.slot];
        control.value_empty[ring.slot].wait(ring.phase ^ 1);
        if (lane() == 0) value_full.arrive_expect(bytes);
        __syncwarp();
        if (page >= 0) {
          atlas::bulk_load(shared.values + ring.slot * kStageBytes + lane() * kPageBytes,
                           a.v_cache + source, kPageBytes, value_full);
        }
        ring.next();
        page = next_page;
      }
      row = end;
      // A tile may reach beyond its item's rows; what starts there is the next item's.
    }
    ticket = __shfl_sync(atlas::kAllLanes, ticket, 0);
  }
  announce({0, 0, 0, 0, 0, 0});
  if (lane() == 0 && atomicAdd(&blocks_done, 1) == gridDim.x - 1) next_ticket = blocks_done = 0;
}

// Halves of a word that hold a bf16 infinity or NaN: their highest bits.
__device__ inline unsigned not_finite(unsigned word) {
  return (word & 0x7F807F80u) + 0x00800080u & 0x80008000u;
}

// Zeroes what is not finite in a tile of values; true if one of those belongs to a key in
// [begin, last].
__device__ inline bool zero_broken(char* values, int first_key, int begin, int last) {
  bool broken = false;
#pragma unroll kGroups == 2 ? 4 : 1
  for (int chunk = threadIdx.x - atlas::kWarp; chunk < kStageBytes / 16; chunk += kHelpers) {
    uint4& place = reinterpret_cast<uint4*>(values)[chunk];
    uint4 v = place;
    if (((not_finite(v.x) | not_finite(v.y)) | (not_finite(v.z) | not_finite(v.w))) == 0) continue;
    const auto zeroed = [](unsigned word) {
      const unsigned bad = not_finite(word);
      return word & ~((bad >> 15) * 0xFFFFu);
    };
    place = {zeroed(v.x), zeroed(v.y), zeroed(v.z), zeroed(v.w)};
    const int key = first_key + chunk / (kPageBytes / 16) * kPage + chunk / 8 % kPage;
    broken |= key >= begin && key <= last;
  }
  return broken;
}

// Warps 1 to 3: queries of each tile, and the check of values of partly hidden key tiles.
__device__ inline void help(const Arguments& a, const Shared& shared) {
  Control& control = *shared.control;
  Ring ring;
  unsigned raw_phases = 0;  // bit s: the phase of value_raw[s]
  for (int n = 0;; ++n) {
    const int slot = n % 2;
    control.work_full[slot].wait(n / 2 % 2);
    const Work work = control.work[slot];
    control.query_empty.wait((n + 1) % 2);
    if (work.n_rows > 0) {
      const bf16* q = a.q + static_cast<size_t>(work.row) * n_heads * head_dim +
                      work.unit * kHeads * head_dim;
      constexpr int kChunks = head_dim / 8;
#pragma unroll kGroups == 2 ? 2 : 1
      for (int i = threadIdx.x - atlas::kWarp; i < kRows * kChunks; i += kHelpers) {
        const int r = i / kChunks, chunk = i % kChunks;
        const int head = r / kPositions, p = r % kPositions;
        const bool inside = p < work.n_rows && head < kHeads;
        const bf16* source = q + static_cast<size_t>(p) * n_heads * head_dim + head * head_dim;
        atlas::copy_async_16(
            shared.query + chunk / 8 * kRows * 128 + r * 128 + (chunk % 8 ^ r % 8) * 16,
            inside ? source + chunk * 8 : q, inside);
      }
      atlas::commit_copies();
      atlas::wait_copies<0>();
      atlas::publish_to_async_proxy();
    }
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
      if (threadIdx.x == atlas::kWarp) control.value_full[ring.slot].arrive();
    }
    __syncwarp();
    if (lane() == 0) control.work_empty[slot].arrive();
  }
}

__device__ inline float minus_infinity() { return __uint_as_float(0xFF800000u); }

__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline unsigned pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(both);
}

constexpr int kScores = kKeys / 2, kOutputs = kColumns / 2;  // registers of a thread
using ScoreProduct = atlas::Wgmma<kKeys>;
using ValueProduct = atlas::Wgmma<kColumns>;

// A consumer thread's part of a tile: rows i = 0, 1 of 64, at positions position[i].
struct Rows {
  float output[kOutputs], maximum[2], total[2];
  unsigned weights[kPages][4];  // of the values, as wgmma takes them
  int position[2];
};

__device__ inline void start_scores(float (&scores)[kScores], const char* query, const char* keys) {
  const unsigned long long a = atlas::wgmma_descriptor(query), b = atlas::wgmma_descriptor(keys);
  atlas::wgmma_hold(scores);
  atlas::wgmma_fence();
#pragma unroll
  for (int i = 0; i < head_dim / 16; ++i) {
    ScoreProduct::bf16_ss(scores, a + (i / 4 * kRows * 128 / 16 + i % 4 * 2),
                          b + (i / 4 * kKeys * 128 / 16 + i % 4 * 2), i > 0);
  }
  atlas::wgmma_commit();
}

__device__ inline void start_values(Rows& rows, const char* values) {
  const unsigned long long b = atlas::wgmma_descriptor(values, 1024, kPage * 128);
  atlas::wgmma_hold(rows.output);
  atlas::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kPages; ++i) {
    ValueProduct::template bf16_rs<1>(rows.output, rows.weights[i], b + i * (kPageBytes / 16), 1);
  }
  atlas::wgmma_commit();
}

__device__ inline void hide(float (&scores)[kScores], const Rows& rows, int first_key) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int distance = rows.position[i] - first_key - lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int back = distance - (8 * j + e);  // how far before the row's position
        const bool seen = window > 0 ? static_cast<unsigned>(back) < window : back >= 0;
        if (!seen) scores[4 * j + 2 * i + e] = minus_infinity();
      }
    }
  }
}

// Scores become weights relative to the new maximum; `correction` is what older weights are
// multiplied with. A row that has seen no key yet keeps maximum -inf and weights 0.
__device__ inline void soften(float (&scores)[kScores], Rows& rows, float (&correction)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float high[2] = {scores[2 * i], scores[2 * i + 1]};
#pragma unroll
    for (int j = 1; j < kKeys / 8; ++j) {
      high[0] = fmaxf(high[0], scores[4 * j + 2 * i]);
      high[1] = fmaxf(high[1], scores[4 * j + 2 * i + 1]);
    }
    float largest = fmaxf(high[0], high[1]);
    largest = fmaxf(largest, __shfl_xor_sync(atlas::kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(atlas::kAllLanes, largest, 2));
    largest = fmaxf(largest, rows.maximum[i]);
    const float base = largest == minus_infinity() ? 0.0f : largest * kScaleLog2;
    correction[i] = exp2_approximate(fmaf(rows.maximum[i], kScaleLog2, -base));
    rows.maximum[i] = largest;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = scores[4 * j + 2 * i + e];
        s = exp2_approximate(fmaf(s, kScaleLog2, -base));
        sum[e] += s;
      }
    }
    rows.total[i] = fmaf(rows.total[i], correction[i], sum[0] + sum[1]);
  }
}

// ptxas moves a wait for products up to where nothing forbids it, which is before the softmax that
// is meant to hide them. It leaves it behind a store that needs the softmax's sums (and never
// happens: they are not negative).
__device__ inline void finish_before_wait(const Rows& rows, Work& anything) {
  asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n"
               "@never st.shared.u32 [%1], 0;\n}" ::"f"(rows.total[0] + rows.total[1]),
               "r"(atlas::shared_address(&anything))
               : "memory");
}

// An accumulator of scores is laid out as two halves of wgmma's A.
__device__ inline void round_weights(Rows& rows, const float (&scores)[kScores]) {
#pragma unroll
  for (int i = 0; i < kPages; ++i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      rows.weights[i][r] = pack(scores[8 * i + 2 * r], scores[8 * i + 2 * r + 1]);
    }
  }
}

__device__ inline void rescale(Rows& rows, const float (&correction)[2]) {
#pragma unroll
  for (int c = 0; c < kOutputs; ++c) rows.output[c] *= correction[c / 2 % 2];
}

// Adds the values that zero_broken took out to the rows that see their keys. Rare, so slow.
__device__ inline void add_broken(Rows& rows, const Arguments& a, const Work& work) {
  const int kv_head = work.unit * kHeads / kGroupHeads;
  const int* table = a.block_table + static_cast<size_t>(work.seq) * a.max_blocks;
  for (int key = work.begin(); key <= work.last(); ++key) {
    if (!work.partly_hidden(key / kKeys)) continue;
    const char* page = a.v_cache + a.page_offset(table[key / kPage], kv_head);
    const int token = key % kPage;
    bool sees[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int back = rows.position[i] - key;
      sees[i] = back >= 0 && (window == 0 || back < window);
    }
#pragma unroll
    for (int j = 0; j < head_dim / 8; ++j) {
      const unsigned word = *reinterpret_cast<const unsigned*>(
          page + j / 8 * kPage * 128 + token * 128 + (j % 8 ^ token % 8) * 16 + lane() % 4 * 4);
      if (not_finite(word) == 0) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const unsigned half = e == 0 ? word << 16 : word & 0xFFFF0000u;
        if ((half & 0x7F800000u) != 0x7F800000u) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (sees[i]) rows.output[4 * j + 2 * i + e] += __uint_as_float(half);
        }
      }
    }
  }
}

// Divides by the sums of weights, and writes 16-byte chunks: the four lanes that share a row hold a
// word each of four chunks, and exchange them for a chunk each.
__device__ inline void write(Rows& rows, const Arguments& a, const Work& work, int first_row) {
  constexpr int kRowTiles = atlas::ceil_div(n_heads * head_dim, 64);
  const int quad = lane() % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = rows.total[i];
    total += __shfl_xor_sync(atlas::kAllLanes, total, 1);
    total += __shfl_xor_sync(atlas::kAllLanes, total, 2);
    const float inverse = 1.0f / total;
    const int r = first_row + 8 * i, head = r / kPositions, p = r % kPositions;
    const bool inside = p < work.n_rows && head < kHeads;
    const int row = work.row + p, column = (work.unit * kHeads + head) * head_dim;
#pragma unroll
    for (int j = 0; j < head_dim / 8; j += 4) {
      unsigned v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* two = rows.output + 4 * (j + k) + 2 * i;
        v[k] = pack(two[0] * inverse, two[1] * inverse);
      }
      const bool odd = quad % 2, upper = quad / 2;
      const unsigned a0 = __shfl_xor_sync(atlas::kAllLanes, odd ? v[0] : v[1], 1);
      const unsigned a1 = __shfl_xor_sync(atlas::kAllLanes, odd ? v[2] : v[3], 1);
      const unsigned b0 = odd ? a0 : v[0], b1 = odd ? v[1] : a0;  // chunk j + quad % 2
      const unsigned b2 = odd ? a1 : v[2], b3 = odd ? v[3] : a1;  // chunk j + 2 + quad % 2
      const unsigned c0 = __shfl_xor_sync(atlas::kAllLanes, upper ? b0 : b2, 2);
      const unsigned c1 = __shfl_xor_sync(atlas::kAllLanes, upper ? b1 : b3, 2);
      const uint4 chunk = {upper ? c0 : b0, upper ? c1 : b1, upper ? b2 : c0, upper ? b3 : c1};
      if (inside && (head_dim % 32 == 0 || j + quad < head_dim / 8)) {
        *reinterpret_cast<uint4*>(
            a.out + atlas::tiles_offset(row, (column + (j + quad) * 8) * 2, kRowTiles)) = chunk;
      }
    }
    if constexpr (n_heads * head_dim % 64 != 0) {  // the row's padding, by the last head
      constexpr int kFirst = n_heads * head_dim / 8, kEnd = kRowTiles * 8;
      if (inside && column == (n_heads - 1) * head_dim) {
        for (int c = kFirst + quad; c < kEnd; c += 4) {
          *reinterpret_cast<uint4*>(a.out + atlas::tiles_offset(row, c * 16, kRowTiles)) = {};
        }
      }
    }
  }
}

// Warpgroups 1..: 64 query rows of each tile.
__device__ inline void consume(const Arguments& a, const Shared& shared, int group) {
  Control& control = *shared.control;
  const char* query = shared.query + group * 64 * 128;
  const int first_row = group * 64 + threadIdx.x / atlas::kWarp % 4 * 16 + lane() / 4;
  const auto release = [](atlas::Barrier& barrier) {
    if (lane() == 0) barrier.arrive();
  };
  // The one warpgroup that holds the token issues its products.
  const auto take_token = [&] { atlas::named_barrier(kTokenBarrier + group, 256); };
  const auto pass_token = [&] {
    atlas::named_arrive(kTokenBarrier + (group + 1 == kGroups ? 0 : group + 1), 256);
  };
  if (group == kGroups - 1) pass_token();

  Ring keys, values;
  for (int n = 0;; ++n) {
    const int slot = n % 2;
    control.query_full.wait(n % 2);
    const Work work = control.work[slot];
    if (work.n_rows == 0) return;
    Rows rows;
    float scores[kScores], correction[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.position[i] = work.position + (first_row + 8 * i) % kPositions;
      rows.maximum[i] = minus_infinity();
      rows.total[i] = 0.0f;
    }

    int tile = work.last_tile();
    const int first_tile = work.first_tile();
    control.key_full[keys.slot].wait(keys.phase);
    start_scores(scores, query, shared.keys + keys.slot * kStageBytes);
    atlas::wgmma_wait<0>();
    atlas::wgmma_hold(scores);
    release(control.key_empty[keys.slot]);
    keys.next();
    if (work.partly_hidden(tile)) hide(scores, rows, tile * kKeys);
    soften(scores, rows, correction);
    round_weights(rows, scores);
#pragma unroll
    for (int c = 0; c < kOutputs; ++c) rows.output[c] = 0.0f;

    while (--tile >= first_tile) {
      control.key_full[keys.slot].wait(keys.phase);
      take_token();
      start_scores(scores, query, shared.keys + keys.slot * kStageBytes);
      control.value_full[values.slot].wait(values.phase);
      start_values(rows, shared.values + values.slot * kStageBytes);
      pass_token();
      atlas::wgmma_wait<1>();
      atlas::wgmma_hold(scores);
      release(control.key_empty[keys.slot]);
      keys.next();
      if (work.partly_hidden(tile)) hide(scores, rows, tile * kKeys);
      soften(scores, rows, correction);
      finish_before_wait(rows, control.work[slot]);
      atlas::wgmma_wait<0>();
      atlas::wgmma_hold(rows.output);
      release(control.value_empty[values.slot]);
      values.next();
      round_weights(rows, scores);
      rescale(rows, correction);
    }
    release(control.query_empty);

    control.value_full[values.slot].wait(values.phase);
    start_values(rows, shared.values + values.slot * kStageBytes);
    atlas::wgmma_wait<0>();
    atlas::wgmma_hold(rows.output);
    release(control.value_empty[values.slot]);
    values.next();
    if (control.work[slot].broken) add_broken(rows, a, work);
    __syncwarp();
    release(control.work_empty[slot]);
    write(rows, a, work, first_row);
  }
}

extern __shared__ __align__(1024) char dynamic_shared[];

}  // namespace

ATLAS_KERNEL(const types::q* __restrict__ q, const types::k_cache* __restrict__ k_cache,
             const types::v_cache* __restrict__ v_cache,
             const types::row_position* __restrict__ row_position,
             const types::row_seq* __restrict__ row_seq,
             const types::block_table* __restrict__ block_table, types::out* __restrict__ out,
             const int* rows, const int* /*seqs*/, const int* max_blocks, const int* /*blocks*/) {
  atlas::launch_dependents();
  Shared shared;
  shared.query = dynamic_shared;
  shared.keys = shared.query + kQueryBytes;
  shared.values = shared.keys + kStages * kStageBytes;
  shared.control = reinterpret_cast<Control*>(shared.values + kStages * kStageBytes);
  Control& control = *shared.control;
  constexpr int kConsumerWarps = 4 * kGroups;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      control.work_full[i].init(1);
      control.work_empty[i].init(kConsumerWarps + kHelpers / atlas::kWarp);
    }
    control.query_full.init(kHelpers / atlas::kWarp);
    control.query_empty.init(kConsumerWarps);
    for (int i = 0; i < kStages; ++i) {
      control.key_full[i].init(1);
      control.key_empty[i].init(kConsumerWarps);
      control.value_raw[i].init(1);
      control.value_full[i].init(1);
      control.value_empty[i].init(kConsumerWarps);
    }
    atlas::publish_barriers();
  }
  __syncthreads();
  atlas::wait_for_inputs();

  const Arguments a = {q,
                       reinterpret_cast<const char*>(k_cache),
                       reinterpret_cast<const char*>(v_cache),
                       row_position,
                       row_seq,
                       block_table,
                       reinterpret_cast<char*>(out),
                       *rows,
                       *max_blocks};
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    atlas::give_registers<kFeederRegisters>();
    if (threadIdx.x < atlas::kWarp) {
      produce(a, shared);
    } else {
      help(a, shared);
    }
  } else {
    atlas::take_registers<kConsumerRegisters>();
    consume(a, shared, warpgroup - 1);
  }
}
