// Groups of row blocks of which several ranges have a part (decode_product.cuh): parts meet in
// scratch and are added up in the order of k.
//
// A range's first group is the last that it sums, so all ranges that a group is the first of
// finish it together, each for every so many tokens. A range that merely begins the group has
// left its part in scratch before. Of two parts that makes one addition by one thread block, and
// nobody waits.
//
// How a reader knows that a part is there: scratch is zero when a launch begins, a sum is stored
// with all its bits inverted, so that it never is zero (arithmetic makes no NaN whose bits are all
// ones), and whoever has read it writes zero again. No flags, no fences: one trip to the L2 cache
// each way.
//
// Thread blocks wait for one another, so all must be resident: a launch has one per multiprocessor.
#pragma once

#include "atlas/decode_product.cuh"

namespace atlas {

template <class Split>
class SharedSums {
 public:
  static constexpr int kN = Split::kN, kTogether = Split::kTogether;
  // Eights of tokens whose sums are given out at a time.
  static constexpr int kMostOwn = kN * kTogether <= 32    ? 1
                                  : kN * kTogether < 128  ? 4
                                  : kN * kTogether == 128 ? 2
                                                          : kTogether;
  // Two sides of consumers leave few registers beside the sums of many tokens.
  static constexpr bool kShort = Split::kSides > 1 && kN >= 64;
  static constexpr int kOwn = kShort ? 2 : kN / 8 < kMostOwn ? kN / 8 : kMostOwn;
  static constexpr int kMostShared = kN >= 128 ? 4 : kN / 32;
  static constexpr int kShared = kShort || kMostShared < kTogether ? 1 : kMostShared / kTogether;

  __device__ explicit SharedSums(unsigned char* scratch)
      : parts_(reinterpret_cast<uint4*>(scratch) + side() * kSide + consumer()) {}

  // The sums of this thread block's range and of the others that have a part of the group, to
  // give(eights, sums) for `rows` tokens: sums[n][block] are those of tokens 8 * eights[n] .. as a
  // thread holds them. Others give the rest. `sum` is used up.
  template <class Give>
  __device__ void finish(int group, int pass, float (&sum)[kTogether][kN / 2], int rows,
                         Give give) const {
    const int range = blockIdx.x, first = Split::first_range(group);
    const int last = Split::last_range(group);
    // Whether the first range has begun the group before it came to its own first.
    const bool begun = first != last && Split::first_group(first) < group;
    const int finishers = last - first + (begun ? 0 : 1);
    if (finishers > 1 || range < last) {
      put(part(range, begun && range == first, pass), sum, rows);
      if (begun && range == first) return;
    }
    if (finishers == 1) {
      give_own(begun ? part(first, true, pass) : nullptr, sum, rows, give);
    } else {
      give_shared(first, last, begun, pass, rows, give);
    }
  }

 private:
  // Parts that are read at a time: a group has 2 to 6 in the products of 8B models.
  static constexpr int kAtOnce = kN <= 32 || kShort ? 4 : 12 / (kShared * kTogether);
  // Of four sums a thread: of a row block, of a part, from a range to the next.
  static constexpr int kBlock = kN / 8 * kConsumers, kSide = kTogether * kBlock;
  static constexpr int kPass = Split::kSides * kSide, kPart = Split::kPasses * kPass;
  static constexpr int kRange = 2 * kPart;

  // What a range has of a group that it begins, or of its first.
  __device__ uint4* part(int range, bool begun, int pass) const {
    return parts_ + static_cast<size_t>(range) * kRange + (begun ? kPart : 0) + pass * kPass;
  }

  __device__ static void put(uint4* to, const float (&sum)[kTogether][kN / 2], int rows) {
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      if (8 * j >= rows) break;
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        const float* four = sum[block] + 4 * j;
        store(
            to + block * kBlock + j * kConsumers,
            make_uint4(inverted(four[0]), inverted(four[1]), inverted(four[2]), inverted(four[3])));
      }
    }
  }
  // The addition makes the one NaN that arithmetic makes of any other.
  __device__ static unsigned inverted(float sum) { return ~__float_as_uint(sum + 0.0f); }

  // Everything, from this range's sums and, if there is one, the part before. A loop that moves
  // registers along: unrolled, its code takes longer to come than to run.
  template <class Give>
  __device__ static void give_own(uint4* before, float (&sum)[kTogether][kN / 2], int rows,
                                  Give give) {
    uint4 next[kOwn][kTogether] = {};
    const auto ask = [&](int start) {
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        const bool wanted = before != nullptr && 8 * (start + n) < rows;
#pragma unroll
        for (int block = 0; block < kTogether; ++block) {
          load(next[n][block], before + block * kBlock + (start + n) * kConsumers, wanted);
        }
      }
    };
    ask(0);
#pragma unroll 1
    for (int start = 0; 8 * start < rows; start += kOwn) {
      int eights[kOwn];
      float4 sums[kOwn][kTogether];
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        eights[n] = start + n;
#pragma unroll
        for (int block = 0; block < kTogether; ++block) {
          const float* four = sum[block] + 4 * n;
          sums[n][block] = make_float4(four[0], four[1], four[2], four[3]);
          if (before != nullptr && 8 * eights[n] < rows) {
            uint4* from = before + block * kBlock + eights[n] * kConsumers;
            while (!there(next[n][block])) load(next[n][block], from, true);
            add(sums[n][block], next[n][block]);
            store(from, uint4{});
          }
        }
      }
      ask(start + kOwn);
      give(eights, sums);
      if constexpr (kOwn < kN / 8) {
#pragma unroll
        for (int block = 0; block < kTogether; ++block) {
#pragma unroll
          for (int i = 0; i + 4 * kOwn < kN / 2; ++i) sum[block][i] = sum[block][i + 4 * kOwn];
        }
      }
    }
  }

  // This thread block's share of the tokens, from all parts in scratch. All reads are under way
  // together; while a part is missing, only that is asked for.
  template <class Give>
  __device__ void give_shared(int first, int last, bool begun, int pass, int rows,
                              Give give) const {
    const int finishers = last - first + (begun ? 0 : 1), eights_in_use = (rows + 7) / 8;
#pragma unroll 1
    for (int start = blockIdx.x - first - (begun ? 1 : 0); start < eights_in_use;
         start += kShared * finishers) {
      int eights[kShared];
      float4 sums[kShared][kTogether];
#pragma unroll
      for (int n = 0; n < kShared; ++n) {
        eights[n] = start + n * finishers;
#pragma unroll
        for (int block = 0; block < kTogether; ++block) {
          sums[n][block] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);  // adding to it changes nothing
        }
      }
#pragma unroll 1
      for (int from = first; from <= last; from += kAtOnce) {
        uint4* const parts = part(from, false, pass);
        const int offset = begun && from == first ? kPart : 0;
        const auto at = [&](int i, int n, int block) {
          return parts + (i == 0 ? offset : i * kRange) + block * kBlock + eights[n] * kConsumers;
        };
        const auto wanted = [&](int i, int n) {
          return i <= last - from && eights[n] < eights_in_use;
        };
        uint4 found[kAtOnce][kShared][kTogether] = {};
        for (;;) {
          each([&](int i, int n, int block) {
            load(found[i][n][block], at(i, n, block), wanted(i, n) && !there(found[i][n][block]));
          });
          const uint4* missing = nullptr;
          each([&](int i, int n, int block) {
            if (wanted(i, n) && !there(found[i][n][block])) missing = at(i, n, block);
          });
          if (missing == nullptr) break;
          uint4 awaited = {};
          do {
            load(awaited, missing, true);
          } while (!there(awaited));
        }
        each([&](int i, int n, int block) {
          if (!wanted(i, n)) return;
          add(sums[n][block], found[i][n][block]);
          store(at(i, n, block), uint4{});
        });
      }
      give(eights, sums);
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
  __device__ static void add(float4& to, const uint4& part) {
    to.x += __uint_as_float(~part.x);
    to.y += __uint_as_float(~part.y);
    to.z += __uint_as_float(~part.z);
    to.w += __uint_as_float(~part.w);
  }
  __device__ static bool there(const uint4& four) {
    return min(min(four.x, four.y), min(four.z, four.w)) != 0;
  }
  __device__ static void store(uint4* to, const uint4& four) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(four.x),
                 "r"(four.y), "r"(four.z), "r"(four.w)
                 : "memory");
  }
  __device__ static void load(uint4& to, const uint4* from, bool wanted) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
        "@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
        : "l"(from), "r"(static_cast<unsigned>(wanted))
        : "memory");
  }

  uint4* parts_;  // as this thread sees them
};

}  // namespace atlas
