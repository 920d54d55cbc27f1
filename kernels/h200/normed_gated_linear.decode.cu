/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = 288
shared = "(130 + min(1, max_rows // 64) * 86) * 1024"
pdl = true
[rows]
up_to = [8, 16, 32, 64, 128, 256]
[serves]
x = ["bf16"]
weight = ["bf16"]
out = ["bf16"]
[scratch]
bytes = "multiprocessors * 2 * 512 * max_rows"
[knobs]
# As in linear.decode.cu.
BLOCKS = "ceil_div(intermediate, 64)"
EACH = "multiprocessors // BLOCKS"
EVEN = "min(1, 10 * BLOCKS * EACH // (9 * multiprocessors))"
RANGES = "multiprocessors - EVEN * (multiprocessors - BLOCKS * EACH)"
TOGETHER = 1
[layouts]
x = "tiles"
weight = "tiles_paired"
out = "tiles"
*/
// normed_gated_linear for steps of 1..256 rows: gated_linear of rows that are yet to be divided by
// their root mean square: the kernel of gated_linear.decode.cu with sums as in
// normed_linear.decode.cu.
#include "atlas/gated_linear_decode.cuh"
