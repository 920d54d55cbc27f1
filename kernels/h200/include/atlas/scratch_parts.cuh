// Parts of sums in scratch, four of a thread at a time (shared_sums.cuh, token_sums.cuh).
//
// How a reader knows that a part is there: scratch is zero when a launch begins, a sum is stored
// with all its bits inverted, so that it never is zero (arithmetic makes no NaN whose bits are all
// ones), and whoever has read it writes zero again. No flags, no fences: one trip to the L2 cache
// each way.
#pragma once

namespace atlas {

// Sums as they stand in scratch. The addition makes the one NaN that arithmetic makes of any other.
__device__ inline unsigned as_part(float sum) { return ~__float_as_uint(sum + 0.0f); }
__device__ inline uint4 as_part(const float* four) {
  return make_uint4(as_part(four[0]), as_part(four[1]), as_part(four[2]), as_part(four[3]));
}
__device__ inline bool is_there(const uint4& part) {
  return min(min(part.x, part.y), min(part.z, part.w)) != 0;
}

__device__ inline void store_part(uint4* to, const uint4& part) {
  asm volatile("st.relaxed.gpu.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(part.x), "r"(part.y),
               "r"(part.z), "r"(part.w)
               : "memory");
}
__device__ inline void load_part(uint4& to, const uint4* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "@p ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"(static_cast<unsigned>(wanted))
      : "memory");
}

// Until all parts of which wanted(i) are in found[i], from at(i): those that are missing are asked
// for together. found begins as zeros.
template <int kCount, class At, class Wanted>
__device__ inline void await_parts(uint4 (&found)[kCount], const At& at, const Wanted& wanted) {
  bool missing = true;
  while (missing) {
    missing = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      load_part(found[i], at(i), wanted(i) && !is_there(found[i]));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) missing |= wanted(i) && !is_there(found[i]);
  }
}

__device__ inline void add_part(float4& to, const uint4& part) {
  to.x += __uint_as_float(~part.x);
  to.y += __uint_as_float(~part.y);
  to.z += __uint_as_float(~part.z);
  to.w += __uint_as_float(~part.w);
}
// Two, which are added up first.
__device__ inline void add_pair(float4& to, const uint4& one, const uint4& other) {
  float4 both = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);  // adding to it changes nothing
  add_part(both, one);
  add_part(both, other);
  to.x += both.x;
  to.y += both.y;
  to.z += both.z;
  to.w += both.w;
}

}  // namespace atlas
