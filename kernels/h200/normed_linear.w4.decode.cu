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
# As in linear.w4.decode.cu.
BLOCKS = "ceil_div(n, 128)"
EACH = "multiprocessors // BLOCKS"
EVEN = "min(1, 10 * BLOCKS * EACH // (9 * multiprocessors))"
RANGES = "multiprocessors - EVEN * (multiprocessors - BLOCKS * EACH)"
PAIRS = "EVEN * (1 - EACH % 2)"
SIDES = 1
[layouts]
x = "tiles"
weight = "frag4"
*/
// normed_linear for steps of 1..256 rows with weights of 4 bits: the kernel of linear.w4.decode.cu
// with sums as in normed_linear.decode.cu.
#include "atlas/linear_decode.cuh"
