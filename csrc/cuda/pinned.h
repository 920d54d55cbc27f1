// Host memory that copies to and from the device fastest.
#pragma once

#include <cstddef>

#include "cuda/driver.h"

namespace atlas {
namespace cuda {

struct Pinned {
  void* memory = nullptr;
  size_t bytes = 0;
  bool mapped = false;  // by us, and registered; else the driver's own
};

// Throws DeviceFault if there is none left.
Pinned pin(const Driver& cuda, size_t bytes);
Result unpin(const Driver& cuda, const Pinned& pinned);

}  // namespace cuda
}  // namespace atlas
