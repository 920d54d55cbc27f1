// A fixed team of threads that runs one job at a time, with a barrier for use inside the job.
//
// The caller of run() is worker 0. A job of many short phases (a program's launches) is handed over
// once and its phases are separated by barrier(), which spins: waking a sleeping thread costs tens
// of microseconds, a spinning barrier a fraction of one. Between jobs workers spin briefly, for
// the next program of the same step, and then sleep.
//
// Threads: one thread at a time may call run(). A job must not throw. A process forked after the
// pool was made has the object but not its threads: there run() throws, and destruction is safe.
#pragma once

#include <memory>

namespace atlas {

class ThreadPool {
 public:
  using Job = void (*)(void* context, int worker);

  // `n_workers` >= 1, the calling thread included, of which `cores` may run at once: a quota that
  // the process's affinity does not show. Throws DeviceFault if threads cannot start.
  ThreadPool(int n_workers, int cores);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int n_workers() const;

  // Calls job(context, worker) on every worker; returns when all have returned.
  void run(Job job, void* context);

  // Called by every worker from inside the job: returns once all have called it.
  void barrier();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace atlas
