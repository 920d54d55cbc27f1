// What this machine's CPU can run.
#pragma once

#include <string>
#include <vector>

namespace atlas {

// Names of kernels/cpu/HARDWARE.toml's levels that this CPU and its operating system support, best
// first. A level added there gets its test in features.cpp; without one it is never chosen.
std::vector<std::string> supported_cpu_levels();

// Cores that the threads of this process may run on: its affinity, not counting quotas.
int affinity_cores();

}  // namespace atlas
