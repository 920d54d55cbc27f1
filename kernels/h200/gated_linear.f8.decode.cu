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
GROUPS = "ceil_div(intermediate, 128)"
TURNS = "ceil_div(GROUPS, multiprocessors)"
EACH = "max(1, multiprocessors // GROUPS)"
# Whether whole groups, or that many whole ranges of each, keep seven of ten multiprocessors busy.
EVEN = "min(1, 10 * GROUPS * EACH // (7 * TURNS * multiprocessors))"
RANGES = "multiprocessors - EVEN * (multiprocessors - ceil_div(GROUPS, TURNS) * EACH)"
TOGETHER = 2
[layouts]
x = "tiles"
weight = "tiles_paired"
out = "tiles"
*/
// gated_linear for steps of 1..256 rows in fp8: out[r, i] = act(gate) * up, rounded once, with
// gate[r, i] = sum over k of x[r, k] * weight[i, k] + bias[i] and up the same of rows intermediate
// + i.
//
// x and out f8g128 in `tiles`, weight f8 or f8g128 in `tiles_paired` (gated_linear.decode.cu); bias
// [2 * intermediate] f32 or none. A thread has the sums of two row blocks, 128 columns of out, so
// that a group of f8g128 is scaled where it is summed.
//
// Split of work, bytes and bound as in linear.decode.cu. Where the groups of 128 columns nearly
// come out even, a thread block takes whole ones and nothing is summed twice: Llama-3-8B's layers
// on an H200, 112 thread blocks against 132 ranges: 2.108 and 2.112 ms at 8 rows, 2.410 and 2.487
// at 32, 2.945 and 3.108 at 64. Qwen3-8B's 36 layers, 96 thread blocks against a
// range for each multiprocessor: +13, +14, -69, -269 us at 1, 8, 32, 128 rows.
//
// From 65 rows on of whole groups sums are by token (decode_weights.cuh): 128 rows of Llama-3-8B's
// 32 layers -169 us, of Qwen3-8B's 36 -216.
#include "atlas/gated_linear_decode.cuh"
