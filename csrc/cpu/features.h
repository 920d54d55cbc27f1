// What this machine's CPU can run.
#pragma once

#include <string>
#include <vector>

namespace atlas {

// Levels of kernels/cpu/HARDWARE.toml that this kind of machine may have, in that order: best
// first. A level added there is added here, with what a CPU must have for it in features.cpp.
const std::vector<std::string>& known_cpu_levels();

// What keeps this CPU or its operating system from running `level`; empty if nothing does. Asking
// about "amx" also asks the system to let this process use its tiles.
std::string cpu_level_obstacle(const std::string& level);

// Cores that the threads of this process may run on: its affinity, not counting quotas.
int affinity_cores();

}  // namespace atlas
