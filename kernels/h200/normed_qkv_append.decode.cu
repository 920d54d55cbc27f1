/* atlas
like = "linear.decode.cu"
[serves]
q_out = ["bf16"]
k_cache = ["bf16"]
v_cache = ["bf16"]
# A block of 128 columns is whole heads.
where = ["(head_dim - 64) * (head_dim - 128) == 0", "rotary_dim == head_dim"]
[limits]
# After the last product, to hold 32 rows to 56 registers.
spills = 192
[knobs]
# One more than there, or what warps exchange costs 32 rows a slot of the ring.
LEAST = 131
BLOCKS = "ceil_div((n_heads + 2 * n_kv_heads) * head_dim, 128)"
[layouts]
k_cache = "kv_tiles"
v_cache = "kv_tiles"
*/
// normed_qkv_append for steps of 1..256 rows: the product of normed_linear.decode.cu, whose
// finished sums are a row's [q heads | k heads | v heads]: q and k are normed where weights are
// given and turned, and all are stored where rope_kv_append.cu stores them.
//
// x, weight, squares as there; turns [rows, head_dim / 2, 2] f32 and places [rows] i32 (rope_rows);
// q_out row-major bf16, caches bf16 in `kv_tiles`. A block of 128 columns is a head or two. Columns
// that turn together are half a head apart: in two warps, which exchange half of what they have
// through shared memory, so that each turns every other token. A norm's squares go along. From 65
// rows on of heads of 128, sums are by token (token_sums.cuh) and a thread has both.
#include "atlas/qkv_append_decode.cuh"
