// The work of a decode step's attention as one list of rounds, and the stretch of it that a block
// has.
//
// For paged_attention.decode.cu, which says what groups, rounds and splits are.
#pragma once

#include "atlas/decode_softmax.cuh"
#include "atlas/instance.h"
#include "atlas/kv_tiles.cuh"
#include "atlas/reduce.cuh"

namespace decode {

constexpr int kGroups = n_kv_heads * kGroupsPerKv;  // of a row
constexpr int kRowsPerThread = atlas::ceil_div(launch::max_rows, launch::block);

// How a row's keys are divided: a function of its position.
struct Cut {
  int begin, position;  // first and last position that the row sees
  int first_page, pages, rounds, rounds_per_split;

  __device__ static Cut of(int position) {
    Cut cut;
    cut.position = position;
    cut.begin = window > 0 && position >= window ? position - window + 1 : 0;
    cut.first_page = cut.begin / atlas::kPageTokens;
    cut.pages = position / atlas::kPageTokens - cut.first_page + 1;
    cut.rounds = atlas::ceil_div(cut.pages, kWarps);
    cut.rounds_per_split = atlas::ceil_div(cut.rounds, knobs::SPLITS);
    return cut;
  }
  __device__ int splits() const { return atlas::ceil_div(rounds, rounds_per_split); }
};

struct Rows {
  int position[launch::max_rows], sequence[launch::max_rows];
};

// A block's stretch of the list, and the walk along it: rows, groups of a row, rounds of a group.
struct Stretch {
  int total;        // rounds of the whole list
  int begin, left;  // its first round in the list; rounds still to come, this one included
  int row, group, round;
  Cut cut;

  __device__ void enter(const Rows& rows) {
    if (left > 0) cut = Cut::of(rows.position[row]);
  }
  __device__ void advance(const Rows& rows) {
    --left;
    if (++round < cut.rounds) return;
    round = 0;
    if (++group < kGroups) return;
    group = 0;
    ++row;
    enter(rows);
  }
  // The warp's page of this round, counted from the sequence's first; the last round may end
  // before.
  __device__ int page(int warp) const { return cut.first_page + round * kWarps + warp; }
  __device__ bool has_page(int warp) const { return round * kWarps + warp < cut.pages; }
};

// Shared memory of find_stretch().
struct Search {
  int rounds[launch::block / atlas::kWarp], ends[2], row, group, round;
};

// All threads call it once the rows are there; each looks at kRowsPerThread of them.
__device__ inline Stretch find_stretch(const Rows& rows, int n_rows, Search& search) {
  const int lane = threadIdx.x % atlas::kWarp, warp = threadIdx.x / atlas::kWarp;
  const int first = threadIdx.x * kRowsPerThread;
  const auto rounds_of = [&](int row) {
    return row < n_rows ? Cut::of(rows.position[row]).rounds * kGroups : 0;
  };
  int before = 0;  // rounds of the rows up to this thread's last, at first from its warp's first
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) before += rounds_of(first + i);
#pragma unroll
  for (int distance = 1; distance < atlas::kWarp; distance *= 2) {
    const int other = __shfl_up_sync(atlas::kAllLanes, before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == atlas::kWarp - 1) search.rounds[warp] = before;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int w = 0; w < launch::block / atlas::kWarp; ++w) {
    if (w < warp) before += search.rounds[w];
    total += search.rounds[w];
  }
#pragma unroll
  for (int row = first + kRowsPerThread - 1; row >= first; --row) {
    const int mine = rounds_of(row);
    before -= mine;
#pragma unroll
    for (int end = 0; end < 2; ++end) {
      // An equal part, moved on to where a split begins.
      const int target = static_cast<long long>(total) * (blockIdx.x + end) / gridDim.x;
      if (threadIdx.x == 0 && target == total) search.ends[end] = total;
      if (target < before || target >= before + mine) continue;
      const Cut cut = Cut::of(rows.position[row]);
      const int group = (target - before) / cut.rounds, rest = (target - before) % cut.rounds;
      const int start = atlas::ceil_div(rest, cut.rounds_per_split) * cut.rounds_per_split;
      const bool next = start >= cut.rounds;  // the next group, or the next row
      search.ends[end] = before + group * cut.rounds + (next ? cut.rounds : start);
      if (end == 1) continue;
      search.round = next ? 0 : start;
      search.group = next ? (group + 1) % kGroups : group;
      search.row = next && group + 1 == kGroups ? row + 1 : row;
    }
  }
  __syncthreads();
  Stretch stretch = {total,      search.ends[0], search.ends[1] - search.ends[0],
                     search.row, search.group,   search.round};
  stretch.enter(rows);
  return stretch;
}

}  // namespace decode
