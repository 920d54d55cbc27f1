// The kernel of ops linear, normed_linear and normed_logits: their .decode.cu files say what it
// computes and how it is launched.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/decode_instance.cuh"
#include "atlas/instance.h"
#include "atlas/largest_logits.cuh"
#include "atlas/row_factors.cuh"
#include "atlas/shared_sums.cuh"

namespace {

using atlas::ceil_div;

constexpr int kColumns = constants::n, kTiles = ceil_div(constants::k, atlas::kTileColumns);
using Weights = atlas::InstanceWeights<kTiles>;
constexpr int kN = Weights::kTokens, kTogether = Weights::kTogether;
constexpr int kBlocks = ceil_div(kColumns, atlas::kTileRows);
using Split = atlas::InstanceSplit<Weights, kBlocks, kTiles, knobs::PAIRS != 0>;
#ifdef ATLAS_TYPE_SQUARES_F32
using Factors = atlas::RowFactors<launch::max_rows, ceil_div(constants::k, atlas::kTileRows),
                                  Weights::kSides * atlas::kConsumers>;
#else
using Factors = atlas::NoRowFactors;
#endif
constexpr bool kNormed = Factors::kBytes > 0;
#ifdef ATLAS_TYPE_LARGEST_F32
using Largest =
    atlas::LargestLogits<launch::max_rows, kColumns, Weights::kSides * atlas::kConsumers>;
#else
using Largest = atlas::AllRows;
#endif
using Cluster = atlas::ClusterSums<Split>;
constexpr int kOther = Factors::kBytes + Largest::kBytes, kRest = kOther + Cluster::kBytes;
using Product = atlas::DecodeProduct<Split, launch::shared, kRest>;
using Sums = atlas::SharedSums<Split>;
static_assert(launch::block == atlas::decode_threads(Weights::kMovesRegisters, Weights::kSides),
              "consumers and those who copy");

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Stores finished sums of some eights of tokens, 32 bytes of a row at a time.
struct Store {
  const float* bias;
  const Factors& factors;
  Largest largest;
  types::out* out;
  int before, rows, group;  // rows of earlier passes, and of this one

  static constexpr int kOwn = kN / 8 < 2 ? 1 : 2;

  template <int kCount>
  __device__ atlas::Nothing fetch(int /*start*/, int /*step*/) const {
    return {};
  }

  template <int kCount>
  __device__ void operator()(int start, int step, const float4 (&sums)[kCount][kTogether],
                             atlas::Nothing /*fetched*/) const {
    float done[kTogether][kCount][4];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int eight = start + n * step;
      if (!Largest::kUsed && 8 * eight >= rows) break;
#pragma unroll
      for (int block = 0; block < kTogether; ++block) {
        finish(first_column(block), min(eight, kN / 8 - 1), sums[n][block], done[block][n]);
        if (8 * eight < rows) store(first_column(block), eight, done[block][n]);
      }
    }
    const int row = 8 * start + threadIdx.x % 4 * 2;
#pragma unroll
    for (int block = 0; block < kTogether; ++block) {
      largest.store(before + row, rows - row, 8 * step, first_column(block), done[block]);
    }
  }

  // Of the two that a thread has of a row block of the group, the first.
  __device__ int first_column(int block) const {
    const int row_block = (group * Weights::kSides + Split::side()) * kTogether + block;
    return row_block * atlas::kTileRows + Split::consumer() / 32 * 16 + threadIdx.x % 32 / 4;
  }

  __device__ void finish(int column, int eight, float4 four, float (&sums)[4]) const {
    sums[0] = four.x, sums[1] = four.y, sums[2] = four.z, sums[3] = four.w;
    if constexpr (kNormed) {
      const float2 factor = factors.two(before + 8 * eight + threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[2 * i] = __fmul_rn(sums[2 * i], factor.x);
        sums[2 * i + 1] = __fmul_rn(sums[2 * i + 1], factor.y);
      }
    }
    if constexpr (HAS_BIAS) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + 8 * i >= kColumns) break;
        sums[2 * i] += bias[column + 8 * i];
        sums[2 * i + 1] += bias[column + 8 * i];
      }
    }
  }

  __device__ void store(int column, int eight, const float (&sums)[4]) const {
    const unsigned kept = largest.kept(before + 8 * eight);
    if (kept == 0) return;
    const int pair = threadIdx.x % 4 * 2, row = 8 * eight + pair;
    types::out* const to = out + static_cast<size_t>(before + row) * kColumns;
    if constexpr (kPairs) {
      store_pairs(to, column, row, sums);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + 8 * i >= kColumns) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (row + e >= rows) break;
          if ((kept >> (pair + e) & 1) == 0) continue;
          to[static_cast<size_t>(e) * kColumns + column + 8 * i] =
              atlas::from_float<types::out>(sums[2 * i + e]);
        }
      }
    }
  }

  // Neighbours of a row exchange sums, so that each stores two columns: 32 bytes of a row again.
  __device__ void store_pairs(types::out* to, int column, int row, const float (&sums)[4]) const {
    const bool odd = threadIdx.x / 4 % 2 != 0;
    const int first = odd ? column + 7 : column;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float got = __shfl_xor_sync(0xFFFFFFFFu, odd ? sums[e] : sums[2 + e], 4);
      if (first >= kColumns || row + e >= rows) continue;
      *reinterpret_cast<__nv_bfloat162*>(to + static_cast<size_t>(e) * kColumns + first) =
          __floats2bfloat162_rn(odd ? got : sums[e], odd ? sums[2 + e] : got);
    }
  }

 private:
  static constexpr bool kPairs = sizeof(types::out) == 2 && kColumns % 2 == 0;
};

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
#ifdef ATLAS_TYPE_SQUARES_F32
             const types::squares* squares,
#endif
#ifdef ATLAS_TYPE_LARGEST_F32
             const types::temperature* temperature, const types::adjust* adjust,
             const types::n_top* n_top,
#endif
             types::out* out,
#ifdef ATLAS_TYPE_LARGEST_F32
             types::largest* largest_out, types::largest_id* largest_id,
#endif
             const int* n_rows, unsigned char* scratch) {
  atlas::launch_dependents();
#ifndef ATLAS_TYPE_SQUARES_F32
  const float* const squares = nullptr;
#endif
  const int rows = *n_rows;
  const auto* weights = reinterpret_cast<const unsigned char*>(weight);
  const Cluster cluster(shared_memory + launch::shared - kRest);
  Product product(shared_memory);
  if (product.is_producer()) {
    product.produce(weights, reinterpret_cast<const unsigned char*>(x), rows);
  } else {
    product.start_consumers();
#ifdef ATLAS_TYPE_LARGEST_F32
    const Largest largest(shared_memory + launch::shared - kOther, temperature, adjust, n_top,
                          largest_out, largest_id, rows);
#else
    const Largest largest;
#endif
    Factors factors(shared_memory + launch::shared - Factors::kBytes, squares, rows);
    const Sums shared(scratch, shared_memory, cluster);
    product.consume(weights, [&](int group, int pass, float (&sums)[kTogether][kN / 2]) {
      factors.settle();
      const int before = pass * kN, left = min(rows - before, kN);
      const Store store{bias, factors, largest, out, before, left, group};
      shared.finish(group, pass, sums, left, store);
    });
  }
}
