// What op normed_logits leaves of a step's rows (normed_logits.decode.cu).
#pragma once

namespace atlas {

// Of the 16 columns that a warp of consumers has of a row: which is the largest. Which of up to
// kRows rows keep all columns, a bit each in shared memory.
template <int kRows, int kColumns, int kThreads>
class LargestLogits {
  static constexpr int kOf = 16, kGroups = (kColumns + kOf - 1) / kOf;
  static_assert(kRows <= kThreads, "a thread for each row");

 public:
  static constexpr bool kUsed = true;
  static constexpr int kBytes = kThreads / 8;

  // All kThreads make one, before those of their barriers that RowFactors has.
  __device__ LargestLogits(unsigned char* shared, const float* temperature, const int* adjust,
                           const int* n_top, float* largest, int* largest_id, int rows)
      : kept_(reinterpret_cast<unsigned*>(shared)), largest_(largest), largest_id_(largest_id) {
    const int row = threadIdx.x;
    const bool keeps =
        row < rows && (temperature[row] > 0.0f || adjust[row] != 0 || n_top[row] >= 0);
    const unsigned kept = __ballot_sync(kAll, keeps);
    if (row % 32 == 0) kept_[row / 32] = kept;
  }

  // Of eight rows from a multiple of eight on, a bit each.
  __device__ unsigned kept(int row) const { return kept_[row / 32] >> row % 32 & 0xFF; }

  // All lanes of a warp call it, with columns `column` and `column` + 8 of rows `row` and the next,
  // as wgmma.cuh has D, of each of kCount eights that are `apart` rows from one another.
  // Of `left` rows from `row` on.
  //
  // Numbers are compared as integers in their order. They are of arithmetic, so none is a NaN with
  // a sign. Half of them go to a neighbour each time, so that a lane ends up with one row.
  template <int kCount>
  __device__ void store(int row, int left, int apart, int column,
                        const float (&sums)[kCount][4]) const {
    const int lane = threadIdx.x % 32;
    static_assert(kCount <= 4, "numbers over the eight lanes of a column");
    unsigned key[2 * kCount];
    int id[2 * kCount];
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      const unsigned first = key_of(sums[i / 2][i % 2], column);
      const unsigned second = key_of(sums[i / 2][2 + i % 2], column + 8);
      key[i] = max(first, second);
      id[i] = second > first ? column + 8 : column;
    }
    int mine = 0;
    bool alone = true;
    halve<16, 2 * kCount>(lane, key, id, mine, alone);
    const int to = row + mine / 2 * apart + mine % 2;
    if (!alone || to >= row + left || column / kOf >= kGroups) return;
    const size_t at = static_cast<size_t>(to) * kGroups + column / kOf;
    largest_[at] = __uint_as_float(key[0] >> 31 != 0 ? key[0] & 0x7FFFFFFFu : ~key[0]);
    largest_id_[at] = id[0];
  }

 private:
  static constexpr unsigned kAll = 0xFFFFFFFFu;

  // 0 is less than every number, and 1 less than any but a NaN with a sign.
  __device__ static unsigned key_of(float value, int column) {
    const int bits = __float_as_int(value + 0.0f);  // -0 is 0
    const unsigned key = static_cast<unsigned>(bits ^ (bits >> 31 | static_cast<int>(0x80000000)));
    return kColumns % kOf == 0 || column < kColumns ? key : 0;
  }

  // Of the lanes that differ in kBit and those below, down to 4, each gets the largest of its share
  // of kCount numbers: of number `mine` of all, if not `alone` together with another lane.
  template <int kBit, int kCount>
  __device__ static void halve(int lane, unsigned* key, int* id, int& mine, bool& alone) {
    if constexpr (kBit >= 4) {
      constexpr int kHalf = kCount > 1 ? kCount / 2 : 1;
      const bool upper = (lane & kBit) != 0;
      if constexpr (kCount > 1) {
        mine += upper ? kHalf : 0;
      } else {
        alone = alone && !upper;
      }
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        unsigned other = key[i];
        int other_id = id[i];
        if constexpr (kCount > 1) {
          other = upper ? key[i] : key[i + kHalf];
          other_id = upper ? id[i] : id[i + kHalf];
          key[i] = upper ? key[i + kHalf] : key[i];
          id[i] = upper ? id[i + kHalf] : id[i];
        }
        other = __shfl_xor_sync(kAll, other, kBit);
        other_id = __shfl_xor_sync(kAll, other_id, kBit);
        const bool larger = other > key[i] || (other == key[i] && other_id < id[i]);
        key[i] = larger ? other : key[i];
        id[i] = larger ? other_id : id[i];
      }
      halve<kBit / 2, kHalf>(lane, key, id, mine, alone);
    }
  }

  unsigned* kept_;
  float* largest_;
  int* largest_id_;
};

// Of products that leave all rows.
struct AllRows {
  static constexpr bool kUsed = false;
  static constexpr int kBytes = 0;
  __device__ static unsigned kept(int /*row*/) { return 0xFF; }
  template <int kCount>
  __device__ static void store(int /*row*/, int /*left*/, int /*apart*/, int /*column*/,
                               const float (& /*sums*/)[kCount][4]) {}
};

}  // namespace atlas
