#include "cpu/probe.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/features.h"
#include "cpu/thread_pool.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // no vector crosses a function here
#endif

namespace atlas {
namespace {

constexpr size_t kReadBytes = size_t{512} << 20;  // beyond any cache
constexpr int kChains = 12;                       // latency times width of the units: 8 to 10
constexpr int64_t kRounds = 4'000'000;

#if defined(__clang__)
#define ATLAS_UNROLL _Pragma("unroll")
#else
#define ATLAS_UNROLL _Pragma("GCC unroll 16")
#endif

// Makes the compiler believe that a result is used.
void keep(const void* value) { asm volatile("" : : "r"(value) : "memory"); }

// Loops for one kind of vector. The target attribute stands for a level's flags, so that one file
// holds all; bodies are written out because an attribute does not reach into a template.
#define ATLAS_READ(name, target, lanes)                                             \
  target uint64_t name(const std::byte* data, size_t bytes) {                       \
    using Vector = uint64_t __attribute__((vector_size(lanes * 8)));                \
    Vector sums[8] = {};                                                            \
    for (size_t at = 0; at + sizeof(sums) <= bytes; at += sizeof(sums)) {           \
      for (int i = 0; i < 8; ++i) {                                                 \
        Vector v;                                                                   \
        std::memcpy(&v, data + at + static_cast<size_t>(i) * sizeof(v), sizeof(v)); \
        sums[i] ^= v;                                                               \
      }                                                                             \
    }                                                                               \
    for (int i = 1; i < 8; ++i) sums[0] ^= sums[i];                                 \
    return sums[0][0] ^ sums[0][1];                                                 \
  }
#define ATLAS_FMA(name, target, lanes)                                          \
  target double name() {                                                        \
    using Vector = float __attribute__((vector_size(lanes * 4)));               \
    Vector sums[kChains], a = Vector{} + 0.999f, b = Vector{} + 1e-3f;          \
    for (int i = 0; i < kChains; ++i) sums[i] = b * static_cast<float>(i);      \
    for (int64_t round = 0; round < kRounds; ++round) {                         \
      ATLAS_UNROLL for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * a + b; \
    }                                                                           \
    Vector total = {};                                                          \
    for (int i = 0; i < kChains; ++i) total += sums[i];                         \
    keep(&total);                                                               \
    return 2.0 * lanes * kChains * static_cast<double>(kRounds);                \
  }

ATLAS_READ(read_baseline, , 2)
ATLAS_FMA(fma_baseline, , 4)

#if defined(__x86_64__)
#define ATLAS_AVX2 __attribute__((target("avx2,fma")))
#define ATLAS_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512")))
#define ATLAS_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")))
ATLAS_READ(read_avx2, ATLAS_AVX2, 4)
ATLAS_READ(read_avx512, ATLAS_AVX512, 8)
ATLAS_FMA(fma_avx2, ATLAS_AVX2, 8)
ATLAS_FMA(fma_avx512, ATLAS_AVX512, 16)

ATLAS_VNNI double dot_int8() {
  __m512i sums[kChains], a = _mm512_set1_epi8(3);
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_epi32(i);
  for (int64_t round = 0; round < kRounds; ++round) {
    ATLAS_UNROLL for (int i = 0; i < kChains; ++i) sums[i] =
        _mm512_dpbusd_epi32(sums[i], a, sums[i]);
  }
  for (int i = 1; i < kChains; ++i) sums[0] = _mm512_xor_si512(sums[0], sums[i]);
  keep(&sums[0]);
  return 128.0 * kChains * static_cast<double>(kRounds);
}
ATLAS_VNNI double dot_bf16() {
  __m512 sums[kChains];
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t round = 0; round < kRounds; ++round) {
    ATLAS_UNROLL for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, a);
  }
  for (int i = 1; i < kChains; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  keep(&sums[0]);
  return 64.0 * kChains * static_cast<double>(kRounds);
}
#endif

// Seconds that the pool takes for `body(worker)`, the best of a few runs.
template <class Body>
double best_seconds(ThreadPool& pool, Body body) {
  double best = 1e30;
  for (int run = 0; run < 6; ++run) {
    const auto before = std::chrono::steady_clock::now();
    pool.run([](void* context, int worker) { (*static_cast<Body*>(context))(worker); }, &body);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - before;
    best = std::min(best, taken.count());
  }
  return best;
}

double rate(ThreadPool& pool, double (*loop)()) {
  std::vector<double> operations(static_cast<size_t>(pool.n_workers()));
  const double seconds =
      best_seconds(pool, [&](int worker) { operations[static_cast<size_t>(worker)] = loop(); });
  return operations[0] * pool.n_workers() / seconds;
}

}  // namespace

CpuRates measure_cpu_rates(int threads) {
  ThreadPool pool(threads, threads);
  CpuRates rates = {};
  uint64_t (*read)(const std::byte*, size_t) = read_baseline;
  double (*fma)() = fma_baseline;
#if defined(__x86_64__)
  if (cpu_level_obstacle("avx2").empty()) read = read_avx2, fma = fma_avx2;
  if (cpu_level_obstacle("avx512").empty()) read = read_avx512, fma = fma_avx512;
  if (cpu_level_obstacle("avx512vnni").empty()) {
    rates.int8 = rate(pool, dot_int8);
    rates.bf16 = rate(pool, dot_bf16);
  }
#endif
  rates.f32 = rate(pool, fma);
  std::vector<std::byte> memory(kReadBytes, std::byte{1});
  const size_t part = kReadBytes / static_cast<size_t>(threads) / 4096 * 4096;
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  const double seconds = best_seconds(pool, [&](int worker) {
    const auto index = static_cast<size_t>(worker);
    sums[index] = read(memory.data() + index * part, part);
  });
  rates.read_bytes = static_cast<double>(part) * threads / seconds;
  return rates;
}

}  // namespace atlas
