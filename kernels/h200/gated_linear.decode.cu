/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = "288 + max_rows // 256 * 96"
shared = "(130 + min(1, max_rows // 64) * 86) * 1024"
pdl = true
[rows]
up_to = [8, 16, 32, 64, 128, 256]
[serves]
x = ["bf16", "f8g128"]
weight = ["bf16", "f8g128"]
out = ["bf16", "f8g128"]
[scratch]
# Of as many groups of 128 columns as a team has at most.
bytes = "multiprocessors * (KEPT * 512 * max(max_rows, min(2 * max_rows, 32)) + 4) + 256"
[knobs]
THREAD_BLOCKS = "multiprocessors"
KEPT = "ceil_div(ceil_div(intermediate, 128), multiprocessors // 2) + 1"
[layouts]
x = "tiles"
weight = "tiles_paired"
out = "tiles"
*/
// gated_linear for steps of 1..256 rows: out[r, i] = act(gate) * up, rounded once, with gate[r, i]
// = sum over k of x[r, k] * weight[i, k] + bias[i] and up the same of rows intermediate + i.
//
// x and weight both bf16 or both f8g128; x and out in `tiles`, weight in `tiles_paired`: a block of
// 128 weight rows holds 8 rows of gates, the 8 of their ups, and so on, so that one thread has both
// sums of a column; 64 columns of out. out bf16 or f8g128, whose groups of 128 columns are a pair
// of blocks. Bias [2 * intermediate] f32 or none.
//
// Split of work, bytes and bound as in linear.decode.cu. f8g128 goes through scratch throughout: a
// thread block finishes whole groups of eight tokens.
#include "atlas/gated_linear_decode.cuh"
