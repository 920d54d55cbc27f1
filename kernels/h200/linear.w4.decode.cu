/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = 288
shared = "(130 + min(1, max_rows // 64) * 86) * 1024"
pdl = true
cluster = "1 + PAIRS * min(1, max_rows // 32) * min(1, 128 // max_rows)"
[rows]
up_to = [8, 16, 32, 64, 128, 256]
[serves]
x = ["bf16"]
weight = ["nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m"]
[limits]
# 16 at 128 rows, of two ranges for each row block.
spills = 32
[scratch]
bytes = "multiprocessors * 2 * 512 * max_rows"
[knobs]
BLOCKS = "ceil_div(n, 128)"
EACH = "multiprocessors // BLOCKS"
# Whether that many whole ranges of each row block keep nine of ten multiprocessors at work.
EVEN = "min(1, 10 * BLOCKS * EACH // (9 * multiprocessors))"
RANGES = "multiprocessors - EVEN * (multiprocessors - BLOCKS * EACH)"
# As in linear.decode.cu. Llama-3-8B in nvfp4, 32 layers on an H200, with clusters against without,
# us: +1, +5, -33, -101, -144 at 1, 8, 32, 64, 128 rows; qkv in 96 ranges, too: +10, -2, -44, -79,
# -103 on top, and one row is what counts.
PAIRS = "EVEN * (1 - EACH % 2)"
SIDES = 1
[layouts]
x = "tiles"
weight = "frag4"
*/
// linear for steps of 1..256 rows with weights of 4 bits: out[r, n] = sum over k of x[r, k] *
// weight[n, k] + bias[n].
//
// x in `tiles`, weight in `frag4`; out row-major, f32 or bf16; bias [n] f32 or none. The kernel is
// linear.decode.cu's, with its split of work; only that the weights, the tensor cores' A, are
// expanded in registers (decode_weights4.cuh).
//
// Bytes: n x k / 2 of codes and a ninth to a quarter of that of scales, once; x as there. Bound by
// the stream of weights in the limit; at few rows, by what it takes to expand them.
#include "atlas/linear_decode.cuh"
