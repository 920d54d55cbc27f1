// mask_logits: logits[i, v] = -inf where bit v of mask[mask_index[i]] is 0; a negative mask_index
// leaves row i alone. Bit v is bit v % 32 of word v // 32.
//
// Layout: logits [logits, vocab] fp32; mask [.., ceil(vocab / 32)] words.
// Shapes: any vocab; bits past it in the last word are ignored.
// Work split: (row, 1024 tokens); a single row is shared by all workers.
// Bytes: at most logits * vocab * 8, less where whole words are allowed. Bound: memory.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

constexpr int kWordBits = 32;

ATLAS_INLINE Mask16 forbidden(uint32_t bits) {
  Mask16 r;
  for (int i = 0; i < kParts; ++i) {
    NativeU32 lane;
    for (int j = 0; j < kNativeLanes; ++j) lane[j] = uint32_t{1} << (i * kNativeLanes + j);
    r.part[i] = (lane & bits) == 0;
  }
  return r;
}

void mask_logits(const CpuLaunch& launch) {
  const auto* mask_index = launch.operand<const int32_t>(0);
  const auto* mask = launch.operand<const uint32_t>(1);
  auto* logits = launch.operand<float>(2);
  const int64_t vocab = launch.integer(0), words = ceil_div(vocab, kWordBits);
  const F32x16 minus_infinity = splat(-__builtin_inff());

  partition_2d(launch, launch.dims[0], vocab, 1024, [&](int64_t row, int64_t begin, int64_t end) {
    if (mask_index[row] < 0) return;
    const uint32_t* bits = mask + mask_index[row] * words;
    float* to = logits + row * vocab;
    for (int64_t v = begin; v < end; v += kWordBits) {
      const uint32_t word = bits[v / kWordBits];
      if (word == ~uint32_t{0}) continue;  // a grammar mostly forbids, free text mostly allows
      for (int64_t half = 0; half < 2 && v + half * kLanes < end; ++half) {
        float* at = to + v + half * kLanes;
        const Mask16 drop = forbidden(word >> (half * kLanes));
        const int64_t count = end - (v + half * kLanes);
        if (count >= kLanes) {
          store(at, select(drop, minus_infinity, load(at)));
        } else {
          store(at, select(drop, minus_infinity, load(at, count)), count);
        }
      }
    }
  });
}

ATLAS_CPU_KERNEL("mask_logits", mask_logits);

}  // namespace
}  // namespace atlas
