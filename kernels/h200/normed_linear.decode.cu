/* atlas
like = "linear.decode.cu"
*/
// normed_linear for steps of 1..256 rows: out[r, n] = sum over k of x[r, k] * weight[n, k] / rms[r]
// + bias[n], rms[r]^2 = the sum of squares[r].
//
// The kernel of linear.decode.cu, whose finished sums are multiplied by 1 / rms before the bias is
// added. squares [rows, ceil(k / 128)] f32, which every thread block adds up for itself.
#include "atlas/linear_decode.cuh"
