/* atlas
[launch]
grid = ["multiprocessors - FITS * (multiprocessors - RANGES)", 1, 1]
block = 288
shared = "KB * 1024"
pdl = true
cluster = "WAYS"
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
BLOCKS = "ceil_div(n, 128)"
TILES = "ceil_div(k, 128 // max(1, size_x))"
# Ranges of a row block, 2, 4 or 8, of which a cluster has all, so that all clusters find room. An
# H200 holds 15 of eight or 30 of four; parts with as many multiprocessors differ in how pairs of
# them are grouped, nine at most in each of eight groups, and hold 13 or 29 at least.
ROOM = "2 * multiprocessors // (5 * BLOCKS)"
SIZE = "2 * min(2, ROOM) * max(1, min(2, ROOM // 2))"
# Whether they are taken: where shared memory has all of a range, up to eight tiles. Qwen3-0.6B's 28
# layers in bf16, us a layer at 1, 8, 32, 128 rows: 25.4, 31.1, 45.6, 124.6 before, with parts in
# scratch, 18.2, 24.6, 40.9, 112.9 with o and down so (and gate_up, gated_linear.decode.cu).
FITS = "min(1, SIZE) * min(1, 8 // ceil_div(TILES, max(1, SIZE)))"
EACH = "multiprocessors // BLOCKS - FITS * (multiprocessors // BLOCKS - SIZE)"
# Whether that many whole ranges of each row block keep seven of ten multiprocessors at work.
# Llama-3-8B's qkv, two for each of 48 row blocks, against a range for each multiprocessor, in the
# sequence of its 32 layers on an H200, us: +47, +20, +19, -137, -175 in bf16 at 1, 8, 32, 64, 128
# rows, +24, -7, -12, -121, -163 in fp8.
EVEN = "max(FITS, min(1, 10 * BLOCKS * EACH // (7 * multiprocessors)))"
# Whether they are added up two by two.
PAIRS = "EVEN * (1 - EACH % 2)"
# Thread blocks of a cluster.
WAYS = "1 + PAIRS * min(1, 128 // max_rows) * (1 + FITS * (SIZE - 2))"
# KB of shared memory: up to 32 rows LEAST, or all of a range and what the cluster's others send
# (in fp8, whose slots have scales, too, of eight tiles all but one).
LEAST = 130
MANY = "min(1, max_rows // 64)"
SENT = "(WAYS - 1) * ceil_div(max_rows, 8 * WAYS) * 4"
WHOLE = "FITS * (ceil_div(TILES, WAYS) * (16 + ceil_div(max_rows, 8)) + SENT + 4)"
KB = "max(LEAST, (1 - MANY) * WHOLE, MANY * 216)"
RANGES = "multiprocessors - EVEN * (multiprocessors - BLOCKS * EACH)"
TOGETHER = 1
[layouts]
x = "tiles"
weight = "tiles"
*/
// linear for steps of 1..256 rows: out[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n].
//
// x and weight in `tiles` (tiles.cuh), both bf16, or x f8g128 and weight f8 or f8g128; out
// row-major, f32 or bf16; bias [n] f32 or none. Weights are wgmma's A, 128 rows a thread block, and
// rows of x its N, so that no part of an instruction is spent on rows that are not there.
//
// Split of work: a multiprocessor has one thread block, with an equal range of the stream of
// weights (decode_product.cuh). Column blocks that lie within a range are stored from registers,
// those that several ranges have a part of go through scratch (shared_sums.cuh). Where whole ranges
// of each column block leave few multiprocessors idle, ranges end with them: fewer parts to add up.
// An even number of them is added up two by two: thread blocks stand in clusters of two, which
// trade their sums without scratch (cluster_sums.cuh): Llama-3-8B's 32 layers on an H200, o and
// down alone, -38, -22, -24, -98 and -190 us at 1, 8, 32, 64 and 128 rows in bf16. Of small
// matrices a cluster has all ranges of a column block, and scratch is not used at all. Ranges and
// the order of additions depend on the shape alone: a row's bits are the same whatever the number
// of rows.
//
// Bytes: n x k weights once, x once a thread block (from the L2 cache). Bound by the stream of
// weights; at 128 rows a product also takes 3 to 6 us to exchange its sums.
//
// Shared memory is more than half of what a multiprocessor has: two products never share one. Under
// dependent launch a block is placed where there is room, so with less two blocks of one launch can
// end up on one multiprocessor (beside a block of a small kernel there is no room for the first),
// and the launch takes half as long again: a Llama-3-8B step of one row took 4.93 ms on an H200
// with 112 KB, 4.35 without dependent launch. What is left is for the kernels between products: the
// ring fills while they run. Up to 32 rows that is attention, too (ms at 1, 8, 32
// rows: 3.85, 4.12, 5.12 so, 3.87, 4.23, 5.35 with 216 KB); more rows need the slots.
#include "atlas/linear_decode.cuh"
