// Whether the kernels of an instruction-set level compute what they should on this machine.
#pragma once

#include <string>

namespace atlas {

// Runs the kernels of `level` that are made of dot products on small random data, one and several
// rows, against a plain loop; takes about a millisecond. Empty if all agree; else the kernel and
// what it did. An illegal instruction counts as a failure and does not end the process.
std::string self_test_cpu_level(const std::string& level);

}  // namespace atlas
