// Runs the CPU kernels that it is linked with, without Python: on a machine that only an emulator
// offers, or compiled in another way than for this one (tests/csrc/cpu_kernels.py builds it).
//
//   cpu_kernels            what the core says of every level of this kind of machine
//   cpu_kernels LEVEL...   the core's self-test of each level, whatever the machine is said to
//   have;
//                          then each linear and linear_a8 against a plain loop, over formats, row
//                          counts, short groups and panels; and every row again, bit for bit, in
//                          other batches and with other numbers of workers. A line per level and
//                          signature says too whether its bits are those of the first level.
//
// Exit code 1 if anything is wrong.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/program.h"
#include "cpu/features.h"
#include "cpu/registry.h"
#include "cpu/self_test.h"

namespace {

using atlas::Constant;
using atlas::CpuKernelEntry;
using atlas::CpuLaunch;

constexpr int64_t kPanel = 16, kGroup = 32, kRows = 49;
struct Shape {
  int64_t n, k;
};
constexpr Shape kShapes[] = {{37, 45}, {16, 64}, {5, 1}, {50, 601}};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

float from_bf16(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
// A normal, positive f16.
float from_f16(uint16_t half) { return std::ldexp(1024.0f + (half & 1023), (half >> 10) - 25); }

struct Bytes {
  std::vector<uint8_t> memory;
  uint8_t* data;
  explicit Bytes(size_t count) : memory(count + 64) {
    data = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  }
  template <class T>
  void set(int64_t index, T value) {
    std::memcpy(data + index * int64_t{sizeof(T)}, &value, sizeof(T));
  }
  template <class T>
  T get(int64_t index) const {
    T value;
    std::memcpy(&value, data + index * int64_t{sizeof(T)}, sizeof(T));
    return value;
  }
};

// Rows of x or a bias, as the kernel and as the loop see them.
struct Values {
  Bytes stored;
  std::vector<float> value;
  Values(std::minstd_rand& random, int64_t count, bool bf16)
      : stored(static_cast<size_t>(count * 4)), value(static_cast<size_t>(count)) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) {
      float drawn = normal(random);
      if (bf16) {
        uint32_t bits;
        std::memcpy(&bits, &drawn, sizeof(bits));
        stored.set(i, static_cast<uint16_t>(bits >> 16));
        drawn = from_bf16(static_cast<uint16_t>(bits >> 16));
      } else {
        stored.set(i, drawn);
      }
      value[static_cast<size_t>(i)] = drawn;
    }
  }
};

// A weight in layout "panel16", and what it means: value(n, k) = code * scale + offset.
struct Weight {
  Bytes stored{0};
  std::vector<double> code, scale, offset;  // [n, k], [n, groups], [n, groups]
};

// f32 or bf16: a vector of a panel is one k of 16 columns, or two.
Weight plain_weight(std::minstd_rand& random, Shape shape, bool bf16) {
  const int64_t per_lane = bf16 ? 2 : 1, lanes = ceil_div(shape.k, per_lane);
  const Values values(random, shape.n * shape.k, bf16);
  Weight weight;
  weight.stored = Bytes(static_cast<size_t>(ceil_div(shape.n, kPanel) * lanes * kPanel * 4));
  for (int64_t n = 0; n < shape.n; ++n) {
    for (int64_t k = 0; k < shape.k; ++k) {
      const int64_t lane = (n / kPanel * lanes + k / per_lane) * kPanel + n % kPanel;
      const int64_t from = n * shape.k + k;
      if (bf16) {
        weight.stored.set(lane * 2 + k % 2, values.stored.get<uint16_t>(from));
      } else {
        weight.stored.set(lane, values.stored.get<float>(from));
      }
      weight.code.push_back(double{values.value[static_cast<size_t>(from)]});
    }
  }
  return weight;
}

// A block format by its name, e.g. i4g32m: kernels/cpu/include/atlas/blocks.h has the layout.
Weight block_weight(std::minstd_rand& random, Shape shape, const std::string& format) {
  const bool wide = format.back() == 'f', narrow = format[1] == '4';  // f32 scales; nibbles
  const int bias = !narrow ? 128 : format == "i4g32" ? 8 : 0;
  const int64_t scale_bytes = wide ? 4 : 2;
  const int64_t offset_bytes = format == "i4g32z" ? 1 : narrow && bias == 0 ? scale_bytes : 0;
  const int64_t codes = kGroup * kPanel / (narrow ? 2 : 1);
  const int64_t block_bytes = codes + kPanel * (scale_bytes + offset_bytes);
  const int64_t groups = ceil_div(shape.k, kGroup);
  Weight weight;
  weight.stored = Bytes(static_cast<size_t>(ceil_div(shape.n, kPanel) * groups * block_bytes));
  std::uniform_int_distribution<int> byte(0, 255), f16(8 << 10, (12 << 10) - 1);
  std::uniform_real_distribution<float> real(0.01f, 0.1f);
  const auto draw = [&](uint8_t* to) {  // a scale or a minimum
    if (wide) {
      const float value = real(random);
      std::memcpy(to, &value, sizeof(value));
      return double{value};
    }
    const auto value = static_cast<uint16_t>(f16(random));
    std::memcpy(to, &value, sizeof(value));
    return double{from_f16(value)};
  };
  for (int64_t n = 0; n < ceil_div(shape.n, kPanel) * kPanel; ++n) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t column = n % kPanel;
      uint8_t* block = weight.stored.data + (n / kPanel * groups + g) * block_bytes;
      uint8_t* scales = block + codes;
      uint8_t* offsets = scales + kPanel * scale_bytes + column * offset_bytes;
      const double scale = draw(scales + column * scale_bytes);
      double offset = -bias * scale;
      if (format == "i4g32z") {
        offset = -scale * (*offsets = static_cast<uint8_t>(byte(random) % 17));
      } else if (offset_bytes > 0) {
        offset = draw(offsets);
      }
      if (n < shape.n) {
        weight.scale.push_back(scale);
        weight.offset.push_back(offset);
      }
      for (int64_t i = 0; i < kGroup; ++i) {
        const int code = byte(random) & (narrow ? 15 : 255);
        const int64_t step = i / 4, stored_step = narrow ? step % 4 : step;
        uint8_t& to = block[(stored_step * kPanel + column) * 4 + i % 4];
        to = static_cast<uint8_t>(narrow && step >= 4 ? to | code << 4 : code);
        if (n < shape.n && g * kGroup + i < shape.k) weight.code.push_back(code);
      }
    }
  }
  return weight;
}

// What a kernel may give for one element: `sum`, and roundings that grow with `size`.
struct Expected {
  double sum, size;
};

Expected plain_loop(const float* x, const Weight& weight, int64_t n, int64_t k) {
  Expected e = {0.0, 0.0};
  for (int64_t i = 0; i < k; ++i) {
    const double product = double{x[i]} * weight.code[static_cast<size_t>(n * k + i)];
    e.sum += product;
    e.size += std::fabs(product);
  }
  return e;
}

// x rounded to int8 in groups of 32 first (atlas/ops/linear_a8.py).
Expected rounded_loop(const float* x, const Weight& weight, int64_t n, int64_t k) {
  Expected e = {0.0, 0.0};
  const int64_t groups = ceil_div(k, kGroup);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * kGroup, end = std::min(k, begin + kGroup);
    float most = 0.0f;
    for (int64_t i = begin; i < end; ++i) most = std::fmax(most, std::fabs(x[i]));
    const auto of_group = static_cast<size_t>(n * groups + g);
    for (int64_t i = begin; i < end; ++i) {
      const double q = double{std::nearbyint(x[i] * (127.0f / most))};
      const double value = weight.code[static_cast<size_t>(n * k + i)] * weight.scale[of_group];
      const double product = double{most / 127.0f} * q * (value + weight.offset[of_group]);
      e.sum += product;
      e.size += std::fabs(double{most / 127.0f} * q) *
                (value + std::fabs(weight.offset[of_group]));  // each part is rounded
    }
  }
  return e;
}

// out[rows, n] of one launch, its workers one after the other.
std::vector<float> run(const CpuKernelEntry& entry, const uint8_t* x, int64_t rows, Shape shape,
                       const Weight& weight, const Values* bias, int workers) {
  Bytes out(static_cast<size_t>(rows * shape.n * 4));
  for (int64_t i = 0; i < rows * shape.n; ++i) out.set(i, std::numeric_limits<float>::quiet_NaN());
  // Exactly as long as x is: a sanitiser or an emulator sees what is read beside it.
  void* operands[] = {const_cast<uint8_t*>(x), weight.stored.data,
                      bias == nullptr ? nullptr : bias->stored.data, out.data};
  Constant constants[2];
  constants[0].i = shape.n;
  constants[1].i = shape.k;
  CpuLaunch launch = {operands, &rows, constants, 0, workers, nullptr, nullptr, nullptr, nullptr};
  Bytes scratch(entry.scratch == nullptr ? 0 : entry.scratch(launch));
  launch.scratch = reinterpret_cast<std::byte*>(scratch.data);
  for (; launch.worker < workers; ++launch.worker) {
    std::fill(scratch.memory.begin(), scratch.memory.end(), uint8_t{0xff});  // garbage, as in use
    entry.kernel(launch);
  }
  std::vector<float> result(static_cast<size_t>(rows * shape.n));
  std::memcpy(result.data(), out.data, result.size() * sizeof(float));
  return result;
}

// A part of a signature: "weight_i4g32" of ".weight_i4g32.bias_f32" is "i4g32".
std::string type_of(const std::string& signature, const std::string& operand) {
  const size_t at = signature.find("." + operand + "_");
  if (at == std::string::npos) return "";
  const size_t begin = at + operand.size() + 2;
  return signature.substr(begin, signature.find('.', begin) - begin);
}

// Empty if all is right. Appends every output to `all`.
std::string check(const CpuKernelEntry& entry, std::vector<float>& all) {
  const std::string signature = entry.signature, type = type_of(signature, "weight");
  const bool rounds = signature.rfind("linear_a8.", 0) == 0;
  const bool bf16 = type_of(signature, "x") == "bf16";
  for (const Shape shape : kShapes) {
    std::minstd_rand random(static_cast<unsigned>(shape.k));
    const Values x(random, kRows * shape.k, bf16), bias(random, shape.n, false);
    const Values* added = type_of(signature, "bias").empty() ? nullptr : &bias;
    const Weight weight = type[0] == 'i' ? block_weight(random, shape, type)
                                         : plain_weight(random, shape, type == "bf16");
    const auto row_at = [&](int64_t r) { return x.stored.data + r * shape.k * (bf16 ? 2 : 4); };
    const std::vector<float> whole = run(entry, row_at(0), kRows, shape, weight, added, 1);
    all.insert(all.end(), whole.begin(), whole.end());
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t n = 0; n < shape.n; ++n) {
        const float* row = x.value.data() + r * shape.k;
        Expected e = (rounds ? rounded_loop : plain_loop)(row, weight, n, shape.k);
        if (added != nullptr) e.sum += double{bias.value[static_cast<size_t>(n)]};
        const double actual = double{whole[static_cast<size_t>(r * shape.n + n)]};
        const double bound = 6e-8 * (static_cast<double>(shape.k) + 4) * e.size + 1e-6;
        if (!(std::fabs(actual - e.sum) <= bound)) {
          return "gives " + std::to_string(actual) + " for " + std::to_string(e.sum) + " at row " +
                 std::to_string(r) + ", column " + std::to_string(n) + " of " +
                 std::to_string(shape.n) + " x " + std::to_string(shape.k);
        }
      }
    }
    for (const int64_t rows : {1, 2, 7, 12, 13, 15, 16, 17, 29, 33, 48}) {
      const int64_t first = random() % static_cast<uint64_t>(kRows - rows + 1);
      const std::vector<float> part =
          run(entry, row_at(first), rows, shape, weight, added, 1 + static_cast<int>(rows % 3));
      if (std::memcmp(part.data(), whole.data() + first * shape.n, part.size() * sizeof(float))) {
        return "gives other bits in a batch of " + std::to_string(rows) + " rows, " +
               std::to_string(shape.n) + " x " + std::to_string(shape.k);
      }
    }
  }
  return "";
}

int report() {
  int wrong = 0;
  for (const atlas::CpuLevel& level : atlas::cpu_levels()) {
    const std::string says = !level.compiled         ? "not linked in"
                             : level.usable()        ? "usable"
                             : level.failure.empty() ? level.obstacle
                                                     : "fails its self-test: " + level.failure;
    std::printf("%s: %s\n", level.name.c_str(), says.c_str());
    wrong += !level.failure.empty();
  }
  return wrong;
}

}  // namespace

int main(int count, char** levels) {
  if (count == 1) return report() > 0;
  bool wrong = false;
  std::map<std::string, std::vector<float>> first;
  for (int i = 1; i < count; ++i) {
    atlas::cpu_level_obstacle(levels[i]);  // asks the system for what it grants on request
    const std::string failure = atlas::self_test_cpu_level(levels[i]);
    std::printf("%s self-test: %s\n", levels[i], failure.empty() ? "passes" : failure.c_str());
    wrong |= !failure.empty();
    for (const std::string& signature : atlas::cpu_kernels(levels[i])) {
      if (signature.rfind("linear", 0) != 0) continue;
      std::vector<float> all;
      const std::string found = check(*atlas::find_cpu_kernel({levels[i]}, signature), all);
      const auto known = first.emplace(signature, all);
      const std::vector<float>& before = known.first->second;
      const bool same = before.size() == all.size() &&
                        std::memcmp(before.data(), all.data(), all.size() * sizeof(float)) == 0;
      std::printf("%s %s: %s\n", levels[i], signature.c_str(),
                  !found.empty() ? found.c_str()
                  : known.second ? "right"
                  : same         ? "right, same bits"
                                 : "right, other bits");
      wrong |= !found.empty();
    }
  }
  return wrong;
}
