/* atlas
[launch]
grid = ["cluster_blocks", "logits", 1]
block = "THREADS"
cluster = "cluster_blocks"
pdl = true
# Loops over few ids are unrolled whole and need more registers than two blocks leave each other.
resident = "min(2, cluster_blocks, 1 + vocab // 4096)"
[knobs]
# H200, 128,256 ids, us of 1 / 128 rows, greedy and at top-p 0.9. In clusters of 8: 512 threads
# 2.8 / 24 and 32 / 202, 256 threads 3.0 / 20 and 52 / 229, 1,024 threads 3.1 / 40 and 36 / 323;
# in clusters of 4 512 threads 3.5 / 21 and 52 / 183; one block a row 7.7 / 19 and 147 / 215.
THREADS = 512
[knobs.choices]
THREADS = [256, 512, 1024]
*/
// sample: one token per row of logits, or of `adjusted` where adjust is not 0; -1 for a row with a
// NaN or without a finite maximum.
//
// logits, adjusted [logits, vocab] f32. A row has the blocks of a cluster, which exchange what they
// find through shared memory. Temperature <= 0: the first of the largest logits. Else weights
// exp((logit - max) / temperature), top-k, then top-p over what is left, then min-p (ties at a
// threshold are kept), and the inverse CDF in id order at a Philox number that depends on (seed,
// position) alone. The token goes to its slot's last_token, and where penalties apply token_count
// [slots, vocab] counts it. Thresholds are found without sorting, by histograms of the logits'
// order-preserving integer keys and of distances below the largest (logits.cuh): two or three
// passes each. Sums are exact integers. Bytes: 4 x vocab from L2 or memory; the passes after the
// first read the L1 cache where a block's share fits it. Greedy rows: bound by latency for few
// rows, by bandwidth for many; others by the passes' arithmetic.
#include "atlas/sample.cuh"
