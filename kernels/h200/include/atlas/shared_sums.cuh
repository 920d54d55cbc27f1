// Groups of row blocks of which several teams have a part (decode_product.cuh): each writes its
// sums to scratch and finishes a share of the group, adding the parts up in the order of k.
//
// Scratch holds one word per thread block, zero at load, and behind them kKept parts per thread
// block, each of 128 x N sums as the threads held them. How a reader knows that a part is there:
// - numbered, up to 16 tokens: a sum and the number of the launch share 64 bits, and the reader
// reads
//   until the number is this launch's. One trip to the L2 cache each way; the block's word counts
//   launches.
// - flagged: fp32 alone, and the block's word counts parts, kKept a launch. Half the bytes, but a
//   fence before the flag and a trip for it.
// H200, Llama-3-8B's products, us a product numbered and flagged: 29.7, 30.5 at 8 tokens in bf16,
// 18.6, 20.0 in f8g128; 34.3, 33.2 and 23.3, 22.5 at 32; 57, 49 and 45, 39 at 128.
//
// Thread blocks wait for one another, so all must be resident: a launch has one per multiprocessor.
#pragma once

#include "atlas/decode_product.cuh"

namespace atlas {

// kKept is 2, a team's first and last groups, or, where whole groups are kept too, as many as a
// range may touch.
template <class Split, int kKept>
class SharedSums {
 public:
  static constexpr int kN = Split::kN, kPair = Split::kPair;
  static constexpr bool kNumbered = kN <= 16;

  // The consumers, once inputs are there.
  __device__ explicit SharedSums(unsigned char* scratch)
      : words_(reinterpret_cast<unsigned*>(scratch)),
        parts_(scratch + align_up(Split::kTeams * kPair * 4, 256)),
        team_(blockIdx.x / kPair),
        count_(team_ < Split::kTeams ? __ldcg(words_ + blockIdx.x) : 0) {}

  // This thread block's part of a group.
  __device__ void put(int group, const float (&sum)[kN / 2], int rows) const {
    const int kept = kept_at(team_, group);
    Four* to = part(blockIdx.x, kept) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      if (8 * j >= rows) break;
      store(to + j * kFours * kConsumers, sum + 4 * j);
    }
    if constexpr (!kNumbered) {
      named_barrier(1, kConsumers);
      if (threadIdx.x == 0) publish(kept + 1);
    }
  }

  // Waits for the parts that thread blocks first_pair .. + pairs - 1 of each team have of a group.
  __device__ void wait(int group, int first_pair, int pairs) const {
    if constexpr (kNumbered) return;
    const int first = Split::first_team(group), count = Split::last_team(group) - first + 1;
    for (int i = threadIdx.x; i < count * pairs; i += kConsumers) {
      const int team = first + i / pairs;
      const unsigned* word = words_ + team * kPair + first_pair + i % pairs;
      const unsigned wanted = count_ + kept_at(team, group) + 1;
      unsigned found;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(word) : "memory");
      } while (static_cast<int>(found - wanted) < 0);
    }
    named_barrier(1, kConsumers);
  }

  // After wait(): for each of kCount (row block `pair` of the group, tokens 8 j ..) the sums that
  // this thread's place held, added up over the teams. All reads are under way together.
  template <int kCount>
  __device__ void get(int group, const int (&pair)[kCount], const int (&j)[kCount],
                      float4 (&total)[kCount]) const {
    constexpr int kAtOnce = 6 / kCount;  // a group has 2 to 6 parts in the products of 8B models
    const int first = Split::first_team(group), last = Split::last_team(group);
    const int first_kept = kept_at(first, group);
#pragma unroll
    for (float4& sums : total) sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int start = first; start <= last; start += kAtOnce) {
      Four found[kCount][kAtOnce][kFours];
      const auto from = [&](int c, int i) {
        // Every team but the first has the group as its own first.
        const int kept = i == 0 && start == first ? first_kept : 0;
        return part((start + i) * kPair + pair[c], kept) + j[c] * kFours * kConsumers + threadIdx.x;
      };
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (start + i > last) break;
#pragma unroll
        for (int c = 0; c < kCount; ++c) load(from(c, i), found[c][i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (start + i > last) break;
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          while (!fresh(found[c][i])) load(from(c, i), found[c][i]);
          add(total[c], found[c][i]);
        }
      }
    }
  }

  // A share of a group's row block: store(j, sums) for some tokens 8 j .., as this thread held
  // them.
  template <class Store>
  __device__ void finish(int group, int pair, int rows, Store store) const {
    constexpr int kCount = kN < 64 ? 1 : 2;
    wait(group, pair, 1);
    const int first = Split::first_team(group), count = Split::last_team(group) - first + 1;
#pragma unroll 1
    for (int start = team_ - first; 8 * start < rows; start += kCount * count) {
      int j[kCount], pairs[kCount];
      float4 total[kCount];
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        pairs[c] = pair;
        j[c] = start + c * count;
        if (8 * j[c] >= rows) j[c] = start;  // read again, stored once
      }
      get(group, pairs, j, total);
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        if (c == 0 || j[c] != start) store(j[c], total[c]);
      }
    }
  }

  // The last thing: the word counts this launch as over.
  __device__ void leave() const {
    if (threadIdx.x == 0 && team_ < Split::kTeams) publish(kNumbered ? 1 : kKept);
  }

 private:
  // Four sums in 16 bytes, or, with numbers, in two times 16, kConsumers apart.
  using Four = uint4;
  static constexpr int kFours = kNumbered ? 2 : 1;
  static constexpr int kPartFours = kN / 8 * kFours * kConsumers;

  __device__ static int kept_at(int team, int group) {
    const int kept = group - Split::first_group(team);
    return kept < kKept ? kept : kKept - 1;
  }
  __device__ Four* part(int block, int kept) const {
    return reinterpret_cast<Four*>(parts_) + static_cast<size_t>(block * kKept + kept) * kPartFours;
  }
  __device__ unsigned number() const { return count_ + 1; }

  __device__ void store(Four* to, const float* sums) const {
    if constexpr (kNumbered) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        // Each 64-bit half is written and read as a whole.
        const auto word = [&](float value) {
          return static_cast<unsigned long long>(number()) << 32 | __float_as_uint(value);
        };
        asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to + i * kConsumers),
                     "l"(word(sums[2 * i])), "l"(word(sums[2 * i + 1]))
                     : "memory");
      }
    } else {
      __stcg(to, make_uint4(__float_as_uint(sums[0]), __float_as_uint(sums[1]),
                            __float_as_uint(sums[2]), __float_as_uint(sums[3])));
    }
  }
  __device__ static void load(const Four* from, Four (&to)[kFours]) {
    if constexpr (kNumbered) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        unsigned long long a, b;
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                     : "=l"(a), "=l"(b)
                     : "l"(from + i * kConsumers)
                     : "memory");
        to[i] = make_uint4(static_cast<unsigned>(a), static_cast<unsigned>(a >> 32),
                           static_cast<unsigned>(b), static_cast<unsigned>(b >> 32));
      }
    } else {
      to[0] = __ldcg(from);
    }
  }
  __device__ bool fresh(const Four (&found)[kFours]) const {
    if constexpr (!kNumbered) return true;
    bool all = true;
#pragma unroll
    for (int i = 0; i < kFours; ++i) all = all && found[i].y == number() && found[i].w == number();
    return all;
  }
  __device__ static void add(float4& total, const Four (&found)[kFours]) {
    const Four& a = found[0];
    const Four& b = found[kFours - 1];
    total.x += __uint_as_float(a.x);
    total.y += __uint_as_float(kNumbered ? a.z : a.y);
    total.z += __uint_as_float(kNumbered ? b.x : a.z);
    total.w += __uint_as_float(kNumbered ? b.z : a.w);
  }
  __device__ void publish(unsigned count) const {
    if constexpr (kNumbered) {
      words_[blockIdx.x] = count_ + count;
    } else {
      __threadfence();
      asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(words_ + blockIdx.x),
                   "r"(count_ + count)
                   : "memory");
    }
  }

  unsigned* words_;
  unsigned char* parts_;
  int team_;
  unsigned count_;  // the word at the start
};

}  // namespace atlas
