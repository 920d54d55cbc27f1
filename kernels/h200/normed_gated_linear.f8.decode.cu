/* atlas
like = "gated_linear.f8.decode.cu"
[limits]
# 12 at 65 to 128 rows where k is a single tile.
spills = 16
*/
// normed_gated_linear for steps of 1..256 rows in fp8: the kernel of gated_linear.f8.decode.cu with
// sums as in normed_linear.decode.cu.
#include "atlas/gated_linear_decode.cuh"
