// The CPU kernels that are linked in, by instruction-set level and signature.
#pragma once

#include <string>
#include <vector>

#include "atlas/kernel.h"

namespace atlas {

struct CpuKernelEntry {
  const char* level;
  const char* signature;
  CpuKernel kernel;
  CpuScratch scratch;  // may be null: none needed
};

// The entry of `signature` at `level`, or null.
const CpuKernelEntry* find_cpu_kernel(const std::string& level, const std::string& signature);

// Levels that have kernels, and signatures of all kernels; each once, in order of registration.
std::vector<std::string> registered_cpu_levels();
std::vector<std::string> registered_cpu_signatures();

}  // namespace atlas
