#include "cpu/registry.h"

#include <algorithm>
#include <csignal>

namespace atlas {
namespace {

// Made at first use: kernel files register from static initialisers, in any order.
std::vector<CpuKernelEntry>& entries() {
  static std::vector<CpuKernelEntry> list;
  return list;
}

}  // namespace

bool register_cpu_kernel(const char* level, const char* signature, CpuKernel kernel,
                         CpuScratch scratch, CpuScratch shared) {
  entries().push_back({level, signature, kernel, scratch, shared});
  return true;
}

const CpuKernelEntry* find_cpu_kernel(const std::vector<std::string>& levels,
                                      const std::string& signature) {
  for (const std::string& level : levels) {
    for (const CpuKernelEntry& entry : entries()) {
      if (level == entry.level && signature == entry.signature) return &entry;
    }
  }
  return nullptr;
}

std::vector<std::string> registered_cpu_levels() {
  std::vector<std::string> levels;
  for (const CpuKernelEntry& entry : entries()) {
    if (std::find(levels.begin(), levels.end(), entry.level) == levels.end()) {
      levels.emplace_back(entry.level);
    }
  }
  return levels;
}

std::vector<std::string> cpu_kernels(const std::string& level) {
  std::vector<std::string> signatures;
  for (const CpuKernelEntry& entry : entries()) {
    const bool known =
        std::find(signatures.begin(), signatures.end(), entry.signature) != signatures.end();
    if (!known && (level.empty() || level == entry.level)) {
      signatures.emplace_back(entry.signature);
    }
  }
  return signatures;
}

void break_cpu_level(const std::string& level, bool faults) {
  for (CpuKernelEntry& entry : entries()) {
    if (level != entry.level) continue;
    if (faults) {
      entry.kernel = [](const CpuLaunch&) { std::raise(SIGILL); };
    } else {
      entry.kernel = [](const CpuLaunch&) {};
    }
  }
}

}  // namespace atlas
