// adjust_logits: adjusted[i] = logits[i] with a bias added, penalties of tokens that occurred, and
// forbidden tokens at -inf, as the bits of adjust[i] say; rows of 0 are left alone.
//
// Layout: logits and adjusted [logits, vocab] fp32; bias and token_count [slots, vocab] by the
//   row's slot, bit 31 of a count: in the prompt, the others: times generated; mask words of 32
//   tokens, lowest bit first.
// Shapes: any vocab; mask bits past it are ignored.
// Work split: (row, 1024 tokens); a single row is shared by all workers.
// Bytes: 8 * vocab for a row that asks for something, 4 more for each of bias and counts.
// Bound: memory.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

constexpr int kWordBits = 32;
enum Adjust : int32_t { kBias = 1, kPenalties = 2, kMask = 4 };

// Lanes of 16 mask bits that are 0.
ATLAS_INLINE Mask16 forbidden(uint32_t bits) {
  Mask16 r;
  for (int i = 0; i < kParts; ++i) {
    NativeU32 lane;
    for (int j = 0; j < kNativeLanes; ++j) lane[j] = uint32_t{1} << (i * kNativeLanes + j);
    r.part[i] = (lane & bits) == 0;
  }
  return r;
}

struct Penalties {
  float repetition, frequency, presence;

  ATLAS_INLINE F32x16 apply(F32x16 x, const int32_t* counts, int64_t count) const {
    int32_t lanes[kLanes] = {};
    __builtin_memcpy(lanes, counts, static_cast<size_t>(count) * sizeof(int32_t));
    for (int i = 0; i < kParts; ++i) {
      NativeI32 seen;
      __builtin_memcpy(&seen, lanes + i * kNativeLanes, sizeof seen);
      const NativeI32 times = seen & 0x7fffffff;
      NativeF32& v = x.part[i];
      const NativeF32 repeated = v > 0.0f ? v / repetition : v * repetition;
      v = seen != 0 ? repeated : v;
      v = v - __builtin_convertvector(times, NativeF32) * frequency;
      v = v - (times != 0 ? NativeF32{} + presence : NativeF32{});
    }
    return x;
  }
};

void adjust_logits(const CpuLaunch& launch) {
  const auto* all_logits = launch.operand<const float>(0);
  const auto* adjust = launch.operand<const int32_t>(1);
  const auto* slot = launch.operand<const int32_t>(2);
  const auto* all_bias = launch.operand<const float>(3);
  const auto* all_counts = launch.operand<const int32_t>(4);
  const auto* repetition = launch.operand<const float>(5);
  const auto* frequency = launch.operand<const float>(6);
  const auto* presence = launch.operand<const float>(7);
  const auto* mask_index = launch.operand<const int32_t>(8);
  const auto* all_masks = launch.operand<const uint32_t>(9);
  auto* all_adjusted = launch.operand<float>(10);
  const int64_t vocab = launch.integer(0), words = ceil_div(vocab, kWordBits);
  const F32x16 minus_infinity = splat(-__builtin_inff());

  partition_2d(launch, launch.dims[0], vocab, 1024, [&](int64_t row, int64_t begin, int64_t end) {
    const int32_t how = adjust[row];
    if (how == 0) return;
    const float* logits = all_logits + row * vocab;
    float* adjusted = all_adjusted + row * vocab;
    // Not formed for rows that do not use them: their slot or mask index may be negative.
    const float* bias = how & kBias ? all_bias + slot[row] * vocab : nullptr;
    const int32_t* counts = how & kPenalties ? all_counts + slot[row] * vocab : nullptr;
    const uint32_t* mask = how & kMask ? all_masks + mask_index[row] * words : nullptr;
    const Penalties penalties = {repetition[row], frequency[row], presence[row]};
    for_lanes(end - begin, [&](int64_t i, auto count) {
      const int64_t v = begin + i;
      F32x16 x = load(logits + v, count);
      if (bias != nullptr) x = x + load(bias + v, count);
      if (counts != nullptr) x = penalties.apply(x, counts + v, count);
      if (mask != nullptr) {
        const uint32_t bits = mask[v / kWordBits] >> (v % kWordBits);
        const F32x16 masked = select(forbidden(bits), minus_infinity, x);
        x = select(x != x, x, masked);  // a NaN is a fault to report, whatever is forbidden
      }
      store(adjusted + v, x, count);
    });
  });
}

ATLAS_CPU_KERNEL("adjust_logits", adjust_logits);

}  // namespace
}  // namespace atlas
