/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = "288 + min(1, max_rows // 128) * 96"
shared = "(130 + min(1, max_rows // 64) * 86) * 1024"
pdl = true
[rows]
up_to = [8, 16, 32, 64, 128, 256]
[serves]
x = ["f8g128"]
weight = ["f8", "f8g128"]
out = ["f8g128"]
[scratch]
bytes = "multiprocessors * 4 * 512 * max_rows"
[knobs]
# As in gated_linear.f8.decode.cu.
GROUPS = "ceil_div(intermediate, 128)"
TURNS = "ceil_div(GROUPS, multiprocessors)"
EACH = "max(1, multiprocessors // GROUPS)"
EVEN = "min(1, 5 * GROUPS * EACH // (4 * TURNS * multiprocessors))"
RANGES = "multiprocessors - EVEN * (multiprocessors - ceil_div(GROUPS, TURNS) * EACH)"
TOGETHER = 2
[layouts]
x = "tiles"
weight = "tiles_paired"
out = "tiles"
*/
// normed_gated_linear for steps of 1..256 rows in fp8: the kernel of gated_linear.f8.decode.cu with
// sums as in normed_linear.decode.cu.
#include "atlas/gated_linear_decode.cuh"
