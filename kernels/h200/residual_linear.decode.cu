/* atlas
like = "linear.decode.cu"
[launch]
arguments = ["eps", "scale"]
[serves]
out = ["bf16", "f8g128"]
[limits]
# To hold 32 rows to 56 registers, of ranges that end within column blocks; 52 where they do not.
spills = 256
[layouts]
out = "tiles"
*/
// residual_linear for steps of 1..256 rows: residual[r, n] += scale * (sum over k of x[r, k] *
// weight[n, k] + bias[n]), out[r, n] = residual[r, n] * norm[n], rounded once, and squares[r, b] =
// the share of columns 128 b on in mean(residual[r]^2) + eps.
//
// x, weight and the product as in linear.decode.cu; residual row-major f32; out bf16 or f8g128 in
// `tiles`; squares row-major f32. A column block is a whole group of f8g128 and its squares one
// number, so nothing of a row is needed that another thread block has: the next product
// (normed_linear, normed_gated_linear) adds the numbers up and divides its sums by their root.
//
// The residual is asked for together with other ranges' parts of the sums, which take longer; of
// eight tokens once inputs are there (shared_sums.cuh). From 65 rows on sums are by token where
// pairs of thread blocks have a row block (token_sums.cuh).
#include "atlas/residual_linear_decode.cuh"
