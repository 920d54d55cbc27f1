#include "cuda/driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

namespace atlas {
namespace cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Why cuInit failed and what helps: the error's own text rarely says.
std::string init_failure(const Driver& driver, Result result) {
  const std::string found = "the NVIDIA driver did not start: " + describe_error(driver, result);
  switch (result) {
    case kNotInitialized:
      return found +
             "; CUDA was used in a parent process before fork(): start this process by spawn "
             "instead";
    case kStubLibrary:
      return found +
             "; the libcuda.so.1 found is the CUDA toolkit's stub for linking: take the toolkit's "
             "stubs folder off LD_LIBRARY_PATH";
    case kNoDevice: {
      const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
      if (visible != nullptr) {
        return "no NVIDIA GPU is visible: CUDA_VISIBLE_DEVICES is \"" + std::string(visible) +
               "\"; unset it, or set it to the indices that `nvidia-smi -L` lists";
      }
      return found +
             "; no NVIDIA GPU was found: check `nvidia-smi`, and in a container that GPUs "
             "are passed in (docker run --gpus all)";
    }
    case kSystemNotReady:
      return found +
             "; on a machine with NVSwitch, the nvidia-fabricmanager service must run and "
             "match the driver's version";
    case kSystemDriverMismatch:
      return found +
             "; the kernel module and libcuda.so.1 are of different driver versions: "
             "reboot after a driver update, or use a container image without its own "
             "libcuda";
    case kCompatNotSupported:
      return found +
             "; a forward-compatibility libcuda (package cuda-compat) was found, which "
             "this GPU does not support: take it off LD_LIBRARY_PATH or update the driver";
    case kUnknown:
      return found +
             "; often the nvidia_uvm kernel module is not loaded or /dev/nvidia-uvm is "
             "missing: run `nvidia-modprobe -u -c 0`, or reboot; `dmesg` has the cause";
    default:
      return found + "; check that `nvidia-smi` works on this machine";
  }
}

Driver open_driver() {
  Driver driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw DeviceFault(std::string("no NVIDIA driver: libcuda.so.1 could not be opened (") +
                      (reason != nullptr ? reason : "unknown reason") +
                      "); install the NVIDIA driver, or in a container pass the GPUs in (docker "
                      "run --gpus all)");
  }
  // Needed before all others: an old driver lacks some of the rest, and must be called old.
  driver.driver_version = reinterpret_cast<Result (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  if (driver.driver_version == nullptr || driver.driver_version(&driver.version) != 0) {
    throw DeviceFault(
        "libcuda.so.1 does not tell its version, so it is no NVIDIA driver; take it off "
        "LD_LIBRARY_PATH");
  }
  if (driver.version < kNeededVersion) {
    throw DeviceFault("the NVIDIA driver is too old: it supports CUDA " +
                      version_text(driver.version) + ", needed is CUDA " +
                      version_text(kNeededVersion) + " (driver 550 or newer); update the driver");
  }
#define ATLAS_RESOLVE(member, symbol, arguments)                                 \
  driver.member = reinterpret_cast<Result(*) arguments>(dlsym(library, symbol)); \
  if (driver.member == nullptr) {                                                \
    throw DeviceFault("libcuda.so.1 (CUDA " + version_text(driver.version) +     \
                      ") lacks the function " symbol                             \
                      "; reinstall the NVIDIA driver, 550 or newer");            \
  }
  ATLAS_CUDA_FUNCTIONS(ATLAS_RESOLVE)
#undef ATLAS_RESOLVE
  const Result result = driver.init(0);
  if (result != 0) throw DeviceFault(init_failure(driver, result));
  driver.process = getpid();
  return driver;
}

CudaDevice query(int index) {
  const Driver& cuda = driver();
  CudaDevice found{};
  found.index = index;
  Device device = 0;
  char name[256] = {};
  check(cuda.device_get(&device, index), "cuDeviceGet");
  check(cuda.device_name(name, sizeof name - 1, device), "cuDeviceGetName");
  const auto attribute = [&](DeviceAttribute name) {
    int value = 0;
    check(cuda.device_attribute(&value, name, device), "cuDeviceGetAttribute");
    return value;
  };
  found.major = attribute(kCapabilityMajor);
  found.minor = attribute(kCapabilityMinor);
  found.multiprocessors = attribute(kMultiprocessors);
  found.shared_memory_per_block = attribute(kSharedPerBlock);
  found.l2_bytes = attribute(kL2Bytes);
  found.cooperative_launch = attribute(kCooperativeLaunch) != 0;
  found.cluster_launch = attribute(kClusterLaunch) != 0;
  check(cuda.device_memory(&found.total_memory, device), "cuDeviceTotalMem");
  found.name = name;
  return found;
}

}  // namespace

const Driver& driver() {
  static const Driver opened = open_driver();
  if (opened.process != getpid()) {
    // The driver does not survive fork(): calls would fail without a reason, or hang.
    throw DeviceFault("CUDA was initialised in process " + std::to_string(opened.process) +
                      " and cannot be used in its forked child " + std::to_string(getpid()) +
                      "; start this process by spawn instead of fork");
  }
  return opened;
}

std::string describe_error(const Driver& driver, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.get_error_name(result, &name) != 0 || name == nullptr) name = "CUDA error";
  std::string description = std::string(name) + " (" + std::to_string(result) + ")";
  if (driver.get_error_string(result, &text) == 0 && text != nullptr) {
    description += std::string(": ") + text;
  }
  return description;
}

void check(Result result, const std::string& what) {
  if (result != 0) throw DeviceFault(what + ": " + describe_error(driver(), result));
}

CudaDevice device_at(int index) {
  const std::vector<CudaDevice> devices = cuda_devices();
  if (index < 0 || static_cast<size_t>(index) >= devices.size()) {
    std::string list;
    for (const CudaDevice& device : devices) {
      list += (list.empty() ? "" : ", ") + std::to_string(device.index) + " (" + device.name + ")";
    }
    throw DeviceFault("there is no CUDA device " + std::to_string(index) +
                      "; this process sees: " + list);
  }
  return devices[static_cast<size_t>(index)];
}

}  // namespace cuda

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  cuda::check(cuda::driver().device_count(&count), "cuDeviceGetCount");
  if (count == 0) {
    throw DeviceFault("the NVIDIA driver reports no device; check `nvidia-smi -L`");
  }
  std::vector<CudaDevice> devices;
  for (int index = 0; index < count; ++index) devices.push_back(cuda::query(index));
  return devices;
}

}  // namespace atlas
