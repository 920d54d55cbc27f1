// Reductions over a warp and a block in one fixed order, so that a result does not depend on
// timing.
#pragma once

namespace atlas {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

// Every lane gets the result. All 32 lanes must call it.
template <class T, class Combine>
__device__ inline T warp_reduce(T value, Combine combine) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// Every thread of a one-dimensional block of kThreads gets the result; all of them must call it.
// `scratch` holds one value per warp and may be used again as soon as the call returns.
template <int kThreads, class T, class Combine>
__device__ inline T block_reduce(T value, Combine combine, T* scratch) {
  static_assert(kThreads % kWarp == 0, "a block is made of whole warps");
  value = warp_reduce(value, combine);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  T result = scratch[0];
  for (int warp = 1; warp < kThreads / kWarp; ++warp) result = combine(result, scratch[warp]);
  __syncthreads();
  return result;
}

}  // namespace atlas
