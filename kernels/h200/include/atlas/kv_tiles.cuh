// Layout `kv_tiles` (atlas/weights/layouts.py) of a KV cache [blocks, heads, 16, head_dim] in bf16.
//
// What one block holds of one head is a page: [ceil(head_dim / 64)][16 tokens][128 bytes],
// contiguous, so that one bulk copy brings it. The eight 16-byte chunks of a token's 128 bytes are
// permuted: chunk c of token t stands at c ^ (t % 8), which ldmatrix and wgmma read without bank
// conflicts. Elements past head_dim are zeros, written with the token.
#pragma once

namespace atlas {

constexpr int kPageTokens = 16, kPageRowBytes = 128;
constexpr int kPageRowElements = kPageRowBytes / 2;

// Bytes of a page of heads of `head_dim` elements.
__host__ __device__ constexpr int kv_page_bytes(int head_dim) {
  return (head_dim + kPageRowElements - 1) / kPageRowElements * kPageTokens * kPageRowBytes;
}

// Where element `element` of token `token` stands in its page, in bytes.
__host__ __device__ constexpr int in_page(int token, int element) {
  const int byte = element % kPageRowElements * 2;
  return (element / kPageRowElements * kPageTokens + token) * kPageRowBytes +
         ((byte / 16 ^ token % 8) * 16 + byte % 16);
}

// Offset of a page in a cache of `heads` KV heads, in bytes.
__host__ __device__ constexpr size_t kv_page_offset(size_t block, int head, int heads,
                                                    int page_bytes) {
  return (block * heads + head) * page_bytes;
}

}  // namespace atlas
