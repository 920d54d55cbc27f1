#include "cpu/features.h"

#ifdef __linux__
#include <sched.h>
#endif

#include <thread>

namespace atlas {

std::vector<std::string> supported_cpu_levels() {
  std::vector<std::string> levels;
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks whether the system saves the wide registers. The flags it
  // knows differ between compilers: those below are known to all, and no CPU that has them lacks
  // the rest of its level (F16C, LZCNT, MOVBE).
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) levels.emplace_back("avx512");
  if (v3) levels.emplace_back("avx2");
#endif
  levels.emplace_back("portable");
  return levels;
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
