/* atlas
like = "linear.w4.decode.cu"
[launch]
arguments = ["eps", "scale"]
[serves]
out = ["bf16"]
[limits]
# From 128 rows on, beside the codes' expansion.
spills = 256
[layouts]
out = "tiles"
*/
// residual_linear for steps of 1..256 rows with weights of 4 bits: the product of
// linear.w4.decode.cu, the rest as in residual_linear.decode.cu.
#include "atlas/residual_linear_decode.cuh"
