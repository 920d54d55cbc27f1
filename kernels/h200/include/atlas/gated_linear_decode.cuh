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

constexpr int kColumns = constants::intermediate;
constexpr int kTiles = ceil_div(constants::k, atlas::kTileColumns);
using Weights = atlas::InstanceWeights<kTiles>;
constexpr int kN = Weights::kTokens, kTogether = Weights::kTogether;
constexpr int kBlockColumns = atlas::kTileRows / 2;
constexpr int kBlocks = ceil_div(kColumns, kBlockColumns);
using Split = atlas::DecodeSplit<Weights, atlas::kPasses, kBlocks, kTiles, knobs::RANGES>;
using Sums = atlas::SharedSums<Split>;
constexpr bool kF8Out = atlas::same_type<types::out, unsigned char>;
// The largest magnitudes of up to kOwn eights of tokens, by token and warp, twice.
constexpr int kWarps = atlas::kConsumers / 32;
constexpr int kLargest = Sums::kOwn * 8 * kWarps, kRest = kF8Out ? 2 * kLargest * 4 : 0;
using Product = atlas::DecodeProduct<Split, launch::shared, kRest>;
static_assert(launch::block == atlas::decode_threads(Weights::kMovesRegisters, Weights::kSides),
              "consumers and those who copy");
static_assert(!kF8Out || kTogether == 2, "a thread block has whole groups of 128 columns of out");

extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ inline float gated(const float* bias, int column, float gate, float up) {
  if (column >= kColumns) return 0.0f;
  if constexpr (HAS_BIAS) {
    gate += bias[column];
    up += bias[kColumns + column];
  }
  return atlas::activate<constants::activation>(gate) * up;
}

// A column's gate and up are rows 8 apart of a row block, so a thread has both: `values` of its
// column of a block, two tokens.
__device__ inline void gate(const float* bias, int column, float4 sums, float (&values)[2]) {
  values[0] = gated(bias, column, sums.x, sums.z);
  values[1] = gated(bias, column, sums.y, sums.w);
}
__device__ inline int column_of(int block) {
  return block * kBlockColumns + atlas::consumer() / 32 * 8 + threadIdx.x % 32 / 4;
}

// bf16. Eight lanes store 16 bytes of a row.
template <class Out>
struct Store {
  const float* bias;
  Out* out;
  int rows, group;

  template <int kCount>
  __device__ void operator()(const int (&eights)[kCount],
                             const float4 (&sums)[kCount][kTogether]) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (8 * eights[n] >= rows) break;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int block = (group * Weights::kSides + atlas::side()) * kTogether + i,
                  column = column_of(block);
        if (block >= kBlocks) break;
        float values[2];
        gate(bias, column, sums[n][i], values);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = 8 * eights[n] + threadIdx.x % 4 * 2 + e;
          if (row >= rows) break;
          out[atlas::tiles_offset(row, 2 * column, kBlocks) / 2] =
              atlas::from_float<Out>(values[e]);
        }
      }
    }
  }
};

// f8g128: a group of 128 columns. All consumers call it together.
template <class Out>
struct StoreF8 {
  const float* bias;
  Out* out;  // the group's tile
  int rows, group;
  unsigned* largest;
  int* turn;

  template <int kCount>
  __device__ void operator()(const int (&eights)[kCount],
                             const float4 (&sums)[kCount][kTogether]) const {
    const int warp = atlas::consumer() / 32, lane = threadIdx.x % 32, token = lane % 4 * 2;
    unsigned* const most = largest + *turn * kLargest;
    *turn ^= 1;  // the barrier below is behind everyone's reads of the turn before
    float value[kCount][kTogether][2];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        gate(bias, column_of(group * kTogether + i), sums[n][i], value[n][i]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        unsigned mine = 0;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          mine = max(mine, atlas::magnitude_bits(value[n][i][e]));
        }
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          mine = max(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, mask));
        }
        if (lane < 4) most[(8 * n + token + e) * kWarps + warp] = mine;
      }
    }
    atlas::named_barrier(1, atlas::kConsumers);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (8 * eights[n] >= rows) break;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto* four = reinterpret_cast<const uint4*>(most + (8 * n + token + e) * kWarps);
        const uint4 a = four[0], b = four[1];
        const atlas::F8Group scaled(
            max(max(max(a.x, a.y), max(a.z, a.w)), max(max(b.x, b.y), max(b.z, b.w))));
        const int row = 8 * eights[n] + token + e;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          // Four lanes' codes in one word.
          unsigned code = scaled.code(value[n][i][e]);
          code |= __shfl_down_sync(0xFFFFFFFFu, code, 4) << 8;
          code |= __shfl_down_sync(0xFFFFFFFFu, code, 8) << 16;
          if (row < rows && lane / 4 % 4 == 0) {
            *reinterpret_cast<unsigned*>(
                out + atlas::in_tile(row, i * kBlockColumns + 8 * warp + lane / 4)) = code;
          }
        }
        if (row < rows && warp == 0 && lane < 4) {
          *reinterpret_cast<float*>(out + atlas::kTileBytes + row * 4) = scaled.scale;
        }
      }
    }
  }
};
static_assert(kWarps == 8, "a token's largest magnitudes are two words of four");

template <class Out>
__device__ inline void consume(Product& product, const Sums& shared, const unsigned char* weights,
                               const float* bias, Out* out, int rows) {
  int turn = 0;
  product.consume(weights, [&](int group, int pass, float (&sums)[kTogether][kN / 2]) {
    const int left = min(rows - pass * kN, kN);
    if constexpr (kF8Out) {
      constexpr int kOutTiles = ceil_div(kColumns, 128);
      auto* largest = reinterpret_cast<unsigned*>(shared_memory + launch::shared - kRest);
      const StoreF8<Out> store{bias,    out + atlas::tile_offset<true>(pass, group, kOutTiles),
                               left,    group,
                               largest, &turn};
      shared.finish(group, pass, sums, left, store);
    } else {
      const Store<Out> store{bias, out + atlas::tile_offset(pass, 0, kBlocks) / 2, left, group};
      shared.finish(group, pass, sums, left, store);
    }
  });
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
    consume(product, Sums(scratch), weights, bias, out, *n_rows);
  }
}
