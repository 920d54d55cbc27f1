/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = "544 + min(1, max_rows // 128) * 96"
shared = "(130 + min(1, max_rows // 64) * 92) * 1024"
pdl = true
[rows]
up_to = [8, 16, 32, 64, 128, 256]
[serves]
x = ["bf16"]
weight = ["nvfp4", "i4g32b", "i4g32", "i4g32z", "i4g32m"]
out = ["bf16"]
[limits]
# 188 in nvfp4 with biases, at 128 rows; without, none.
spills = 192
[scratch]
bytes = "multiprocessors * 2 * 2 * 512 * max_rows"
[knobs]
RANGES = "multiprocessors"
SIDES = 2
[layouts]
x = "tiles"
weight = "frag4_paired"
out = "tiles"
*/
// normed_gated_linear for steps of 1..256 rows with weights of 4 bits: the kernel of
// gated_linear.w4.decode.cu with sums as in normed_linear.decode.cu.
#include "atlas/gated_linear_decode.cuh"
