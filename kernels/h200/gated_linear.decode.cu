/* atlas
[launch]
grid = ["multiprocessors - PAIRS * (multiprocessors - RANGES)", 1, 1]
block = "288 + min(1, max_rows // 128) * (TOGETHER - 1) * 96"
# As in linear.decode.cu; few rows of pairs have room for eight tiles, all of a range of
# Qwen3-0.6B's, with 32 rows and what the other sends.
shared = "(130 + PAIRS * 44 + min(1, max_rows // 64) * (86 - PAIRS * 44)) * 1024"
pdl = true
cluster = "1 + PAIRS * min(1, 128 // max_rows)"
[rows]
up_to = [8, 16, 32, 64, 128, 256]
[serves]
x = ["bf16"]
weight = ["bf16"]
out = ["bf16"]
[scratch]
bytes = "multiprocessors * 2 * 512 * max_rows"
[knobs]
BLOCKS = "ceil_div(intermediate, 64)"
TURNS = "ceil_div(BLOCKS, multiprocessors)"
EACH = "max(1, multiprocessors // BLOCKS)"
# Whether whole row blocks, or that many whole ranges of each, keep seven of ten multiprocessors
# busy. Two of a thread block share their tokens, too. Llama-3-8B's 32 layers on an H200, us against
# a range for each multiprocessor: +23, +27, +33, -1, -159 at 1, 8, 32, 64, 128 rows; without
# sharing tokens +9, +13, -10, -19, +97 on top. Qwen3-8B's 36 layers, on 96 thread blocks:
# +34, +35, +3, -189 us at 1, 8, 32, 128 rows (128 ranges of single row blocks -1, -3, -20, -110).
EVEN = "min(1, 10 * BLOCKS * EACH // (7 * TURNS * multiprocessors))"
# Whether there are two ranges of each: a cluster adds them up, without scratch.
PAIRS = "EVEN * min(1, EACH // 2) * (1 - min(1, EACH // 3))"
RANGES = "multiprocessors - EVEN * (multiprocessors - ceil_div(BLOCKS, TURNS) * EACH)"
TOGETHER = "1 + EVEN * (1 - TURNS % 2)"
[layouts]
x = "tiles"
weight = "tiles_paired"
out = "tiles"
*/
// gated_linear for steps of 1..256 rows: out[r, i] = act(gate) * up, rounded once, with gate[r, i]
// = sum over k of x[r, k] * weight[i, k] + bias[i] and up the same of rows intermediate + i.
//
// All bf16; x and out in `tiles`, weight in `tiles_paired`: a block of 128 weight rows holds 8 rows
// of gates, the 8 of their ups, and so on, so that one thread has both sums of a column; 64 columns
// of out. Bias [2 * intermediate] f32 or none.
//
// Split of work, bytes and bound as in linear.decode.cu. From 65 rows on of whole row blocks, or
// pairs of thread blocks, sums are by token (decode_weights.cuh).
#include "atlas/gated_linear_decode.cuh"
