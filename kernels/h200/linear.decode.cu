/* atlas
[launch]
grid = ["multiprocessors", 1, 1]
block = "288 + max_rows // 256 * 96"
shared = "(112 + max_rows // 256 * 112) * 1024"
resident = "1 + min(1, 64 // max_rows)"
pdl = true
[rows]
up_to = [8, 16, 32, 64, 128, 256]
[serves]
x = ["bf16", "f8g128"]
weight = ["bf16", "f8g128"]
[scratch]
bytes = "multiprocessors * (2 * 512 * max_rows + 4) + 256"
[knobs]
THREAD_BLOCKS = "multiprocessors"
[layouts]
x = "tiles"
weight = "tiles"
*/
// linear for steps of 1..256 rows: out[r, n] = sum over k of x[r, k] * weight[n, k] + bias[n].
//
// x and weight in `tiles` (tiles.cuh), both bf16 or both f8g128; out row-major, f32 or bf16; bias
// [n] f32 or none. Weights are wgmma's A, 128 rows a thread block, and rows of x its N, so that no
// part of an instruction is spent on rows that are not there.
//
// Split of work: every multiprocessor has one thread block and an equal share of the stream of
// weights (decode_product.cuh). Column blocks that lie within a share are stored from registers,
// those that several shares have a part of go through scratch (shared_sums.cuh). Shares depend on
// the shape alone: a row's bits are the same whatever the number of rows.
//
// Bytes: n x k weights once, x once a thread block (from the L2 cache; from SHARE_FROM rows on,
// once for two). Bound by the stream of weights up to 64 rows; above, by the cache's bandwidth and
// the tensor cores. Shared memory leaves room for the next launch's thread block, whose ring fills
// meanwhile.
#include "atlas/convert.cuh"
#include "atlas/instance.h"
#include "atlas/shared_sums.cuh"

namespace {

using atlas::ceil_div;

constexpr int kN = launch::max_rows, kColumns = constants::n;
#ifdef ATLAS_TYPE_WEIGHT_F8G128
using Weights = atlas::F8Weights<kN>;
constexpr int kTiles = ceil_div(constants::k, 128);
#else
static_assert(atlas::same_type<types::weight, __nv_bfloat16> &&
                  atlas::same_type<types::x, __nv_bfloat16>,
              "x and weight are both bf16 or both f8g128");
using Weights = atlas::Bf16Weights<kN>;
constexpr int kTiles = ceil_div(constants::k, 64);
#endif
constexpr int kBlocks = ceil_div(kColumns, atlas::kTileRows);
using Split = atlas::DecodeSplit<Weights, kN, kBlocks, kTiles, 1, knobs::THREAD_BLOCKS>;
using Product = atlas::DecodeProduct<Split, launch::shared>;
using Sums = atlas::SharedSums<Split, 2>;
static_assert(launch::block == atlas::decode_threads(kN), "consumers and those who copy");

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Sums of tokens 8 j .. as a thread of `warp` holds them. Eight lanes store 32 bytes of a row.
struct Store {
  const float* bias;
  types::out* out;
  int rows;

  __device__ void operator()(int block, int j, int warp, float4 four) const {
    const float sums[4] = {four.x, four.y, four.z, four.w};
    const int lane = threadIdx.x % 32, row = 8 * j + lane % 4 * 2;
    const int column = block * atlas::kTileRows + 16 * warp + lane / 4;
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

ATLAS_KERNEL(const types::x* __restrict__ x, const types::weight* __restrict__ weight,
             const types::bias* __restrict__ bias, types::out* __restrict__ out, const int* n_rows,
             unsigned char* __restrict__ scratch) {
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
        store(group, j, threadIdx.x / 32, make_float4(four[0], four[1], four[2], four[3]));
      }
    });
    const int first = product.first_group(), last = product.last_group();
    for (int group = first; group <= last; group = group < last ? last : last + 1) {
      if (!product.shares(group)) continue;
      shared.finish(group, 0, rows,
                    [&](int j, int warp, float4 sums) { store(group, j, warp, sums); });
    }
    shared.leave();
  }
}
