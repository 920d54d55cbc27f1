// One row of logits and the blocks that work on it (row_group.cuh): passes over the row, its
// largest element, sums, and thresholds found without sorting.
//
// The row is cut into one stretch of consecutive ids for each warp of each part, so a warp's passes
// after the first find its stretch in the L1 cache. What is added up are integers: counts, and
// weights in units of 2^-44. So no sum depends on an order, and results are the same bits for any
// number of parts.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/ordered_key.cuh"
#include "atlas/reduce.cuh"
#include "atlas/row_group.cuh"

namespace atlas {

using Word = unsigned long long;

constexpr int kThreads = launch::block, kWarps = kThreads / kWarp;
constexpr int kVocab = constants::vocab;
constexpr int kVector = kVocab % 4 == 0 ? 4 : 1;  // logits of a load
constexpr int kStep = kWarp * kVector;            // logits that a warp loads at once
constexpr int kSteps = ceil_div(kVocab, kParts * kWarps * kStep);
constexpr int kStretch = kSteps * kStep;
constexpr int kGroup = 8;  // lanes whose largest logits are compared to find a floor
constexpr int kGroups = kParts * kThreads / kGroup;
constexpr int kDigit = 12, kBins = 1 << kDigit;
constexpr int kSums = 3;  // slots of part_sums: searches use the first

static_assert(kThreads % kWarp == 0 && kWarps <= kWarp, "one warp reduces what all warps found");
static_assert(kParts <= kWarp, "one warp writes to all parts");
static_assert(kVocab <= 1 << 18, "2^18 weights of at most 2^44 units fit a word");

__device__ inline int lane() { return threadIdx.x % kWarp; }
__device__ inline int warp() { return threadIdx.x / kWarp; }
// The first id of this warp's stretch.
__device__ inline int stretch_begin() { return (part() * kWarps + warp()) * kStretch; }

constexpr Word kOne = Word{1} << 44;

// A weight of at most 1 in units of 2^-44.
__device__ inline Word fixed(float weight) { return __float2ull_rn(weight * 0x1p44f); }

__device__ inline void load_logits(const float* row, int id, float (&values)[kVector]) {
  if constexpr (kVector == 4) {
    const float4 loaded = *reinterpret_cast<const float4*>(row + id);
    values[0] = loaded.x, values[1] = loaded.y, values[2] = loaded.z, values[3] = loaded.w;
  } else {
    values[0] = row[id];
  }
}

// visit(logit, id) for this thread's share of the row, by ascending id; kBatch loads in flight.
template <int kBatch, class Visit>
__device__ inline void for_each_logit(const float* row, Visit visit) {
  const int first = stretch_begin() + lane() * kVector;
#pragma unroll 1
  for (int step = 0; step < kSteps; step += kBatch) {
    float values[kBatch][kVector];
    const auto taken = [&](int b) {
      return step + b < kSteps && first + (step + b) * kStep < kVocab;
    };
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (taken(b)) load_logits(row, first + (step + b) * kStep, values[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!taken(b)) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) visit(values[b][i], first + (step + b) * kStep + i);
    }
  }
}

// Sums of 64-bit integers, exact, whose halves are shared words: 64-bit additions to shared memory
// are loops of compare and swap.
__device__ inline void add_word(unsigned* low, unsigned* high, Word amount) {
  unsigned carry = static_cast<unsigned>(amount >> 32);
  const auto addend = static_cast<unsigned>(amount);
  if (addend != 0) carry += atomicAdd(low, addend) > ~addend;
  if (carry != 0) atomicAdd(high, carry);
}

// A logit and its id as one word: larger for larger logits, and for lower ids among equals.
__device__ inline Word ranked(float logit, int id) {
  return static_cast<Word>(ordered_key(logit)) << 32 | (0xFFFFFFFFu - static_cast<unsigned>(id));
}
__device__ inline int id_of(Word key) {
  return static_cast<int>(0xFFFFFFFFu - static_cast<unsigned>(key));
}
__device__ inline unsigned key_of(Word key) { return static_cast<unsigned>(key >> 32); }

// ranked() of the row's first largest logit; kKeyNan if there is a NaN. At least kGroups logits
// have keys >= `floor`, which may be 0.
struct Largest {
  Word best;
  unsigned floor;

  __device__ int id() const { return id_of(best); }
  __device__ unsigned key() const { return key_of(best); }
  // Whether the row has an answer: no NaN, and a finite maximum.
  __device__ bool valid() const { return key() > kKeyMinusInfinity && key() < kKeyPlusInfinity; }
};

// What a search found: the bin in which the sum from the top reaches the target, the sum over the
// bins above it, and whether the sum with it is exactly the target.
struct Found {
  int bin;
  bool exact;
  Word above;
};

// Shared memory of a block. `low` and `high` are zeros whenever no search is under way.
struct Scratch {
  unsigned low[kBins], high[kBins];
  Word warp_words[kWarps];
  unsigned warp_floors[kWarps];
  Word part_best[kParts];
  unsigned part_floors[kParts];
  Word part_sums[kSums][kParts];
  Found found;
};

__device__ inline void clear_bins(Scratch& scratch) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) scratch.low[i] = scratch.high[i] = 0;
}

// All threads of all parts call it, once, after group_arrive(), and all get the result.
__device__ inline Largest find_largest(const float* row, Scratch& scratch) {
  constexpr int kBatch = kSteps <= 10 ? kSteps : 8;
  float top = __uint_as_float(0xFF800000u);
  int at = stretch_begin() + lane() * kVector;
  const bool any = at < kVocab;
  bool nan = false;
  for_each_logit<kBatch>(row, [&](float logit, int id) {
    nan |= logit != logit;
    if (logit > top) top = logit, at = id;
  });
  if (nan) top = __uint_as_float(0x7FC00000u);
  Word best = any ? ranked(top, at) : 0;
  // The largest of each group, then the smallest of those.
  const auto larger = [&](int distance) {
    const Word other = __shfl_xor_sync(kAllLanes, best, distance);
    best = other > best ? other : best;
  };
#pragma unroll
  for (int distance = 1; distance < kGroup; distance *= 2) larger(distance);
  unsigned floor = __reduce_min_sync(kAllLanes, key_of(best));
#pragma unroll
  for (int distance = kGroup; distance < kWarp; distance *= 2) larger(distance);
  if (lane() == 0) scratch.warp_words[warp()] = best, scratch.warp_floors[warp()] = floor;
  __syncthreads();
  if (warp() == 0) {
    best = lane() < kWarps ? scratch.warp_words[lane()] : 0;
    floor = lane() < kWarps ? scratch.warp_floors[lane()] : ~0u;
    best = warp_reduce(best, Max());
    floor = __reduce_min_sync(kAllLanes, floor);
  }
  group_wait();
  if (threadIdx.x < kParts) {
    *in_part(&scratch.part_best[part()], threadIdx.x) = best;
    *in_part(&scratch.part_floors[part()], threadIdx.x) = floor;
  }
  group_barrier();
  Largest largest{scratch.part_best[0], scratch.part_floors[0]};
#pragma unroll
  for (int i = 1; i < kParts; ++i) {
    largest.best = max(largest.best, scratch.part_best[i]);
    largest.floor = min(largest.floor, scratch.part_floors[i]);
  }
  return largest;
}

// Sums over a block's warps: after it, warp_words holds one sum per warp, until the next barrier
// that follows a write to it.
__device__ inline void sum_warps(Word mine, Scratch& scratch) {
  __syncthreads();  // earlier readers of warp_words are done
  mine = warp_reduce(mine, Sum());
  if (lane() == 0) scratch.warp_words[warp()] = mine;
  __syncthreads();
}

// Gives part_sums[kSlot] of every part the sum of each part. A kernel uses each slot once: a part
// may be read while others are already at the next sum.
template <int kSlot>
__device__ inline void sum_parts(Word mine, Scratch& scratch) {
  sum_warps(mine, scratch);
  if (warp() == 0) {
    const Word sum = warp_reduce(lane() < kWarps ? scratch.warp_words[lane()] : 0, Sum());
    if (lane() < kParts) *in_part(&scratch.part_sums[kSlot][part()], lane()) = sum;
  }
  group_barrier();
}

// The sum of `mine` over all threads of all parts.
template <int kSlot>
__device__ inline Word group_sum(Word mine, Scratch& scratch) {
  sum_parts<kSlot>(mine, scratch);
  Word total = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) total += scratch.part_sums[kSlot][i];
  return total;
}

// Inclusive sums over a block's threads, and the sum of all. All threads call it.
struct Scan {
  Word upto, total;
};
__device__ inline Scan scan_block(Word own, Scratch& scratch) {
  Scan scan{own, 0};
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const Word before = __shfl_up_sync(kAllLanes, scan.upto, distance);
    if (lane() >= distance) scan.upto += before;
  }
  __syncthreads();  // earlier readers of warp_words are done
  if (lane() == kWarp - 1) scratch.warp_words[warp()] = scan.upto;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const Word of_warp = scratch.warp_words[w];
    if (w < warp()) scan.upto += of_warp;
    scan.total += of_warp;
  }
  return scan;
}

// Adds up the parts' bins, the uppermost first, to where the sum reaches a target, and clears them.
// above: the sum over what lies over the top bin. target_of(sum over all bins) is the target. All
// threads of all parts call it when they have filled their bins, and all get the result.
template <class TargetOf>
__device__ inline Found find_bin(Word above, TargetOf target_of, Scratch& scratch) {
  // Each part adds up its own section of the bins; a thread kEach neighbours, from `top` down.
  constexpr int kSection = kBins / kParts, kEach = ceil_div(kSection, kThreads);
  constexpr int kLast = kSection / kEach - 1;  // the last thread that has bins
  static_assert(kSection % kEach == 0, "sections are cut into whole threads' shares");
  const int top = kBins - 1 - part() * kSection - static_cast<int>(threadIdx.x) * kEach;
  const bool works = static_cast<int>(threadIdx.x) <= kLast;
  const auto sum_of = [&](int bin) {
    Word sum = 0;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const Scratch* theirs = in_part(&scratch, p);
      sum += static_cast<Word>(theirs->high[bin]) << 32 | theirs->low[bin];
    }
    return sum;
  };
  group_barrier();
  Word own = 0;
  if (works) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) own += sum_of(top - i);
  }
  const Scan scan = scan_block(own, scratch);
  const Word section = scan.total;
  Word upto = scan.upto;  // over threads, then over parts too
  if (threadIdx.x < kParts) *in_part(&scratch.part_sums[0][part()], threadIdx.x) = section;
  group_barrier();
  Word total = 0;
  upto += above;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const Word of_part = scratch.part_sums[0][p];
    if (p < part()) upto += of_part;
    total += of_part;
  }
  const Word target = target_of(total);
  Word before = upto - own;
  // A target of 0 is reached by the topmost bin; one that nobody reaches ends in the lowest.
  const bool first = part() == 0 && threadIdx.x == 0;
  const bool last = part() == kParts - 1 && threadIdx.x == kLast;
  if (works && (first || before < target) && (last || upto >= target)) {
    int bin = top;
    if constexpr (kEach > 1) {
      own = sum_of(bin);
#pragma unroll 1
      while (before + own < target && bin > top - kEach + 1) {
        before += own;
        own = sum_of(--bin);
      }
    }
    const Found found{bin, before + own == target, before};
    for (int p = 0; p < kParts; ++p) *in_part(&scratch.found, p) = found;
  }
  group_barrier();
  clear_bins(scratch);  // no part reads them any more
  __syncthreads();
  return scratch.found;
}

// The largest key T from `low` to `high` such that the measures of keys >= T sum to `target` or
// more; with kAnyEqual, any key that has the same logits above it will do. `above` is the sum over
// keys over `high`; `low` must reach the target. Each pass narrows the range to one of kBins parts
// of it. key(logit, id) gives a Key, measure(logit) an integer. All threads of all parts call it,
// and all get the result.
template <bool kAnyEqual, class Key, class KeyOf, class Measure>
__device__ inline Key highest_key(const float* row, Key low, Key high, Word above, Word target,
                                  KeyOf key, Measure measure, Scratch& scratch) {
  while (low < high) {
    const Key width = high - low;
    const int bits = sizeof(Key) == 8 ? 64 - __clzll(static_cast<long long>(width))
                                      : 32 - __clz(static_cast<int>(width));
    const int shift = max(bits - kDigit, 0);
    for_each_logit<2>(row, [&](float logit, int id) {
      const Key at = key(logit, id);
      if (at < low || at > high) return;
      const auto bin = static_cast<unsigned>((at - low) >> shift);
      add_word(&scratch.low[bin], &scratch.high[bin], measure(logit));
    });
    const Found found = find_bin(above, [&](Word) { return target; }, scratch);
    const Key bin = min(static_cast<Key>(found.bin), width >> shift);
    low += bin << shift;
    if (kAnyEqual && found.exact) break;
    above = found.above;
    high = min(high, low + ((Key{1} << shift) - 1));
  }
  return low;
}

}  // namespace atlas
