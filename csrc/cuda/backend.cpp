// The CUDA backend: one arena in device memory, one stream, and programs of kernels from device
// images.
//
// Everything is allocated and every kernel is loaded before the first run; a run only launches. A
// kernel's arguments are addresses: of its operands in the arena, and of the step header's words
// that hold its dims, so that a launch recorded once is right for every step.
#include "core/backend.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "cuda/driver.h"

namespace atlas {
namespace {

using namespace cuda;

constexpr size_t kHeaderWords = 16;
constexpr unsigned kSharedWithoutOptIn = 48 * 1024;

std::string gibibytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1u << 30));
  return text;
}

struct LoadedLaunch {
  LaunchSpec spec;
  Function function;
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int device)
      : cuda_(driver()), device_(device_at(device)), process_(getpid()) {
    const char* sync = std::getenv("ATLAS_SYNC");
    synchronous_ = sync != nullptr && std::strcmp(sync, "1") == 0;
    check(cuda_.device_get(&handle_, device), "cuDeviceGet");
    check(cuda_.context_retain(&context_, handle_), "creating a context on " + device_.name);
    try {
      enter();
      check(cuda_.stream_create(&stream_, kStreamNonBlocking), "cuStreamCreate");
    } catch (...) {
      cuda_.context_release(handle_);
      throw;
    }
  }
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  // Errors are ignored: after a device fault every call fails, and there is nobody left to tell.
  ~CudaBackend() override {
    if (process_ != getpid() || cuda_.context_set(context_) != 0) return;
    cuda_.stream_synchronize(stream_);
    for (void* memory : staging_) cuda_.host_free(memory);
    if (arena_ != 0) cuda_.memory_free(arena_);
    for (Library library : images_) cuda_.library_unload(library);
    cuda_.stream_destroy(stream_);
    cuda_.context_release(handle_);
  }

  std::string describe() const override {
    return device_.name + " (CUDA device " + std::to_string(device_.index) +
           ", compute capability " + capability() + ", " + gibibytes(device_.total_memory) +
           ", driver CUDA " + std::to_string(cuda_.version / 1000) + "." +
           std::to_string(cuda_.version % 1000 / 10) + ")";
  }

  void allocate(size_t bytes) override {
    enter();
    if (arena_ != 0) throw DeviceFault("the arena is allocated once");
    const Result result = cuda_.memory_allocate(&arena_, std::max<size_t>(bytes, 1));
    if (result == kOutOfMemory) {
      size_t free = 0, total = 0;
      check(cuda_.memory_info(&free, &total), "cuMemGetInfo");
      throw DeviceFault(device_.name + ": the arena needs " + gibibytes(bytes) + ", free are " +
                        gibibytes(free) + " of " + gibibytes(total) +
                        "; stop other processes on this device, or plan fewer KV blocks or a "
                        "smaller quant");
    }
    check(result, "allocating an arena of " + gibibytes(bytes));
    arena_bytes_ = bytes;
  }

  size_t arena_bytes() const override { return arena_bytes_; }

  void write(size_t offset, const void* data, size_t bytes) override {
    if (bytes == 0) return;
    enter();
    check(cuda_.copy_to_device(at(offset, bytes), data, bytes, stream_), "copying to the device");
    synchronize();
  }

  void read(size_t offset, void* data, size_t bytes) override {
    if (bytes == 0) return;
    enter();
    check(cuda_.copy_to_host(data, at(offset, bytes), bytes, stream_), "copying from the device");
    synchronize();
  }

  void fill(size_t offset, uint8_t value, size_t bytes) override {
    if (bytes == 0) return;
    enter();
    check(cuda_.fill_bytes(at(offset, bytes), value, bytes, stream_), "filling device memory");
    synchronize();
  }

  void* staging(size_t bytes) override {
    enter();
    void* memory = nullptr;
    check(cuda_.host_allocate(&memory, std::max<size_t>(bytes, 1), kHostAllocPortable),
          "allocating " + std::to_string(bytes) + " bytes of pinned host memory");
    staging_.push_back(memory);
    return memory;
  }

  void load_images(const std::vector<std::string_view>& images) override {
    enter();
    if (!images_.empty()) throw DeviceFault("device images are loaded once");
    for (std::string_view image : images) {
      Library library = nullptr;
      const Result result =
          cuda_.library_load(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
      if (result != 0) {
        std::string hint;
        if (result == kNoBinaryForDevice) {
          hint = "; it was compiled for another architecture than compute capability " +
                 capability() + ": build the target of this hardware (ATLAS_TARGET_HW)";
        }
        throw DeviceFault(device_.name + ": device image " + std::to_string(images_.size()) +
                          " does not load: " + describe_error(cuda_, result) + hint);
      }
      images_.push_back(library);
    }
  }

  int load(const ProgramSpec& program) override {
    enter();
    std::vector<LoadedLaunch> loaded;
    for (const LaunchSpec& spec : program) {
      for (size_t offset : spec.operands) {
        if (offset != kNoOperand && offset > arena_bytes_) {
          throw DeviceFault(where(spec) + ": an operand at byte " + std::to_string(offset) +
                            " is outside the arena of " + std::to_string(arena_bytes_));
        }
      }
      for (int word : spec.dims) {
        if (word < 0 || static_cast<size_t>(word) >= kHeaderWords) {
          throw DeviceFault(where(spec) + ": no header word " + std::to_string(word));
        }
      }
      for (const GridAxis& axis : spec.grid) {
        if (axis.divisor <= 0 || axis.dim >= static_cast<int>(spec.dims.size())) {
          throw DeviceFault(where(spec) + ": a grid axis has divisor " +
                            std::to_string(axis.divisor) + " and dim " + std::to_string(axis.dim));
        }
      }
      addresses_.reserve(std::max(addresses_.capacity(), spec.operands.size() + spec.dims.size()));
      arguments_.reserve(addresses_.capacity());
      loaded.push_back({spec, resolve(spec)});
    }
    programs_.push_back(std::move(loaded));
    return static_cast<int>(programs_.size()) - 1;
  }

  void begin_step(size_t offset, const void* block, size_t bytes) override {
    enter();
    std::memcpy(header_, check_header(block, bytes), sizeof header_);
    step_ = at(offset, bytes);
    check(cuda_.copy_to_device(step_, block, bytes, stream_), "copying a step to the device");
    // The caller may write the next step into the block once this returns.
    synchronize();
  }

  void run(int program, size_t begin, size_t end) override {
    enter();
    if (program < 0 || static_cast<size_t>(program) >= programs_.size()) {
      throw DeviceFault("no program " + std::to_string(program) + " is loaded");
    }
    const std::vector<LoadedLaunch>& launches = programs_[static_cast<size_t>(program)];
    if (begin > end || end > launches.size()) {
      throw DeviceFault("program " + std::to_string(program) + " has " +
                        std::to_string(launches.size()) + " launches, asked for [" +
                        std::to_string(begin) + ", " + std::to_string(end) + ")");
    }
    if (step_ == 0) throw DeviceFault("run() before begin_step()");
    for (size_t i = begin; i < end; ++i) launch(launches[i]);
  }

  void synchronize() override {
    enter();
    const Result result = cuda_.stream_synchronize(stream_);
    if (result != 0) {
      throw DeviceFault(device_.name +
                        ": work on the device failed: " + describe_error(cuda_, result) +
                        "; set ATLAS_SYNC=1 to learn which launch it is");
    }
  }

 private:
  // Makes the context current on the calling thread; refuses in a forked child, where calls may
  // hang.
  void enter() {
    if (process_ != getpid()) driver();  // throws, and says why
    check(cuda_.context_set(context_), "cuCtxSetCurrent");
  }

  std::string capability() const {
    return std::to_string(device_.major) + "." + std::to_string(device_.minor);
  }

  static std::string where(const LaunchSpec& spec) {
    return "launch " + spec.name + " of op " + spec.op + " (kernel " + spec.kernel + ")";
  }

  DevicePointer at(size_t offset, size_t bytes) const {
    if (offset > arena_bytes_ || bytes > arena_bytes_ - offset) {
      throw DeviceFault("arena access [" + std::to_string(offset) + ", +" + std::to_string(bytes) +
                        ") is outside the arena of " + std::to_string(arena_bytes_) + " bytes");
    }
    return arena_ + offset;
  }

  // The function of a launch, loaded and set up now so that nothing is left to do in a step.
  Function resolve(const LaunchSpec& spec) {
    if (spec.image < 0 || static_cast<size_t>(spec.image) >= images_.size()) {
      throw DeviceFault(where(spec) + ": no device image " + std::to_string(spec.image) + ", " +
                        std::to_string(images_.size()) + " are loaded");
    }
    Function& function = functions_[{spec.image, spec.kernel}];
    if (function == nullptr) {
      Kernel kernel = nullptr;
      check(cuda_.library_kernel(&kernel, images_[static_cast<size_t>(spec.image)],
                                 spec.kernel.c_str()),
            where(spec) + " is not in device image " + std::to_string(spec.image));
      Function found = nullptr;
      check(cuda_.kernel_function(&found, kernel), where(spec));
      check(cuda_.function_load(found), where(spec) + " does not load");
      function = found;
    }
    int most = 0;
    check(cuda_.function_attribute(&most, kMaxThreadsPerBlock, function), where(spec));
    if (spec.block == 0 || spec.block > static_cast<unsigned>(most)) {
      throw DeviceFault(where(spec) + ": " + std::to_string(spec.block) +
                        " threads per block, possible are 1 to " + std::to_string(most));
    }
    if (spec.shared > kSharedWithoutOptIn) {
      check(
          cuda_.function_set_attribute(function, kMaxDynamicShared, static_cast<int>(spec.shared)),
          where(spec) + ": " + std::to_string(spec.shared) + " bytes of shared memory");
    }
    return function;
  }

  void launch(const LoadedLaunch& launch) {
    const LaunchSpec& spec = launch.spec;
    unsigned grid[3];
    for (int axis = 0; axis < 3; ++axis) {
      const GridAxis& extent = spec.grid[static_cast<size_t>(axis)];
      int64_t value = extent.multiplier;
      if (extent.dim >= 0) {
        const int64_t dim = header_[spec.dims[static_cast<size_t>(extent.dim)]];
        value *= (dim + extent.divisor - 1) / extent.divisor;
      }
      if (value <= 0) return;  // nothing to compute
      grid[axis] = static_cast<unsigned>(value);
    }
    addresses_.clear();
    for (size_t offset : spec.operands) {
      addresses_.push_back(offset == kNoOperand ? 0 : arena_ + offset);
    }
    for (int word : spec.dims) {
      addresses_.push_back(step_ + sizeof(int32_t) * static_cast<size_t>(word));
    }
    arguments_.clear();
    for (DevicePointer& address : addresses_) arguments_.push_back(&address);
    Result result = cuda_.launch(launch.function, grid[0], grid[1], grid[2], spec.block, 1, 1,
                                 spec.shared, stream_, arguments_.data(), nullptr);
    if (result == 0 && synchronous_) result = cuda_.stream_synchronize(stream_);
    if (result != 0) {
      throw DeviceFault(where(spec) + " failed with grid " + std::to_string(grid[0]) + " x " +
                        std::to_string(grid[1]) + " x " + std::to_string(grid[2]) + ", block " +
                        std::to_string(spec.block) + ", " + std::to_string(spec.shared) +
                        " bytes of shared memory: " + describe_error(cuda_, result) +
                        (synchronous_ ? ""
                                      : "; if an earlier launch is the cause, ATLAS_SYNC=1 "
                                        "names it"));
    }
  }

  const Driver& cuda_;
  CudaDevice device_;
  int process_;
  bool synchronous_ = false;
  Device handle_ = 0;
  Context context_ = nullptr;
  Stream stream_ = nullptr;
  DevicePointer arena_ = 0;
  size_t arena_bytes_ = 0;
  std::vector<void*> staging_;
  std::vector<Library> images_;
  std::map<std::pair<int, std::string>, Function> functions_;
  std::vector<std::vector<LoadedLaunch>> programs_;
  int32_t header_[kHeaderWords] = {};
  DevicePointer step_ = 0;
  // Arguments of the launch at hand; reserved at load, so a step does not allocate.
  std::vector<DevicePointer> addresses_;
  std::vector<void*> arguments_;
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(int device) {
  return std::make_unique<CudaBackend>(device);
}

}  // namespace atlas
