// Which instruction-set levels may be used: compiled in, supported by the machine, and right in a
// self-test. Each is judged once in a process, when it is first considered.
#pragma once

#include <string>
#include <vector>

#include "core/backend.h"

namespace atlas {

// What is known about `name`, one of known_cpu_levels().
CpuLevel judge_cpu_level(const std::string& name);

// Usable levels from `first` ("" = the best) down, best first; empty if `first` is none of them.
std::vector<std::string> usable_cpu_levels(const std::string& first);

}  // namespace atlas
