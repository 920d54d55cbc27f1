/* atlas
like = "gated_linear.decode.cu"
*/
// normed_gated_linear for steps of 1..256 rows: gated_linear of rows that are yet to be divided by
// their root mean square: the kernel of gated_linear.decode.cu with sums as in
// normed_linear.decode.cu.
#include "atlas/gated_linear_decode.cuh"
