// The CPU kernels that are linked in, by instruction-set level and signature.
#pragma once

#include <string>
#include <vector>

#include "atlas/kernel.h"
#include "core/backend.h"  // cpu_kernels, break_cpu_level

namespace atlas {

struct CpuKernelEntry {
  const char* level;
  const char* signature;
  CpuKernel kernel;
  CpuScratch scratch, shared;  // may be null: none needed
};

// The entry of `signature` at the first of `levels` that has one, or null.
const CpuKernelEntry* find_cpu_kernel(const std::vector<std::string>& levels,
                                      const std::string& signature);

// Levels that have kernels, in order of registration.
std::vector<std::string> registered_cpu_levels();

}  // namespace atlas
