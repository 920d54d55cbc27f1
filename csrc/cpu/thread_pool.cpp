#include "cpu/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/backend.h"
#include "cpu/features.h"

namespace atlas {
namespace {

// A waiting worker polls this often at full speed, 15 to 40 ns each, and offers its core to others
// between further polls: on a busy machine the worker it waits for may be queued behind it.
constexpr int kEagerPolls = 64;
// Offers before a worker without a job goes to sleep, 0.3 us each where nobody takes them.
constexpr int kIdleOffers = 400;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// Fields that workers write are on cache lines of their own.
struct ThreadPool::State {
  // With more workers than cores a spinning worker holds the core that another needs.
  State(int workers, int cores)
      : n_workers(workers), owner(getpid()), spins(workers <= std::min(cores, affinity_cores())) {}

  const int n_workers;
  const pid_t owner;
  const bool spins;
  std::vector<std::thread> threads;

  Job job = nullptr;
  void* context = nullptr;
  bool stopping = false;
  // Raised after the three fields above are set: workers take the job when they see it.
  alignas(64) std::atomic<uint32_t> epoch{0};
  std::atomic<int> sleepers{0};
  std::mutex mutex;
  std::condition_variable wake;

  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> generation{0};

  void barrier() {
    if (n_workers == 1) return;
    const uint32_t mine = generation.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == n_workers) {
      arrived.store(0, std::memory_order_relaxed);
      generation.store(mine + 1, std::memory_order_release);
      return;
    }
    const auto released = [&] { return generation.load(std::memory_order_acquire) != mine; };
    if (poll(released)) return;
    while (!released()) std::this_thread::yield();
  }

  template <class Condition>
  bool poll(Condition condition) const {
    for (int i = spins ? kEagerPolls : 0; i > 0; --i) {
      if (condition()) return true;
      pause_cpu();
    }
    return condition();
  }

  // Publishes the fields of a job. The order of the store of `epoch` and the load of `sleepers`
  // here, and of their counterparts in wait(), is what makes a lost wake-up impossible.
  void publish() {
    epoch.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    const std::lock_guard<std::mutex> lock(mutex);
    wake.notify_all();
  }

  void wait(uint32_t seen) {
    const auto called = [&] { return epoch.load(std::memory_order_acquire) != seen; };
    if (poll(called)) return;
    for (int i = spins ? kIdleOffers : 0; i > 0; --i) {
      std::this_thread::yield();
      if (called()) return;
    }
    std::unique_lock<std::mutex> lock(mutex);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    wake.wait(lock, [&] { return epoch.load(std::memory_order_seq_cst) != seen; });
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

  void work(int worker) {
    for (uint32_t seen = 0;; ++seen) {
      wait(seen);
      if (stopping) return;
      job(context, worker);
      barrier();
    }
  }

  void stop() {
    stopping = true;
    publish();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }
};

ThreadPool::ThreadPool(int n_workers, int cores) {
  if (n_workers < 1) {
    throw DeviceFault("cpu threads: " + std::to_string(n_workers) + "; accepted: 1 or more");
  }
  state_ = std::make_unique<State>(n_workers, cores);
  State* state = state_.get();
  try {
    for (int worker = 1; worker < n_workers; ++worker) {
      state->threads.emplace_back([state, worker] { state->work(worker); });
    }
  } catch (const std::system_error& error) {
    const size_t started = state->threads.size() + 1;
    state->stop();
    throw DeviceFault("cpu threads: could start " + std::to_string(started) + " of " +
                      std::to_string(n_workers) + " (" + error.what() + "); use fewer");
  }
}

ThreadPool::~ThreadPool() {
  if (state_->owner == getpid()) {
    state_->stop();
  } else {
    // Forked: the threads exist only in the parent, and the condition variable remembers waiters
    // that will never leave it. Nothing of it can be destroyed, so it is left behind.
    static_cast<void>(state_.release());
  }
}

int ThreadPool::n_workers() const { return state_->n_workers; }

void ThreadPool::run(Job job, void* context) {
  if (state_->owner != getpid()) {
    throw DeviceFault("cpu threads: this backend belongs to process " +
                      std::to_string(state_->owner) + " and was carried over a fork into process " +
                      std::to_string(getpid()) +
                      ", which has none of its threads; make the backend " + "after forking");
  }
  state_->job = job;
  state_->context = context;
  state_->publish();
  job(context, 0);
  state_->barrier();
}

void ThreadPool::barrier() { state_->barrier(); }

}  // namespace atlas
