/* atlas
[layouts]
table = "panel16"
*/
// embedding: out[r] = table[token(r)]; a negative row_token means the last token sampled in the
// row's slot. A slot that holds no valid token (its logits were NaN) gives a row of NaN, so that
// the row's own sampling reports it as well.
//
// Layout: the table is stored like a linear's weight, [ceil(vocab / 16)][hidden][16], because a
//   tied head is the same buffer; a token's row is a column of its panel, 16 elements apart.
// Shapes: any hidden, any vocab.
// Work split: (row, 16 columns); a single row is shared by all workers.
// Bytes: a cache line per element read, rows * hidden * 64, and rows * hidden * 4 written.
// Bound: memory latency, hidden by out-of-order loads. Against the layers' work it is nothing.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

ATLAS_INLINE float widen(float value) { return value; }
ATLAS_INLINE float widen(Bf16 value) { return bit_cast<float>(uint32_t{value.bits} << 16); }

template <class Table>
void embedding(const CpuLaunch& launch) {
  const auto* row_token = launch.operand<const int32_t>(0);
  const auto* row_seq = launch.operand<const int32_t>(1);
  const auto* seq_slot = launch.operand<const int32_t>(2);
  const auto* last_token = launch.operand<const int32_t>(3);
  const auto* table = launch.operand<const Table>(4);
  auto* out = launch.operand<float>(5);
  const int64_t rows = launch.dims[0], vocab = launch.integer(0), hidden = launch.integer(1);

  partition_2d(launch, rows, hidden, kLanes, [&](int64_t row, int64_t begin, int64_t end) {
    int64_t token = row_token[row];
    if (token < 0) token = last_token[seq_slot[row_seq[row]]];
    float* to = out + row * hidden;
    if (token < 0 || token >= vocab) {
      for (int64_t k = begin; k < end; ++k) to[k] = __builtin_nanf("");
      return;
    }
    const Table* from = table + token / kLanes * hidden * kLanes + token % kLanes;
    for (int64_t k = begin; k < end; ++k) to[k] = widen(from[k * kLanes]);
  });
}

ATLAS_CPU_KERNEL("embedding.table_f32", embedding<float>);
ATLAS_CPU_KERNEL("embedding.table_bf16", embedding<Bf16>);

}  // namespace
}  // namespace atlas
