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
out = ["bf16", "f8g128"]
[limits]
# To hold 32 rows to 56 registers, of ranges that end within column blocks; 52 where they do not.
spills = 256
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
out = "tiles"
*/
// residual_linear for steps of 1..256 rows: residual[r, n] += scale * (sum over k of x[r, k] *
// weight[n, k] + bias[n]), out[r, n] = residual[r, n] * norm[n], rounded once, and squares[r, b] =
// the share of columns 128 b on in mean(residual[r]^2) + eps.
//
// x, weight and the product as in linear.decode.cu; residual row-major f32; out bf16 or f8g128 in
// `tiles`; squares row-major f32. A column block is a whole group of f8g128 and its squares one
// number, so nothing of a row is needed that another thread block has: the next product
// (normed_linear, normed_gated_linear) adds the numbers up and divides its sums by their root.
//
// The residual is asked for together with other ranges' parts of the sums, which take longer.
#include "atlas/residual_linear_decode.cuh"
