// The CPU backend: the arena is anonymous memory, and a program is a list of kernel calls that all
// workers of a thread pool walk through together, with a barrier after each launch.
#include "core/backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <utility>

#include "cpu/levels.h"
#include "cpu/numa.h"
#include "cpu/registry.h"
#include "cpu/thread_pool.h"

namespace atlas {
namespace {

constexpr char kNodes[] = "/sys/devices/system/node";
using Clock = std::chrono::steady_clock;

// Zeroed anonymous memory: a page costs nothing until it is touched.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      throw DeviceFault("cpu memory: " + std::to_string(bytes) + " bytes cannot be had (" +
                        std::strerror(errno) + ")");
    }
    data_ = static_cast<std::byte*>(data);
#ifdef MADV_HUGEPAGE
    // Weights stream through in order: huge pages save most of the address translation. Only
    // advice, so a refusal is no error.
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
  }
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

// Bytes of memory beside the operands, the most of any launch.
struct Scratch {
  size_t per_worker = 0, shared = 0;
};

// A launch whose kernel and operands are resolved. Indices below point into CpuProgram's arrays.
struct ResolvedLaunch {
  CpuKernel kernel;
  int phase;
  size_t operands, dims, constants;
};

struct CpuProgram {
  std::vector<ResolvedLaunch> launches;
  std::vector<void*> operands;
  std::vector<int> dim_words;  // header word of each dim
  std::vector<int64_t> dims;   // its value in the current step
  std::vector<Constant> constants;
};

class CpuBackend final : public Backend {
 public:
  // levels: the one to use, then those that stand in for kernels it does not have. Not empty.
  CpuBackend(int n_threads, int cores, std::vector<std::string> levels)
      : levels_(std::move(levels)), pool_(n_threads, cores) {}

  std::string describe() const override {
    return "cpu, " + describe_levels() + ", " + std::to_string(pool_.n_workers()) + " threads";
  }

  void allocate(size_t bytes) override {
    if (arena_.size() != 0) throw DeviceFault("cpu memory: the arena was allocated already");
    arena_ = Memory(bytes);
    // Whoever loads a model writes all of it: without this its pages would all lie near one core.
    // A refusal costs bandwidth, which doctor says, and nothing else.
    interleave(arena_.data(), bytes, memory_nodes(kNodes));
  }
  size_t arena_bytes() const override { return arena_.size(); }

  void write(size_t offset, const void* data, size_t bytes) override {
    if (bytes != 0) std::memcpy(range(offset, bytes), data, bytes);
  }
  void read(size_t offset, void* data, size_t bytes) override {
    if (bytes != 0) std::memcpy(data, range(offset, bytes), bytes);
  }
  void fill(size_t offset, uint8_t value, size_t bytes) override {
    if (bytes != 0) std::memset(range(offset, bytes), value, bytes);
  }

  void* staging(size_t bytes) override {
    staging_.emplace_back(bytes);
    return staging_.back().data();
  }

  void release(void* staging) override {
    const auto found = std::find_if(staging_.begin(), staging_.end(),
                                    [&](Memory& memory) { return memory.data() == staging; });
    if (found == staging_.end()) throw DeviceFault("release() of what is not staging memory");
    staging_.erase(found);
  }

  int load(const ProgramSpec& program) override {
    CpuProgram resolved;
    Scratch scratch;
    for (const LaunchSpec& launch : program) resolve(launch, resolved, scratch);
    resolved.dims.resize(resolved.dim_words.size());
    reserve(scratch);
    programs_.push_back(std::move(resolved));
    return static_cast<int>(programs_.size()) - 1;
  }

  void begin_step(size_t offset, const void* block, size_t bytes) override {
    const int32_t* header = check_header(block, bytes);
    std::copy_n(header, kHeaderWords, header_);
    write(offset, block, bytes);
  }

  void run(int program, size_t begin, size_t end) override { replay(program, begin, end, nullptr); }

  std::vector<double> run_timed(int program, size_t begin, size_t end) override {
    std::vector<Clock::time_point> times(end - std::min(begin, end) + 1);
    times[0] = Clock::now();
    replay(program, begin, end, times.data() + 1);
    std::vector<double> seconds;
    for (size_t i = 1; i < times.size(); ++i) {
      seconds.push_back(std::chrono::duration<double>(times[i] - times[i - 1]).count());
    }
    return seconds;
  }

  double run_seconds(int program, size_t begin, size_t end, int repeats) override {
    std::vector<double> seconds;
    for (int i = 0; i < std::max(1, repeats); ++i) {
      const Clock::time_point started = Clock::now();
      run(program, begin, end);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - started).count());
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }

  void synchronize() override {}  // run() returns when the work is done

 private:
  // Runs launches [begin, end). `times`, if not null, gets the moment at which each was done.
  void replay(int program, size_t begin, size_t end, Clock::time_point* times) {
    if (program < 0 || static_cast<size_t>(program) >= programs_.size()) {
      throw DeviceFault("cpu: no program has handle " + std::to_string(program));
    }
    CpuProgram& p = programs_[static_cast<size_t>(program)];
    if (begin > end || end > p.launches.size()) {
      throw DeviceFault("cpu: launches [" + std::to_string(begin) + ", " + std::to_string(end) +
                        ") of a program of " + std::to_string(p.launches.size()));
    }
    if (header_[0] != kStepVersion) throw DeviceFault("cpu: run() before begin_step()");
    if (begin == end) return;
    for (size_t i = 0; i < p.dims.size(); ++i) p.dims[i] = header_[p.dim_words[i]];
    Replay replay = {this, &p, begin, end, times};
    pool_.run([](void* context, int worker) { static_cast<Replay*>(context)->run(worker); },
              &replay);
  }

  // What the workers need to walk through launches [begin, end).
  struct Replay {
    CpuBackend* backend;
    const CpuProgram* program;
    size_t begin, end;
    Clock::time_point* times;

    void run(int worker) {
      CpuLaunch launch;
      launch.worker = worker;
      launch.n_workers = backend->pool_.n_workers();
      launch.scratch = backend->scratch_.data() + backend->scratch_stride_ * worker;
      launch.shared = backend->shared_.data();
      launch.barrier = [](void* pool) { static_cast<ThreadPool*>(pool)->barrier(); };
      launch.barrier_context = &backend->pool_;
      for (size_t i = begin; i < end; ++i) {
        const ResolvedLaunch& resolved = program->launches[i];
        if (includes(resolved.phase, backend->header_)) {
          launch.operands = program->operands.data() + resolved.operands;
          launch.dims = program->dims.data() + resolved.dims;
          launch.constants = program->constants.data() + resolved.constants;
          resolved.kernel(launch);
          if (i + 1 < end || times != nullptr) {  // the pool itself waits for the last one
            backend->pool_.barrier();
          }
        }
        if (times != nullptr && worker == 0) times[i - begin] = Clock::now();
      }
    }
  };

  // Which ops run at which level: "linear at avx512vnni, all else at avx512".
  std::string describe_levels() const {
    const auto ops_of = [](const std::string& level) {
      std::set<std::string> ops;
      for (const std::string& signature : cpu_kernels(level)) {
        ops.insert(signature.substr(0, signature.find('.')));
      }
      return ops;
    };
    const size_t total = ops_of("").size();
    std::set<std::string> placed;
    std::string text;
    for (const std::string& level : levels_) {
      std::vector<std::string> ops;
      for (const std::string& op : ops_of(level)) {
        if (placed.insert(op).second) ops.push_back(op);
      }
      if (placed.size() == total && text.empty()) return level + " kernels";
      if (placed.size() == total) return text + "all else at " + level;
      if (!ops.empty()) text += join(ops) + " at " + level + ", ";
    }
    return text;
  }

  std::byte* range(size_t offset, size_t bytes) const {
    if (offset > arena_.size() || bytes > arena_.size() - offset) {
      throw DeviceFault("cpu memory: bytes [" + std::to_string(offset) + ", +" +
                        std::to_string(bytes) + ") are outside the arena of " +
                        std::to_string(arena_.size()));
    }
    return arena_.data() + offset;
  }

  // Appends a launch to `program` and raises `scratch` to what it needs.
  void resolve(const LaunchSpec& launch, CpuProgram& program, Scratch& scratch) const {
    const std::string& name = launch.variants.front().kernel;  // one serves every step
    const auto fail = [&](const std::string& what) {
      throw DeviceFault("cpu: launch " + launch.name + " of op " + launch.op + ", kernel " + name +
                        ": " + what);
    };
    const CpuKernelEntry* entry = find_cpu_kernel(levels_, name);
    if (entry == nullptr) fail("not compiled in at level " + join(levels_));
    program.launches.push_back({entry->kernel, launch.phase, program.operands.size(),
                                program.dim_words.size(), program.constants.size()});
    for (const size_t offset : launch.operands) {
      if (offset == kNoOperand) {
        program.operands.push_back(nullptr);
        continue;
      }
      if (offset >= arena_.size()) {
        fail("an operand is at offset " + std::to_string(offset) + ", outside the arena of " +
             std::to_string(arena_.size()) + " bytes");
      }
      program.operands.push_back(arena_.data() + offset);
    }
    for (const int word : launch.dims) {
      if (word < 1 || word >= static_cast<int>(kHeaderWords)) {
        fail("a dim is header word " + std::to_string(word) + "; accepted: 1 to " +
             std::to_string(kHeaderWords - 1));
      }
      program.dim_words.push_back(word);
    }
    program.constants.insert(program.constants.end(), launch.constants.begin(),
                             launch.constants.end());
    CpuLaunch probe = {};
    probe.n_workers = pool_.n_workers();
    probe.constants = launch.constants.data();
    const auto bytes = [&](CpuScratch asked) { return asked == nullptr ? 0 : asked(probe); };
    scratch.per_worker = std::max(scratch.per_worker, bytes(entry->scratch));
    scratch.shared = std::max(scratch.shared, bytes(entry->shared));
  }

  void reserve(const Scratch& scratch) {
    if (scratch.shared > shared_.size()) shared_ = Memory(scratch.shared);
    if (scratch.per_worker <= scratch_stride_) return;
    // Workers' parts begin on different pages, so that none of them share one.
    constexpr size_t kPage = size_t{2} << 20;
    scratch_stride_ = (scratch.per_worker + kPage - 1) / kPage * kPage;
    scratch_ = Memory(scratch_stride_ * static_cast<size_t>(pool_.n_workers()));
  }

  const std::vector<std::string> levels_;
  int32_t header_[kHeaderWords] = {};
  Memory arena_{0}, scratch_{0}, shared_{0};
  size_t scratch_stride_ = 0;
  std::vector<Memory> staging_;
  std::vector<CpuProgram> programs_;
  ThreadPool pool_;  // last: its threads end before what they use
};

}  // namespace

std::string interleave_obstacle() {
  const Memory memory(size_t{1} << 16);
  return interleave(memory.data(), memory.size(), memory_nodes(kNodes));
}

std::unique_ptr<Backend> make_cpu_backend(int n_threads, const std::string& level, int cores) {
  std::vector<std::string> levels = usable_cpu_levels(level);
  if (levels.empty()) {
    std::string found;
    for (const CpuLevel& l : cpu_levels()) {
      found += (found.empty() ? "" : "; ") + l.name + ": ";
      if (l.usable()) {
        found += "usable";
      } else if (!l.compiled) {
        found += "not compiled in";
      } else {
        found += l.obstacle.empty() ? "fails its self-test (" + l.failure + ")" : l.obstacle;
      }
    }
    const std::string what = level.empty() ? "none" : level;
    throw DeviceFault("cpu level: " + what + " is not usable here; accepted: " +
                      join(usable_cpu_levels("")) + " (" + found + ")");
  }
  return std::make_unique<CpuBackend>(n_threads, cores, std::move(levels));
}

}  // namespace atlas
