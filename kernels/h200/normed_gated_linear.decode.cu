/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = "288 + min(1, max_rows // 128) * (TOGETHER - 1) * 96"
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
# As in gated_linear.decode.cu.
BLOCKS = "ceil_div(intermediate, 64)"
TURNS = "ceil_div(BLOCKS, multiprocessors)"
EACH = "max(1, multiprocessors // BLOCKS)"
EVEN = "min(1, 5 * BLOCKS * EACH // (4 * TURNS * multiprocessors))"
RANGES = "multiprocessors - EVEN * (multiprocessors - ceil_div(BLOCKS, TURNS) * EACH)"
TOGETHER = "1 + EVEN * (1 - TURNS % 2)"
[layouts]
x = "tiles"
weight = "tiles_paired"
out = "tiles"
*/
// normed_gated_linear for steps of 1..256 rows: gated_linear of rows that are yet to be divided by
// their root mean square: the kernel of gated_linear.decode.cu with sums as in
// normed_linear.decode.cu.
#include "atlas/gated_linear_decode.cuh"
