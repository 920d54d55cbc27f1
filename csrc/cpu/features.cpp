#include "cpu/features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sched.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>

namespace atlas {
namespace {

#if defined(__x86_64__)
// One bit of what CPUID or XGETBV says. Read here and not by __builtin_cpu_supports, whose names
// differ between compilers.
struct Feature {
  const char* name;
  enum Register { kLeaf1Ecx, kLeaf7Ebx, kLeaf7Ecx, kLeaf7Edx, kLeaf7_1Eax, kLeaf81Ecx, kXcr0 } from;
  uint64_t bits;
};

// What each level adds to the one before it, from the lowest on. The last entries of a level are
// the registers that the system must save (XCR0): AVX bits 1-2, AVX-512 bits 5-7, tiles 17-18.
constexpr Feature kAvx2[] = {
    {"AVX2", Feature::kLeaf7Ebx, 1u << 5},
    {"FMA", Feature::kLeaf1Ecx, 1u << 12},
    {"F16C", Feature::kLeaf1Ecx, 1u << 29},
    {"MOVBE", Feature::kLeaf1Ecx, 1u << 22},
    {"BMI and BMI2", Feature::kLeaf7Ebx, 1u << 3 | 1u << 8},
    {"LZCNT", Feature::kLeaf81Ecx, 1u << 5},
    {"a system that saves AVX registers", Feature::kXcr0, 0x6},
};
constexpr Feature kAvx512[] = {
    {"AVX512 F, DQ, CD, BW and VL", Feature::kLeaf7Ebx, 1u << 16 | 1u << 17 | 1u << 28 | 3u << 30},
    {"a system that saves AVX-512 registers", Feature::kXcr0, 0xe6},
};
constexpr Feature kAvx512Vnni[] = {
    {"AVX512_VNNI", Feature::kLeaf7Ecx, 1u << 11},
    {"AVX512_BF16", Feature::kLeaf7_1Eax, 1u << 5},
};
constexpr Feature kAmx[] = {
    {"AMX-TILE, AMX-INT8 and AMX-BF16", Feature::kLeaf7Edx, 1u << 24 | 1u << 25 | 1u << 22},
    {"a system that saves AMX tiles", Feature::kXcr0, 0x60000},
};

uint64_t read(Feature::Register from) {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  switch (from) {
    case Feature::kLeaf1Ecx:
      return __get_cpuid(1, &a, &b, &c, &d) ? c : 0;
    case Feature::kLeaf7Ebx:
      return __get_cpuid_count(7, 0, &a, &b, &c, &d) ? b : 0;
    case Feature::kLeaf7Ecx:
      return __get_cpuid_count(7, 0, &a, &b, &c, &d) ? c : 0;
    case Feature::kLeaf7Edx:
      return __get_cpuid_count(7, 0, &a, &b, &c, &d) ? d : 0;
    case Feature::kLeaf7_1Eax:
      return __get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1 &&
                     __get_cpuid_count(7, 1, &a, &b, &c, &d)
                 ? a
                 : 0;
    case Feature::kLeaf81Ecx:
      return __get_cpuid(0x80000001, &a, &b, &c, &d) ? c : 0;
    case Feature::kXcr0:
      // XGETBV exists only where the system has turned XSAVE on (OSXSAVE).
      if (!(read(Feature::kLeaf1Ecx) & 1u << 27)) return 0;
      asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
      return uint64_t{d} << 32 | a;
  }
  return 0;
}

template <size_t n>
std::string missing(const Feature (&features)[n]) {
  for (const Feature& feature : features) {
    if ((read(feature.from) & feature.bits) != feature.bits) return feature.name;
  }
  return "";
}

// Tiles are granted per process and on request: until then the first tile instruction is a fault.
std::string request_tiles() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  return std::string("permission of the system to use AMX tiles (") + std::strerror(errno) + ")";
#else
  return "a Linux system, for permission to use AMX tiles";
#endif
}
#endif

}  // namespace

const std::vector<std::string>& known_cpu_levels() {
#if defined(__x86_64__)
  static const std::vector<std::string> levels = {"amx", "avx512vnni", "avx512", "avx2",
                                                  "portable"};
#elif defined(__aarch64__)
  static const std::vector<std::string> levels = {"i8mm", "portable"};
#else
  static const std::vector<std::string> levels = {"portable"};
#endif
  return levels;
}

std::string cpu_level_obstacle(const std::string& level) {
  if (level == "portable") return "";
  std::string lacks = "a test for this level in csrc/cpu/features.cpp";
#if defined(__x86_64__)
  if (level == "avx2" || level == "avx512" || level == "avx512vnni" || level == "amx") {
    lacks = missing(kAvx2);
    if (lacks.empty() && level != "avx2") lacks = missing(kAvx512);
    if (lacks.empty() && (level == "avx512vnni" || level == "amx")) lacks = missing(kAvx512Vnni);
    if (lacks.empty() && level == "amx") lacks = missing(kAmx);
    if (lacks.empty() && level == "amx") lacks = request_tiles();
  }
#elif defined(__aarch64__) && defined(__linux__)
  if (level == "i8mm") {
    constexpr uint64_t kDotProduct = 1u << 20, kI8mm = 1u << 13, kBf16 = 1u << 14;
    const bool has = (getauxval(AT_HWCAP) & kDotProduct) &&
                     (getauxval(AT_HWCAP2) & (kI8mm | kBf16)) == (kI8mm | kBf16);
    lacks = has ? "" : "ASIMDDP, I8MM and BF16";
  }
#endif
  return lacks.empty() ? "" : "needs " + lacks;
}

int affinity_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned cores = std::thread::hardware_concurrency();
  return cores > 0 ? static_cast<int>(cores) : 1;
}

}  // namespace atlas
