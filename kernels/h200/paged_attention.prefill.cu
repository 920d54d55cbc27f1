/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = "(WARPGROUPS + 1) * 128"
shared = "(WARPGROUPS * 64 + STAGES * 2 * KEYS) * 128 * HALVES + 512"
pdl = true
[scratch]
bytes = 8
[serves]
q = ["bf16"]
k_cache = ["bf16"]
v_cache = ["bf16"]
out = ["bf16"]
[layouts]
k_cache = "kv_tiles"
v_cache = "kv_tiles"
out = "operand"
[knobs]
# On an H200, causal, TFLOP/s of 1 x 8,192 and 16 x 2,048 rows (docs/kernels/ledger.md, entry 14):
# three warpgroups with heads of 64 (496 and 380; two: 416 and 349), where exponentials take as long
# as products; longer heads, or a window, leave them no registers.
HALVES = "ceil_div(head_dim, 64)"
WARPGROUPS = "2 + 1 // HALVES * (1 - min(1, window))"
# As many as the registers hold. Heads of 256: 80 keys 618 and 501, 64 keys 594 and 493.
KEYS = "min(128, 400 // (HALVES + 1) // 16 * 16)"
# As many as fit: heads of 128 with two 597 and 511, with three 659 and 544.
FREE = "shared_memory_per_block - 512 - WARPGROUPS * 64 * 128 * HALVES"
STAGES = "min(4, FREE // (2 * KEYS * 128 * HALVES))"
# Query heads of a tile at most. Heads of 128, 16 x 2,048 rows: four 511, one 476.
HEADS = 4
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
// step's last rows (of the longest tiles in a prompt) first. Its first warpgroup feeds the others
// (prefill_feed.cuh): warp 0 finds the tiles and copies keys, warp 1 values, each into a ring;
// warps 2 and 3 copy queries and check values (below). Each other warpgroup owns 64 query rows:
// scores of key tile n and values of tile n - 1 are multiplied while the softmax of another
// warpgroup runs; a token passed around by named barriers keeps them apart.
//
// Keys are cut into tiles at multiples of KEYS, walked from the last to the first. A tile that a
// row does not see changes nothing of it, to the bit: so its bits depend on its position and
// sequence, not on how rows were cut into chunks or tiles.
//
// Hidden keys: their scores are replaced, their values weighted 0. But 0 x NaN is NaN: in tiles
// that are hidden from some row, values that are not finite (or were never written) are set to zero
// by warps 2 and 3 before they are multiplied, and added at the end to the rows that see them.
//
// Flops: 4 x head_dim per query head and visible key; bound by the tensor cores at head_dim 128 and
// 256, by exponentials as much at 64.
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/pdl.cuh"
#include "atlas/prefill_feed.cuh"
#include "atlas/reduce.cuh"
#include "atlas/tiles.cuh"
#include "atlas/wgmma.cuh"

namespace {

using namespace prefill;

static_assert(atlas::same_type<types::q, bf16> && atlas::same_type<types::k_cache, bf16> &&
                  atlas::same_type<types::v_cache, bf16> && atlas::same_type<types::out, bf16>,
              "queries, caches and outputs are bf16");
static_assert(scale > 0.0f, "the largest score is found before scaling");

constexpr float kScaleLog2 = scale * 1.44269504088896341f;
// Of the file's 65,536, as two or three consuming warpgroups leave them.
constexpr int kConsumerRegisters = kGroups == 2 ? 224 : 160;
constexpr int kFeederRegisters = kGroups == 2 ? 56 : 32;
// Warpgroups start a tile one after the other: 544 to 554 TFLOP/s at 16 x 2,048 rows and heads of
// 128. Longer ones have no registers left for it.
constexpr bool kStagger = head_dim <= 128;

__device__ inline float minus_infinity() { return __uint_as_float(0xFF800000u); }

__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger one; NaN if one is.
__device__ inline float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
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
// multiplied with. A row that has seen no key yet keeps maximum -inf and weights 0; a score that is
// NaN makes all weights NaN, one of +inf as well.
__device__ inline void soften(float (&scores)[kScores], Rows& rows, float (&correction)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float high[2] = {scores[2 * i], scores[2 * i + 1]};
#pragma unroll
    for (int j = 1; j < kKeys / 8; ++j) {
      high[0] = max_or_nan(high[0], scores[4 * j + 2 * i]);
      high[1] = max_or_nan(high[1], scores[4 * j + 2 * i + 1]);
    }
    float largest = max_or_nan(high[0], high[1]);
    largest = max_or_nan(largest, __shfl_xor_sync(atlas::kAllLanes, largest, 1));
    largest = max_or_nan(largest, __shfl_xor_sync(atlas::kAllLanes, largest, 2));
    largest = max_or_nan(largest, rows.maximum[i]);
    const float base = largest == minus_infinity() ? 0.0f : __fmul_rn(largest, kScaleLog2);
    // Exactly 1 where the maximum stays: both products are rounded.
    correction[i] = exp2_approximate(__fmul_rn(rows.maximum[i], kScaleLog2) - base);
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
  asm volatile(
      "{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n"
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
  const int* table = a.table(work);
  for (int key = work.begin(); key <= work.last(); ++key) {
    if (!work.partly_hidden(key / kKeys)) continue;
    const char* page = a.v_cache + atlas::kv_page_offset(table[key / kPage], work.kv_head(),
                                                         n_kv_heads, kPageBytes);
    bool sees[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int back = rows.position[i] - key;
      sees[i] = back >= 0 && (window == 0 || back < window);
    }
#pragma unroll
    for (int j = 0; j < head_dim / 8; ++j) {
      const unsigned word = *reinterpret_cast<const unsigned*>(
          page + atlas::in_page(key % kPage, 8 * j + lane() % 4 * 2));
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
    if constexpr (kStagger) take_token();
    start_scores(scores, query, shared.keys + keys.slot * kStageBytes);
    if constexpr (kStagger) pass_token();
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
             const int* rows, const int* /*seqs*/, const int* max_blocks, const int* /*blocks*/,
             unsigned char* scratch) {
  atlas::launch_dependents();
  Shared shared;
  shared.query = dynamic_shared;
  shared.keys = shared.query + kQueryBytes;
  shared.values = shared.keys + kStages * kStageBytes;
  shared.control = reinterpret_cast<Control*>(shared.values + kStages * kStageBytes);
  if (threadIdx.x == 0) shared.control->init();
  __syncthreads();
  atlas::wait_for_inputs();

  const Arguments a = {q,
                       reinterpret_cast<const char*>(k_cache),
                       reinterpret_cast<const char*>(v_cache),
                       row_position,
                       row_seq,
                       block_table,
                       reinterpret_cast<char*>(out),
                       reinterpret_cast<unsigned*>(scratch),
                       *rows,
                       *max_blocks};
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    atlas::give_registers<kFeederRegisters>();
    const int warp = threadIdx.x / atlas::kWarp;
    if (warp == 0) {
      feed_work_and_keys(a, shared);
    } else if (warp == 1) {
      feed_values(a, shared);
    } else {
      feed_queries(a, shared);
    }
  } else {
    atlas::take_registers<kConsumerRegisters>();
    consume(a, shared, warpgroup - 1);
  }
}
