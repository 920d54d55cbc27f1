// The work of a decode step's attention as one list of units, and the stretch of it that a block
// has.
//
// For paged_attention.decode.cu, which says what groups, units and splits are.
#pragma once

#include "atlas/decode_page.cuh"
#include "atlas/instance.h"
#include "atlas/kv_tiles.cuh"
#include "atlas/reduce.cuh"

namespace decode {

constexpr int kGroups = n_kv_heads * kGroupsPerKv;  // of a row
constexpr int kMaxRows = launch::max_rows;
constexpr int kRowWarps = atlas::ceil_div(kMaxRows, atlas::kWarp);  // whose threads have rows

static_assert(kMaxRows <= launch::block, "a row has a thread");

// Of what is not negative: two thirds of the instructions.
__device__ inline int quotient(unsigned x, unsigned by) { return x / by; }
__device__ inline int quotient_up(unsigned x, unsigned by) { return (x + by - 1) / by; }

// How a row's keys are divided: a function of its position.
struct Cut {
  int begin, position;  // first and last position that the row sees
  int first_page, pages, units, split_units;

  __device__ static Cut of(int position) {
    Cut cut;
    cut.position = position;
    cut.begin = window > 0 && position >= window ? position - window + 1 : 0;
    cut.first_page = quotient(cut.begin, atlas::kPageTokens);
    cut.pages = quotient(position, atlas::kPageTokens) - cut.first_page + 1;
    cut.units = quotient_up(cut.pages, kUnitPages);
    cut.split_units = quotient_up(cut.units, knobs::SPLITS * knobs::SPLIT) * knobs::SPLIT;
    return cut;
  }
  __device__ int splits() const { return quotient_up(units, split_units); }
};

// The step's rows, and the lowest position that it computes of any sequence of a remainder.
struct Rows {
  int position[kMaxRows], sequence[kMaxRows], lowest[kMaxRows];

  __device__ static int remainder(unsigned sequence) { return sequence % kMaxRows; }
  // Earlier steps have written the keys before this one.
  __device__ int fresh(int row) const { return lowest[remainder(sequence[row])]; }
};

struct Place {
  int row, group, unit;
};

// Where a block's equal part of `total` units begins.
__device__ inline int part_begin(int total, unsigned block) {
  const float share = __fdividef(static_cast<float>(block), static_cast<float>(gridDim.x));
  return block == gridDim.x ? total : static_cast<int>(static_cast<float>(total) * share);
}

// Units begin..end - 1 of the list, from `first` until before `last`.
struct Stretch {
  // Units of the warps' rows, for find(). They are read in fours: nothing else stands among them.
  alignas(16) int sums[atlas::ceil_div(kRowWarps, 4) * 4];
  int total;  // units of the whole list
  int begin, end;
  Place first, last;

  // All threads call it, and put their row into `rows` if they have one; afterwards both are there
  // for all.
  __device__ void find(Rows& rows, bool has_row, int position, int sequence, int n_rows) {
    const int lane = threadIdx.x % atlas::kWarp, warp = threadIdx.x / atlas::kWarp;
    const int row = threadIdx.x;
    if (row < kMaxRows) rows.lowest[row] = 0x7FFFFFFF;
    if (has_row) rows.position[row] = position, rows.sequence[row] = sequence;
    const Cut cut = Cut::of(position);
    const int mine = has_row ? cut.units * kGroups : 0;
    int before = mine;  // at first with this row, from the warp's first
#pragma unroll
    for (int distance = 1; distance < atlas::kWarp; distance *= 2) {
      const int other = __shfl_up_sync(atlas::kAllLanes, before, distance);
      if (lane >= distance) before += other;
    }
    if (warp < kRowWarps && lane == atlas::kWarp - 1) sums[warp] = before;
    __syncthreads();
    if (has_row) atomicMin(&rows.lowest[Rows::remainder(sequence)], position);
    if (warp < kRowWarps) {
      int sum = 0;
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) {
        if (w < warp) before += sums[w];
        sum += sums[w];
      }
      before -= mine;
      // Equal parts, moved on to where a split begins.
      const int from = part_begin(sum, blockIdx.x), until = part_begin(sum, blockIdx.x + 1);
      if (threadIdx.x == 0) {
        total = sum;
        if (from == sum) begin = sum, first = {n_rows, 0, 0};
        if (until == sum) end = sum, last = {n_rows, 0, 0};
      }
      bool begins = from >= before && from < before + mine;
      bool ends = until >= before && until < before + mine;
      while (begins || ends) {  // the rows of both at the same time, unless they are one
        const bool is_begin = begins;
        const int target = (is_begin ? from : until) - before;
        int group = quotient(target, cut.units);
        int unit = quotient_up(target - group * cut.units, cut.split_units) * cut.split_units;
        if (unit >= cut.units) unit = 0, ++group;
        (is_begin ? begin : end) = before + group * cut.units + unit;
        (is_begin ? first : last) =
            group == kGroups ? Place{row + 1, 0, 0} : Place{row, group, unit};
        if (is_begin) {
          begins = false;
        } else {
          ends = false;
        }
      }
    }
    __syncthreads();
  }
};

// The walk along a stretch. Where the next block goes on with the last group, what this one has of
// it comes first: it is there long before the other ends.
struct Walk {
  const Rows& rows;
  const Stretch& stretch;
  int left, ahead;  // units still to come, this one included; of them those that come first
  Place at;
  Cut cut;

  __device__ Walk(const Rows& r, const Stretch& s) : rows(r), stretch(s), left(s.end - s.begin) {
    ahead = left > s.last.unit ? s.last.unit : 0;
    at = ahead > 0 ? Place{s.last.row, s.last.group, 0} : s.first;
    if (left > 0) cut = Cut::of(rows.position[at.row]);
  }
  __device__ void skip(int units) {
    left -= units;
    if (left <= 0) return;
    at.unit += units;
    if (ahead > 0 && (ahead -= units) <= 0) {
      at = stretch.first;
      at.unit -= ahead;
      cut = Cut::of(rows.position[at.row]);
    }
    while (at.unit >= (kGroups - at.group) * cut.units) {
      at.unit -= (kGroups - at.group) * cut.units;
      at.group = 0;
      cut = Cut::of(rows.position[++at.row]);
    }
    const int groups = quotient(at.unit, cut.units);
    at.group += groups;
    at.unit -= groups * cut.units;
  }
  // The unit's first page, counted from the sequence's first, and whether there is a second.
  __device__ int page() const { return cut.first_page + at.unit * kUnitPages; }
  __device__ bool two() const { return at.unit * kUnitPages + 1 < cut.pages; }
  // Units of this group from this one on that are in the stretch.
  __device__ int here() const { return min(cut.units - at.unit, ahead > 0 ? ahead : left); }
};

}  // namespace decode
