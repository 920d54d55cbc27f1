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
constexpr int kCoreAbi = 5;

// Version and word order of the step header: atlas/runtime/step.py defines both. Word 0 is the
// version, word 1 + i is symbol i, the last word is the step's phase.
constexpr int kStepVersion = 3;
constexpr size_t kHeaderWords = 16;
constexpr size_t kPhaseWord = 15;

// A constant of a launch, which CPU kernels take at run time; on a GPU it is compiled in, or among
// a variant's arguments.
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

// Steps that make a launch, or that a variant serves: any, or those whose header's phase word is
// this minus 1.
enum Phase : int { kAnyPhase = 0, kPrefill = 1, kDecode = 2 };

// Whether a step with this header is among them.
inline bool includes(int phase, const int32_t* header) {
  return phase == kAnyPhase || phase == header[kPhaseWord] + 1;
}

// One way to run a launch: the kernel compiled for a phase and a largest number of rows. The core
// takes the one with the least max_rows that holds the step's rows. All but `kernel` is cuda only.
struct Variant {
  int phase = kAnyPhase;
  int max_rows = 0;                 // 0: any number
  std::string kernel;               // cpu: signature; cuda: symbol in `image`
  int image = -1;                   // index into the images handed to Backend::load_images
  std::array<GridAxis, 3> grid{};   // blocks
  unsigned block = 1;               // threads per block
  unsigned shared = 0;              // dynamic shared memory, bytes
  unsigned cluster = 1;             // blocks of a cluster, along x
  bool pdl = false;                 // may begin before its predecessor ends: it waits on the device
  bool cooperative = false;         // all blocks are resident at once
  std::vector<uint32_t> arguments;  // words of constants that it takes behind the dims
  size_t scratch = kNoOperand;      // arena offset of memory that all launches of the kernel share
};

struct LaunchSpec {
  std::string name;                 // "layers.3.qkv": for error messages
  std::string op;                   // "linear"
  int phase = kAnyPhase;            // steps that make it; others leave it out
  std::vector<size_t> operands;     // arena offsets or kNoOperand, in the contract's order
  std::vector<int> dims;            // header words, in the contract's order
  std::vector<Constant> constants;  // in the contract's order
  int row_dim = -1;                 // index into dims of the count that max_rows bounds, or -1
  std::vector<Variant> variants;    // at least one
};

using ProgramSpec = std::vector<LaunchSpec>;

}  // namespace atlas
