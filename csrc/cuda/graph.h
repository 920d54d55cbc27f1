// Graphs: what a program puts on the stream for one header, recorded once and replayed by one call.
#pragma once

#include <array>
#include <functional>
#include <string>

#include "core/program.h"
#include "cuda/driver.h"

namespace atlas {
namespace cuda {

// A program recorded for the largest step it may replay. Grids are those of `header`; kernels read
// the step's own counts on the device, so a smaller step computes no more than it asks for.
struct StepGraph {
  std::array<int32_t, kHeaderWords> header;
  DevicePointer step;
  GraphExec exec;

  bool holds(const int32_t* other, DevicePointer at) const {
    if (at != step || other[kPhaseWord] != header[kPhaseWord]) return false;
    for (size_t word = 1; word < kPhaseWord; ++word) {
      if (other[word] > header[word]) return false;
    }
    return true;
  }
};

// Records what `submit` puts on `stream`, and makes it ready to replay. Throws what `submit`
// throws, or DeviceFault that begins with `what`.
GraphExec record(const Driver& cuda, Stream stream, const std::string& what,
                 const std::function<void()>& submit);

}  // namespace cuda
}  // namespace atlas
