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
out = ["bf16"]
[limits]
# From 128 rows on, beside the codes' expansion.
spills = 256
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
out = "tiles"
*/
// residual_linear for steps of 1..256 rows with weights of 4 bits: the product of
// linear.w4.decode.cu, the rest as in residual_linear.decode.cu.
#include "atlas/residual_linear_decode.cuh"
