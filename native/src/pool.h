// Thread pools, shared by all engines of a process: one for updates, and one per file system for reads and writes. A
// hundred small optimizers therefore need no more threads than a big one.
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
#include <utility>
#include <vector>

namespace csd {

void block_signals();  // in the current thread: signals are for the program's own threads

class Pool {
 public:
  // `cpus`: the CPUs for its threads; none: all that the process may use.
  explicit Pool(uint32_t threads, std::optional<cpu_set_t> cpus = {}) : cpus_(cpus), wanted_(threads) {}
  using Task = std::function<void()>;

  // Starts the threads. Throws std::system_error if not even one can be created. After that, submit() does not throw
  // for lack of threads.
  void start();
  // Queues tasks, which run in order of submission; tasks of low priority run after all others. Tasks must not throw.
  // Once a thread is running, submit() does not throw either.
  void submit(Task task, bool low_priority = false);
  void submit(std::list<Task> tasks, bool low_priority = false);
  void resize(uint32_t threads);  // from the next task on
  void stop();                    // ends all threads; only when nothing is queued, and not for shared pools
  void grow(uint32_t threads);    // to at least this many
  uint32_t size() noexcept;

  // The pool for updates, on all CPUs that this process may use or on those of a NUMA node (see numa.h), if it may use
  // any there. By default it has one thread per CPU; the pool of a node has a proportional part of all threads.
  static Pool &updates(uint32_t numa = 0);
  static void use_update_threads(uint32_t threads);  // sets the total from which all update pools are sized
  static Pool &io(dev_t file_system);                // at first with CSD_IO_DEPTH threads, one per request in flight

 private:
  friend struct Pools;
  friend uint32_t idle_here(Pool &);
  void add_threads();
  void work();
  void wake_another(std::unique_lock<std::mutex> &);
  std::mutex mutex_;
  std::condition_variable wake_, stopped_;
  std::list<Task> tasks_, low_priority_;
  const std::optional<cpu_set_t> cpus_;
  uint32_t wanted_, running_ = 0, n_asleep_ = 0;
  bool is_waking_ = false;  // a thread was woken, and has not looked for tasks yet
};

// Tasks that a thread runs itself, because waking another one would take longer than they do.
class TasksHere {
 public:
  TasksHere() = default;
  ~TasksHere();  // runs the tasks, and those that they submit; hold no lock that a task takes
  TasksHere(const TasksHere &) = delete;
  TasksHere &operator=(const TasksHere &) = delete;

  // Calls `call`; whatever it gives to submit_here() is left to this object, if `is_open`.
  template <typename Call>
  auto collect(bool is_open, Call call) {
    const Opened opened(is_open ? this : nullptr);
    return call();
  }

 private:
  friend void submit_here(Pool &, Pool::Task, bool low_priority);
  friend uint32_t idle_here(Pool &);
  struct Opened {
    explicit Opened(TasksHere *here) : before(std::exchange(current_, here)) {}
    ~Opened() { current_ = before; }
    Opened(const Opened &) = delete;
    Opened &operator=(const Opened &) = delete;
    TasksHere *const before;
  };
  static thread_local TasksHere *current_;  // what collects on this thread
  std::list<Pool::Task> tasks_;
};

// Leaves the task to the TasksHere that collects on this thread; if there is none, submits it to the pool.
void submit_here(Pool &, Pool::Task, bool low_priority = false);
uint32_t idle_here(Pool &);  // how many threads have nothing to do and could take what is submitted so

}  // namespace csd
