// The kernel of op residual_linear: its .decode.cu files say what it computes and how it is
// launched.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/decode_instance.cuh"
#include "atlas/f8_group.cuh"
#include "atlas/instance.h"
#include "atlas/token_sums.cuh"

namespace {

using atlas::ceil_div;

constexpr int kColumns = constants::n, kTiles = ceil_div(constants::k, atlas::kTileColumns);
constexpr int kBlocks = ceil_div(kColumns, atlas::kTileRows);
template <class Weights>
using SplitOf = atlas::InstanceSplit<Weights, kBlocks, kTiles, knobs::PAIRS != 0>;
// Whether a thread has tokens rather than weight rows: of whole row blocks.
constexpr bool kByToken = atlas::kAlsoByToken && kColumns % atlas::kTileRows == 0 &&
                          atlas::kFitsTokenSums<SplitOf<atlas::InstanceWeights<kTiles> > >;
using Weights = atlas::InstanceWeights<kTiles, kByToken>;
constexpr int kN = Weights::kTokens;
using Split = SplitOf<Weights>;
using Cluster = atlas::ClusterSums<Split>;
using Sums = atlas::SharedSums<Split>;
constexpr bool kF8Out = atlas::same_type<types::out, unsigned char>;
static_assert(Split::kOfGroup == 1, "a group is a row block");
static_assert(launch::block == atlas::decode_threads(Weights::kMovesRegisters),
              "consumers and those who copy");

// A warp has 16 columns of a row block: one or two of the 16-byte chunks of a row of tiles.
constexpr int kWarps = atlas::kConsumers / 32, kWarpColumns = atlas::kTileRows / kWarps;
constexpr int kChunks = kF8Out ? 1 : 2, kChunkBytes = 16;
constexpr int kOutTiles = ceil_div(kColumns, kF8Out ? 128 : 64);
// Eights of tokens that are stored at a time. Of each token: what every warp has of its squares and
// of its largest magnitude, and the elements of out, so that whole chunks are stored.
constexpr int kOwn = Sums::kShared;
constexpr int kPartials = 8 * kOwn * kWarps * 4;
constexpr int kStaged = 8 * kOwn * kChunks * kChunkBytes;
// By token: a warp stores eight tokens, and needs the scales of weight rows.
constexpr int kEightBytes = 8 * atlas::kTileRows * (kF8Out ? 1 : 2);
constexpr int kRest = kByToken ? kWarps * kEightBytes + atlas::kTileRows * 4
                               : (kF8Out ? 2 : 1) * kPartials + kWarps * kStaged;
static_assert(8 * kOwn <= 32, "a lane for each token");
using Product = atlas::DecodeProduct<Split, launch::shared, kRest + Cluster::kBytes>;

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Adds finished sums to the residual stream and stores it, what it is times the next norm's weight,
// and the share that the row block's squares have in each row's mean square.
struct Store {
  static constexpr int kOwn = ::kOwn;

  const float *bias, *norm;
  float eps, scale;
  float *residual, *squares;  // of the pass's first row, as is the row of tiles
  unsigned char* out;
  int rows, block;

  template <int kCount>
  struct Fetched {
    float residual[kCount][2][2], norm[2], bias[2];  // by column, token
  };

  __device__ int first_column() const {
    return block * atlas::kTileRows + threadIdx.x / 32 * kWarpColumns + threadIdx.x % 32 / 4;
  }
  __device__ static bool exists(int column) {
    return kColumns % atlas::kTileRows == 0 || column < kColumns;
  }
  __device__ static int first_token() { return threadIdx.x % 4 * 2; }

  template <int kCount>
  __device__ Fetched<kCount> fetch(int start, int step) const {
    Fetched<kCount> found = {};
    const int column = first_column();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!exists(column + 8 * i)) break;
      found.norm[i] = norm[column + 8 * i];
      if constexpr (HAS_BIAS) found.bias[i] = bias[column + 8 * i];
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = 8 * (start + n * step) + first_token() + e;
          if (row < rows) found.residual[n][i][e] = residual[at(row, column + 8 * i)];
        }
      }
    }
    return found;
  }

  template <int kCount>
  __device__ void operator()(int start, int step, const float4 (&sums)[kCount][1],
                             const Fetched<kCount>& fetched) const {
    static_assert(kCount <= kOwn, "they have room");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* const shared = shared_memory + launch::shared - kRest;
    auto* const parts = reinterpret_cast<float*>(shared);  // by token and warp
    [[maybe_unused]] auto* const largest = reinterpret_cast<unsigned*>(shared + kPartials);
    unsigned char* const staged = shared + kRest - (kWarps - warp) * kStaged;
    const int column = first_column();
    float value[kCount][2][2];  // by column, token
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float four[2][2] = {{sums[n][0].x, sums[n][0].y}, {sums[n][0].z, sums[n][0].w}};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * (start + n * step) + first_token() + e;
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sum = HAS_BIAS ? __fadd_rn(four[i][e], fetched.bias[i]) : four[i][e];
          const float added = fmaf(scale, sum, fetched.residual[n][i][e]);
          const bool there = exists(column + 8 * i);
          if (there && row < rows) residual[at(row, column + 8 * i)] = added;
          value[n][i][e] = there ? __fmul_rn(added, fetched.norm[i]) : 0.0f;
          square = there ? fmaf(added, added, square) : square;
        }
        unsigned magnitude =
            max(atlas::magnitude_bits(value[n][0][e]), atlas::magnitude_bits(value[n][1][e]));
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          square += __shfl_xor_sync(0xFFFFFFFFu, square, mask);
          if constexpr (kF8Out) {
            magnitude = max(magnitude, __shfl_xor_sync(0xFFFFFFFFu, magnitude, mask));
          }
        }
        if (lane < 4) {
          const int place = (8 * n + first_token() + e) * kWarps + warp;
          parts[place] = square;
          if constexpr (kF8Out) largest[place] = magnitude;
        }
      }
    }
    barrier();
    // A lane has one token of those of all warps.
    const int eight = start + lane / 8 * step, row = 8 * eight + lane % 8;
    const bool mine = lane < 8 * kCount && row < rows;
    float factor = 1.0f;
    if constexpr (kF8Out) {
      unsigned most = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = max(most, mine ? largest[lane * kWarps + w] : 0);
      const atlas::F8Group scaled(most);
      factor = scaled.used ? scaled.factor : -1.0f;
      if (warp == 0 && mine) {
        *reinterpret_cast<float*>(out + atlas::tile_offset<true>(0, block, kOutTiles) +
                                  atlas::kTileBytes + row * 4) = scaled.scale;
      }
    }
    if (warp == kWarps - 1 && mine) {
      float square = parts[lane * kWarps];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) square += parts[lane * kWarps + w];
      squares[static_cast<size_t>(row) * kBlocks + block] =
          fmaf(square, 1.0f / kColumns, eps * (1.0f / kBlocks));
    }
    stage(value, factor, staged);
    __syncwarp();
#pragma unroll
    for (int first = 0; first < 8 * kCount * kChunks; first += 32) {
      const int chunk = first + lane, token = chunk / kChunks;
      if (chunk >= 8 * kCount * kChunks) break;
      const int to = 8 * (start + token / 8 * step) + token % 8;
      const int tile_chunk = block * (8 * kChunks) + warp * kChunks + chunk % kChunks;
      if (to >= rows || tile_chunk >= 8 * kOutTiles) continue;
      *reinterpret_cast<uint4*>(out + atlas::tile_offset<kF8Out>(0, tile_chunk / 8, kOutTiles) +
                                atlas::in_tile(to, tile_chunk % 8 * kChunkBytes)) =
          *reinterpret_cast<const uint4*>(staged + chunk * kChunkBytes);
    }
    barrier();  // Whatever comes next writes where others may still read.
  }

 private:
  __device__ static void barrier() { atlas::named_barrier(1, atlas::kConsumers); }
  __device__ static size_t at(int row, int column) {
    return static_cast<size_t>(row) * kColumns + column;
  }

  // Elements of this warp's columns, chunk by chunk. `factor`: of the token that a lane has.
  template <int kCount>
  __device__ static void stage(const float (&value)[kCount][2][2], float factor,
                               unsigned char* staged) {
    const int column = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = 8 * n + first_token() + e;
        unsigned char* const to = staged + token * kChunks * kChunkBytes;
        if constexpr (kF8Out) {
          const float by = __shfl_sync(0xFFFFFFFFu, factor, token);
          const unsigned codes = __nv_cvt_float2_to_fp8x2(
              make_float2(value[n][0][e] * by, value[n][1][e] * by), __NV_SATFINITE, __NV_E4M3);
          to[column] = by < 0.0f ? 0 : codes & 0xFF;
          to[column + 8] = by < 0.0f ? 0 : codes >> 8;
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            reinterpret_cast<types::out*>(to)[column + 8 * i] =
                atlas::from_float<types::out>(value[n][i][e]);
          }
        }
      }
    }
  }
};

// The same of sums by token (token_sums.cuh).
template <class Split>
struct ByToken {
  using Sums = atlas::TokenSums<Split>;
  static constexpr int kEights = Sums::kEights;

  const float *bias, *norm;
  float eps, scale;
  float *residual, *squares;
  unsigned char *out, *scratch;
  int rows, block;

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ int column(int j) const { return block * atlas::kTileRows + Sums::column(j); }

  __device__ void finish(const Weights& weights, const Cluster& cluster,
                         float (&sum)[kN / 2]) const {
    const int row = Sums::token();
    float2 before[kEights] = {}, factor[kEights] = {};
    if (Sums::gives(rows) && row < rows) {
#pragma unroll
      for (int j = 0; j < kEights; ++j) before[j] = *reinterpret_cast<const float2*>(at(row, j));
    }
    float all[kN / 4];
    Sums::trade(weights, cluster, rest() + kWarps * kEightBytes, sum, all);
    if (Sums::gives(rows)) {
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        factor[j] = *reinterpret_cast<const float2*>(norm + column(j));
      }
    }
    if (Sums::finish(scratch, rows, all)) give(row, all, before, factor);
  }

 private:
  __device__ static unsigned char* rest() { return shared_memory + launch::shared - kRest; }
  __device__ float* at(int row, int j) const {
    return residual + static_cast<size_t>(row) * kColumns + column(j);
  }

  __device__ void give(int row, float (&value)[kN / 4], const float2 (&before)[kEights],
                       const float2 (&factor)[kEights]) const {
    unsigned most = 0;
    float square = 0.0f;
#pragma unroll
    for (int w = 0; w < kEights / 2; ++w) {  // in the order of Store: 16 columns, then all
      float part[2] = {};
#pragma unroll
      for (int j = 2 * w; j < 2 * w + 2; ++j) {
        float added[2] = {value[2 * j], value[2 * j + 1]};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if constexpr (HAS_BIAS) added[e] = __fadd_rn(added[e], bias[column(j) + e]);
          added[e] = fmaf(scale, added[e], e == 0 ? before[j].x : before[j].y);
          part[e] = fmaf(added[e], added[e], part[e]);
          value[2 * j + e] = __fmul_rn(added[e], e == 0 ? factor[j].x : factor[j].y);
          most = max(most, atlas::magnitude_bits(value[2 * j + e]));
        }
        if (row < rows) *reinterpret_cast<float2*>(at(row, j)) = make_float2(added[0], added[1]);
      }
      float all = part[0] + part[1];
      all += __shfl_xor_sync(0xFFFFFFFFu, all, 1);
      all += __shfl_xor_sync(0xFFFFFFFFu, all, 2);
      square = w == 0 ? all : square + all;
    }
    if (lane() % 4 == 0 && row < rows) {
      squares[static_cast<size_t>(row) * kBlocks + block] =
          fmaf(square, 1.0f / kColumns, eps * (1.0f / kBlocks));
    }
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    unsigned char* const staged = rest() + threadIdx.x / 32 * kEightBytes;
    if constexpr (kF8Out) {
      const atlas::F8Group group(most);
      if (lane() % 4 == 0 && row < rows) {
        *reinterpret_cast<float*>(out + atlas::tile_offset<true>(0, block, kOutTiles) +
                                  atlas::kTileBytes + row * 4) = group.scale;
      }
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        *reinterpret_cast<unsigned short*>(staged + atlas::in_tile(lane() / 4, Sums::column(j))) =
            group.codes(value[2 * j], value[2 * j + 1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        *reinterpret_cast<__nv_bfloat162*>(
            staged + j / 8 * (kEightBytes / 2) +
            atlas::in_tile(lane() / 4, 16 * (j % 8) + lane() % 4 * 4)) =
            __floats2bfloat162_rn(value[2 * j], value[2 * j + 1]);
      }
    }
    atlas::publish_to_async_proxy();
    __syncwarp();
    constexpr int kOfBlock = kF8Out ? 1 : 2, kBytes = kEightBytes / kOfBlock;
    if (lane() < kOfBlock) {
      atlas::bulk_store(out + atlas::tile_offset<kF8Out>(0, block * kOfBlock + lane(), kOutTiles) +
                            Sums::eight() * kBytes,
                        staged + lane() * kBytes, min(8, rows - 8 * Sums::eight()) * (kBytes / 8));
      atlas::bulk_commit();
      atlas::bulk_wait<0>();
    }
  }
};

// A template, so that it is compiled only where sums are by token: nothing else fits TokenSums.
template <class Split>
__device__ inline void finish_by_token(const Store& store, unsigned char* scratch,
                                       const Weights& weights, const Cluster& cluster,
                                       float (&sum)[kN / 2]) {
  const ByToken<Split> by_token{store.bias,    store.norm, store.eps, store.scale, store.residual,
                                store.squares, store.out,  scratch,   store.rows,  store.block};
  by_token.finish(weights, cluster, sum);
}

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             types::residual* residual, const types::norm* norm, types::out* out,
             types::squares* squares, const int* n_rows, float eps, float scale,
             unsigned char* scratch) {
  atlas::launch_dependents();
  const int rows = *n_rows;
  const auto* weights = reinterpret_cast<const unsigned char*>(weight);
  const Cluster cluster(shared_memory + launch::shared - kRest - Cluster::kBytes);
  Product product(shared_memory);
  if (product.is_producer()) {
    product.produce(weights, reinterpret_cast<const unsigned char*>(x), rows);
  } else {
    product.start_consumers();
    const Sums shared(scratch, shared_memory, cluster);
    const auto store = [&](int group, int pass) {
      const int before = pass * kN;
      auto* tiles =
          reinterpret_cast<unsigned char*>(out) + atlas::tile_offset<kF8Out>(pass, 0, kOutTiles);
      return Store{bias,
                   norm,
                   eps,
                   scale,
                   residual + static_cast<size_t>(before) * kColumns,
                   squares + static_cast<size_t>(before) * kBlocks,
                   tiles,
                   min(rows - before, kN),
                   group};
    };
    const auto early = Sums::early(store(product.first_group(), 0));
    product.consume(weights, [&](int group, int pass, float (&sums)[1][kN / 2]) {
      const Store give = store(group, pass);
      if constexpr (kByToken) {
        finish_by_token<Split>(give, scratch, product.weights(), cluster, sums[0]);
      } else {
        shared.finish(group, pass, sums, give.rows, give, early);
      }
    });
  }
}
