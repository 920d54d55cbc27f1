// The kernel of ops gated_linear and normed_gated_linear: their .decode.cu files say what it
// computes and how it is launched.
#pragma once

#include "atlas/activation.cuh"
#include "atlas/convert.cuh"
#include "atlas/decode_instance.cuh"
#include "atlas/f8_group.cuh"
#include "atlas/instance.h"
#include "atlas/row_factors.cuh"
#include "atlas/shared_sums.cuh"

namespace {

using atlas::ceil_div;

constexpr int kColumns = constants::intermediate;
constexpr int kTiles = ceil_div(constants::k, atlas::kTileColumns);
using Weights = atlas::InstanceWeights<kTiles>;
constexpr int kN = Weights::kTokens, kTogether = Weights::kTogether;
constexpr int kBlockColumns = atlas::kTileRows / 2;
constexpr int kBlocks = ceil_div(kColumns, kBlockColumns);
using Split = atlas::DecodeSplit<Weights, atlas::kPasses, kBlocks, kTiles, knobs::RANGES, false, 1>;
using Sums = atlas::SharedSums<Split>;
constexpr bool kF8Out = atlas::same_type<types::out, unsigned char>;
constexpr int kSides = Weights::kSides, kOutTiles = ceil_div(kColumns, kF8Out ? 128 : 64);
// Tiles of out that a thread has a part of, and eights of tokens that it activates at a time: of
// one tile, all. Rows that are not there are activated, too, but not stored: with branches around
// eights the compiler spills.
constexpr int kMyTiles = kF8Out ? 1 : kTogether;
constexpr int kOwn = kMyTiles * kSides == 1 || kN == 8 ? kN / 8 : kN < 128 ? 2 : 8;
// Whether they are so few that each thread stores its own: barriers and a copy take longer.
constexpr bool kDirect = kN == 8 && !kF8Out;
// Where they wait to be copied, and what the groups of f8g128 are multiplied by.
constexpr int kEightBytes = 8 * atlas::kTileRowBytes;
constexpr int kStaged = kDirect ? 0 : kMyTiles * kOwn * kEightBytes;
constexpr int kGroupFactors = kF8Out ? kN * 4 : 0;
#ifdef ATLAS_TYPE_SQUARES_F32
using Factors = atlas::RowFactors<launch::max_rows, ceil_div(constants::k, atlas::kTileRows),
                                  kSides * atlas::kConsumers>;
#else
using Factors = atlas::NoRowFactors;
#endif
constexpr int kRest = kSides * kStaged + kGroupFactors + Factors::kBytes;
using Product = atlas::DecodeProduct<Split, launch::shared, kRest>;
static_assert(launch::block == atlas::decode_threads(Weights::kMovesRegisters, kSides),
              "consumers and those who copy");
static_assert(!kF8Out || (kTogether == 2 && kSides == 1),
              "a thread has both halves of a group of 128 columns");

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Whether the last group has all of its columns. Where one of its row blocks is not there, the last
// one stands in for it (decode_product.cuh), and f8g128 must not see that.
constexpr bool kWhole = kColumns % (kBlockColumns * Split::kOfGroup) == 0;

__device__ inline float gated(const float* bias, int column, float gate, float up) {
  if (!kWhole && column >= kColumns) return 0.0f;
  if constexpr (HAS_BIAS) {
    gate += bias[column];
    up += bias[kColumns + column];
  }
  return atlas::activate_rounded<constants::activation>(gate) * up;
}

// Activates finished sums and stores them: a tile of out by eights of tokens, which are contiguous
// in memory, by way of shared memory. f8g128: a tile is a group of 128 columns and its scales.
template <class Out>
struct Store {
  static constexpr int kOwn = ::kOwn, kWarps = atlas::kConsumers / 32;
  static_assert(!kF8Out || kN * kWarps * 4 <= kStaged, "largest magnitudes stand where codes will");

  const float* bias;
  Factors row_factors;
  unsigned char* out;       // the row of tiles
  int before, rows, group;  // rows of earlier passes, and of this one

  template <int kCount>
  __device__ atlas::Nothing fetch(int /*start*/, int /*step*/) const {
    return {};
  }

  template <int kCount>
  __device__ void operator()(int start, int step, const float4 (&sums)[kCount][kTogether],
                             atlas::Nothing /*fetched*/) const {
    static_assert(kCount <= kOwn, "they have room");
    unsigned char* const staged = shared_memory + launch::shared - kRest + Split::side() * kStaged;
    const int me = Split::consumer(), warp = me / 32, lane = me % 32;
    const int first = (group * kSides + Split::side()) * kTogether;
    // The last call's eights are on their way.
    if (!kDirect && me < kMyTiles * kOwn) atlas::bulk_wait_read<0>();
    if constexpr (!kDirect) barrier();
    float value[kCount][kTogether][2];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        // A column's gate and up are rows 8 apart of a row block, so a thread has both.
        const int in_block = 8 * warp + lane / 4;
        const int column = (first + i) * kBlockColumns + in_block;
        float4 four = sums[n][i];
        if constexpr (Factors::kBytes > 0) {
          const int eight = min(start + n * step, kN / 8 - 1);
          const float2 factor = row_factors.two(before + 8 * eight + lane % 4 * 2);
          four = make_float4(__fmul_rn(four.x, factor.x), __fmul_rn(four.y, factor.y),
                             __fmul_rn(four.z, factor.x), __fmul_rn(four.w, factor.y));
        }
        value[n][i][0] = gated(bias, column, four.x, four.z);
        value[n][i][1] = gated(bias, column, four.y, four.w);
        if constexpr (!kF8Out) {
          unsigned char* const to = kDirect
                                        ? out + atlas::tile_offset<false>(0, first + i, kOutTiles)
                                        : staged + (n * kMyTiles + i) * kEightBytes;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int token = lane % 4 * 2 + e;
            if (kDirect && (token >= rows || first + i >= kOutTiles)) break;
            *reinterpret_cast<Out*>(to + atlas::in_tile(token, 2 * in_block)) =
                atlas::from_float<Out>(value[n][i][e]);
          }
        }
      }
    }
    if constexpr (kDirect) return;
    if constexpr (kF8Out) scale(start, step, value, staged);
    atlas::publish_to_async_proxy();
    barrier();
    const int eight = start + me / kMyTiles * step, tile = kF8Out ? group : first + me % kMyTiles;
    if (me < kMyTiles * kCount && 8 * eight < rows && tile < kOutTiles) {
      atlas::bulk_store(out + atlas::tile_offset<kF8Out>(0, tile, kOutTiles) + eight * kEightBytes,
                        staged + me * kEightBytes, min(8, rows - 8 * eight) * atlas::kTileRowBytes);
      atlas::bulk_commit();
    }
  }

 private:
  __device__ static void barrier() { atlas::named_barrier(1 + Split::side(), atlas::kConsumers); }

  template <int kCount>
  __device__ void scale(int start, int step, const float (&value)[kCount][kTogether][2],
                        unsigned char* staged) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane % 4 * 2;
    auto* const largest = reinterpret_cast<unsigned*>(staged);  // by token and warp
    auto* const factors = reinterpret_cast<float*>(staged + kStaged);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
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
        if (lane < 4) largest[(8 * n + token + e) * kWarps + warp] = mine;
      }
    }
    barrier();
    const int row = 8 * (start + threadIdx.x / 8 * step) + threadIdx.x % 8;
    if (threadIdx.x < 8 * kCount && row < rows) {
      unsigned most = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = max(most, largest[threadIdx.x * kWarps + w]);
      const atlas::F8Group scaled(most);
      factors[threadIdx.x] = scaled.used ? scaled.factor : -1.0f;
      *reinterpret_cast<float*>(out + atlas::tile_offset<true>(0, group, kOutTiles) +
                                atlas::kTileBytes + row * 4) = scaled.scale;
    }
    barrier();
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * n + token);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        // Codes of one column, two tokens.
        const unsigned codes = __nv_cvt_float2_to_fp8x2(
            make_float2(value[n][i][0] * factor.x, value[n][i][1] * factor.y), __NV_SATFINITE,
            __NV_E4M3);
        const int column = i * kBlockColumns + 8 * warp + lane / 4;
        unsigned char* const to = staged + n * kEightBytes;
        to[atlas::in_tile(token, column)] = factor.x < 0.0f ? 0 : codes & 0xFF;
        to[atlas::in_tile(token + 1, column)] = factor.y < 0.0f ? 0 : codes >> 8;
      }
    }
  }
};

template <class Out>
__device__ inline void consume(Product& product, const Sums& shared, const unsigned char* weights,
                               const float* bias, Factors factors, Out* out, int rows) {
  product.consume(weights, [&](int group, int pass, float (&sums)[kTogether][kN / 2]) {
    const int before = pass * kN, left = min(rows - before, kN);
    auto* tiles =
        reinterpret_cast<unsigned char*>(out) + atlas::tile_offset<kF8Out>(pass, 0, kOutTiles);
    shared.finish(group, pass, sums, left, Store<Out>{bias, factors, tiles, before, left, group});
  });
  if (!kDirect && Split::consumer() < kMyTiles * kOwn) atlas::bulk_wait<0>();
}

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
#ifdef ATLAS_TYPE_SQUARES_F32
             const types::squares* squares,
#endif
             types::out* out, const int* n_rows, unsigned char* scratch) {
  atlas::launch_dependents();
#ifndef ATLAS_TYPE_SQUARES_F32
  const float* const squares = nullptr;
#endif
  const int rows = *n_rows;
  const auto* weights = reinterpret_cast<const unsigned char*>(weight);
  Product product(shared_memory);
  if (product.is_producer()) {
    product.produce(weights, reinterpret_cast<const unsigned char*>(x), rows);
  } else {
    product.start_consumers();
    const Factors factors(shared_memory + launch::shared - Factors::kBytes, squares, rows);
    consume(product, Sums(scratch, shared_memory), weights, bias, factors, out, rows);
  }
}
