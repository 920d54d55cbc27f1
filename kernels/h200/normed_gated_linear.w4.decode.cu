/* atlas
like = "gated_linear.w4.decode.cu"
*/
// normed_gated_linear for steps of 1..256 rows with weights of 4 bits: the kernel of
// gated_linear.w4.decode.cu with sums as in normed_linear.decode.cu.
#include "atlas/gated_linear_decode.cuh"
