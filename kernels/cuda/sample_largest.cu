/* atlas
like = "sample.cu"
*/
// sample_largest: sample.cu's kernel, of logits that normed_logits left: largest f32 and largest_id
// i32 [logits, ceil(vocab / 16)]. A greedy row that is not adjusted is sampled from those, by one
// block, and has no logits. Bytes of such a row: vocab / 4.
#include "atlas/sample.cuh"
