// The kernel of linear.decode.cu and linear.w4.decode.cu, which say what it computes and how it is
// launched.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/decode_instance.cuh"
#include "atlas/instance.h"
#include "atlas/shared_sums.cuh"

namespace {

using atlas::ceil_div;

constexpr int kN = launch::max_rows, kColumns = constants::n;
constexpr int kTiles = ceil_div(constants::k, atlas::kTileColumns);
using Weights = atlas::InstanceWeights<kN, kTiles>;
constexpr int kBlocks = ceil_div(kColumns, atlas::kTileRows);
using Split = atlas::DecodeSplit<Weights, kN, kBlocks, kTiles, 1, knobs::THREAD_BLOCKS>;
using Product = atlas::DecodeProduct<Split, launch::shared>;
using Sums = atlas::SharedSums<Split, 2>;
static_assert(launch::block == atlas::decode_threads(kN), "consumers and those who copy");

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Sums of tokens 8 j .. as a thread holds them. Eight lanes store 32 bytes of a row.
struct Store {
  const float* bias;
  types::out* out;
  int rows;

  __device__ void operator()(int block, int j, float4 four) const {
    const float sums[4] = {four.x, four.y, four.z, four.w};
    const int lane = threadIdx.x % 32, row = 8 * j + lane % 4 * 2;
    const int column = block * atlas::kTileRows + threadIdx.x / 32 * 16 + lane / 4;
    types::out* to = out + static_cast<size_t>(row) * kColumns + column;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + 8 * i >= kColumns) break;
      float added = 0.0f;
      if constexpr (HAS_BIAS) added = bias[column + 8 * i];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (row + e >= rows) break;
        to[static_cast<size_t>(e) * kColumns + 8 * i] =
            atlas::from_float<types::out>(sums[2 * i + e] + added);
      }
    }
  }
};

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::out* out, const int* n_rows, unsigned char* scratch) {
  atlas::launch_dependents();
  const int rows = *n_rows;
  const auto* weights = reinterpret_cast<const unsigned char*>(weight);
  Product product(shared_memory);
  if (product.is_producer()) {
    product.produce(weights, reinterpret_cast<const unsigned char*>(x));
  } else {
    product.start_consumers();
    Sums shared(scratch);
    const Store store{bias, out, rows};
    product.consume(weights, [&](int group, const Weights& sums) {
      if (product.shares(group)) {
        shared.put(group, sums.sum, rows);
        return;
      }
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        if (8 * j >= rows) break;
        const float* four = sums.sum + 4 * j;
        store(group, j, make_float4(four[0], four[1], four[2], four[3]));
      }
    });
    const int first = product.first_group(), last = product.last_group();
    for (int group = first; group <= last; group = group < last ? last : last + 1) {
      if (!product.shares(group)) continue;
      shared.finish(group, 0, rows, [&](int j, float4 sums) { store(group, j, sums); });
    }
    shared.leave();
  }
}
