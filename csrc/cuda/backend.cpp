// The CUDA backend: one arena in device memory, a stream for runs and one for copies in each
// direction, and programs of kernels from device images.
//
// Everything is allocated, every kernel loaded and every graph made before the first step; a step
// only copies, launches and replays. A kernel's arguments are addresses: of its operands in the
// arena, and of the step header's words that hold its dims, so that a launch or a graph recorded
// once is right for every step.
//
// A small copy between two graphs costs 7 us (H200), in which nothing runs. So a step's block is
// copied while the step before runs, if it has a place of its own, and results are copied out while
// the next one runs. Events keep the order; the host waits for none of it.
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
#include "cuda/pinned.h"

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
      for (int lane = 0; lane < kLanes; ++lane) {
        check(cuda_.stream_create(&streams_[lane], kStreamNonBlocking), "cuStreamCreate");
        fences_[lane].create(cuda_, streams_[lane]);
      }
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
    for (Stream stream : streams_) cuda_.stream_synchronize(stream);
    for (LoadedProgram& program : programs_) {
      for (StepGraph& graph : program.graphs) cuda_.graph_exec_destroy(graph.exec);
    }
    for (Fences& fences : fences_) fences.destroy();
    stopwatch_.destroy();
    for (const Pinned& pinned : staging_) unpin(cuda_, pinned);
    if (arena_ != 0) cuda_.memory_free(arena_);
    images_.unload();
    for (Stream stream : streams_) cuda_.stream_destroy(stream);
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
    check(cuda_.copy_to_device(at(offset, bytes), data, bytes, runs()), "copying to the device");
    synchronize();
  }

  void read(size_t offset, void* data, size_t bytes) override {
    if (bytes == 0) return;
    enter();
    check(cuda_.copy_to_host(data, at(offset, bytes), bytes, runs()), "copying from the device");
    synchronize();
  }

  void fill(size_t offset, uint8_t value, size_t bytes) override {
    if (bytes == 0) return;
    enter();
    check(cuda_.fill_bytes(at(offset, bytes), value, bytes, runs()), "filling device memory");
    synchronize();
  }

  void* staging(size_t bytes) override {
    enter();
    staging_.push_back(pin(cuda_, bytes));
    return staging_.back().memory;
  }

  void release(void* staging) override {
    enter();
    const auto found = std::find_if(staging_.begin(), staging_.end(),
                                    [&](const Pinned& pinned) { return pinned.memory == staging; });
    if (found == staging_.end()) throw DeviceFault("release() of what is not staging memory");
    const Pinned pinned = *found;
    staging_.erase(found);
    check(unpin(cuda_, pinned), "freeing pinned host memory");
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
    const DevicePointer place = at(offset, bytes);
    const bool moved = step_ != 0 && place != step_;
    // Runs that used this place were begun before the step that is now the last, and so were runs
    // whose results lie where this step's will.
    const int64_t before_last = before_step_;
    before_step_ = behind_runs();
    if (moved) wait_for(kIn, kRuns, before_last);
    wait_for(kRuns, kOut, moved ? earlier_reads_ : std::max(earlier_reads_, reads_));
    earlier_reads_ = moved ? reads_ : kNone;
    reads_ = kNone;
    step_ = place;
    check(cuda_.copy_to_device(step_, block, bytes, moved ? streams_[kIn] : runs()),
          "copying a step to the device");
    if (moved) wait_for(kRuns, kIn, fences_[kIn].set());
  }

  void run(int program, size_t begin, size_t end) override {
    enter();
    LoadedProgram& loaded = checked(program, begin, end);
    if (begin == 0 && end == loaded.launches.size()) {
      for (const StepGraph& graph : loaded.graphs) {
        if (graph.holds(header_, step_)) {
          check(cuda_.graph_launch(graph.exec, runs()),
                "replaying the " + graph_name(program, graph.header.data()) +
                    " (ATLAS_SYNC=1 launches one by one and names the one at fault)");
          return;
        }
      }
    }
    for (size_t i = begin; i < end; ++i) submit(loaded.launches[i], header_, step_);
  }

  void run_on(int program, size_t launch, const std::vector<size_t>& operands) override {
    enter();
    LoadedLaunch& one = checked(program, launch, launch + 1).launches[launch];
    if (operands.size() != one.spec.operands.size()) {
      throw DeviceFault("launch " + one.spec.name + " takes " +
                        std::to_string(one.spec.operands.size()) + " operands, given are " +
                        std::to_string(operands.size()));
    }
    one.place(operands, arena_, arena_bytes_);
    submit(one, header_, step_);
  }

  void capture(int program, size_t offset, const int32_t* header) override {
    enter();
    LoadedProgram& loaded = checked(program, 0, 0);
    check_header(header, sizeof(int32_t) * kHeaderWords);
    if (synchronous_) return;  // whoever waits after each launch wants to see them
    StepGraph graph;
    std::copy_n(header, kHeaderWords, graph.header.begin());
    graph.step = at(offset, sizeof(int32_t) * kHeaderWords);
    graph.exec = record(cuda_, streams_[kRuns], graph_name(program, header), [&] {
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
    wait_for(kOut, kRuns, behind_runs());
    check(cuda_.copy_to_host(data, at(offset, bytes), bytes, streams_[kOut]),
          "copying from the device");
    reads_ = fences_[kOut].set();
  }

  int64_t fence() override {
    enter();
    wait_for(kOut, kRuns, behind_runs());
    return ticket(kOut, fences_[kOut].set());
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
      check(cuda_.copy_to_device(at(offset, bytes), data, bytes, streams_[kIn]),
            "copying to the device");
    }
    return ticket(kIn, fences_[kIn].set());
  }

  void order_runs() override {
    enter();
    wait_for(kRuns, kIn, fences_[kIn].set());
  }

  void order_uploads() override {
    enter();
    wait_for(kIn, kRuns, behind_runs());
  }

  void synchronize() override {
    enter();
    for (Stream stream : streams_) done(cuda_.stream_synchronize(stream));
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
      check(cuda_.event_record_node(events[i], streams_[kRuns], kEventRecordExternal),
            "cuEventRecordWithFlags");
    };
    const GraphExec exec = record(cuda_, streams_[kRuns], "a graph of timed launches", [&] {
      for (size_t i = 0; i < n; ++i) {
        mark(2 * i);
        submit(loaded.launches[begin + i], header_, step_, false);
        mark(2 * i + 1);
      }
      mark(2 * n);
    });
    Result result = cuda_.graph_launch(exec, runs());
    if (result == 0) result = cuda_.stream_synchronize(runs());
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

  double run_seconds(int program, size_t begin, size_t end, int repeats) override {
    enter();
    LoadedProgram& loaded = checked(program, begin, end);
    const std::vector<Event>& events = stopwatch_.events(2);
    const GraphExec exec = record(cuda_, streams_[kRuns], "a timed graph", [&] {
      for (size_t i = begin; i < end; ++i) submit(loaded.launches[i], header_, step_, false);
    });
    std::vector<double> seconds;
    Result result = 0;
    for (int i = 0; i < std::max(1, repeats) && result == 0; ++i) {
      result = cuda_.event_record(events[0], runs());
      if (result == 0) result = cuda_.graph_launch(exec, runs());
      if (result == 0) result = cuda_.event_record(events[1], runs());
      if (result == 0) result = cuda_.stream_synchronize(runs());
      if (result == 0) seconds.push_back(stopwatch_.seconds(0));
    }
    cuda_.graph_exec_destroy(exec);
    done(result);
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }

 private:
  enum Lane { kRuns, kIn, kOut, kLanes };  // a stream and its fences
  static constexpr int64_t kNone = -1;     // no mark

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
    launch(cuda_, one, header, step, runs(), synchronous);
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

  // The stream of runs, to put something on it.
  Stream runs() {
    runs_marked_ = false;
    return streams_[kRuns];
  }

  // A mark behind all runs so far.
  int64_t behind_runs() {
    if (!runs_marked_) runs_mark_ = fences_[kRuns].set();
    runs_marked_ = true;
    return runs_mark_;
  }

  // What `later` gets from now on waits for what `earlier` had got at `mark`.
  void wait_for(Lane later, Lane earlier, int64_t mark) {
    if (mark == kNone) return;
    if (later == kRuns) runs_marked_ = false;
    check(cuda_.stream_wait(streams_[later], fences_[earlier].event(mark), 0), "cuStreamWaitEvent");
  }

  // A ticket is a mark and the lane that it is of.
  static int64_t ticket(Lane lane, int64_t mark) { return mark * kLanes + lane; }
  Event event(int64_t ticket) const {
    if (ticket < 0) throw DeviceFault("no fence " + std::to_string(ticket));
    return fences_[static_cast<size_t>(ticket % kLanes)].event(ticket / kLanes);
  }

  const Driver& cuda_;
  CudaDevice device_;
  int process_;
  bool synchronous_ = false;
  Device handle_ = 0;
  Context context_ = nullptr;
  Stream streams_[kLanes] = {};
  DevicePointer arena_ = 0;
  size_t arena_bytes_ = 0;
  std::vector<Pinned> staging_;
  Images images_;
  std::vector<LoadedProgram> programs_;
  Fences fences_[kLanes];
  Stopwatch stopwatch_;
  int32_t header_[kHeaderWords] = {};
  DevicePointer step_ = 0;
  // Marks: behind the runs before the last step, the reads since it began, and the reads before it
  // that no runs have waited for.
  int64_t before_step_ = kNone, reads_ = kNone, earlier_reads_ = kNone;
  bool runs_marked_ = false;
  int64_t runs_mark_ = kNone;
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(int device) {
  return std::make_unique<CudaBackend>(device);
}

}  // namespace atlas
