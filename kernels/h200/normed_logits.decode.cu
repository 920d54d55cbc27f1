/* atlas
like = "linear.decode.cu"
[serves]
x = ["bf16"]
weight = ["bf16"]
*/
// normed_logits for steps of 1..256 rows: out of normed_linear.decode.cu's kernel, but only of rows
// that are drawn (temperature > 0), adjusted (adjust != 0) or asked for log-probabilities (n_top >=
// 0); and of every row the largest of every 16 columns and its column, largest f32 and largest_id
// i32 [rows, ceil(n / 16)]: what a warp has of them. NaN if one of them is.
//
// temperature, adjust, n_top [rows] are of the step block. Bytes: n / 2 a row, and 4 n of rows that
// are kept. 128,256 columns of 4,096 on an H200, us at 1, 8, 32, 64, 128 rows: all logits
// (normed_linear) 232, 233, 252, 269, 296; greedy rows here 232, 233, 237, 255, 275; kept rows 232,
// 235, 257, 279, 313.
#include "atlas/linear_decode.cuh"
