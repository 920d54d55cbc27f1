// The CUDA driver API, opened at run time.
//
// Atlas is built without any CUDA header and runs without a driver: what it uses of the API is
// declared here, and found in libcuda.so.1 by dlopen when a device is first asked for, never at
// import. The declarations follow the driver's stable C ABI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/backend.h"

namespace atlas {

// A device as the driver reports it.
struct CudaDevice {
  int index;
  std::string name;
  int major, minor;  // compute capability
  size_t total_memory;
  int multiprocessors;
  int shared_memory_per_block;  // the most dynamic and static together, opted in
  int l2_bytes;
  bool cooperative_launch, cluster_launch;
};

// The devices this process may use. Throws DeviceFault that says why there are none: no driver, an
// old or broken one, no device. Initialises the driver, so a process that forks later should not
// call it.
std::vector<CudaDevice> cuda_devices();

namespace cuda {

using Result = int;  // CUresult; 0 is success
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Library = struct LibraryTag*;
using Kernel = struct KernelTag*;
using Function = struct FunctionTag*;
using Event = struct EventTag*;
using Graph = struct GraphTag*;
using GraphExec = struct GraphExecTag*;

// CUlaunchAttribute: an id, and a value of 64 bytes whose first words the id gives a meaning.
struct LaunchAttribute {
  uint64_t id;
  union {
    unsigned words[16];
    uint64_t alignment;
  };
};
static_assert(sizeof(LaunchAttribute) == 72);
enum LaunchAttributeId : uint64_t { kCooperative = 2, kClusterDimension = 4, kProgrammatic = 6 };

// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned n_attributes;
};

enum DeviceAttribute {
  kMultiprocessors = 16,
  kL2Bytes = 38,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kCooperativeLaunch = 95,
  kSharedPerBlock = 97,
  kClusterLaunch = 120,
};
enum FunctionAttribute {
  kMaxThreadsPerBlock = 0,
  kMaxDynamicShared = 8,
  kSharedCarveout = 9,
  kLargeClusters = 14,
};
enum Error {
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kStubLibrary = 34,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kNoBinaryForDevice = 209,
  kNotReady = 600,
  kSystemNotReady = 802,
  kSystemDriverMismatch = 803,
  kCompatNotSupported = 804,
  kUnknown = 999,
};
constexpr unsigned kHostAllocPortable = 1, kHostRegisterPortable = 1;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventTimed = 0, kEventUntimed = 2;
constexpr unsigned kEventRecordExternal = 1;  // a node of the graph being captured
constexpr int kCaptureThreadLocal = 1;

// CUDA 12.4 is the first whose driver can load a function ahead of its first launch (cuFuncLoad):
// without it the first step would load code, which may allocate. All else is older: launch
// attributes 11.8, programmatic edges in a captured graph 12.3.
constexpr int kNeededVersion = 12040;

// Every function that Atlas calls, under its exported name.
#define ATLAS_CUDA_FUNCTIONS(X)                                                                  \
  X(get_error_name, "cuGetErrorName", (Result, const char**))                                    \
  X(get_error_string, "cuGetErrorString", (Result, const char**))                                \
  X(init, "cuInit", (unsigned))                                                                  \
  X(driver_version, "cuDriverGetVersion", (int*))                                                \
  X(device_count, "cuDeviceGetCount", (int*))                                                    \
  X(device_get, "cuDeviceGet", (Device*, int))                                                   \
  X(device_name, "cuDeviceGetName", (char*, int, Device))                                        \
  X(device_memory, "cuDeviceTotalMem_v2", (size_t*, Device))                                     \
  X(device_attribute, "cuDeviceGetAttribute", (int*, int, Device))                               \
  X(context_retain, "cuDevicePrimaryCtxRetain", (Context*, Device))                              \
  X(context_release, "cuDevicePrimaryCtxRelease_v2", (Device))                                   \
  X(context_set, "cuCtxSetCurrent", (Context))                                                   \
  X(memory_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                          \
  X(memory_allocate, "cuMemAlloc_v2", (DevicePointer*, size_t))                                  \
  X(memory_free, "cuMemFree_v2", (DevicePointer))                                                \
  X(host_allocate, "cuMemHostAlloc", (void**, size_t, unsigned))                                 \
  X(host_free, "cuMemFreeHost", (void*))                                                         \
  X(host_register, "cuMemHostRegister_v2", (void*, size_t, unsigned))                            \
  X(host_unregister, "cuMemHostUnregister", (void*))                                             \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", (DevicePointer, const void*, size_t, Stream))        \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, DevicePointer, size_t, Stream))                \
  X(fill_bytes, "cuMemsetD8Async", (DevicePointer, unsigned char, size_t, Stream))               \
  X(stream_create, "cuStreamCreate", (Stream*, unsigned))                                        \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                              \
  X(stream_synchronize, "cuStreamSynchronize", (Stream))                                         \
  X(library_load, "cuLibraryLoadData",                                                           \
    (Library*, const void*, int*, void**, unsigned, int*, void**, unsigned))                     \
  X(library_unload, "cuLibraryUnload", (Library))                                                \
  X(library_kernel, "cuLibraryGetKernel", (Kernel*, Library, const char*))                       \
  X(kernel_function, "cuKernelGetFunction", (Function*, Kernel))                                 \
  X(function_load, "cuFuncLoad", (Function))                                                     \
  X(function_attribute, "cuFuncGetAttribute", (int*, int, Function))                             \
  X(function_set_attribute, "cuFuncSetAttribute", (Function, int, int))                          \
  X(launch, "cuLaunchKernelEx", (const LaunchConfig*, Function, void**, void**))                 \
  X(active_clusters, "cuOccupancyMaxActiveClusters", (int*, Function, const LaunchConfig*))      \
  X(active_blocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor", (int*, Function, int, size_t)) \
  X(event_create, "cuEventCreate", (Event*, unsigned))                                           \
  X(event_destroy, "cuEventDestroy_v2", (Event))                                                 \
  X(event_record, "cuEventRecord", (Event, Stream))                                              \
  X(event_record_node, "cuEventRecordWithFlags", (Event, Stream, unsigned))                      \
  X(event_synchronize, "cuEventSynchronize", (Event))                                            \
  X(event_query, "cuEventQuery", (Event))                                                        \
  X(event_elapsed, "cuEventElapsedTime", (float*, Event, Event))                                 \
  X(stream_wait, "cuStreamWaitEvent", (Stream, Event, unsigned))                                 \
  X(capture_begin, "cuStreamBeginCapture_v2", (Stream, int))                                     \
  X(capture_end, "cuStreamEndCapture", (Stream, Graph*))                                         \
  X(graph_instantiate, "cuGraphInstantiateWithFlags", (GraphExec*, Graph, uint64_t))             \
  X(graph_upload, "cuGraphUpload", (GraphExec, Stream))                                          \
  X(graph_launch, "cuGraphLaunch", (GraphExec, Stream))                                          \
  X(graph_destroy, "cuGraphDestroy", (Graph))                                                    \
  X(graph_exec_destroy, "cuGraphExecDestroy", (GraphExec))

// The driver's functions, callable as `driver().memory_free(pointer)`.
struct Driver {
#define ATLAS_DECLARE(member, symbol, arguments) Result(*member) arguments = nullptr;
  ATLAS_CUDA_FUNCTIONS(ATLAS_DECLARE)
#undef ATLAS_DECLARE
  int version = 0;  // CUDA version of the driver, e.g. 12080 for 12.8
  int process = 0;  // the process that opened it: a forked child cannot use it
};

// The driver, opened and initialised at the first call. Throws DeviceFault that says in one
// sentence what was found and what to do; a later call tries again.
const Driver& driver();

// Throws DeviceFault "<what>: <error's name and text>" unless `result` is success.
void check(Result result, const std::string& what);

// "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory".
std::string describe_error(const Driver& driver, Result result);

// The device at `index`. Throws DeviceFault naming the devices that exist.
CudaDevice device_at(int index);

}  // namespace cuda
}  // namespace atlas
