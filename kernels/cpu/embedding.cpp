/* atlas
[layouts]
table = "panel16"
*/
// embedding: out[r] = table[token(r)] * scale; a negative row_token means the last token sampled in
// the row's slot. A slot that holds no valid token (its logits were NaN) gives a row of NaN, so
// that the row's own sampling reports it as well.
//
// Layout: the table is stored like a linear's weight, in panels of 16 rows ("panel16"; blocks.h for
//   block formats), because a tied head is the same buffer; a token's row is one lane of its panel.
// Shapes: any hidden, any vocab.
// Work split: (row, 32 columns); a single row is shared by all workers.
// Bytes: a cache line per 4 bytes of a row read, and rows * hidden * 4 written.
// Bound: memory latency, hidden by out-of-order loads. Against the layers' work it is nothing.
#include "atlas/blocks.h"
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

// Columns [begin, end) of one row of a table of element type Table, `hidden` columns wide.
template <class Table>
struct Rows {
  static void read(const std::byte* table, int64_t row, int64_t hidden, Range columns, float* to) {
    constexpr int64_t kPerLane = sizeof(float) / sizeof(Table);
    const auto* lanes = reinterpret_cast<const uint32_t*>(table) +
                        row / kLanes * ceil_div(hidden, kPerLane) * kLanes + row % kLanes;
    for (int64_t k = columns.begin; k < columns.end; ++k) {
      const uint32_t lane = lanes[k / kPerLane * kLanes];
      // The even k of two is the lower half; a bf16 is the upper half of an fp32.
      to[k] = bit_cast<float>(kPerLane == 1 || k % 2 ? lane & (kPerLane == 1 ? ~0u : 0xffff0000u)
                                                     : lane << 16);
    }
  }
};

// The same of a block format. Products are rounded before minimums are added, as the definition of
// the formats has it: the conversion keeps the compiler from fusing the two.
template <int bits, int bias, class Scale, class Offset>
struct Rows<Blocks<bits, bias, Scale, Offset>> {
  using Format = Blocks<bits, bias, Scale, Offset>;
  static void read(const std::byte* table, int64_t row, int64_t hidden, Range columns, float* to) {
    const auto* panel =
        reinterpret_cast<const uint8_t*>(table) + row / kLanes * Format::panel_bytes(hidden);
    const int64_t column = row % kLanes;
    for (int64_t k = columns.begin; k < columns.end; ++k) {
      const uint8_t* block = panel + k / kGroup * Format::kBytes;
      const int64_t step = k % kGroup / kStepK;
      uint32_t code = block[step % Format::kLoads * kStepBytes + column * kStepK + k % kStepK];
      if (bits == 4) code = step < Format::kLoads ? code & 15 : code >> 4;
      const float scale = Format::scale(block, column);
      int32_t value = static_cast<int32_t>(code) - bias;
      if constexpr (Format::kHasZero) value -= static_cast<int32_t>(Format::offset(block, column));
      to[k] = static_cast<float>(double{static_cast<float>(value)} * double{scale});
      if constexpr (Format::kHasMinimum) to[k] += Format::offset(block, column);
    }
  }
};

template <class Table>
void embedding(const CpuLaunch& launch) {
  const auto* row_token = launch.operand<const int32_t>(0);
  const auto* row_seq = launch.operand<const int32_t>(1);
  const auto* seq_slot = launch.operand<const int32_t>(2);
  const auto* last_token = launch.operand<const int32_t>(3);
  const auto* table = launch.operand<const std::byte>(4);
  auto* out = launch.operand<float>(5);
  const int64_t rows = launch.dims[0], vocab = launch.integer(0), hidden = launch.integer(1);
  const auto scale = static_cast<float>(launch.real(2));

  partition_2d(launch, rows, hidden, kGroup, [&](int64_t row, int64_t begin, int64_t end) {
    int64_t token = row_token[row];
    if (token < 0) token = last_token[seq_slot[row_seq[row]]];
    float* to = out + row * hidden;
    if (token < 0 || token >= vocab) {
      for (int64_t k = begin; k < end; ++k) to[k] = __builtin_nanf("");
      return;
    }
    Rows<Table>::read(table, token, hidden, {begin, end}, to);
    if (scale != 1.0f) {
      for (int64_t k = begin; k < end; ++k) to[k] *= scale;
    }
  });
}

ATLAS_CPU_KERNEL("embedding.table_f32", embedding<float>);
ATLAS_CPU_KERNEL("embedding.table_bf16", embedding<Bf16>);
ATLAS_CPU_KERNEL("embedding.table_i8g32", embedding<I8g32>);
ATLAS_CPU_KERNEL("embedding.table_i8g32f", embedding<I8g32f>);
ATLAS_CPU_KERNEL("embedding.table_i4g32", embedding<I4g32>);
ATLAS_CPU_KERNEL("embedding.table_i4g32z", embedding<I4g32z>);
ATLAS_CPU_KERNEL("embedding.table_i4g32m", embedding<I4g32m>);
ATLAS_CPU_KERNEL("embedding.table_i4g32f", embedding<I4g32f>);

}  // namespace
}  // namespace atlas
