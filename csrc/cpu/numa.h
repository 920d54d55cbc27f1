// Memory on machines whose CPUs have parts of it nearer to them than others.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace atlas {

// Memory nodes of the CPUs that this process may run on; empty where the system does not tell.
// root: /sys/devices/system/node, or what stands for it in a test.
std::vector<int> memory_nodes(const std::string& root);

// Asks for the pages of [data, +bytes), not touched yet, to be spread over `nodes` in turn. What
// kept it from being done, or empty. Nothing is asked with fewer than two nodes, nor where a policy
// was set for the process from outside (numactl).
//
// Spread, and not placed where the worker that will read a page runs: workers are not bound to
// cores, every worker reads every part of the KV cache, and all memory controllers share the load.
std::string interleave(void* data, size_t bytes, const std::vector<int>& nodes);

}  // namespace atlas
