// Two kinds of threads serve all engines of a process: one pool that updates, and for every file system one pool that
// reads and writes. A hundred small optimizers therefore cost no more threads than one big one.
#pragma once
#include <sched.h>
#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace csd {

void block_signals();  // in this thread: they are for the program's own

class Pool {
 public:
  // `cpus`: that its threads run on; none: on those of the process.
  explicit Pool(uint32_t threads, std::optional<cpu_set_t> cpus = {}) : cpus_(cpus), wanted_(threads) {}
  using Task = std::function<void()>;

  // Throws std::system_error if not a single thread can be had. From then on submit() does not throw for want of one.
  void start();
  // In the order in which they come, but what can wait after all that cannot. Tasks throw nothing; once a thread runs,
  // this throws nothing either.
  void submit(Task task, bool can_wait = false);
  void submit(std::list<Task> tasks, bool can_wait = false);
  void resize(uint32_t threads);  // from the next task on
  void stop();                    // nothing is queued any more; for pools that are not the process's own
  void grow(uint32_t threads);    // unless there are as many
  uint32_t size() noexcept;

  // Updates on any CPU this process may run on, or on those of a NUMA node (see numa.h) if it has any there: as many
  // threads as CPUs unless set, and of a node its part of them.
  static Pool &updates(uint32_t numa = 0);
  static void use_update_threads(uint32_t threads);  // in all, by nodes or not
  static Pool &io(dev_t file_system);                // CSD_IO_DEPTH requests in flight

 private:
  friend struct Pools;
  void add_threads();
  void work();
  std::mutex mutex_;
  std::condition_variable wake_, stopped_;
  std::list<Task> tasks_, waiting_;  // these, and then those that can wait
  const std::optional<cpu_set_t> cpus_;
  uint32_t wanted_, running_ = 0;
};

}  // namespace csd
