// The kernel of op normed_qkv_append: its .decode.cu files say what it computes and how it is
// launched.
#pragma once

#include "atlas/convert.cuh"
#include "atlas/decode_instance.cuh"
#include "atlas/instance.h"
#include "atlas/kv_tiles.cuh"
#include "atlas/row_factors.cuh"
#include "atlas/token_sums.cuh"

namespace {

using atlas::ceil_div;

constexpr int kHeadDim = constants::head_dim, kHalf = kHeadDim / 2;
constexpr int kQHeads = constants::n_heads, kKvHeads = constants::n_kv_heads;
constexpr int kColumns = (kQHeads + 2 * kKvHeads) * kHeadDim;
constexpr int kTiles = ceil_div(constants::k, atlas::kTileColumns);
constexpr int kBlocks = ceil_div(kColumns, atlas::kTileRows);
template <class Weights>
using SplitOf = atlas::InstanceSplit<Weights, kBlocks, kTiles, knobs::PAIRS != 0>;
// Whether a thread has tokens rather than weight rows: of row blocks that are a head each.
constexpr bool kByToken = atlas::kAlsoByToken && kHeadDim == atlas::kTileRows &&
                          atlas::kFitsTokenSums<SplitOf<atlas::InstanceWeights<kTiles> > >;
using Weights = atlas::InstanceWeights<kTiles, kByToken>;
constexpr int kN = Weights::kTokens;
using Split = SplitOf<Weights>;
using Cluster = atlas::ClusterSums<Split>;
using Sums = atlas::SharedSums<Split>;
using Factors = atlas::RowFactors<launch::max_rows, ceil_div(constants::k, atlas::kTileRows),
                                  Weights::kSides * atlas::kConsumers>;
static_assert(Split::kOfGroup == 1, "a group is a row block");
static_assert((kHeadDim == 64 || kHeadDim == 128) && constants::rotary_dim == kHeadDim,
              "a row block is whole heads, all of which turns");
static_assert(launch::block == atlas::decode_threads(Weights::kMovesRegisters),
              "consumers and those who copy");

// A warp has 16 columns of a row block; kPartner warps on are those that turn with them.
constexpr int kWarps = atlas::kConsumers / 32, kWarpColumns = atlas::kTileRows / kWarps;
constexpr int kHeadWarps = kHeadDim / kWarpColumns, kPartner = kHeadWarps / 2;
constexpr bool kNorms = HAS_Q_NORM || HAS_K_NORM;
constexpr int kOwn = Sums::kShared;
// Of every eight tokens: what a warp sends to its partner, of four of them, two columns a lane,
// and what every warp has of the tokens' squares.
constexpr int kSent = kOwn * 32 * 8, kPartials = kNorms ? 8 * kOwn * kWarps * 4 : 0;
// By token: a warp's eight tokens of a head, and scales of weight rows.
constexpr int kEightBytes = 8 * kHeadDim * 2;
constexpr int kExchange =
    kByToken ? kWarps * kEightBytes + atlas::kTileRows * 4 : kWarps * kSent + kPartials;
constexpr int kRest = kExchange + Factors::kBytes;
using Product = atlas::DecodeProduct<Split, launch::shared, kRest + Cluster::kBytes>;

extern __shared__ __align__(1024) unsigned char shared_memory[];

// What a head's elements are multiplied by, of the sum of their squares.
__device__ inline float norm_factor(float squares) {
  return 1.0f / sqrtf(fmaf(squares, 1.0f / static_cast<float>(kHeadDim), constants::eps));
}

// Norms, turns and stores finished sums. Of two warps whose columns turn together each takes one of
// every two tokens: a thread has columns c and c + kHalf of a token, for two c.
struct Store {
  static constexpr int kOwn = ::kOwn;

  const float *bias, *q_norm, *k_norm;
  const float2* turns;
  const int* places;
  const Factors& factors;
  __nv_bfloat16* q_out;
  unsigned char *k_cache, *v_cache;
  int before, rows, block;  // rows of earlier passes, and of this one

  template <int kCount>
  struct Fetched {
    float2 turns[kCount][2];  // cosine and sine
    int place[kCount];
    float norm[2][2];  // of columns c and c + kHalf
  };

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }
  // Which of two tokens this warp takes, and which half of a head it has columns of.
  __device__ static int half() { return warp() / kPartner % 2; }
  // The head that the warp has columns of, of q's, k's and v's, and its first column there below
  // kHalf.
  __device__ int head() const {
    return block * (atlas::kTileRows / kHeadDim) + warp() / kHeadWarps;
  }
  __device__ static int first_column() { return warp() % kPartner * kWarpColumns; }
  __device__ bool is_query() const { return head() < kQHeads; }
  __device__ bool is_key() const { return !is_query() && head() < kQHeads + kKvHeads; }
  __device__ static int token(int eight) { return 8 * eight + lane() % 4 * 2 + half(); }
  __device__ const float* norm() const {
    if (HAS_Q_NORM && is_query()) return q_norm;
    return HAS_K_NORM && is_key() ? k_norm : nullptr;
  }

  template <int kCount>
  __device__ Fetched<kCount> fetch(int start, int step) const {
    Fetched<kCount> found = {};
    const int column = first_column() + lane() / 4;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int row = token(start + n * step);
      if (row >= rows) continue;
      found.place[n] = places[before + row];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        found.turns[n][i] = turns[static_cast<size_t>(before + row) * kHalf + column + 8 * i];
      }
    }
    if constexpr (kNorms) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (norm()) found.norm[i / 2][i % 2] = norm()[column + 8 * (i / 2) + kHalf * (i % 2)];
      }
    }
    return found;
  }

  template <int kCount>
  __device__ void operator()(int start, int step, const float4 (&sums)[kCount][1],
                             const Fetched<kCount>& fetched) const {
    static_assert(kCount <= kOwn, "they have room");
    unsigned char* const shared = shared_memory + launch::shared - kRest;
    auto* const sent = reinterpret_cast<float2*>(shared) + lane();
    [[maybe_unused]] auto* const parts = reinterpret_cast<float*>(shared + kWarps * kSent);
    const int partner = warp() ^ kPartner;
    float kept[kCount][2];  // of the own token
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int row = 8 * min(start + n * step, kN / 8 - 1) + lane() % 4 * 2;
      const float2 factor = factors.two(before + row);
      float value[2][2] = {{__fmul_rn(sums[n][0].x, factor.x), __fmul_rn(sums[n][0].z, factor.x)},
                           {__fmul_rn(sums[n][0].y, factor.y), __fmul_rn(sums[n][0].w, factor.y)}};
      if constexpr (HAS_BIAS) {
        const int column = block * atlas::kTileRows + warp() * kWarpColumns + lane() / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (column + 8 * i >= kColumns) break;
          value[0][i] = __fadd_rn(value[0][i], bias[column + 8 * i]);
          value[1][i] = __fadd_rn(value[1][i], bias[column + 8 * i]);
        }
      }
      if constexpr (kNorms) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float square = fmaf(value[e][1], value[e][1], __fmul_rn(value[e][0], value[e][0]));
#pragma unroll
          for (int mask = 4; mask < 32; mask *= 2) {
            square += __shfl_xor_sync(0xFFFFFFFFu, square, mask);
          }
          if (lane() < 4) parts[(8 * n + lane() * 2 + e) * kWarps + warp()] = square;
        }
      }
      const bool second = half() != 0;
      kept[n][0] = second ? value[1][0] : value[0][0];
      kept[n][1] = second ? value[1][1] : value[0][1];
      sent[(warp() * kCount + n) * 32] =
          make_float2(second ? value[0][0] : value[1][0], second ? value[0][1] : value[1][1]);
    }
    barrier();
    // What the partner sent is read by this warp alone, which puts elements in its place.
    unsigned char* const staged = shared + partner * kCount * 32 * 8;
    float2 got[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) got[n] = sent[(partner * kCount + n) * 32];
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      float low[2], high[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float other = i == 0 ? got[n].x : got[n].y;
        low[i] = half() ? other : kept[n][i];
        high[i] = half() ? kept[n][i] : other;
      }
      if constexpr (kNorms) {
        if (norm()) {
          const float* const mine =
              parts + (8 * n + lane() % 4 * 2 + half()) * kWarps + warp() / kHeadWarps * kHeadWarps;
          float square = mine[0];
#pragma unroll
          for (int w = 1; w < kHeadWarps; ++w) square += mine[w];
          const float factor = norm_factor(square);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            low[i] = low[i] * factor * fetched.norm[i][0];
            high[i] = high[i] * factor * fetched.norm[i][1];
          }
        }
      }
      auto* const to =
          reinterpret_cast<__nv_bfloat16*>(staged + n * 256 + lane() % 4 * 64) + lane() / 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 turn = fetched.turns[n][i];
        const bool turns_by = is_query() || is_key();
        const float a = low[i], b = high[i];
        to[8 * i] = __float2bfloat16_rn(turns_by ? fmaf(a, turn.x, -__fmul_rn(b, turn.y)) : a);
        to[16 + 8 * i] = __float2bfloat16_rn(turns_by ? fmaf(b, turn.x, __fmul_rn(a, turn.y)) : b);
      }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      // Chunks of 16 bytes: 4 tokens x 2 halves x 2 of two eights.
      const int mine = n + lane() / 16, chunk = lane() % 16, of = chunk / 4;
      const int first = __shfl_sync(0xFFFFFFFFu, fetched.place[n], of);
      const int next =
          kCount > 1 ? __shfl_sync(0xFFFFFFFFu, fetched.place[min(n + 1, kCount - 1)], of) : 0;
      const int place = lane() < 16 ? first : next;
      const int row = 8 * (start + mine * step) + of * 2 + half();
      if (mine >= kCount || row >= rows || head() >= kQHeads + 2 * kKvHeads) continue;
      const int column = first_column() + chunk / 2 % 2 * kHalf + chunk % 2 * 8;
      *reinterpret_cast<uint4*>(target(before + row, place, column)) =
          *reinterpret_cast<const uint4*>(staged + mine * 256 + chunk * 16);
    }
    barrier();  // Whatever comes next writes where others may still read.
  }

  // Where eight elements from `column` on of the head of a row go.
  __device__ unsigned char* target(int row, int place, int column) const {
    if (is_query()) {
      return reinterpret_cast<unsigned char*>(
          q_out + (static_cast<size_t>(row) * kQHeads + head()) * kHeadDim + column);
    }
    const int kv_head = is_key() ? head() - kQHeads : head() - kQHeads - kKvHeads;
    constexpr int kPage = atlas::kv_page_bytes(kHeadDim);
    return (is_key() ? k_cache : v_cache) +
           atlas::kv_page_offset(place / atlas::kPageTokens, kv_head, kKvHeads, kPage) +
           atlas::in_page(place % atlas::kPageTokens, column);
  }

 private:
  __device__ static void barrier() { atlas::named_barrier(1, atlas::kConsumers); }
};

// The same of sums by token (token_sums.cuh): four lanes have a token's head, a thread both of each
// two columns that turn together.
template <class Split>
struct ByToken {
  using Sums = atlas::TokenSums<Split>;
  static constexpr int kEights = Sums::kEights, kTurning = kEights / 2, kChunks = kHeadDim / 8;
  const Store& store;

  __device__ void finish(const Weights& weights, const Cluster& cluster, unsigned char* scratch,
                         float (&sum)[kN / 2]) const {
    const int row = Sums::token();
    int place = 0;
    float4 turn[kTurning] = {};  // cosine and sine of two columns
    if (Sums::gives(store.rows) && row < store.rows) {
      place = store.places[row];
      if (turns()) {
#pragma unroll
        for (int j = 0; j < kTurning; ++j) {
          turn[j] = *reinterpret_cast<const float4*>(
              store.turns + static_cast<size_t>(row) * kHalf + Sums::column(j));
        }
      }
    }
    unsigned char* const rest = shared_memory + launch::shared - kRest;
    float value[kN / 4];
    Sums::trade(weights, cluster, rest + kWarps * kEightBytes, sum, value);
    if (!Sums::finish(scratch, store.rows, value)) return;
    scale(row, value);
    if constexpr (kNorms) norm(value);
    unsigned char* const staged = rest + threadIdx.x / 32 * kEightBytes;
#pragma unroll
    for (int j = 0; j < kTurning; ++j) {
      float low[2], high[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float a = value[2 * j + e], b = value[2 * (j + kTurning) + e];
        const float cosine = e == 0 ? turn[j].x : turn[j].z, sine = e == 0 ? turn[j].y : turn[j].w;
        low[e] = turns() ? fmaf(a, cosine, -__fmul_rn(b, sine)) : a;
        high[e] = turns() ? fmaf(b, cosine, __fmul_rn(a, sine)) : b;
      }
      put(staged, j, low);
      put(staged, j + kTurning, high);
    }
    __syncwarp();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = lane; i < 8 * kChunks; i += 32) {
      const int token = i / kChunks, chunk = i % kChunks, of = 8 * Sums::eight() + token;
      const int to = __shfl_sync(0xFFFFFFFFu, place, 4 * token);
      if (of >= store.rows) continue;
      *reinterpret_cast<uint4*>(store.target(of, to, 8 * chunk)) =
          *reinterpret_cast<const uint4*>(staged + at(token, chunk));
    }
  }

 private:
  __device__ bool turns() const { return store.is_query() || store.is_key(); }
  // Chunks of a token are permuted, so that eight tokens' do not meet in a bank.
  __device__ static int at(int token, int chunk) {
    return token * kHeadDim * 2 + (chunk ^ token) * 16;
  }
  __device__ static void put(unsigned char* staged, int j, const float (&two)[2]) {
    const int lane = threadIdx.x % 32;
    *reinterpret_cast<__nv_bfloat162*>(staged + at(lane / 4, j) + lane % 4 * 4) =
        __floats2bfloat162_rn(two[0], two[1]);
  }
  __device__ void scale(int row, float (&value)[kN / 4]) const {
    const float factor = store.factors.one(row);
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      value[i] = __fmul_rn(value[i], factor);
      if constexpr (HAS_BIAS) {
        value[i] = __fadd_rn(
            value[i], store.bias[store.block * atlas::kTileRows + Sums::column(i / 2) + i % 2]);
      }
    }
  }
  // In the order of Store: squares of 16 columns, then all.
  __device__ void norm(float (&value)[kN / 4]) const {
    const float* const weight = store.norm();
    if (weight == nullptr) return;
    float square = 0.0f;
#pragma unroll
    for (int w = 0; w < kEights / 2; ++w) {
      const float *first = value + 4 * w, *second = first + 2;
      float part = fmaf(second[0], second[0], __fmul_rn(first[0], first[0])) +
                   fmaf(second[1], second[1], __fmul_rn(first[1], first[1]));
      part += __shfl_xor_sync(0xFFFFFFFFu, part, 1);
      part += __shfl_xor_sync(0xFFFFFFFFu, part, 2);
      square = w == 0 ? part : square + part;
    }
    const float factor = norm_factor(square);
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(weight + Sums::column(j));
      value[2 * j] = value[2 * j] * factor * by.x;
      value[2 * j + 1] = value[2 * j + 1] * factor * by.y;
    }
  }
};

// A template, so that it is compiled only where sums are by token: nothing else fits TokenSums.
template <class Split>
__device__ inline void finish_by_token(const Store& store, const Weights& weights,
                                       const Cluster& cluster, unsigned char* scratch,
                                       float (&sum)[kN / 2]) {
  ByToken<Split>{store}.finish(weights, cluster, scratch, sum);
}

}  // namespace

ATLAS_KERNEL(const types::x* x, const types::weight* weight, const types::bias* bias,
             const types::squares* squares, const types::q_norm* q_norm,
             const types::k_norm* k_norm, const types::turns* turns, const types::places* places,
             types::q_out* q_out, types::k_cache* k_cache, types::v_cache* v_cache,
             const int* n_rows, const int* /*blocks*/, unsigned char* scratch) {
  atlas::launch_dependents();
  const int rows = *n_rows;
  const auto* weights = reinterpret_cast<const unsigned char*>(weight);
  const Cluster cluster(shared_memory + launch::shared - kRest - Cluster::kBytes);
  Product product(shared_memory);
  if (product.is_producer()) {
    product.produce(weights, reinterpret_cast<const unsigned char*>(x), rows);
  } else {
    product.start_consumers();
    Factors factors(shared_memory + launch::shared - Factors::kBytes, squares, rows);
    const Sums shared(scratch, shared_memory, cluster);
    const auto store = [&](int group, int pass) {
      return Store{bias,
                   q_norm,
                   k_norm,
                   reinterpret_cast<const float2*>(turns),
                   places,
                   factors,
                   q_out,
                   reinterpret_cast<unsigned char*>(k_cache),
                   reinterpret_cast<unsigned char*>(v_cache),
                   pass * kN,
                   min(rows - pass * kN, kN),
                   group};
    };
    const auto early = Sums::early(store(product.first_group(), 0));
    product.consume(weights, [&](int group, int pass, float (&sums)[1][kN / 2]) {
      factors.settle();
      const Store give = store(group, pass);
      if constexpr (kByToken) {
        finish_by_token<Split>(give, product.weights(), cluster, scratch, sums[0]);
      } else {
        shared.finish(group, pass, sums, give.rows, give, early);
      }
    });
  }
}
