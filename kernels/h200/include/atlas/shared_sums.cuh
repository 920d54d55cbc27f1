// Groups of row blocks of which several ranges have a part (decode_product.cuh): parts meet in
// scratch and are added up in the order of k.
//
// A range's first group is the last that it sums, so all ranges that a group is the first of
// finish it together, each for every so many tokens. A range that merely begins the group has
// left its part in scratch before. Of two parts that makes one addition by one thread block, and
// nobody waits.
//
// Where every group has the same even number of ranges, neighbours' parts may be added up first: a
// cluster does that without scratch (cluster_sums.cuh): of two, and the pairs are what meets here,
// or of all of a group's, and nothing does.
//
// Thread blocks wait for one another, so all must be resident: a launch has at most one per
// multiprocessor, and whoever loads it sees that its clusters have room.
#pragma once

#include "atlas/cluster_sums.cuh"
#include "atlas/scratch_parts.cuh"

namespace atlas {

// Finished sums go to give(start, step, sums, fetched): sums[n][block] are those of the eight
// tokens from 8 * (start + n * step) on, as a thread holds them. fetched = give.fetch<count>(start,
// step): what else it reads for them, asked for before parts are. Give::kOwn: eights that it takes
// at a time from registers. All consumers call it together.
struct Nothing {};  // what is fetched for sums that need nothing else

template <class Split>
class SharedSums {
 public:
  static constexpr int kN = Split::kN, kTogether = Split::kTogether, kWays = Split::kWays;
  // Eights of a share, and parts, that are read at a time: a group has 2 to 6 parts in the products
  // of 8B models. Two sides of consumers leave few registers beside the sums of many tokens.
  static constexpr int kMostShared = kN >= 128 ? 4 : kN / 32;
  static constexpr bool kShort = Split::kSides > 1 && kN >= 64;
  static constexpr int kShared = kShort || kMostShared < kTogether ? 1 : kMostShared / kTogether;

  // `spare`: shared memory of which nobody needs the contents once the last slot is summed up.
  __device__ SharedSums(unsigned char* scratch, unsigned char* spare,
                        const ClusterSums<Split>& cluster = ClusterSums<Split>())
      : parts_(reinterpret_cast<uint4*>(scratch) + Split::side() * kSide + Split::consumer()),
        kept_(reinterpret_cast<uint4*>(spare) + Split::side() * kKept + Split::consumer()),
        cluster_(cluster) {}

  // What else the range's first group needs of eight tokens, asked for once inputs are there: when
  // the last slot is summed, the next launch's blocks stream weights, and it takes longer to come
  // than the parts do (Llama-3-8B's 32 layers in nvfp4 on an H200, rows' factors added up late as
  // well: -17 to -26 us at 1 row, -8 to -22 at 8). Blocks that will give nothing ask, too.
  template <class Give>
  __device__ static auto early(const Give& give) {
    if constexpr (!kHolds) {
      return Nothing{};
    } else if constexpr (Split::kTrades) {
      return OfCluster<Give>{give, static_cast<int>(blockIdx.x) % kWays}.template fetch<1>(0, 1);
    } else {
      return give.template fetch<1>(0, 1);
    }
  }

  // Adds the sums of the other ranges that have a part of the group to those of this thread
  // block's, and gives a share of the `rows` tokens; others give the rest. `sum` is used up.
  template <class Give, class Early = Nothing>
  __device__ void finish(int group, int pass, float (&sum)[kTogether][kN / 2], int rows, Give give,
                         const Early& early = {}) const {
    const int range = blockIdx.x, first = Split::first_range(group);
    const int last = Split::last_range(group);
    if constexpr (Split::kTrades) {
      finish_traded(range, first, last, sum, rows, give, early);
      return;
    }
    // Whether the first range has begun the group before it came to its own first.
    const bool begun = !Split::kEven && first != last && Split::first_group(first) < group;
    const int finishers = last - first + (begun ? 0 : 1);
    if (begun && range == first) {
      put(part(range, true, pass), sum, rows, -1, 1);
    } else if (finishers == 1) {
      if (begun) add_before(part(first, true, pass), sum, rows);
      give_own(sum, rows, give);
    } else {
      const int mine = range - first - (begun ? 1 : 0);
      if constexpr (kHolds) {
        if (mine == 0) {
          give_held(first, last, begun, sum, give, early);
        } else {
          put(part(range, false, pass), sum, rows, -1, 1);
        }
        return;
      }
      share(first, last, begun, mine, finishers, pass, sum, rows, give, early);
    }
  }

 private:
  // The eights of tokens that a block of a cluster takes.
  template <class Give>
  struct OfCluster {
    static constexpr int kOwn =
        Give::kOwn < ClusterSums<Split>::kEights ? Give::kOwn : ClusterSums<Split>::kEights;
    Give give;
    int rank;

    template <int kCount>
    __device__ auto fetch(int start, int step) const {
      return give.template fetch<kCount>(kWays * start + rank, kWays * step);
    }
    template <int kCount, class Fetched>
    __device__ void operator()(int start, int step, const float4 (&sums)[kCount][kTogether],
                               const Fetched& fetched) const {
      give(kWays * start + rank, kWays * step, sums, fetched);
    }
  };

  template <int kCount, class Give, class Early>
  __device__ static auto fetch(const Give& give, int start, int step, const Early& early) {
    if constexpr (kHolds && !same_type<Early, Nothing>) {
      return early;
    } else {
      return give.template fetch<kCount>(start, step);
    }
  }

  template <class Give, class Early>
  __device__ void finish_traded(int range, int first, int last,
                                const float (&sum)[kTogether][kN / 2], int rows, Give give,
                                const Early& early) const {
    constexpr int kEights = ClusterSums<Split>::kEights, kOwn = OfCluster<Give>::kOwn;
    const int rank = range % kWays, eights = ClusterSums<Split>::eights(rows);
    const OfCluster<Give> of_cluster{give, rank};
    float all[kTogether][4 * kEights] = {};
    if constexpr (Split::kEach == kWays && kEights <= kOwn) {
      // What else is needed is asked for while sums are on their way.
      const auto fetched = fetch<kOwn>(of_cluster, 0, 1, early);
      cluster_.trade(sum, all);
      float4 sums[kOwn][kTogether];
      four_by_four(all, sums);
      if (eights > 0) of_cluster(0, 1, sums, fetched);
      return;
    }
    cluster_.trade(sum, all);
    if constexpr (Split::kEach == kWays) {
      give_own(all, 8 * eights, of_cluster);
    } else {
      share(first + rank, last - (kWays - 1) + rank, false, (range - first) / kWays,
            Split::kEach / kWays, 0, all, 8 * eights, of_cluster, early);
    }
  }

  // Leaves sums for the others that finish the group and takes what they leave.
  template <int kSums, class Give, class Early>
  __device__ void share(int first, int last, bool begun, int mine, int finishers, int pass,
                        const float (&sum)[kTogether][kSums], int rows, Give give,
                        const Early& early) const {
    // All is summed up. A side may still be giving, with a barrier of its own.
    if (kKeeps && 8 * mine < rows) named_barrier(3, Split::kSides * kConsumers);
    put(part(blockIdx.x, false, pass), sum, rows, kKeeps ? mine : -1, finishers);
    give_shared(first, last, begun, mine, finishers, pass, rows, give, early);
  }

  // Whether a thread block keeps its own share of its sums: between passes nothing is spare.
  static constexpr bool kKeeps = Split::kPasses == 1;
  // Of eight tokens the first finisher gives everything, and has its own in registers.
  static constexpr bool kHolds = kN == 8;
  static constexpr int kMost =
      kN <= 32 || kShort ? 4 : (Split::kByPairs ? 8 : 12) / (kShared * kTogether);
  // Ranges from one part that is read to the next; whether two of them are added up first.
  static constexpr int kRanges = Split::kWays, kParts = Split::kEach / kRanges;
  static constexpr bool kByPairs = Split::kByPairs && Split::kEach > 2 && !Split::kTrades;
  static constexpr int kAtOnce = kParts > 0 && kParts < kMost ? kParts : kMost;
  static_assert(!kByPairs || kAtOnce % 2 == 0, "pairs are read together");
  // Of four sums a thread: of a row block, of a part, from a range to the next; of what is kept.
  static constexpr int kBlock = kN / 8 * kConsumers, kSide = kTogether * kBlock;
  static constexpr int kPass = Split::kSides * kSide, kPart = Split::kPasses * kPass;
  static constexpr int kRange = 2 * kPart, kKept = (kN / 8 + 1) / 2 * kTogether * kConsumers;

  // What a range has of a group that it begins, or of its first.
  __device__ uint4* part(int range, bool begun, int pass) const {
    return parts_ + static_cast<size_t>(range) * kRange + (begun ? kPart : 0) + pass * kPass;
  }
  // Where the n-th eight of this thread block's own share waits.
  __device__ uint4* kept(int n, int block) const {
    return kept_ + (n * kTogether + block) * kConsumers;
  }

  // Leaves sums in scratch, but for every `step`-th eight from `mine` on, which stays here.
  template <int kSums>
  __device__ void put(uint4* to, const float (&sum)[kTogether][kSums], int rows, int mine,
                      int step) const {
    int next = mine, n = 0;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      if (8 * j >= rows) break;
      const bool stays = j == next;
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        store_part(stays ? kept(n, block) : to + block * kBlock + j * kConsumers,
                   as_part(sum[block] + 4 * j));
      }
      if (stays) {
        next += step;
        ++n;
      }
    }
  }
  // Adds the part before, some of it while the next is on its way.
  __device__ static void add_before(uint4* from, float (&sum)[kTogether][kN / 2], int rows) {
    constexpr int kMost = kN * kTogether <= 128 && Split::kSides == 1 ? 4 : 2;
    constexpr int kBatch = kN / 8 < kMost ? kN / 8 : kMost;
    uint4 found[2][kBatch][kTogether] = {};
    const auto at = [&](int j, int block) { return from + block * kBlock + j * kConsumers; };
    const auto ask = [&](uint4(&to)[kBatch][kTogether], int start) {
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
#pragma unroll
        for (int block = 0; block < kTogether; ++block) {
          load_part(to[n][block], at(start + n, block), 8 * (start + n) < rows);
        }
      }
    };
    ask(found[0], 0);
#pragma unroll
    for (int start = 0; start < kN / 8; start += kBatch) {
      uint4(&now)[kBatch][kTogether] = found[start / kBatch % 2];
      if (start + kBatch < kN / 8) ask(found[(start / kBatch + 1) % 2], start + kBatch);
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        if (8 * (start + n) >= rows) break;
#pragma unroll
        for (int block = 0; block < kTogether; ++block) {
          while (!is_there(now[n][block])) load_part(now[n][block], at(start + n, block), true);
          float* four = sum[block] + 4 * (start + n);
          float4 both = make_float4(four[0], four[1], four[2], four[3]);
          add_part(both, now[n][block]);
          four[0] = both.x;
          four[1] = both.y;
          four[2] = both.z;
          four[3] = both.w;
          store_part(at(start + n, block), uint4{});
          now[n][block] = uint4{};
        }
      }
    }
  }

  // The first eights.
  template <int kSums, int kCount>
  __device__ static void four_by_four(const float (&sum)[kTogether][kSums],
                                      float4 (&sums)[kCount][kTogether]) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        const float* four = sum[block] + 4 * n;
        sums[n][block] = make_float4(four[0], four[1], four[2], four[3]);
      }
    }
  }

  // Everything, in a loop that moves registers along: unrolled, its code takes longer to come than
  // to run.
  template <int kSums, class Give>
  __device__ static void give_own(float (&sum)[kTogether][kSums], int rows, Give give) {
    constexpr int kOwn = Give::kOwn;
#pragma unroll 1
    for (int start = 0; 8 * start < rows; start += kOwn) {
      const auto fetched = give.template fetch<kOwn>(start, 1);
      float4 sums[kOwn][kTogether];
      four_by_four(sum, sums);
      give(start, 1, sums, fetched);
      if constexpr (4 * kOwn < kSums) {
#pragma unroll
        for (int block = 0; block < kTogether; ++block) {
#pragma unroll
          for (int i = 0; i + 4 * kOwn < kSums; ++i) sum[block][i] = sum[block][i + 4 * kOwn];
        }
      } else {
        break;
      }
    }
  }

  // This thread block's share of the tokens, from all parts: of pairs, those of the same half. All
  // reads are under way together; while parts are missing, all of these are asked for, or of many
  // tokens, to be quiet, only one.
  template <class Give, class Early>
  __device__ void give_shared(int first, int last, bool begun, int mine, int step, int pass,
                              int rows, Give give, const Early& early) const {
    const int eights = (rows + 7) / 8;
    int before = 0;  // eights of the share that are given
#pragma unroll 1
    for (int start = mine; start < eights; start += kShared * step) {
      const auto fetched = fetch<kShared>(give, start, step, early);
      float4 sums[kShared][kTogether];
#pragma unroll
      for (int n = 0; n < kShared; ++n) {
#pragma unroll
        for (int block = 0; block < kTogether; ++block) {
          sums[n][block] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);  // adding to it changes nothing
        }
      }
#pragma unroll 1
      for (int from = first; from <= last; from += kAtOnce * kRanges) {
        uint4* const parts = part(from, false, pass);
        const int offset = begun && from == first ? kPart : 0,
                  own = kKeeps ? (static_cast<int>(blockIdx.x) - from) / kRanges : -1;
        const auto at = [&](int i, int n, int block) {
          uint4* there = parts + (i == 0 ? offset : i * kRanges * kRange) + block * kBlock +
                         (start + n * step) * kConsumers;
          return i == own ? kept(before + n, block) : there;
        };
        const auto wanted = [&](int i, int n) {
          return i * kRanges <= last - from && start + n * step < eights;
        };
        uint4 found[kAtOnce][kShared][kTogether] = {};
        for (;;) {
          each([&](int i, int n, int block) {
            load_part(found[i][n][block], at(i, n, block),
                      wanted(i, n) && !is_there(found[i][n][block]));
          });
          const uint4* missing = nullptr;
          each([&](int i, int n, int block) {
            if (wanted(i, n) && !is_there(found[i][n][block])) missing = at(i, n, block);
          });
          if (missing == nullptr) break;
          if constexpr (kN > 16) {
            uint4 awaited = {};
            do {
              load_part(awaited, missing, true);
            } while (!is_there(awaited));
          }
        }
        each([&](int i, int n, int block) {
          if (!wanted(i, n)) return;
          if constexpr (!kByPairs) {
            add_part(sums[n][block], found[i][n][block]);
          } else if (i % 2 != 0) {
            add_pair(sums[n][block], found[i - 1][n][block], found[i][n][block]);
          }
          store_part(at(i, n, block), uint4{});
        });
      }
      give(start, step, sums, fetched);
      before += kShared;
    }
  }

  // The first finisher's, of eight tokens: the part before, its own sums, then the parts behind.
  template <class Give, class Early>
  __device__ void give_held(int first, int last, bool begun, const float (&sum)[kTogether][kN / 2],
                            Give give, const Early& early) const {
    float4 sums[1][kTogether];
#pragma unroll
    for (float4& four : sums[0]) four = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);  // as above
    if (begun) add_parts<1>(part(first, true, 0), 1, sums[0]);
#pragma unroll
    for (int block = 0; block < kTogether; ++block) add_part(sums[0][block], as_part(sum[block]));
    // By pairs, too, its own, the second, and a pair; then two pairs at a time.
    constexpr int kNext = kByPairs ? 4 : 3;
    add_parts<3>(part(blockIdx.x + 1, false, 0), kByPairs ? 3 : last - blockIdx.x, sums[0]);
#pragma unroll 1
    for (int from = blockIdx.x + 4; from <= last; from += kNext) {
      add_parts<kNext>(part(from, false, 0), last - from + 1, sums[0]);
    }
    give(0, 1, sums, early);
  }
  // Adds the parts of `count` ranges, of the first kMost, which are asked for together.
  template <int kMost>
  __device__ static void add_parts(uint4* from, int count, float4 (&sums)[kTogether]) {
    uint4 found[kMost * kTogether] = {};
    const auto at = [&](int i) { return from + i / kTogether * kRange + i % kTogether * kBlock; };
    await_parts(found, at, [&](int i) { return i / kTogether < count; });
#pragma unroll
    for (int i = 0; i < kMost * kTogether; ++i) {
      const int range = i / kTogether, block = i % kTogether;
      if (range >= count) break;
      // Of an odd number of parts the first completes a pair.
      constexpr int kOdd = kMost % 2;
      if (!kByPairs || range < kOdd) {
        add_part(sums[block], found[i]);
      } else if ((range - kOdd) % 2 != 0) {
        add_pair(sums[block], found[i - kTogether], found[i]);
      }
      store_part(at(i), uint4{});
    }
  }

  template <class Visit>
  __device__ static void each(Visit visit) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int n = 0; n < kShared; ++n) {
#pragma unroll
        for (int block = 0; block < kTogether; ++block) visit(i, n, block);
      }
    }
  }

  uint4 *parts_, *kept_;  // as this thread sees them
  ClusterSums<Split> cluster_;
};

}  // namespace atlas
