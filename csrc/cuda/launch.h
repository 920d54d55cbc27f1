// Kernels of device images, and launching them: everything is looked up, checked and set up at
// load, so that a launch is a choice of variant, three multiplications and one call.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/program.h"
#include "cuda/driver.h"

namespace atlas {
namespace cuda {

struct LoadedVariant {
  Variant spec;
  Function function = nullptr;
  LaunchAttribute attributes[3] = {};
  unsigned n_attributes = 0;
  DevicePointer scratch = 0;
  std::vector<void*> arguments;
};

// A launch whose kernels are loaded. A variant's arguments point to the `addresses` of operands and
// of the words of the step header that hold its dims, then into the variant: to its own constants
// and its scratch, which a kernel that has none does not take.
struct LoadedLaunch {
  LoadedLaunch() = default;
  LoadedLaunch(LoadedLaunch&&) = default;  // and no copy, whose arguments would be another's

  // Gives the operands places in the arena. Throws DeviceFault if one lies outside.
  void place(const std::vector<size_t>& operands, DevicePointer arena, size_t arena_bytes);

  LaunchSpec spec;
  std::vector<LoadedVariant> variants;  // least max_rows first; any number of rows last
  std::vector<DevicePointer> addresses;
};

// The loaded device images and the kernels found in them.
class Images {
 public:
  Images(const Driver& cuda, const CudaDevice& device) : cuda_(cuda), device_(device) {}

  void load(const std::vector<std::string_view>& images);
  void unload();

  // Throws DeviceFault that names the launch and what this device or its images lack.
  LoadedLaunch resolve(const LaunchSpec& spec, DevicePointer arena, size_t arena_bytes);

 private:
  Function find(const std::string& where, const Variant& variant);
  LoadedVariant resolve(const std::string& where, const Variant& variant);
  int active_clusters(const std::string& where, const LoadedVariant& variant) const;
  void check_resident(const std::string& where, const LoadedVariant& variant, int clusters) const;

  const Driver& cuda_;
  const CudaDevice& device_;
  std::vector<Library> libraries_;
  std::map<std::pair<int, std::string>, Function> functions_;
};

// Puts one launch on `stream`, for the step whose header is `header` and lies at `step` on the
// device. Left out is a launch of another phase, of no rows, or of an empty grid. With
// `synchronous`, waits for it. Throws DeviceFault that names kernel, op, geometry, dims and
// operands.
void launch(const Driver& cuda, LoadedLaunch& launch, const int32_t* header, DevicePointer step,
            Stream stream, bool synchronous);

}  // namespace cuda
}  // namespace atlas
