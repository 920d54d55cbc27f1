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
constexpr int kBlockColumns = atlas::kTileRows / 2;
constexpr int kBlocks = ceil_div(kColumns, kBlockColumns);
constexpr bool kF8Out = atlas::same_type<types::out, unsigned char>;
template <class Weights>
using SplitOf = atlas::InstanceSplit<Weights, kBlocks, kTiles, (launch::cluster > 1)>;
// Whether a thread has tokens rather than weight rows (decode_weights.cuh): of whole groups, whose
// sums nobody else has a part of, and in bf16 of row blocks that a pair of thread blocks has.
#ifdef ATLAS_FOUR_BIT
constexpr bool kByToken = false;
#else
using SplitByRow = SplitOf<atlas::InstanceWeights<kTiles> >;
constexpr bool kOfPair = !kF8Out && SplitByRow::kWays == 2 && SplitByRow::kEach == 2;
constexpr bool kByToken =
    atlas::kTokens == 128 && (kOfPair || ceil_div(kBlocks, knobs::TOGETHER) % knobs::RANGES == 0);
#endif
using Weights = atlas::InstanceWeights<kTiles, kByToken>;
constexpr int kN = Weights::kTokens, kTogether = Weights::kTogether;
using Split = SplitOf<Weights>;
using Cluster = atlas::ClusterSums<Split>;
using Sums = atlas::SharedSums<Split>;
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
// By token: scales of a group's weight rows.
constexpr int kRowScales = kByToken && kF8Out ? kTogether * atlas::kTileRows * 4 : 0;
#ifdef ATLAS_TYPE_SQUARES_F32
using Factors = atlas::RowFactors<launch::max_rows, ceil_div(constants::k, atlas::kTileRows),
                                  kSides * atlas::kConsumers>;
#else
using Factors = atlas::NoRowFactors;
#endif
constexpr int kRest = kSides * kStaged + kGroupFactors + kRowScales + Factors::kBytes;
using Product = atlas::DecodeProduct<Split, launch::shared, kRest + Cluster::kBytes>;
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
  const Factors& row_factors;
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

// The same of sums by token, in bf16: a warp stores an eight of its tokens after the other, or the
// one of which its thread block has the pair's sums.
struct StoreBf16ByToken {
  const float* bias;
  const Factors& row_factors;
  unsigned char* out;
  int before, rows, group;

  __device__ void operator()(const float (&sums)[kTogether][kN / 2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store(threadIdx.x / 32 * 2 + h,
            [&](int i, int j, int e) { return sums[i][4 * j + 2 * h + e]; });
    }
  }
  template <class Cluster>
  __device__ void of_pair(const Cluster& cluster, const float (&sum)[kN / 2]) const {
    float both[kN / 4];
    cluster.trade_by_token(sum, both);
    store(threadIdx.x / 32 * 2 + blockIdx.x % 2,
          [&](int /*i*/, int j, int e) { return both[2 * j + e]; });
  }

 private:
  // at(row block, eight of its stored rows, which of two): sums of the lane's token of the eight.
  template <class At>
  __device__ void store(int eight, At at) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, four = lane % 4;
    unsigned char* const staged =
        shared_memory + launch::shared - kRest + warp * (kStaged / (atlas::kConsumers / 32));
    const float factor = row_factors.one(before + 8 * eight + lane / 4);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int q = 0; q < kBlockColumns / 8; ++q) {
        const int column = (group * kTogether + i) * kBlockColumns + 8 * q + 2 * four;
        float value[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          value[e] = gated(bias, column + e, factored(at(i, 2 * q, e), factor),
                           factored(at(i, 2 * q + 1, e), factor));
        }
        *reinterpret_cast<__nv_bfloat162*>(staged + i * kEightBytes +
                                           atlas::in_tile(lane / 4, 16 * q + 4 * four)) =
            __floats2bfloat162_rn(value[0], value[1]);
      }
    }
    __syncwarp();
    constexpr int kChunks = kEightBytes / 16;
#pragma unroll
    for (int chunk = lane; chunk < kTogether * kChunks; chunk += 32) {
      const int tile = group * kTogether + chunk / kChunks;
      if (8 * eight + chunk % kChunks / 8 >= rows || tile >= kOutTiles) continue;
      *reinterpret_cast<uint4*>(out + atlas::tile_offset<false>(0, tile, kOutTiles) +
                                eight * kEightBytes + chunk % kChunks * 16) =
          *reinterpret_cast<const uint4*>(staged + chunk * 16);
    }
    __syncwarp();
  }
  __device__ static float factored(float sum, float factor) {
    return Factors::kBytes > 0 ? __fmul_rn(sum, factor) : sum;
  }
};

// The same of sums by token, in fp8: a thread has gates and ups of two tokens, so that four lanes
// have a token's group of 128 columns, and a warp two eights of tokens, which it stores by itself.
struct StoreByToken {
  const float *bias, *row_scales;  // of weight rows as they are stored, in shared memory
  const Factors& row_factors;
  unsigned char* out;
  int before, rows, group;

  __device__ void operator()(const float (&sums)[kTogether][kN / 2]) const {
    unsigned char* const staged = shared_memory + launch::shared - kRest;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16, four = lane % 4;
    float value[2][kTogether][kBlockColumns / 4];  // by token; columns 8 q + 2 * four + e
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int q = 0; q < kBlockColumns / 8; ++q) {
        float2 scale[2] = {};  // of two gates, and of their ups
#pragma unroll
        for (int up = 0; up < 2; ++up) {
          scale[up] = *reinterpret_cast<const float2*>(row_scales + i * atlas::kTileRows +
                                                       8 * (2 * q + up) + 2 * four);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float factor = row_factors.one(before + token(h));
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float* gate = sums[i] + 8 * q + 2 * h + e;
            const int column = (group * kTogether + i) * kBlockColumns + 8 * q + 2 * four + e;
            value[h][i][2 * q + e] = gated(bias, column, scaled(gate[0], scale[0], e, factor),
                                           scaled(gate[4], scale[1], e, factor));
          }
        }
      }
    }
    // The last call's eights are on their way.
    if (lane < 2) atlas::bulk_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned most = 0;
#pragma unroll
      for (const auto& block : value[h]) {
#pragma unroll
        for (float one : block) most = max(most, atlas::magnitude_bits(one));
      }
      most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
      most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
      const atlas::F8Group to_codes(most);
      if (four == 0 && token(h) < rows) {
        *reinterpret_cast<float*>(out + atlas::tile_offset<true>(0, group, kOutTiles) +
                                  atlas::kTileBytes + token(h) * 4) = to_codes.scale;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int q = 0; q < kBlockColumns / 8; ++q) {
          const int column = i * kBlockColumns + 8 * q + 2 * four;
          *reinterpret_cast<unsigned short*>(staged + atlas::in_tile(token(h), column)) =
              to_codes.codes(value[h][i][2 * q], value[h][i][2 * q + 1]);
        }
      }
    }
    atlas::publish_to_async_proxy();
    __syncwarp();
    const int eight = first / 8 + lane;
    if (lane < 2 && 8 * eight < rows) {
      atlas::bulk_store(out + atlas::tile_offset<true>(0, group, kOutTiles) + eight * kEightBytes,
                        staged + eight * kEightBytes,
                        min(8, rows - 8 * eight) * atlas::kTileRowBytes);
      atlas::bulk_commit();
    }
  }

 private:
  __device__ static int token(int h) {
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
  }
  __device__ static float scaled(float sum, float2 scale, int e, float factor) {
    if (Weights::kTail != 0) sum = __fmul_rn(sum, e == 0 ? scale.x : scale.y);
    return Factors::kBytes > 0 ? __fmul_rn(sum, factor) : sum;
  }
};

template <class Out, class Product, class Cluster>
__device__ inline void consume(Product& product, const Sums& shared, const Cluster& cluster,
                               const unsigned char* weights, const float* bias, Factors& factors,
                               Out* out, int rows) {
  product.consume(weights, [&](int group, int pass, float (&sums)[kTogether][kN / 2]) {
    const int before = pass * kN, left = min(rows - before, kN);
    auto* tiles =
        reinterpret_cast<unsigned char*>(out) + atlas::tile_offset<kF8Out>(pass, 0, kOutTiles);
    if constexpr (kByToken && kF8Out) {
      auto* const scales =
          reinterpret_cast<float*>(shared_memory + launch::shared - Factors::kBytes - kRowScales);
      atlas::named_barrier(1, atlas::kConsumers);  // The last group's are read.
      scales[threadIdx.x] = product.weights().row_scale;
      factors.settle();
      atlas::named_barrier(1, atlas::kConsumers);
      const StoreByToken store{bias, scales, factors, tiles, before, left, group};
      store(sums);
    } else if constexpr (kByToken) {
      factors.settle();
      const StoreBf16ByToken store{bias, factors, tiles, before, left, group};
      if constexpr (Split::kTrades) {
        store.of_pair(cluster, sums[0]);
      } else {
        store(sums);
      }
    } else {
      factors.settle();
      shared.finish(group, pass, sums, left, Store<Out>{bias, factors, tiles, before, left, group});
    }
  });
  if ((kByToken && kF8Out) || (!kDirect && Split::consumer() < kMyTiles * kOwn)) {
    atlas::bulk_wait<0>();
  }
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
  const Cluster cluster(shared_memory + launch::shared - kRest - Cluster::kBytes);
  Product product(shared_memory);
  if (product.is_producer()) {
    product.produce(weights, reinterpret_cast<const unsigned char*>(x), rows);
  } else {
    product.start_consumers();
    Factors factors(shared_memory + launch::shared - Factors::kBytes, squares, rows);
    consume(product, Sums(scratch, shared_memory, cluster), cluster, weights, bias, factors, out,
            rows);
  }
}
