/* atlas
like = "linear.w4.decode.cu"
*/
// normed_linear for steps of 1..256 rows with weights of 4 bits: the kernel of linear.w4.decode.cu
// with sums as in normed_linear.decode.cu.
#include "atlas/linear_decode.cuh"
