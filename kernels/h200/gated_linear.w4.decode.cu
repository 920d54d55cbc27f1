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
// gated_linear for steps of 1..256 rows with weights of 4 bits: out[r, i] = act(gate) * up, rounded
// once, with gate[r, i] = sum over k of x[r, k] * weight[i, k] + bias[i] and up the same of rows
// intermediate + i.
//
// x and out in `tiles`, weight in `frag4_paired`; bias [2 * intermediate] f32 or none. The kernel
// is gated_linear.decode.cu's; weights, bytes and bound as in linear.w4.decode.cu. Two row blocks
// share each tile of x: there are so many that few are summed up by several thread blocks, which
// is what groups of two cost the other products.
#include "atlas/gated_linear_decode.cuh"
