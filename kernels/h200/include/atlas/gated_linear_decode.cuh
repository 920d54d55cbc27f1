// The kernel of gated_linear.decode.cu and gated_linear.w4.decode.cu, which say what it computes
// and how it is launched.
#pragma once

#include "atlas/activation.cuh"
#include "atlas/convert.cuh"
#include "atlas/decode_instance.cuh"
#include "atlas/f8_group.cuh"
#include "atlas/instance.h"
#include "atlas/shared_sums.cuh"

namespace {

using atlas::ceil_div;

constexpr int kN = launch::max_rows, kColumns = constants::intermediate;
constexpr int kTiles = ceil_div(constants::k, atlas::kTileColumns);
using Weights = atlas::InstanceWeights<kN, kTiles>;
constexpr int kBlockColumns = atlas::kTileRows / 2;
constexpr int kBlocks = ceil_div(kColumns, kBlockColumns);
constexpr bool kF8Out = atlas::same_type<types::out, unsigned char>;
constexpr int kPair = kF8Out ? 2 : 1;
using Split = atlas::DecodeSplit<Weights, kN, kBlocks, kTiles, kPair, knobs::THREAD_BLOCKS>;
using Product = atlas::DecodeProduct<Split, launch::shared>;
using Sums = atlas::SharedSums<Split, kF8Out ? knobs::KEPT : 2>;
static_assert(launch::block == atlas::decode_threads(kN), "consumers and those who copy");

extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ inline float gated(const float* bias, int column, float gate, float up) {
  if (column >= kColumns) return 0.0f;
  if constexpr (HAS_BIAS) {
    gate += bias[column];
    up += bias[kColumns + column];
  }
  return atlas::activate<constants::activation>(gate) * up;
}

// bf16: sums of tokens 8 j .. as a thread holds them. Eight lanes store 16 bytes of a
// row.
template <class Out>
struct Store {
  const float* bias;
  Out* out;
  int rows;

  __device__ void operator()(int block, int j, float4 sums) const {
    constexpr int kOutTiles = ceil_div(kColumns, kBlockColumns);
    const int lane = threadIdx.x % 32;
    const int column = block * kBlockColumns + threadIdx.x / 32 * 8 + lane / 4;
    const float values[2] = {gated(bias, column, sums.x, sums.z),
                             gated(bias, column, sums.y, sums.w)};
    if (block >= kBlocks) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * j + lane % 4 * 2 + e;
      if (row >= rows) break;
      out[atlas::tiles_offset(row, 2 * column, kOutTiles) / 2] = atlas::from_float<Out>(values[e]);
    }
  }
};

// f8g128: this thread block's share of a group of 128 columns, eight tokens at a time. `largest`
// has room for 8 words a warp.
template <class Out>
__device__ inline void finish_f8(const Sums& shared, int group, const float* bias, Out* out,
                                 int rows, unsigned* largest) {
  constexpr int kOutTiles = ceil_div(kColumns, 128);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane % 4 * 2;
  const int first = Split::first_team(group);
  const int sharers = (Split::last_team(group) - first + 1) * kPair;
  shared.wait(group, 0, kPair);
  Out* tile = out + atlas::tile_offset<true>(0, group, kOutTiles);
#pragma unroll 1
  for (int j = blockIdx.x - first * kPair; 8 * j < rows; j += sharers) {
    float value[kPair][2];
    unsigned most[2] = {};
    const int pairs[2] = {0, 1}, both[2] = {j, j};
    float4 totals[2];
    shared.get(group, pairs, both, totals);
#pragma unroll
    for (int pair = 0; pair < kPair; ++pair) {
      const float4 sums = totals[pair];
      const int column = (group * kPair + pair) * kBlockColumns + 8 * warp + lane / 4;
      value[pair][0] = gated(bias, column, sums.x, sums.z);
      value[pair][1] = gated(bias, column, sums.y, sums.w);
#pragma unroll
      for (int e = 0; e < 2; ++e) most[e] = max(most[e], atlas::magnitude_bits(value[pair][e]));
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        most[e] = max(most[e], __shfl_xor_sync(0xFFFFFFFFu, most[e], mask));
      }
      if (lane < 4) largest[8 * warp + token + e] = most[e];
    }
    atlas::named_barrier(1, atlas::kConsumers);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int w = 0; w < atlas::kConsumers / 32; ++w) {
        most[e] = max(most[e], largest[8 * w + token + e]);
      }
      const atlas::F8Group scaled(most[e]);
      const int row = 8 * j + token + e;
      Out* to =
          tile + static_cast<size_t>(row / atlas::kTileRows) * kOutTiles * atlas::kTileStride<true>;
#pragma unroll
      for (int pair = 0; pair < kPair; ++pair) {
        // Four lanes' codes in one word.
        unsigned code = scaled.code(value[pair][e]);
        code |= __shfl_down_sync(0xFFFFFFFFu, code, 4) << 8;
        code |= __shfl_down_sync(0xFFFFFFFFu, code, 8) << 16;
        if (row < rows && lane / 4 % 4 == 0) {
          *reinterpret_cast<unsigned*>(
              to + atlas::in_tile(row % atlas::kTileRows,
                                  pair * kBlockColumns + 8 * warp + lane / 4)) = code;
        }
      }
      if (row < rows && warp == 0 && lane < 4) {
        *reinterpret_cast<float*>(to + atlas::kTileBytes + row % atlas::kTileRows * 4) =
            scaled.scale;
      }
    }
    atlas::named_barrier(1, atlas::kConsumers);
  }
}

// The consumers' part.
template <class Out>
__device__ inline void consume(Product& product, Sums& shared, const unsigned char* weights,
                               const float* bias, Out* out, int rows) {
  const int first = product.first_group(), last = product.last_group();
  if constexpr (kF8Out) {
    product.consume(weights,
                    [&](int group, const Weights& sums) { shared.put(group, sums.sum, rows); });
    auto* largest = reinterpret_cast<unsigned*>(shared_memory + launch::shared - Product::kRest);
    for (int group = first; group <= last; ++group) {
      finish_f8(shared, group, bias, out, rows, largest);
    }
  } else {
    const Store<Out> store{bias, out, rows};
    product.consume(weights, [&](int group, const Weights& sums) {
      if (product.shares(group)) {
        shared.put(group, sums.sum, rows);
        return;
      }
      const int block = group * kPair + product.pair();
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        if (8 * j >= rows) break;
        const float* four = sums.sum + 4 * j;
        store(block, j, make_float4(four[0], four[1], four[2], four[3]));
      }
    });
    for (int group = first; group <= last; group = group < last ? last : last + 1) {
      if (!product.shares(group)) continue;
      shared.finish(group, product.pair(), rows,
                    [&](int j, float4 sums) { store(group * kPair + product.pair(), j, sums); });
    }
  }
}

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::out* out, const int* n_rows, unsigned char* scratch) {
  atlas::launch_dependents();
  const auto* weights = reinterpret_cast<const unsigned char*>(weight);
  Product product(shared_memory);
  if (product.is_producer()) {
    product.produce(weights, reinterpret_cast<const unsigned char*>(x));
  } else {
    product.start_consumers();
    Sums shared(scratch);
    consume(product, shared, weights, bias, out, *n_rows);
    shared.leave();
  }
}
