// rope_kv_append: norm each head of q and k where weights are given, rotate them by the row's
// position, write q to q_out and k, v to the KV cache.
//
// Layout: a row of qkv is [q heads | k heads | v heads]; caches are [blocks][n_kv_heads][16][dim].
//   Of the leading rotary_dim elements of a head, i is paired with i + rotary_dim / 2, by the angle
//   position * inv_freq[seq_rope[seq], i], an fp32 product as in the reference.
// Shapes: any head_dim, any even rotary_dim; the last vector of a half may be partial.
// Order: a head's squares are summed in vectors of 16 from element 0 on, then by halves.
// Work split: (row, head) over all q, k and v heads; workers that share a row each find its sines.
// Bytes: rows * (n_heads + 2 * n_kv_heads) * head_dim, read once and written once.
// Bound: memory; the sines of a row cost about as much as one of its heads.
#include "atlas/partition.h"
#include "atlas/simd.h"

namespace atlas {
namespace {

constexpr int64_t kBlockSize = 16;

// Sine and cosine of an fp32 angle, |angle| < 2^30: reduced by quarter turns and summed as Taylor
// series in fp64, so that rounding to fp32 is the only error that shows. Branch-free for
// vectorisation.
ATLAS_INLINE void sin_cos(float angle, float* sin, float* cos) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double x = angle;
  const double shifted = x * 0.63661977236758134308 + kMagic;
  const double n = shifted - kMagic;
  const auto quarter = static_cast<uint32_t>(bit_cast<uint64_t>(shifted));
  const double r = (x - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11;
  const double z = r * r;
  double s = -1.0 / 39916800;
  s = s * z + 1.0 / 362880;
  s = s * z - 1.0 / 5040;
  s = s * z + 1.0 / 120;
  s = s * z - 1.0 / 6;
  s = (s * z) * r + r;
  double c = 1.0 / 479001600;
  c = c * z - 1.0 / 3628800;
  c = c * z + 1.0 / 40320;
  c = c * z - 1.0 / 720;
  c = c * z + 1.0 / 24;
  c = c * z - 0.5;
  c = c * z + 1.0;
  const double sine = quarter & 1 ? c : s, cosine = quarter & 1 ? s : c;
  *sin = static_cast<float>(quarter & 2 ? -sine : sine);
  *cos = static_cast<float>((quarter + 1) & 2 ? -cosine : cosine);
}

// What turns the heads of one row.
struct Turn {
  const float *sin, *cos;
  int64_t half, dim;  // rotary_dim / 2, head_dim
  float eps;
  float* normed;  // room for a head
};

template <class From, class To>
ATLAS_INLINE void copy(const From* from, To* to, int64_t n) {
  for_lanes(n, [&](int64_t i, auto count) { store(to + i, load(from + i, count), count); });
}

template <class From, class To>
ATLAS_INLINE void rotate(const Turn& turn, const From* from, To* to) {
  for_lanes(turn.half, [&](int64_t i, auto count) {
    const F32x16 a = load(from + i, count), b = load(from + turn.half + i, count);
    const F32x16 s = load(turn.sin + i, count), c = load(turn.cos + i, count);
    store(to + i, a * c - b * s, count);
    store(to + turn.half + i, b * c + a * s, count);
  });
  copy(from + 2 * turn.half, to + 2 * turn.half, turn.dim - 2 * turn.half);
}

// `norm` may be null.
template <class From, class To>
ATLAS_INLINE void norm_and_rotate(const Turn& turn, const float* norm, const From* from, To* to) {
  if (norm == nullptr) return rotate(turn, from, to);
  F32x16 squares = zero();
  for_lanes(turn.dim, [&](int64_t i, auto count) {
    const F32x16 v = load(from + i, count);
    squares = squares + v * v;
  });
  const float mean = sum(squares) / static_cast<float>(turn.dim);
  const F32x16 scale = splat(1.0f / __builtin_sqrtf(mean + turn.eps));
  for_lanes(turn.dim, [&](int64_t i, auto count) {
    store(turn.normed + i, load(from + i, count) * scale * load(norm + i, count), count);
  });
  rotate(turn, turn.normed, to);
}

template <class Qkv, class Q, class Kv>
void rope_kv_append(const CpuLaunch& launch) {
  const auto* qkv = launch.operand<const Qkv>(0);
  const auto* q_norm = launch.operand<const float>(1);  // this and the next may be null
  const auto* k_norm = launch.operand<const float>(2);
  const auto* inv_freq = launch.operand<const float>(3);
  const auto* seq_rope = launch.operand<const int32_t>(4);
  const auto* row_position = launch.operand<const int32_t>(5);
  const auto* row_seq = launch.operand<const int32_t>(6);
  const auto* block_table = launch.operand<const int32_t>(7);
  auto* q_out = launch.operand<Q>(8);
  auto* k_cache = launch.operand<Kv>(9);
  auto* v_cache = launch.operand<Kv>(10);
  const int64_t rows = launch.dims[0], max_blocks = launch.dims[2];
  const int64_t n_heads = launch.integer(0), n_kv_heads = launch.integer(1);
  const int64_t dim = launch.integer(2), half = launch.integer(3) / 2;
  const auto eps = static_cast<float>(launch.real(5));
  const auto scale = static_cast<float>(launch.real(6));
  const int64_t heads = n_heads + 2 * n_kv_heads;
  auto* sin = reinterpret_cast<float*>(launch.scratch);
  float* cos = sin + half;
  const Turn turn = {sin, cos, half, dim, eps, cos + half};

  partition_2d(launch, rows, heads, 1, [&](int64_t row, int64_t begin, int64_t end) {
    const int64_t position = row_position[row], seq = row_seq[row];
    if (begin < n_heads + n_kv_heads) {
      const float* frequency = inv_freq + seq_rope[seq] * half;
      for (int64_t i = 0; i < half; ++i) {
        sin_cos(static_cast<float>(position) * frequency[i], sin + i, cos + i);
        sin[i] *= scale;
        cos[i] *= scale;
      }
    }
    const int64_t block = block_table[seq * max_blocks + position / kBlockSize];
    const auto in_cache = [&](int64_t head) {
      return ((block * n_kv_heads + head) * kBlockSize + position % kBlockSize) * dim;
    };
    for (int64_t head = begin; head < end; ++head) {
      const Qkv* from = qkv + (row * heads + head) * dim;
      if (head < n_heads) {
        norm_and_rotate(turn, q_norm, from, q_out + (row * n_heads + head) * dim);
      } else if (head < n_heads + n_kv_heads) {
        norm_and_rotate(turn, k_norm, from, k_cache + in_cache(head - n_heads));
      } else {
        copy(from, v_cache + in_cache(head - n_heads - n_kv_heads), dim);
      }
    }
  });
}

// Sines and cosines of one row, and one head after its norm.
size_t scratch(const CpuLaunch& launch) {
  return static_cast<size_t>(launch.integer(3) + launch.integer(2)) * sizeof(float);
}

ATLAS_CPU_KERNEL("rope_kv_append.qkv_f32.q_out_f32.k_cache_f32.v_cache_f32",
                 rope_kv_append<float, float, float>, scratch);
ATLAS_CPU_KERNEL("rope_kv_append.qkv_f32.q_out_bf16.k_cache_bf16.v_cache_bf16",
                 rope_kv_append<float, Bf16, Bf16>, scratch);
ATLAS_CPU_KERNEL("rope_kv_append.qkv_f32.q_norm_f32.k_norm_f32.q_out_f32.k_cache_f32.v_cache_f32",
                 rope_kv_append<float, float, float>, scratch);
ATLAS_CPU_KERNEL(
    "rope_kv_append.qkv_f32.q_norm_f32.k_norm_f32.q_out_bf16.k_cache_bf16.v_cache_bf16",
    rope_kv_append<float, Bf16, Bf16>, scratch);

}  // namespace
}  // namespace atlas
