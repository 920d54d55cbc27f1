// Programs as the core sees them: launches whose operands are already arena offsets.
//
// Names, shapes and contracts stay in Python (atlas/runtime/program.py); the core keeps a launch's
// name only to say which one failed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace atlas {

// Raised with every change of LaunchSpec, of the kernel argument order or of the CPU kernel ABI.
// Kernel sets carry the value they were built for; another value is refused at load.
constexpr int kCoreAbi = 2;

// Version and word order of the step header: atlas/runtime/step.py defines both. Word 0 is the
// version, word 1 + i is symbol i.
constexpr int kStepVersion = 2;

// A constant of a launch. CPU kernels take it at run time; on a GPU it is compiled in.
union Constant {
  int64_t i;
  double f;
};

// One axis of a launch grid: multiplier * ceil(dim / divisor), or just multiplier if dim is -1.
struct GridAxis {
  int dim = -1;  // index into LaunchSpec::dims
  int64_t divisor = 1;
  int64_t multiplier = 1;
};

// In place of the offset of an optional operand that a launch leaves out.
constexpr size_t kNoOperand = ~size_t{0};

struct LaunchSpec {
  std::string name;                 // "layers.3.qkv": for error messages
  std::string op;                   // "linear"
  std::string kernel;               // cpu: signature; cuda: symbol in `image`
  int image = -1;                   // cuda: index into the images handed to Backend::load_images
  std::vector<size_t> operands;     // arena offsets or kNoOperand, in the contract's order
  std::vector<int> dims;            // header words, in the contract's order
  std::vector<Constant> constants;  // in the contract's order
  std::array<GridAxis, 3> grid;     // cuda only, as are the two below
  unsigned block = 1;               // threads per block
  unsigned shared = 0;              // dynamic shared memory, bytes
};

using ProgramSpec = std::vector<LaunchSpec>;

}  // namespace atlas
