/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = 288
shared = "(130 + min(1, max_rows // 64) * 86) * 1024"
pdl = true
cluster = "1 + PAIRS * min(1, max_rows // 32) * min(1, 128 // max_rows)"
# Few rows: attention is resident beside it.
resident = "4 - 3 * min(1, max_rows // 64)"
[rows]
up_to = [8, 16, 32, 64, 128, 256]
[serves]
x = ["bf16", "f8g128"]
weight = ["bf16", "f8", "f8g128"]
[limits]
# After the last product, to hold 32 rows to 56 registers.
spills = 64
[scratch]
bytes = "multiprocessors * 2 * 512 * max_rows"
[knobs]
# As in linear.decode.cu.
BLOCKS = "ceil_div(n, 128)"
EACH = "multiprocessors // BLOCKS"
EVEN = "min(1, 10 * BLOCKS * EACH // (7 * multiprocessors))"
PAIRS = "EVEN * (1 - EACH % 2)"
RANGES = "multiprocessors - EVEN * (multiprocessors - BLOCKS * EACH)"
TOGETHER = 1
[layouts]
x = "tiles"
weight = "tiles"
*/
// normed_linear for steps of 1..256 rows: out[r, n] = sum over k of x[r, k] * weight[n, k] / rms[r]
// + bias[n], rms[r]^2 = the sum of squares[r].
//
// The kernel of linear.decode.cu, whose finished sums are multiplied by 1 / rms before the bias is
// added. squares [rows, ceil(k / 128)] f32, which every thread block adds up for itself.
#include "atlas/linear_decode.cuh"
