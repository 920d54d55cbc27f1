// The CUDA backend: one arena in device memory, a stream for steps and one for loading, and
// programs of kernels from device images.
//
// Everything is allocated, every kernel loaded and every graph made before the first step; a step
// only copies, launches and replays. A kernel's arguments are addresses: of its operands in the
// arena, and of the step header's words that hold its dims, so that a launch or a graph recorded
// once is right for every step.
#include "core/backend.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/driver.h"
#include "cuda/events.h"
#include "cuda/graph.h"
#include "cuda/launch.h"

namespace atlas {
namespace {

using namespace cuda;

std::string gibibytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1u << 30));
  return text;
}

struct LoadedProgram {
  std::vector<LoadedLaunch> launches;
  std::vector<StepGraph> graphs;  // least first
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int device)
      : cuda_(driver()),
        device_(device_at(device)),
        process_(getpid()),
        images_(cuda_, device_),
        stopwatch_(cuda_) {
    const char* sync = std::getenv("ATLAS_SYNC");
    synchronous_ = sync != nullptr && std::strcmp(sync, "1") == 0;
    check(cuda_.device_get(&handle_, device), "cuDeviceGet");
    check(cuda_.context_retain(&context_, handle_), "creating a context on " + device_.name);
    try {
      enter();
      check(cuda_.stream_create(&stream_, kStreamNonBlocking), "cuStreamCreate");
      check(cuda_.stream_create(&upload_stream_, kStreamNonBlocking), "cuStreamCreate");
      fences_[kRuns].create(cuda_, stream_);
      fences_[kUploads].create(cuda_, upload_stream_);
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
    cuda_.stream_synchronize(upload_stream_);
    cuda_.stream_synchronize(stream_);
    for (LoadedProgram& program : programs_) {
      for (StepGraph& graph : program.graphs) cuda_.graph_exec_destroy(graph.exec);
    }
    for (Fences& fences : fences_) fences.destroy();
    stopwatch_.destroy();
    for (void* memory : staging_) cuda_.host_free(memory);
    if (arena_ != 0) cuda_.memory_free(arena_);
    images_.unload();
    cuda_.stream_destroy(upload_stream_);
    cuda_.stream_destroy(stream_);
    cuda_.context_release(handle_);
  }

  std::string describe() const override {
    return device_.name + " (CUDA device " + std::to_string(device_.index) +
           ", compute capability " + std::to_string(device_.major) + "." +
           std::to_string(device_.minor) + ", " + gibibytes(device_.total_memory) +
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
    read_later(offset, data, bytes);
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
    images_.load(images);
  }

  int load(const ProgramSpec& program) override {
    enter();
    LoadedProgram loaded;
    for (const LaunchSpec& spec : program) {
      loaded.launches.push_back(images_.resolve(spec, arena_, arena_bytes_));
    }
    programs_.push_back(std::move(loaded));
    return static_cast<int>(programs_.size()) - 1;
  }

  void begin_step(size_t offset, const void* block, size_t bytes) override {
    enter();
    std::memcpy(header_, check_header(block, bytes), sizeof header_);
    step_ = at(offset, bytes);
    check(cuda_.copy_to_device(step_, block, bytes, stream_), "copying a step to the device");
  }

  void run(int program, size_t begin, size_t end) override {
    enter();
    LoadedProgram& loaded = checked(program, begin, end);
    if (begin == 0 && end == loaded.launches.size()) {
      for (const StepGraph& graph : loaded.graphs) {
        if (graph.holds(header_, step_)) {
          check(cuda_.graph_launch(graph.exec, stream_),
                "replaying the " + graph_name(program, graph.header.data()) +
                    " (ATLAS_SYNC=1 launches one by one and names the one at fault)");
          return;
        }
      }
    }
    for (size_t i = begin; i < end; ++i) submit(loaded.launches[i], header_, step_);
  }

  void capture(int program, size_t offset, const int32_t* header) override {
    enter();
    LoadedProgram& loaded = checked(program, 0, 0);
    check_header(header, sizeof(int32_t) * kHeaderWords);
    if (synchronous_) return;  // whoever waits after each launch wants to see them
    StepGraph graph;
    std::copy_n(header, kHeaderWords, graph.header.begin());
    graph.step = at(offset, sizeof(int32_t) * kHeaderWords);
    graph.exec = record(cuda_, stream_, graph_name(program, header), [&] {
      for (LoadedLaunch& one : loaded.launches) submit(one, graph.header.data(), graph.step);
    });
    const auto place = std::upper_bound(
        loaded.graphs.begin(), loaded.graphs.end(), graph,
        [](const StepGraph& a, const StepGraph& b) { return a.header < b.header; });
    loaded.graphs.insert(place, graph);
  }

  void read_later(size_t offset, void* data, size_t bytes) override {
    if (bytes == 0) return;
    enter();
    check(cuda_.copy_to_host(data, at(offset, bytes), bytes, stream_), "copying from the device");
  }

  int64_t fence() override {
    enter();
    return ticket(kRuns);
  }

  void wait(int64_t ticket) override {
    enter();
    done(cuda_.event_synchronize(event(ticket)));
  }

  bool passed(int64_t ticket) override {
    enter();
    const Result result = cuda_.event_query(event(ticket));
    if (result == kNotReady) return false;
    done(result);
    return true;
  }

  int64_t upload(size_t offset, const void* data, size_t bytes) override {
    enter();
    if (bytes != 0) {
      check(cuda_.copy_to_device(at(offset, bytes), data, bytes, upload_stream_),
            "copying to the device");
    }
    return ticket(kUploads);
  }

  void order_runs() override { order(kUploads, stream_); }
  void order_uploads() override { order(kRuns, upload_stream_); }

  void synchronize() override {
    enter();
    done(cuda_.stream_synchronize(upload_stream_));
    done(cuda_.stream_synchronize(stream_));
  }

  // As a graph with an event before and one after each launch: launched one by one, a short
  // kernel's time would be that of the host. Less what two events without a launch between them are
  // apart.
  std::vector<double> run_timed(int program, size_t begin, size_t end) override {
    enter();
    LoadedProgram& loaded = checked(program, begin, end);
    const size_t n = end - begin;
    if (n == 0) return {};
    const std::vector<Event>& events = stopwatch_.events(2 * n + 1);
    const auto mark = [&](size_t i) {
      check(cuda_.event_record_node(events[i], stream_, kEventRecordExternal),
            "cuEventRecordWithFlags");
    };
    const GraphExec exec = record(cuda_, stream_, "a graph of timed launches", [&] {
      for (size_t i = 0; i < n; ++i) {
        mark(2 * i);
        submit(loaded.launches[begin + i], header_, step_, false);
        mark(2 * i + 1);
      }
      mark(2 * n);
    });
    Result result = cuda_.graph_launch(exec, stream_);
    if (result == 0) result = cuda_.stream_synchronize(stream_);
    cuda_.graph_exec_destroy(exec);
    done(result);
    std::vector<double> seconds, empty;
    for (size_t i = 0; i < n; ++i) {
      seconds.push_back(stopwatch_.seconds(2 * i));
      empty.push_back(stopwatch_.seconds(2 * i + 1));
    }
    std::sort(empty.begin(), empty.end());
    for (double& one : seconds) one = std::max(0.0, one - empty[n / 2]);
    return seconds;
  }

  double run_seconds(int program, size_t begin, size_t end) override {
    enter();
    const std::vector<Event>& events = stopwatch_.events(2);
    check(cuda_.event_record(events[0], stream_), "cuEventRecord");
    run(program, begin, end);
    check(cuda_.event_record(events[1], stream_), "cuEventRecord");
    synchronize();
    return stopwatch_.seconds(0);
  }

 private:
  enum Lane { kRuns, kUploads, kLanes };  // a stream and its fences

  // Makes the context current on the calling thread; refuses in a forked child, where calls may
  // hang.
  void enter() {
    if (process_ != getpid()) driver();  // throws, and says why
    check(cuda_.context_set(context_), "cuCtxSetCurrent");
  }

  DevicePointer at(size_t offset, size_t bytes) const {
    if (offset > arena_bytes_ || bytes > arena_bytes_ - offset) {
      throw DeviceFault("arena access [" + std::to_string(offset) + ", +" + std::to_string(bytes) +
                        ") is outside the arena of " + std::to_string(arena_bytes_) + " bytes");
    }
    return arena_ + offset;
  }

  LoadedProgram& checked(int program, size_t begin, size_t end) {
    if (program < 0 || static_cast<size_t>(program) >= programs_.size()) {
      throw DeviceFault("no program " + std::to_string(program) + " is loaded");
    }
    LoadedProgram& loaded = programs_[static_cast<size_t>(program)];
    if (begin > end || end > loaded.launches.size()) {
      throw DeviceFault("program " + std::to_string(program) + " has " +
                        std::to_string(loaded.launches.size()) + " launches, asked for [" +
                        std::to_string(begin) + ", " + std::to_string(end) + ")");
    }
    if (end > begin && step_ == 0) throw DeviceFault("run() before begin_step()");
    return loaded;
  }

  void submit(LoadedLaunch& one, const int32_t* header, DevicePointer step) {
    submit(one, header, step, synchronous_);
  }
  void submit(LoadedLaunch& one, const int32_t* header, DevicePointer step, bool synchronous) {
    launch(cuda_, one, header, step, stream_, synchronous);
  }

  static std::string graph_name(int program, const int32_t* header) {
    std::string words;
    for (size_t i = 1; i < kHeaderWords; ++i)
      words += (i > 1 ? " " : "") + std::to_string(header[i]);
    return "graph of program " + std::to_string(program) + " for the step header [" + words + "]";
  }

  // A failure of work that was begun earlier.
  void done(Result result) const {
    if (result == 0) return;
    throw DeviceFault(device_.name +
                      ": work on the device failed: " + describe_error(cuda_, result) +
                      "; set ATLAS_SYNC=1 to learn which launch it is");
  }

  // A ticket is a mark and the lane that it is of.
  int64_t ticket(Lane lane) { return fences_[lane].set() * kLanes + lane; }
  Event event(int64_t ticket) const {
    if (ticket < 0) throw DeviceFault("no fence " + std::to_string(ticket));
    return fences_[static_cast<size_t>(ticket % kLanes)].event(ticket / kLanes);
  }

  // What `later` gets from now on waits for what `earlier` got until now.
  void order(Lane earlier, Stream later) {
    enter();
    check(cuda_.stream_wait(later, event(ticket(earlier)), 0), "cuStreamWaitEvent");
  }

  const Driver& cuda_;
  CudaDevice device_;
  int process_;
  bool synchronous_ = false;
  Device handle_ = 0;
  Context context_ = nullptr;
  Stream stream_ = nullptr, upload_stream_ = nullptr;
  DevicePointer arena_ = 0;
  size_t arena_bytes_ = 0;
  std::vector<void*> staging_;
  Images images_;
  std::vector<LoadedProgram> programs_;
  Fences fences_[kLanes];
  Stopwatch stopwatch_;
  int32_t header_[kHeaderWords] = {};
  DevicePointer step_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(int device) {
  return std::make_unique<CudaBackend>(device);
}

}  // namespace atlas
