#include "cpu/registry.h"

#include <algorithm>

namespace atlas {
namespace {

// Made at first use: kernel files register from static initialisers, in any order.
std::vector<CpuKernelEntry>& entries() {
  static std::vector<CpuKernelEntry> list;
  return list;
}

std::vector<std::string> distinct(const char* CpuKernelEntry::* field) {
  std::vector<std::string> result;
  for (const CpuKernelEntry& entry : entries()) {
    if (std::find(result.begin(), result.end(), entry.*field) == result.end()) {
      result.emplace_back(entry.*field);
    }
  }
  return result;
}

}  // namespace

bool register_cpu_kernel(const char* level, const char* signature, CpuKernel kernel,
                         CpuScratch scratch) {
  entries().push_back({level, signature, kernel, scratch});
  return true;
}

const CpuKernelEntry* find_cpu_kernel(const std::string& level, const std::string& signature) {
  for (const CpuKernelEntry& entry : entries()) {
    if (level == entry.level && signature == entry.signature) return &entry;
  }
  return nullptr;
}

std::vector<std::string> registered_cpu_levels() { return distinct(&CpuKernelEntry::level); }
std::vector<std::string> registered_cpu_signatures() {
  return distinct(&CpuKernelEntry::signature);
}

}  // namespace atlas
