/* atlas
[layouts]
gate_up = "panel16"
down = "panel16"
[levels]
also = ["avx512vnni"]
*/
// moe_mlp: out[r] = sum over j of weight[r, j] * down_e (act(gate_e x[r]) * up_e x[r]), where e is
// the row's j-th expert.
//
// Layout: gate_up stacks every expert's [gate; up], [n_experts * 2 * intermediate, hidden], and
// down
//   every expert's rows, both in panels of 16 rows ("panel16"); an expert may begin within a panel.
// Shapes: any. Experts that no row chose are not read.
// Order: products as in product.h; the activated values are rounded to the type of x, as they enter
//   a product; the experts of a row are added in the order of j. So a row's result depends neither
//   on the other rows, nor on how they share experts, nor on workers.
// Passes, over up to 64 rows at a time, with a barrier after each of the first two: activated
// values
//   of all (row, expert) pairs; their products with down; the weighted sums. Pairs are sorted by
//   expert, so that an expert's rows lie together and share every weight that is read.
// Work split: (expert, 64 columns) weighted by the expert's rows; sums by (row, 16 columns).
// Bytes: 3 * hidden * intermediate weights per expert that 64 rows choose.
// Bound: memory (weights) up to some 7 rows an expert, FMA units above.
#include "atlas/activation.h"
#include "atlas/product.h"

namespace atlas {
namespace {

constexpr int64_t kChunkRows = kBlockRows;  // a row has an expert at most once
constexpr int64_t kColumns = 64;
constexpr int64_t kWide = kColumns + 2 * kLanes;  // columns of the panels that hold them

// Memory handed out piece by piece, each on a cache line of its own.
struct Carver {
  std::byte* at;
  template <class T>
  ATLAS_INLINE T* take(int64_t count) {
    auto* piece = reinterpret_cast<T*>(at);
    at += ceil_div(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
    return piece;
  }
};

template <class X, class Weight>
struct Moe {
  int64_t n_experts, top_k, hidden, intermediate;
  // Private to a worker.
  int32_t *begin, *pair_row, *place;  // first pair of each expert; row of a pair; pair of (row, j)
  X* gathered;                        // an expert's rows of x
  float *gate, *up;                   // kChunkRows x kWide
  Scratch scratch;
  // Shared.
  X* activated;     // [pairs, intermediate]
  float* products;  // [pairs, hidden]

  explicit Moe(const CpuLaunch& launch)
      : n_experts(launch.integer(0)),
        top_k(launch.integer(1)),
        hidden(launch.integer(2)),
        intermediate(launch.integer(3)) {}

  size_t lay_out_private(std::byte* memory) {
    Carver carver = {memory};
    begin = carver.take<int32_t>(n_experts + 1);
    pair_row = carver.take<int32_t>(kChunkRows * top_k);
    place = carver.take<int32_t>(kChunkRows * top_k);
    gathered = carver.take<X>(kChunkRows * hidden);
    gate = carver.take<float>(kChunkRows * kWide);
    up = carver.take<float>(kChunkRows * kWide);
    scratch.sums = carver.take<float>(kBlockRows * kSumsStride);
    scratch.weight_copy = carver.take<float>(kWeightCopy);
    scratch.x_copy = carver.take<float>(kChunkRows * max64(hidden, intermediate));
    return static_cast<size_t>(carver.at - memory);
  }
  size_t lay_out_shared(std::byte* memory) {
    Carver carver = {memory};
    activated = carver.take<X>(kChunkRows * top_k * intermediate);
    products = carver.take<float>(kChunkRows * top_k * hidden);
    return static_cast<size_t>(carver.at - memory);
  }

  int64_t count(int64_t expert) const { return begin[expert + 1] - begin[expert]; }

  // Sorts the pairs of `rows` rows by expert, then by row; every worker for itself.
  void sort(const int32_t* ids, int64_t rows) {
    for (int64_t e = 0; e <= n_experts; ++e) begin[e] = 0;
    for (int64_t i = 0; i < rows * top_k; ++i) ++begin[ids[i]];
    for (int64_t e = 0, sum = 0; e <= n_experts; ++e) {
      sum += begin[e];
      begin[e] = static_cast<int32_t>(sum);  // the end of e's pairs; counted down to their begin
    }
    for (int64_t i = rows * top_k - 1; i >= 0; --i) {
      place[i] = --begin[ids[i]];
      pair_row[place[i]] = static_cast<int32_t>(i / top_k);
    }
  }

  // Calls body(expert, columns) for this worker's part of all experts' `width` columns, which go in
  // pieces of kColumns. A piece costs its weights, as much as about 8 rows of arithmetic, and its
  // rows.
  template <class Body>
  void for_pieces(const CpuLaunch& launch, int64_t width, const Body& body) const {
    const int64_t pieces = ceil_div(width, kColumns);
    const auto cost = [&](int64_t e) { return count(e) == 0 ? 0 : count(e) + 8; };
    int64_t total = 0;
    for (int64_t e = 0; e < n_experts; ++e) total += cost(e) * pieces;
    const Range mine = partition(launch, total);
    int64_t at = 0;  // of the expert's first piece, on a line of all pieces by their cost
    for (int64_t e = 0; e < n_experts; at += cost(e++) * pieces) {
      if (count(e) == 0) continue;
      // A piece belongs to the share in which it begins.
      const auto before = [&](int64_t cut) {
        return min64(pieces, ceil_div(max64(0, cut - at), cost(e)));
      };
      for (int64_t piece = before(mine.begin); piece < before(mine.end); ++piece) {
        body(e, Range{piece * kColumns, min64(width, (piece + 1) * kColumns)});
      }
    }
  }

  // Rows times rows [columns.begin, columns.end) of the stacked weight. Returns where the result's
  // first column is in `to`, whose rows are kWide apart.
  template <class Element>
  const float* multiply(const Element* x, int64_t rows, const Weight* weight, Range columns,
                        int64_t k, float* to) const {
    const int64_t first = columns.begin / kLanes;
    const int64_t panels = ceil_div(columns.end, kLanes) - first;
    const int64_t panel_elements = ceil_div(k, kLaneK<Weight>) * kLaneK<Weight> * kLanes;
    multiply_block(x, rows, weight + first * panel_elements, nullptr, {0, panels}, kWide, k,
                   scratch, to);
    return to + columns.begin % kLanes;
  }

  // `rows` rows as tiles read them.
  const TileX<X>* tiled(const X* rows, int64_t n, int64_t k) const {
    return tile_x(rows, n, k, reinterpret_cast<TileX<X>*>(scratch.x_copy));
  }

  template <class Activation>
  void activate(const CpuLaunch& launch, const X* x, const Weight* gate_up, Activation activation) {
    int64_t loaded = -1;
    const TileX<X>* from = nullptr;
    for_pieces(launch, intermediate, [&](int64_t e, Range columns) {
      const int64_t rows = count(e), base = e * 2 * intermediate;
      if (loaded != e) {
        for (int64_t r = 0; r < rows; ++r) {
          __builtin_memcpy(gathered + r * hidden, x + pair_row[begin[e] + r] * hidden,
                           static_cast<size_t>(hidden) * sizeof(X));
        }
        from = tiled(gathered, rows, hidden);
        loaded = e;
      }
      const Range gates = {base + columns.begin, base + columns.end};
      const Range ups = {gates.begin + intermediate, gates.end + intermediate};
      const float* g = multiply(from, rows, gate_up, gates, hidden, gate);
      const float* u = multiply(from, rows, gate_up, ups, hidden, up);
      for (int64_t r = 0; r < rows; ++r, g += kWide, u += kWide) {
        X* to = activated + (begin[e] + r) * intermediate + columns.begin;
        for_lanes(columns.end - columns.begin, [&](int64_t i, auto n) {
          store(to + i, activation(load(g + i, n)) * load(u + i, n), n);
        });
      }
    });
  }

  void project(const CpuLaunch& launch, const Weight* down) {
    int64_t loaded = -1;
    const TileX<X>* from = nullptr;
    for_pieces(launch, hidden, [&](int64_t e, Range columns) {
      const int64_t rows = count(e), base = e * hidden;
      if (loaded != e) from = tiled(activated + begin[e] * intermediate, rows, intermediate);
      loaded = e;
      const Range outputs = {base + columns.begin, base + columns.end};
      const float* y = multiply(from, rows, down, outputs, intermediate, gate);
      for (int64_t r = 0; r < rows; ++r, y += kWide) {
        float* to = products + (begin[e] + r) * hidden + columns.begin;
        for_lanes(columns.end - columns.begin,
                  [&](int64_t i, auto n) { store(to + i, load(y + i, n), n); });
      }
    });
  }

  void add_up(const CpuLaunch& launch, const float* weights, int64_t rows, float* out) const {
    partition_2d(launch, rows, hidden, kLanes, [&](int64_t row, int64_t first, int64_t last) {
      for_lanes(last - first, [&](int64_t i, auto n) {
        F32x16 total = zero();
        for (int64_t j = row * top_k; j < (row + 1) * top_k; ++j) {
          total = total + splat(weights[j]) * load(products + place[j] * hidden + first + i, n);
        }
        store(out + row * hidden + first + i, total, n);
      });
    });
  }
};

template <class X, class Weight>
void moe_mlp(const CpuLaunch& launch) {
  const auto* x = launch.operand<const X>(0);
  const auto* gate_up = launch.operand<const Weight>(1);
  const auto* down = launch.operand<const Weight>(2);
  const auto* expert_id = launch.operand<const int32_t>(3);
  const auto* expert_weight = launch.operand<const float>(4);
  auto* out = launch.operand<float>(5);
  Moe<X, Weight> moe(launch);
  moe.lay_out_private(launch.scratch);
  moe.lay_out_shared(launch.shared);

  for (int64_t first = 0; first < launch.dims[0]; first += kChunkRows) {
    const int64_t rows = min64(kChunkRows, launch.dims[0] - first);
    moe.sort(expert_id + first * moe.top_k, rows);
    with_activation(launch.integer(4), [&](auto activation) {
      moe.activate(launch, x + first * moe.hidden, gate_up, activation);
    });
    launch.wait_for_others();
    moe.project(launch, down);
    launch.wait_for_others();
    moe.add_up(launch, expert_weight + first * moe.top_k, rows, out + first * moe.hidden);
  }
}

template <class X>
size_t scratch(const CpuLaunch& launch) {
  return Moe<X, X>(launch).lay_out_private(nullptr);
}
template <class X>
size_t shared(const CpuLaunch& launch) {
  return Moe<X, X>(launch).lay_out_shared(nullptr);
}

ATLAS_CPU_KERNEL("moe_mlp.x_f32.gate_up_f32.down_f32", moe_mlp<float, float>, scratch<float>,
                 shared<float>);
ATLAS_CPU_KERNEL("moe_mlp.x_f32.gate_up_bf16.down_bf16", moe_mlp<float, Bf16>, scratch<float>,
                 shared<float>);
ATLAS_CPU_KERNEL("moe_mlp.x_bf16.gate_up_bf16.down_bf16", moe_mlp<Bf16, Bf16>, scratch<Bf16>,
                 shared<Bf16>);

}  // namespace
}  // namespace atlas
