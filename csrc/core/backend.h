// The backend interface: what a device must offer to run programs.
//
// Scope: one arena, byte copies in and out of it, loading programs, running launches in order.
// Out of scope: what buffers mean, memory planning, tokens, requests (all Python).
// Threads: one thread at a time may call a backend.
// Order: begin_step(), run() and read_later() take effect in the order of their calls and may
// return before they are done. read(), write(), fill(), wait() and synchronize() wait. Functions
// with a default here are for devices that work beside the host; the default does it at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/program.h"

namespace atlas {

// Carries the device, kernel or argument at fault in its text; becomes atlas.errors.DeviceError.
struct DeviceFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // One line for logs: device, instruction-set level, threads.
  virtual std::string describe() const = 0;

  // The one device allocation. Called once, before anything else below.
  virtual void allocate(size_t bytes) = 0;
  virtual size_t arena_bytes() const = 0;

  // Copies between host memory and the arena; complete on return.
  virtual void write(size_t offset, const void* data, size_t bytes) = 0;
  virtual void read(size_t offset, void* data, size_t bytes) = 0;
  virtual void fill(size_t offset, uint8_t value, size_t bytes) = 0;

  // Host memory that copies to the device fastest (pinned on CUDA). Lives as long as the backend,
  // unless it is released before; no copy from or to it may then be in flight.
  virtual void* staging(size_t bytes) = 0;
  virtual void release(void* staging) = 0;

  // Device images that programs refer to by index. Optional: only for backends that load code.
  virtual void load_images(const std::vector<std::string_view>& images) {
    if (!images.empty()) throw DeviceFault("this backend loads no images");
  }

  // Resolve every kernel of a program now; a missing one throws. Returns the program's handle.
  virtual int load(const ProgramSpec& program) = 0;

  // Begin a step: copy `bytes` of the step block (host) to `offset` in the arena. The block's
  // header supplies the dims of the runs that follow. A block in staging() memory must stay as it
  // is until a fence() taken after this call is passed. Steps that alternate between two places
  // are faster: the block is copied while the step before runs.
  virtual void begin_step(size_t offset, const void* block, size_t bytes) = 0;

  // Run launches [begin, end) of a program, in order.
  virtual void run(int program, size_t begin, size_t end) = 0;

  // Run one launch on other operands, from now on: offsets in the arena as its spec has them.
  // Optional: while a model is loaded, one launch makes many weights.
  virtual void run_on(int program, size_t launch, const std::vector<size_t>& operands) {
    (void)program, (void)launch, (void)operands;
    throw DeviceFault("this backend runs launches on the operands that they were loaded with");
  }

  // Make later runs of the whole program cheap for every step whose header's words are at most
  // those of `header`, at the same phase and the same `offset` of the step block. Before ready.
  virtual void capture(int program, size_t offset, const int32_t* header) {
    (void)program, (void)offset, (void)header;
  }

  // Copy from the arena to `data`, which is staging() memory; complete once a fence() taken
  // afterwards is passed. The next step may run meanwhile, if its place is another: it must then
  // not write what is read here. The step after that waits.
  virtual void read_later(size_t offset, void* data, size_t bytes) { read(offset, data, bytes); }

  // A mark behind everything begun so far; wait() returns once that is done, passed() tells.
  virtual int64_t fence() { return 0; }
  virtual void wait(int64_t ticket) { (void)ticket; }
  virtual bool passed(int64_t ticket) {
    (void)ticket;
    return true;
  }

  // Copy staging() memory to the arena beside the runs. Returns the ticket after which
  // `data` may be written again. Copies and runs are not ordered among each other, except by
  // order_runs(): later runs wait for the copies so far, and order_uploads(): later copies wait for
  // the runs so far. Both make the device wait, not the host.
  virtual int64_t upload(size_t offset, const void* data, size_t bytes) {
    write(offset, data, bytes);
    return 0;
  }
  virtual void order_runs() {}
  virtual void order_uploads() {}

  virtual void synchronize() = 0;

  // run(), and the seconds that each launch took alone, nothing overlapping it: on a GPU with its
  // own start (1.3 us on an H200), which overlaps its predecessor in a replayed program.
  virtual std::vector<double> run_timed(int program, size_t begin, size_t end) = 0;
  // run(), `repeats` times, and the median of the seconds that all of it took on the device; as one
  // graph where there are graphs.
  virtual double run_seconds(int program, size_t begin, size_t end, int repeats) = 0;

 protected:
  // Reads the header of a step block. Throws DeviceFault on another version.
  static const int32_t* check_header(const void* block, size_t bytes) {
    const auto* header = static_cast<const int32_t*>(block);
    if (bytes < sizeof(int32_t) * kHeaderWords || header[0] != kStepVersion) {
      throw DeviceFault("step block: version " +
                        std::to_string(bytes < sizeof(int32_t) ? -1 : header[0]) +
                        ", accepted: " + std::to_string(kStepVersion));
    }
    return header;
  }
};

// n_threads workers, of which the process may run `cores` at once; kernels of `level` ("" = the
// best usable one); an op without a kernel there runs the next lower level's.
std::unique_ptr<Backend> make_cpu_backend(int n_threads, const std::string& level, int cores);

// Memory nodes near this process's CPUs (csrc/cpu/numa.h), over which an arena is spread, and what
// keeps this process from spreading memory over them; empty if nothing does.
std::vector<int> memory_nodes(const std::string& root);
std::string interleave_obstacle();

// What is known about an instruction-set level.
struct CpuLevel {
  std::string name;
  bool compiled = false;
  std::string obstacle;  // what keeps this machine from running it, if it is compiled in
  std::string failure;   // what its self-test found wrong, if it could run
  bool usable() const { return compiled && obstacle.empty() && failure.empty(); }
};
// Every level that this kind of machine may have, best first, each judged.
std::vector<CpuLevel> cpu_levels();
// Signatures of the CPU kernels compiled in at `level` ("" = at any), each once, e.g.
// "linear.x_f32.weight_f32.out_f32".
std::vector<std::string> cpu_kernels(const std::string& level);
// For tests of what happens then: makes every kernel of a level compute nothing, or fault. Only
// before the level is first considered.
void break_cpu_level(const std::string& level, bool faults);

// Opens the CUDA driver by dlopen and creates a context on `device`. Throws DeviceFault that says
// what was found and what is needed when there is no driver, an old one, or no such device.
std::unique_ptr<Backend> make_cuda_backend(int device);

}  // namespace atlas
