#include "cuda/launch.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace atlas {
namespace cuda {
namespace {

constexpr int kAllShared = 100;           // percent
constexpr unsigned kPortableCluster = 8;  // every device with clusters runs this many blocks

std::string describe(const LaunchSpec& spec) { return "launch " + spec.name + " of op " + spec.op; }

std::string describe(const LaunchSpec& spec, const Variant& variant) {
  return describe(spec) + " (kernel " + variant.kernel + ")";
}

// "a, b, c" of anything that std::to_string takes; `none` in place of kNoOperand.
template <class Values>
std::string join(const Values& values) {
  std::string text;
  for (const auto& value : values) {
    text += text.empty() ? "" : ", ";
    text += static_cast<size_t>(value) == kNoOperand ? "none" : std::to_string(value);
  }
  return text;
}

const char* phase_name(int phase) {
  return phase == kPrefill ? "prefill" : phase == kDecode ? "decode" : "any phase";
}

std::string capability(const CudaDevice& device) {
  return std::to_string(device.major) + "." + std::to_string(device.minor);
}

void check_geometry(const LaunchSpec& spec, const Variant& variant) {
  const std::string where = describe(spec, variant);
  for (const GridAxis& axis : variant.grid) {
    if (axis.divisor <= 0 || axis.dim >= static_cast<int>(spec.dims.size())) {
      throw DeviceFault(where + ": a grid axis has divisor " + std::to_string(axis.divisor) +
                        " and dim " + std::to_string(axis.dim));
    }
  }
  if (variant.cluster == 0 || variant.grid[0].multiplier % variant.cluster != 0) {
    throw DeviceFault(where + ": clusters of " + std::to_string(variant.cluster) +
                      " blocks do not divide a grid of " +
                      std::to_string(variant.grid[0].multiplier) + " blocks along x");
  }
}

// Whether there is anything to do in a step: its phase makes the launch, for a row at least.
bool is_made(const LaunchSpec& spec, const int32_t* header) {
  if (!includes(spec.phase, header)) return false;
  return spec.row_dim < 0 || header[spec.dims[static_cast<size_t>(spec.row_dim)]] > 0;
}

LoadedVariant& choose(LoadedLaunch& launch, const int32_t* header) {
  const int row_dim = launch.spec.row_dim;
  const int rows = row_dim < 0 ? 0 : header[launch.spec.dims[static_cast<size_t>(row_dim)]];
  for (LoadedVariant& variant : launch.variants) {
    const Variant& spec = variant.spec;
    if (!includes(spec.phase, header)) continue;
    if (spec.max_rows == 0 || rows <= spec.max_rows) return variant;
  }
  std::string have;
  for (const LoadedVariant& variant : launch.variants) {
    have += have.empty() ? "" : ", ";
    have += phase_name(variant.spec.phase);
    if (variant.spec.max_rows != 0) have += " up to " + std::to_string(variant.spec.max_rows);
  }
  throw DeviceFault(describe(launch.spec) + " has no kernel for " + std::to_string(rows) +
                    " rows in phase " + phase_name(header[kPhaseWord] + 1) +
                    "; there are: " + have);
}

}  // namespace

void Images::load(const std::vector<std::string_view>& images) {
  if (!libraries_.empty()) throw DeviceFault("device images are loaded once");
  for (std::string_view image : images) {
    Library library = nullptr;
    const Result result =
        cuda_.library_load(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result != 0) {
      std::string hint;
      if (result == kNoBinaryForDevice) {
        hint = "; it was compiled for another architecture than compute capability " +
               capability(device_) + ": build the target of this hardware (ATLAS_TARGET_HW)";
      }
      throw DeviceFault(device_.name + ": device image " + std::to_string(libraries_.size()) +
                        " does not load: " + describe_error(cuda_, result) + hint);
    }
    libraries_.push_back(library);
  }
}

void Images::unload() {
  for (Library library : libraries_) cuda_.library_unload(library);
}

Function Images::find(const std::string& where, const Variant& variant) {
  if (variant.image < 0 || static_cast<size_t>(variant.image) >= libraries_.size()) {
    throw DeviceFault(where + ": no device image " + std::to_string(variant.image) + ", " +
                      std::to_string(libraries_.size()) + " are loaded");
  }
  Function& function = functions_[{variant.image, variant.kernel}];
  if (function == nullptr) {
    Kernel kernel = nullptr;
    check(cuda_.library_kernel(&kernel, libraries_[static_cast<size_t>(variant.image)],
                               variant.kernel.c_str()),
          where + " is not in device image " + std::to_string(variant.image));
    Function found = nullptr;
    check(cuda_.kernel_function(&found, kernel), where);
    check(cuda_.function_load(found), where + " does not load");
    function = found;
  }
  return function;
}

LoadedVariant Images::resolve(const std::string& where, const Variant& variant) {
  LoadedVariant loaded;
  loaded.spec = variant;
  loaded.function = find(where, variant);
  int most = 0;
  check(cuda_.function_attribute(&most, kMaxThreadsPerBlock, loaded.function), where);
  if (variant.block == 0 || variant.block > static_cast<unsigned>(most)) {
    throw DeviceFault(where + ": " + std::to_string(variant.block) +
                      " threads per block, possible are 1 to " + std::to_string(most));
  }
  // Above 48 KB it must be asked for, and of those the kernel's static memory takes a part.
  if (variant.shared > 0) {
    check(cuda_.function_set_attribute(loaded.function, kMaxDynamicShared,
                                       static_cast<int>(variant.shared)),
          where + ": " + std::to_string(variant.shared) +
              " bytes of shared memory, this device has " +
              std::to_string(device_.shared_memory_per_block) + " per block");
  }
  const auto attribute = [&loaded](LaunchAttributeId id) -> unsigned* {
    LaunchAttribute& added = loaded.attributes[loaded.n_attributes++];
    added.id = id;
    return added.words;
  };
  if (variant.pdl) {
    attribute(kProgrammatic)[0] = 1;
    // Kernels that overlap share a multiprocessor, and some of them need all of its memory as
    // shared memory. Steps of SmolLM2 on an H200: 1.4 % shorter at 1 row, 3.5 % at 8, 0.4 % longer
    // at 128.
    check(cuda_.function_set_attribute(loaded.function, kSharedCarveout, kAllShared), where);
  }
  if (variant.cooperative) attribute(kCooperative)[0] = 1;
  int clusters = 0;
  if (variant.cluster > 1) {
    unsigned* size = attribute(kClusterDimension);
    size[0] = variant.cluster;
    size[1] = size[2] = 1;
    if (variant.cluster > kPortableCluster) {
      check(cuda_.function_set_attribute(loaded.function, kLargeClusters, 1),
            where + ": clusters of " + std::to_string(variant.cluster) + " blocks");
    }
    clusters = active_clusters(where, loaded);
  }
  if (variant.cooperative || variant.scratch != kNoOperand) {
    check_resident(where, loaded, clusters);
  }
  return loaded;
}

// How many clusters are resident at once: one at least.
int Images::active_clusters(const std::string& where, const LoadedVariant& variant) const {
  if (!device_.cluster_launch) {
    throw DeviceFault(where + ": " + device_.name + " (compute capability " + capability(device_) +
                      ") has no clusters");
  }
  const Variant& spec = variant.spec;
  const auto blocks = static_cast<unsigned>(spec.grid[0].multiplier);
  const LaunchConfig config = {{blocks, 1, 1}, {spec.block, 1, 1}, spec.shared,
                               nullptr,        variant.attributes, variant.n_attributes};
  int clusters = 0;
  check(cuda_.active_clusters(&clusters, variant.function, &config), where);
  if (clusters < 1) {
    throw DeviceFault(where + ": no cluster of " + std::to_string(spec.cluster) + " blocks with " +
                      std::to_string(spec.shared) + " bytes of shared memory each fits on " +
                      device_.name);
  }
  return clusters;
}

// Blocks that wait for one another must be resident at once, or they would wait forever. Those of a
// kernel with scratch may do so: what they leave there for each other has no other reader.
// `clusters`: of the kernel's, that are resident at once.
void Images::check_resident(const std::string& where, const LoadedVariant& variant,
                            int clusters) const {
  const Variant& spec = variant.spec;
  if (spec.cooperative && !device_.cooperative_launch) {
    throw DeviceFault(where + ": " + device_.name + " has no cooperative launch");
  }
  int64_t blocks = 1;
  for (const GridAxis& axis : spec.grid) {
    if (axis.dim >= 0) {
      throw DeviceFault(where +
                        ": the grid of a kernel that is cooperative or has scratch may not "
                        "depend on a dim of the step");
    }
    blocks *= axis.multiplier;
  }
  int per_multiprocessor = 0;
  check(cuda_.active_blocks(&per_multiprocessor, variant.function, static_cast<int>(spec.block),
                            spec.shared),
        where);
  const int64_t alone = int64_t{per_multiprocessor} * device_.multiprocessors;
  const int64_t most = spec.cluster > 1 ? std::min(alone, int64_t{clusters} * spec.cluster) : alone;
  if (blocks > most) {
    const std::string grouped =
        most < alone ? " in clusters of " + std::to_string(spec.cluster) : std::string();
    throw DeviceFault(where + ": its " + std::to_string(blocks) + " blocks" + grouped +
                      " wait for one another, and " + device_.name + " holds " +
                      std::to_string(most) + " at once; build for this device's own hardware");
  }
}

void LoadedLaunch::place(const std::vector<size_t>& operands, DevicePointer arena,
                         size_t arena_bytes) {
  for (size_t offset : operands) {
    if (offset != kNoOperand && offset > arena_bytes) {
      throw DeviceFault(describe(spec) + ": an operand at byte " + std::to_string(offset) +
                        " is outside the arena of " + std::to_string(arena_bytes));
    }
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    addresses[i] = operands[i] == kNoOperand ? 0 : arena + operands[i];
  }
  spec.operands = operands;
}

LoadedLaunch Images::resolve(const LaunchSpec& spec, DevicePointer arena, size_t arena_bytes) {
  for (int word : spec.dims) {
    if (word < 0 || static_cast<size_t>(word) >= kHeaderWords) {
      throw DeviceFault(describe(spec) + ": no header word " + std::to_string(word));
    }
  }
  if (spec.row_dim >= static_cast<int>(spec.dims.size())) {
    throw DeviceFault(describe(spec) + ": no dim " + std::to_string(spec.row_dim));
  }
  LoadedLaunch loaded;
  loaded.spec = spec;
  loaded.addresses.resize(spec.operands.size() + spec.dims.size());
  loaded.place(spec.operands, arena, arena_bytes);
  for (const Variant& variant : spec.variants) {
    check_geometry(spec, variant);
    loaded.variants.push_back(resolve(describe(spec, variant), variant));
    if (variant.scratch == kNoOperand) continue;
    if (variant.scratch > arena_bytes) {
      throw DeviceFault(describe(spec, variant) + ": scratch at byte " +
                        std::to_string(variant.scratch) + " is outside the arena of " +
                        std::to_string(arena_bytes));
    }
    loaded.variants.back().scratch = arena + variant.scratch;
  }
  std::stable_sort(loaded.variants.begin(), loaded.variants.end(),
                   [](const LoadedVariant& a, const LoadedVariant& b) {
                     const auto rows = [](const LoadedVariant& v) {
                       return v.spec.max_rows == 0 ? std::numeric_limits<int>::max()
                                                   : v.spec.max_rows;
                     };
                     return rows(a) < rows(b);
                   });
  for (LoadedVariant& variant : loaded.variants) {  // which stay where they are from here on
    for (DevicePointer& address : loaded.addresses) variant.arguments.push_back(&address);
    for (uint32_t& word : variant.spec.arguments) variant.arguments.push_back(&word);
    variant.arguments.push_back(&variant.scratch);
  }
  return loaded;
}

void launch(const Driver& cuda, LoadedLaunch& launch, const int32_t* header, DevicePointer step,
            Stream stream, bool synchronous) {
  const LaunchSpec& spec = launch.spec;
  if (!is_made(spec, header)) return;
  LoadedVariant& variant = choose(launch, header);
  LaunchConfig config = {{},     {variant.spec.block, 1, 1}, variant.spec.shared,
                         stream, variant.attributes,         variant.n_attributes};
  for (size_t i = 0; i < 3; ++i) {
    const GridAxis& axis = variant.spec.grid[i];
    const int64_t value = axis.dim < 0 ? 1 : header[spec.dims[static_cast<size_t>(axis.dim)]];
    const int64_t blocks = (value + axis.divisor - 1) / axis.divisor * axis.multiplier;
    if (blocks <= 0) return;
    config.grid[i] = static_cast<unsigned>(blocks);
  }
  for (size_t i = 0; i < spec.dims.size(); ++i) {
    launch.addresses[spec.operands.size() + i] =
        step + sizeof(int32_t) * static_cast<size_t>(spec.dims[i]);
  }
  Result result = cuda.launch(&config, variant.function, variant.arguments.data(), nullptr);
  if (result == 0 && synchronous) result = cuda.stream_synchronize(stream);
  if (result == 0) return;
  std::vector<int> dims;
  for (int word : spec.dims) dims.push_back(header[word]);
  throw DeviceFault(
      describe(spec, variant.spec) + " failed with grid " + std::to_string(config.grid[0]) + " x " +
      std::to_string(config.grid[1]) + " x " + std::to_string(config.grid[2]) + ", block " +
      std::to_string(config.block[0]) + ", cluster " + std::to_string(variant.spec.cluster) + ", " +
      std::to_string(config.shared) + " bytes of shared memory, dims [" + join(dims) +
      "], operands at arena bytes [" + join(spec.operands) + "]: " + describe_error(cuda, result) +
      (synchronous ? "" : "; if an earlier launch is the cause, ATLAS_SYNC=1 names it"));
}

}  // namespace cuda
}  // namespace atlas
