/* atlas
like = "linear.w4.decode.cu"
[serves]
q_out = ["bf16"]
k_cache = ["bf16"]
v_cache = ["bf16"]
# A block of 128 columns is whole heads.
where = ["(head_dim - 64) * (head_dim - 128) == 0", "rotary_dim == head_dim"]
[limits]
# From 128 rows on, beside the codes' expansion.
spills = 352
[knobs]
BLOCKS = "ceil_div((n_heads + 2 * n_kv_heads) * head_dim, 128)"
[layouts]
k_cache = "kv_tiles"
v_cache = "kv_tiles"
*/
// normed_qkv_append for steps of 1..256 rows with weights of 4 bits: the product of
// linear.w4.decode.cu, the rest as in normed_qkv_append.decode.cu.
#include "atlas/qkv_append_decode.cuh"
