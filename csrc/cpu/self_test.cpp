#include "cpu/self_test.h"

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/program.h"
#include "cpu/registry.h"

namespace atlas {
namespace {

constexpr int64_t kPanel = 16;

// Bits of the bf16 nearest to `value`, which is finite; and back.
uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float stored(float value, float*) { return value; }
uint16_t stored(float value, uint16_t*) { return to_bf16(value); }
float read(float value) { return value; }
float read(uint16_t value) { return from_bf16(value); }

// Memory of a test with an alignment that arena buffers have, too.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : memory_(count + 64 / sizeof(T)) {}
  T* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (64 - address % 64) % 64 / sizeof(T);
  }

 private:
  std::vector<T> memory_;
};

// Runs a kernel that needs nothing shared, as one worker.
void run(const CpuKernelEntry& entry, void* const* operands, const int64_t* dims,
         const Constant* constants) {
  CpuLaunch launch = {operands, dims, constants, 0, 1, nullptr, nullptr, nullptr, nullptr};
  Buffer<std::byte> scratch(entry.scratch == nullptr ? 0 : entry.scratch(launch));
  launch.scratch = scratch.data();
  entry.kernel(launch);
}

// out = x weight^T by one worker. The tail of k, of n and of a row tile are part of it.
template <class Element>
std::string test_linear(const CpuKernelEntry& entry, int64_t rows, int64_t n, int64_t k) {
  std::minstd_rand random(static_cast<unsigned>(rows));
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const int64_t panels = (n + kPanel - 1) / kPanel;
  // A lane of a panel holds 4 bytes of consecutive columns: one f32 or two bf16.
  constexpr int64_t kPerLane = 4 / int64_t{sizeof(Element)};
  const int64_t lanes = (k + kPerLane - 1) / kPerLane;
  Buffer<Element> x(static_cast<size_t>(rows * k));
  Buffer<Element> weight(static_cast<size_t>(panels * lanes * kPerLane * kPanel));
  Buffer<float> out(static_cast<size_t>(rows * n));
  Element* kind = nullptr;
  for (int64_t i = 0; i < rows * k; ++i) x.data()[i] = stored(uniform(random), kind);
  const auto at = [&](int64_t row, int64_t column) -> Element& {
    const int64_t lane = (row / kPanel * lanes + column / kPerLane) * kPanel + row % kPanel;
    return weight.data()[lane * kPerLane + column % kPerLane];
  };
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t column = 0; column < k; ++column) at(row, column) = stored(uniform(random), kind);
  }
  for (int64_t i = 0; i < rows * n; ++i) out.data()[i] = std::numeric_limits<float>::quiet_NaN();

  void* operands[] = {x.data(), weight.data(), nullptr, out.data()};  // without a bias
  Constant constants[2];
  constants[0].i = n;
  constants[1].i = k;
  run(entry, operands, &rows, constants);

  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t row = 0; row < n; ++row) {
      double sum = 0.0, size = 0.0;
      for (int64_t column = 0; column < k; ++column) {
        const double product = double{read(x.data()[r * k + column])} * read(at(row, column));
        sum += product;
        size += std::fabs(product);
      }
      // k roundings of fp32 at most; the comparison is false for NaN.
      const double actual = out.data()[r * n + row];
      if (!(std::fabs(actual - sum) <= 6e-8 * static_cast<double>(k) * size)) {
        return "gives " + std::to_string(actual) + " for " + std::to_string(sum);
      }
    }
  }
  return "";
}

template <class Element>
std::string test_linear(const CpuKernelEntry& entry) {
  for (const int64_t rows : {1, 19}) {
    std::string found = test_linear<Element>(entry, rows, 70, 100);
    if (!found.empty()) return found + ", " + std::to_string(rows) + " rows";
  }
  return "";
}

// moe_mlp of one expert for each row, silu, by one worker: the experts' panels are no whole ones.
template <class Element>
std::string test_moe_mlp(const CpuKernelEntry& entry) {
  constexpr int64_t kExperts = 3, kHidden = 37, kIntermediate = 22, kRows = 9;
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  constexpr int64_t kPerLane = 4 / int64_t{sizeof(Element)};
  // Values of [n, k] in panels; `at` is where one of them is stored.
  const auto at = [](int64_t row, int64_t column, int64_t k) {
    const int64_t lanes = (k + kPerLane - 1) / kPerLane;
    const int64_t lane = (row / kPanel * lanes + column / kPerLane) * kPanel + row % kPanel;
    return lane * kPerLane + column % kPerLane;
  };
  constexpr int64_t kGateUp = kExperts * 2 * kIntermediate, kDown = kExperts * kHidden;
  Buffer<Element> x(kRows * kHidden), gate_up((kGateUp + kPanel) * (kHidden + 1));
  Buffer<Element> down((kDown + kPanel) * (kIntermediate + 1));
  Buffer<float> out(kRows * kHidden), weight(kRows);
  Buffer<int32_t> expert(kRows);
  Element* kind = nullptr;
  for (int64_t i = 0; i < kRows * kHidden; ++i) x.data()[i] = stored(uniform(random), kind);
  for (int64_t i = 0; i < kGateUp * kHidden; ++i) {
    gate_up.data()[at(i / kHidden, i % kHidden, kHidden)] = stored(uniform(random), kind);
  }
  for (int64_t i = 0; i < kDown * kIntermediate; ++i) {
    down.data()[at(i / kIntermediate, i % kIntermediate, kIntermediate)] =
        stored(uniform(random), kind);
  }
  for (int32_t r = 0; r < kRows; ++r) {
    expert.data()[r] = r % 2 * 2;  // one that no row chose is between them
    weight.data()[r] = uniform(random);
  }
  std::memset(out.data(), 0xff, kRows * kHidden * sizeof(float));

  void* operands[] = {x.data(),      gate_up.data(), down.data(),
                      expert.data(), weight.data(),  out.data()};
  Constant constants[5];
  const int64_t values[] = {kExperts, 1, kHidden, kIntermediate, 0};
  for (int i = 0; i < 5; ++i) constants[i].i = values[i];
  const int64_t rows = kRows;
  CpuLaunch launch = {operands, &rows, constants, 0, 1, nullptr, nullptr, nullptr, nullptr};
  Buffer<std::byte> scratch(entry.scratch(launch)), shared(entry.shared(launch));
  launch.scratch = scratch.data();
  launch.shared = shared.data();
  entry.kernel(launch);

  for (int64_t r = 0; r < kRows; ++r) {
    double activated[kIntermediate];
    for (int64_t i = 0; i < kIntermediate; ++i) {
      double sums[2] = {};
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t row = (expert.data()[r] * 2 + half) * kIntermediate + i;
        for (int64_t k = 0; k < kHidden; ++k) {
          sums[half] +=
              double{read(x.data()[r * kHidden + k])} * read(gate_up.data()[at(row, k, kHidden)]);
        }
      }
      const double value = sums[0] / (1.0 + std::exp(-sums[0])) * sums[1];
      activated[i] = read(stored(static_cast<float>(value), kind));
    }
    for (int64_t n = 0; n < kHidden; ++n) {
      double sum = 0.0, size = 0.0;
      for (int64_t i = 0; i < kIntermediate; ++i) {
        const int64_t row = expert.data()[r] * kHidden + n;
        const double product =
            activated[i] * read(down.data()[at(row, i, kIntermediate)]) * weight.data()[r];
        sum += product;
        size += std::fabs(product);
      }
      // An activated value near a rounding boundary of its type may fall to either side.
      const double bound = sizeof(Element) == sizeof(float) ? 1e-5 : 8e-3;
      const double actual = out.data()[r * kHidden + n];
      if (!(std::fabs(actual - sum) <= bound * size)) {
        return "gives " + std::to_string(actual) + " for " + std::to_string(sum);
      }
    }
  }
  return "";
}

// linear_a8 with 8-bit codes and scales, or 4-bit codes, scales and minimums, in panels of 16
// columns (kernels/cpu/include/atlas/blocks.h). The last panel and the last group are short.
template <int bits>
std::string test_linear_a8(const CpuKernelEntry& entry, int64_t rows) {
  constexpr int64_t kN = 40, kK = 72, kGroup = 32, kPanels = 3, kGroups = 3;
  constexpr int64_t kCodes = kGroup * kPanel * bits / 8, kHalves = bits == 8 ? 1 : 2;
  constexpr int64_t kBlock = kCodes + kHalves * kPanel * 2;
  std::minstd_rand random(static_cast<unsigned>(rows));
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  Buffer<float> x(static_cast<size_t>(rows * kK)), out(static_cast<size_t>(rows * kN));
  Buffer<uint8_t> weight(kPanels * kGroups * kBlock);
  for (int64_t i = 0; i < rows * kK; ++i) x.data()[i] = uniform(random);
  for (int64_t i = 0; i < rows * kN; ++i) out.data()[i] = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < kPanels * kGroups * kBlock; ++i) {
    weight.data()[i] = static_cast<uint8_t>(random() >> 8);
  }
  const auto block_of = [&](int64_t n, int64_t k) {
    return weight.data() + (n / kPanel * kGroups + k / kGroup) * kBlock;
  };
  // Scales and minimums are powers of two, as f16: 2^(exponent - 15).
  const auto exponent_at = [](int64_t n, int64_t half) { return 8 + n % 4 + 3 * half; };
  for (int64_t n = 0; n < kPanels * kPanel; ++n) {
    for (int64_t k = 0; k < kGroups * kGroup; k += kGroup) {
      for (int64_t half = 0; half < kHalves; ++half) {
        const auto bits_of_f16 = static_cast<uint16_t>(exponent_at(n, half) << 10);
        std::memcpy(block_of(n, k) + kCodes + (half * kPanel + n % kPanel) * 2, &bits_of_f16, 2);
      }
    }
  }
  const auto code_at = [&](int64_t n, int64_t k) {
    const int64_t at = k % kGroup, step = at / 4;
    const int64_t stored_step = bits == 8 ? step : step % 4;
    const int code = block_of(n, k)[(stored_step * kPanel + n % kPanel) * 4 + at % 4];
    return bits == 8 ? code - 128 : step < 4 ? code & 15 : code >> 4;
  };

  void* operands[] = {x.data(), weight.data(), nullptr, out.data()};
  Constant constants[2];
  constants[0].i = kN;
  constants[1].i = kK;
  run(entry, operands, &rows, constants);

  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < kN; ++n) {
      double sum = 0.0;
      for (int64_t begin = 0; begin < kK; begin += kGroup) {
        const int64_t end = std::min(begin + kGroup, kK);
        float most = 0.0f;
        for (int64_t k = begin; k < end; ++k)
          most = std::fmax(most, std::fabs(x.data()[r * kK + k]));
        double dot = 0.0, total = 0.0;
        for (int64_t k = begin; k < end; ++k) {
          const float rounded = std::nearbyint(x.data()[r * kK + k] * (127.0f / most));
          dot += double{rounded} * code_at(n, k);
          total += double{rounded};
        }
        const auto power = [&](int64_t half) {
          return std::ldexp(1.0, static_cast<int>(exponent_at(n, half)) - 15);
        };
        sum += double{most} / 127.0 * (power(0) * dot + (kHalves == 2 ? power(1) * total : 0.0));
      }
      const double actual = out.data()[r * kN + n];
      if (!(std::fabs(actual - sum) <= 1e-5 * (1.0 + std::fabs(sum)))) {
        return "gives " + std::to_string(actual) + " for " + std::to_string(sum) + ", " +
               std::to_string(rows) + " rows";
      }
    }
  }
  return "";
}
template <int bits>
std::string test_linear_a8(const CpuKernelEntry& entry) {
  const std::string found = test_linear_a8<bits>(entry, 1);
  // So many rows that AMX takes part: two tiles, of 15 and of 14.
  return found.empty() ? test_linear_a8<bits>(entry, 29) : found;
}

// Attention of the last rows of one sequence by one worker, over blocks in reverse order; the last
// block and the columns have a tail.
template <class Element>
std::string test_attention(const CpuKernelEntry& entry) {
  constexpr int64_t kHeads = 2, kDim = 40, kBlocks = 3, kBlock = 16, kRows = 3, kPosition = 34;
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  Element* kind = nullptr;
  Buffer<Element> q(kRows * kHeads * kDim), keys(kBlocks * kBlock * kDim);
  Buffer<Element> values(kBlocks * kBlock * kDim), out(kRows * kHeads * kDim);
  for (int64_t i = 0; i < kRows * kHeads * kDim; ++i) q.data()[i] = stored(uniform(random), kind);
  for (int64_t i = 0; i < kBlocks * kBlock * kDim; ++i) {
    keys.data()[i] = stored(uniform(random), kind);
    values.data()[i] = stored(uniform(random), kind);
  }
  std::memset(out.data(), 0xff, kRows * kHeads * kDim * sizeof(Element));

  int32_t position[kRows], seq[kRows] = {}, table[kBlocks];
  for (int32_t r = 0; r < kRows; ++r) position[r] = kPosition + r;
  for (int32_t b = 0; b < kBlocks; ++b) table[b] = kBlocks - 1 - b;
  void* operands[] = {q.data(), keys.data(), values.data(), position, seq, table, out.data()};
  const int64_t dims[] = {kRows, 1, kBlocks, kBlocks};
  Constant constants[5];
  constants[0].i = kHeads;
  constants[1].i = 1;
  constants[2].i = kDim;
  constants[3].i = 0;  // no window
  constants[4].f = 1.0 / std::sqrt(double{kDim});
  run(entry, operands, dims, constants);

  const auto in_cache = [&](int64_t t) { return (table[t / kBlock] * kBlock + t % kBlock) * kDim; };
  for (int64_t i = 0; i < kRows * kHeads; ++i) {
    double total = 0.0, sums[kDim] = {};
    for (int64_t t = 0; t <= position[i / kHeads]; ++t) {
      double score = 0.0;
      for (int64_t d = 0; d < kDim; ++d) {
        score += double{read(q.data()[i * kDim + d])} * read(keys.data()[in_cache(t) + d]);
      }
      const double weight = std::exp(score / std::sqrt(double{kDim}));
      total += weight;
      for (int64_t d = 0; d < kDim; ++d) sums[d] += weight * read(values.data()[in_cache(t) + d]);
    }
    for (int64_t d = 0; d < kDim; ++d) {
      // Roundings of weights and result to bf16, if that is the type, on values below 1.
      const double bound = sizeof(Element) == sizeof(float) ? 1e-5 : 8e-3;
      const double actual = read(out.data()[i * kDim + d]), expected = sums[d] / total;
      if (!(std::fabs(actual - expected) <= bound)) {
        return "gives " + std::to_string(actual) + " for " + std::to_string(expected);
      }
    }
  }
  return "";
}

struct Test {
  const char* signature;
  std::string (*run)(const CpuKernelEntry&);
};
constexpr Test kTests[] = {
    {"linear.x_f32.weight_f32.out_f32", test_linear<float>},
    {"linear.x_bf16.weight_bf16.out_f32", test_linear<uint16_t>},
    {"linear_a8.x_f32.weight_i8g32", test_linear_a8<8>},
    {"linear_a8.x_f32.weight_i4g32m", test_linear_a8<4>},
    {"moe_mlp.x_f32.gate_up_f32.down_f32", test_moe_mlp<float>},
    {"moe_mlp.x_bf16.gate_up_bf16.down_bf16", test_moe_mlp<uint16_t>},
    {"paged_attention.q_f32.k_cache_f32.v_cache_f32.out_f32", test_attention<float>},
    {"paged_attention.q_bf16.k_cache_bf16.v_cache_bf16.out_bf16", test_attention<uint16_t>},
};

// Where to go on a signal during a test; null on threads that run none.
thread_local sigjmp_buf* escape = nullptr;

void on_signal(int signal) {
  if (escape != nullptr) siglongjmp(*escape, signal);
  // Another thread's, at the same time: it happens again, and ends the process as it would have.
  std::signal(signal, SIG_DFL);
}

// Runs a test with illegal instructions and bad addresses caught.
std::string guarded(const Test& test, const CpuKernelEntry& entry) {
  constexpr int kSignals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction before[4], action = {};
  action.sa_handler = on_signal;
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &action, &before[i]);
  sigjmp_buf here;
  // Static: a jump back leaves no local variable behind that it could have changed.
  static thread_local std::string found;
  const int signal = sigsetjmp(here, 1);
  if (signal == 0) {
    escape = &here;
    found = test.run(entry);
  } else {
    found = "ends with signal " + std::to_string(signal);
  }
  escape = nullptr;
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &before[i], nullptr);
  return found;
}

}  // namespace

std::string self_test_cpu_level(const std::string& level) {
  for (const Test& test : kTests) {
    const CpuKernelEntry* entry = find_cpu_kernel({level}, test.signature);
    if (entry == nullptr) continue;
    const std::string found = guarded(test, *entry);
    if (!found.empty()) return std::string(test.signature) + " " + found;
  }
  return "";
}

}  // namespace atlas
