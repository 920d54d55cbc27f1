// Counter-based random numbers: Philox-4x32-10 (Salmon et al., SC'11), as atlas/ops/sample.py has
// it.
#pragma once

namespace atlas {

// First word for counter (counter, 0, 0, 0) and a 64-bit key.
__device__ inline unsigned philox4x32(unsigned counter, unsigned long long key) {
  unsigned c0 = counter, c1 = 0, c2 = 0, c3 = 0;
  unsigned k0 = static_cast<unsigned>(key), k1 = static_cast<unsigned>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const unsigned long long product0 = 0xD2511F53ull * c0, product1 = 0xCD9E8D57ull * c2;
    c0 = static_cast<unsigned>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<unsigned>(product1);
    c2 = static_cast<unsigned>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<unsigned>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// 24 random bits w for the token at `position` of a request with `seed`: the random number is (w +
// 1/2) / 2^24.
__device__ inline unsigned random_word(long long seed, int position) {
  return philox4x32(static_cast<unsigned>(position), static_cast<unsigned long long>(seed)) >> 8;
}

}  // namespace atlas
