// The parts of attention: inner products over blocks of 16 tokens in two arithmetics, the softmax
// of a stretch of tokens, and the tile of queries that go through a context together.
//
// Both arithmetics work on steps of one element per query and one vector per 16 results: `Wide`
// multiplies fp32 numbers one at a time; `Pairs`, where the CPU has them, multiplies bf16 numbers
// two at a time and sums in fp32. A query's result is one chain of steps in a fixed order, whatever
// else is computed beside it.
#pragma once

#include "atlas/partition.h"
#include "atlas/simd.h"
#include "atlas/transpose.h"

namespace atlas {
namespace {  // one copy per file and level: see kernel.h

constexpr int64_t kBlockSize = 16;
static_assert(kBlockSize == kLanes, "a block's scores are one vector");

// Queries x blocks of scores, and queries x vectors of values, whose sums fit the registers.
#if defined(__AVX512F__)
constexpr int kScoreQueries = 6, kScoreBlocks = 2, kValueQueries = 4, kValueVectors = 4;
#elif defined(__AVX2__)
constexpr int kScoreQueries = 4, kScoreBlocks = 1, kValueQueries = 2, kValueVectors = 2;
#elif defined(__aarch64__)
constexpr int kScoreQueries = 4, kScoreBlocks = 1, kValueQueries = 2, kValueVectors = 2;
#else
constexpr int kScoreQueries = 2, kScoreBlocks = 1, kValueQueries = 1, kValueVectors = 2;
#endif

// Rows [begin, end) of a block of `dim` columns as vectors of `padded`; all others are zero.
template <class T>
struct BlockRows {
  const T* block;
  int64_t dim, begin, end;

  ATLAS_INLINE const T* row(int64_t t) const { return block + t * dim; }
  ATLAS_INLINE bool holds(int64_t t) const { return begin <= t && t < end; }
};

struct Wide {
  using Element = float;
  using Vector = F32x16;
  static constexpr int kPerStep = 1;
  static constexpr int64_t kPadding = kLanes;

  static ATLAS_INLINE Vector vector(const Element* from) { return load(from); }
  static ATLAS_INLINE F32x16 step(F32x16 sum, Element element, Vector v) {
    return sum + splat(element) * v;
  }
  template <class T>
  static ATLAS_INLINE void query(const T* from, int64_t dim, int64_t padded, Element* to) {
    for_lanes(dim, [&](int64_t i, auto count) { store(to + i, load(from + i, count)); });
    for (int64_t i = ceil_div(dim, kLanes) * kLanes; i < padded; i += kLanes) store(to + i, zero());
  }
  // to[column][token].
  template <class T>
  static ATLAS_INLINE void keys(const T* block, int64_t dim, Element* to) {
    for (int64_t i = 0; i < dim; i += kLanes) {
      F32x16 rows[kBlockSize];
      if (i + kLanes <= dim) {
        for (int t = 0; t < kBlockSize; ++t) rows[t] = load(block + t * dim + i);
      } else {
        for (int t = 0; t < kBlockSize; ++t) rows[t] = load(block + t * dim + i, dim - i);
      }
      transpose(rows);
      for (int j = 0; j < kLanes; ++j) store(to + (i + j) * kLanes, rows[j]);
    }
  }
  // to[token][column].
  template <class T>
  static ATLAS_INLINE const Element* values(const BlockRows<T>& from, int64_t padded, Element* to) {
    if constexpr (sizeof(T) == sizeof(Element)) {
      if (padded == from.dim && from.begin == 0 && from.end == kBlockSize) return from.block;
    }
    for (int64_t t = 0; t < kBlockSize; ++t) {
      for_lanes(from.dim, [&](int64_t i, auto count) {
        store(to + t * padded + i, from.holds(t) ? load(from.row(t) + i, count) : zero());
      });
    }
    return to;
  }
  // Weights of 16 tokens to where elements are read from. Returns them as they are used.
  static ATLAS_INLINE F32x16 weights(F32x16 weights, Element* row, int64_t block) {
    store(row + block * kLanes, weights);
    return weights;
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Element = uint32_t;  // two bf16
  using Vector = __m512i;
  static constexpr int kPerStep = 2;
  static constexpr int64_t kPadding = 2 * kLanes;

  static ATLAS_INLINE Vector vector(const Element* from) { return _mm512_loadu_si512(from); }
  static ATLAS_INLINE F32x16 step(F32x16 sum, Element element, Vector v) {
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(element));
    return {bit_cast<NativeF32>(_mm512_dpbf16_ps(bit_cast<__m512>(sum.part[0]),
                                                 bit_cast<__m512bh>(pair), bit_cast<__m512bh>(v)))};
  }
  // Up to 32 elements; the others are zero.
  static ATLAS_INLINE Vector load_row(const Bf16* from, int64_t count) {
    if (count >= kPadding) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, from);
  }
  static ATLAS_INLINE void query(const Bf16* from, int64_t dim, int64_t padded, Element* to) {
    for (int64_t i = 0; i < padded; i += kPadding) {
      _mm512_storeu_si512(to + i / 2, load_row(from + i, max64(0, dim - i)));
    }
  }
  // to[pair of columns][token].
  static ATLAS_INLINE void keys(const Bf16* block, int64_t dim, Element* to) {
    for (int64_t i = 0; i < dim; i += kPadding) {
      F32x16 rows[kBlockSize];
      for (int t = 0; t < kBlockSize; ++t) {
        rows[t].part[0] = bit_cast<NativeF32>(load_row(block + t * dim + i, dim - i));
      }
      transpose(rows);
      for (int j = 0; j < kLanes; ++j) {
        _mm512_storeu_si512(to + (i / 2 + j) * kLanes, bit_cast<__m512i>(rows[j].part[0]));
      }
    }
  }
  // to[pair of tokens][column].
  static ATLAS_INLINE const Element* values(const BlockRows<Bf16>& from, int64_t padded,
                                            Element* to) {
    alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                      37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                      11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t t = 0; t < kBlockSize; t += 2) {
      for (int64_t i = 0; i < from.dim; i += kPadding) {
        const int64_t count = from.dim - i;
        const __m512i a = load_row(from.row(t) + i, from.holds(t) ? count : 0);
        const __m512i b = load_row(from.row(t + 1) + i, from.holds(t + 1) ? count : 0);
        Element* pairs = to + t / 2 * padded + i;
        _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(pairs + kLanes, _mm512_permutex2var_epi16(a, high, b));
      }
    }
    return to;
  }
  static ATLAS_INLINE F32x16 weights(F32x16 weights, Element* row, int64_t block) {
    auto* to = reinterpret_cast<Bf16*>(row + block * kLanes / 2);
    store(to, weights);
    return load(to);
  }
};
#endif

// Elements share their memory with floats.
template <class Element>
ATLAS_INLINE Element element_at(const Element* from) {
  Element element;
  __builtin_memcpy(&element, from, sizeof(element));
  return element;
}

// scores[q][b] = query q . key of each token of block b, for n queries and m blocks.
// queries: `stride` elements apart; keys: `key_stride` elements a block; scores: one row of
// `score_stride` floats a query.
template <class Math, int n, int m>
ATLAS_INLINE void score(const typename Math::Element* queries, int64_t stride,
                        const typename Math::Element* keys, int64_t key_stride, int64_t steps,
                        float* scores, int64_t score_stride) {
  F32x16 sum[n][m];
  for (int q = 0; q < n; ++q) {
    for (int b = 0; b < m; ++b) sum[q][b] = zero();
  }
  for (int64_t i = 0; i < steps; ++i) {
    typename Math::Vector key[m];
    for (int b = 0; b < m; ++b) key[b] = Math::vector(keys + b * key_stride + i * kLanes);
    for (int q = 0; q < n; ++q) {
      const auto element = element_at(queries + q * stride + i);
      for (int b = 0; b < m; ++b) sum[q][b] = Math::step(sum[q][b], element, key[b]);
    }
  }
  for (int q = 0; q < n; ++q) {
    for (int b = 0; b < m; ++b) store(scores + q * score_stride + b * kLanes, sum[q][b]);
  }
}

// sums[q][column] += weights of query q . values, over one block, for n queries and w vectors.
template <class Math, int n, int w>
ATLAS_INLINE void add_columns(const typename Math::Element* weights, int64_t weight_stride,
                              const typename Math::Element* values, int64_t padded, float* sums) {
  F32x16 sum[n][w];
  for (int q = 0; q < n; ++q) {
    for (int i = 0; i < w; ++i) sum[q][i] = load(sums + q * padded + i * kLanes);
  }
  for (int64_t t = 0; t < kBlockSize / Math::kPerStep; ++t) {
    typename Math::Vector value[w];
    for (int i = 0; i < w; ++i) value[i] = Math::vector(values + t * padded + i * kLanes);
    for (int q = 0; q < n; ++q) {
      const auto element = element_at(weights + q * weight_stride + t);
      for (int i = 0; i < w; ++i) sum[q][i] = Math::step(sum[q][i], element, value[i]);
    }
  }
  for (int q = 0; q < n; ++q) {
    for (int i = 0; i < w; ++i) store(sums + q * padded + i * kLanes, sum[q][i]);
  }
}
template <class Math, int n>
ATLAS_INLINE void add_values(const typename Math::Element* weights, int64_t weight_stride,
                             const typename Math::Element* values, int64_t padded, float* sums) {
  int64_t i = 0;
  for (; i + kValueVectors * kLanes <= padded; i += kValueVectors * kLanes) {
    add_columns<Math, n, kValueVectors>(weights, weight_stride, values + i, padded, sums + i);
  }
  for (; i < padded; i += kLanes) {
    add_columns<Math, n, 1>(weights, weight_stride, values + i, padded, sums + i);
  }
}

// body(first, n) for [begin, end) in tiles of `most`, n a compile-time constant.
template <int most, class Body>
ATLAS_INLINE void tiles_of(int64_t begin, int64_t end, const Body& body) {
  for (; begin + most <= end; begin += most) body(begin, std::integral_constant<int, most>());
  if constexpr (most > 1) tiles_of<most - 1>(begin, end, body);
}

// The largest score, the sum of weights and the weighted sum of V of one query over some tokens;
// the two sums relative to the largest score.
struct Softmax {
  float* largest;
  float* total;
  float* sum;
};

// e^(score - reference), 0 where no score was larger than -inf.
ATLAS_INLINE float reference_of(float largest) {
  return largest == -__builtin_inff() ? 0.0f : largest;
}

// Takes `part`, of a later chunk, into `all`.
ATLAS_INLINE void combine(const Softmax& all, const Softmax& part, int64_t padded) {
  const float top = *part.largest > *all.largest ? *part.largest : *all.largest;
  const F32x16 keep = exp(splat(*all.largest - reference_of(top)));
  const F32x16 take = exp(splat(*part.largest - reference_of(top)));
  const F32x16 total = splat(*all.total) * keep + splat(*part.total) * take;
  for (int64_t i = 0; i < padded; i += kLanes) {
    store(all.sum + i, load(all.sum + i) * keep + load(part.sum + i) * take);
  }
  *all.largest = top;
  *all.total = total.part[0][0];
}

// Consecutive rows of one sequence, the first at `position`; `per_kv` query heads of each of `n_kv`
// KV heads. Queries are numbered by KV head, then row, then head.
struct Tile {
  int64_t begin, end, position, seq;
  int64_t kv_begin, n_kv, head_begin, per_kv;

  ATLAS_INLINE int64_t rows() const { return end - begin; }
  ATLAS_INLINE int64_t queries() const { return n_kv * rows() * per_kv; }
  ATLAS_INLINE int64_t first_query(int64_t kv, int64_t row) const {
    return (kv * rows() + row) * per_kv;
  }
  ATLAS_INLINE int64_t row_of(int64_t query) const { return query / per_kv % rows(); }
  ATLAS_INLINE int64_t head_of(int64_t query) const {
    return head_begin + query / per_kv / rows() * per_kv + query % per_kv;
  }
};

}  // namespace
}  // namespace atlas
