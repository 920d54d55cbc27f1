// Global memory that blocks of one launch exchange while they run: each word is read as some block
// wrote it, with no order among words (PTX ISA, relaxed at gpu scope).
#pragma once

namespace atlas {

__device__ inline uint2 load_relaxed(const uint2* source) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(source)
               : "memory");
  return v;
}

__device__ inline void store_relaxed(uint2* target, uint2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(v.x), "r"(v.y)
               : "memory");
}

}  // namespace atlas
