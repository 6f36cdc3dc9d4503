#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "csd.h"
#include "float_mode.h"
#include "numa.h"

namespace csd {
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);  // keep these for crash handlers
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

void Pool::start() {
  std::lock_guard lock(mutex_);
  add_threads();
}

void Pool::submit(Task task, bool low_priority) {
  std::list<Task> one;
  one.push_back(std::move(task));
  submit(std::move(one), low_priority);
}

void Pool::submit(std::list<Task> tasks, bool low_priority) {
  if (tasks.empty()) return;
  std::unique_lock lock(mutex_);
  add_threads();
  std::list<Task> &to = low_priority ? low_priority_ : tasks_;
  to.splice(to.end(), tasks);
  wake_another(lock);
}

// Wakes a thread if one sleeps, and none is waking up: each wakes the next while there are tasks. To wake them all
// would cost the caller ten microseconds and more for each. Unlocks first, so that the thread need not wait.
void Pool::wake_another(std::unique_lock<std::mutex> &lock) {
  const bool wakes = n_asleep_ > 0 && !is_waking_;
  is_waking_ |= wakes;
  lock.unlock();
  if (wakes) wake_.notify_one();
}

void Pool::add_threads() {
  while (running_ < wanted_) {
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::exception &) {  // std::system_error, std::bad_alloc
      if (running_ == 0) throw;
      return;  // fewer threads do the same work, more slowly
    }
    running_++;
  }
}

void Pool::resize(uint32_t threads) {
  std::lock_guard lock(mutex_);
  wanted_ = threads;
  wake_.notify_all();
}

void Pool::grow(uint32_t threads) {
  std::lock_guard lock(mutex_);
  wanted_ = std::max(wanted_, threads);
}

void Pool::stop() {
  std::unique_lock lock(mutex_);
  wanted_ = 0;
  wake_.notify_all();
  stopped_.wait(lock, [this] { return running_ == 0; });
}

uint32_t Pool::size() noexcept {
  std::lock_guard lock(mutex_);
  return wanted_;
}

void Pool::work() {
  block_signals();
  if (cpus_) pthread_setaffinity_np(pthread_self(), sizeof *cpus_, &*cpus_);  // best effort
  const FloatMode mode(Subnormals::zero);
  std::unique_lock lock(mutex_);
  for (;;) {
    while (tasks_.empty() && low_priority_.empty() && running_ <= wanted_) {
      n_asleep_++;
      wake_.wait(lock);
      n_asleep_--;
      is_waking_ = false;  // whatever has woken this thread, it now looks for tasks
    }
    if (running_ > wanted_) {
      running_--;
      wake_.notify_one();
      if (running_ == 0) stopped_.notify_all();
      return;
    }
    std::list<Task> task;
    std::list<Task> &from = tasks_.empty() ? low_priority_ : tasks_;
    task.splice(task.end(), from, from.begin());
    if (tasks_.empty() && low_priority_.empty()) lock.unlock();
    else wake_another(lock);
    task.front()();
    task.clear();
    lock.lock();
  }
}

thread_local TasksHere *TasksHere::current_ = nullptr;

TasksHere::~TasksHere() {
  if (tasks_.empty()) return;
  const FloatMode mode(Subnormals::zero);  // as on the pool's threads
  const Opened opened(this);
  while (!tasks_.empty()) {
    std::list<Pool::Task> task;
    task.splice(task.end(), tasks_, tasks_.begin());
    task.front()();
  }
}

void submit_here(Pool &pool, Pool::Task task, bool low_priority) {
  if (TasksHere::current_) TasksHere::current_->tasks_.push_back(std::move(task));
  else pool.submit(std::move(task), low_priority);
}

uint32_t idle_here(Pool &pool) {
  if (TasksHere::current_) return 0;
  std::lock_guard lock(pool.mutex_);
  return pool.tasks_.empty() && pool.low_priority_.empty() ? pool.n_asleep_ : 0;
}

// The pools of the process. Never destroyed: their threads may still be waiting when the process exits.
struct Pools {
  Pool updates;
  std::mutex mutex;  // guards what follows
  std::map<uint32_t, Pool> of_node;
  std::map<dev_t, Pool> io;

  explicit Pools(uint32_t threads) : updates(threads) {}

  // The part of the update threads that a node with these CPUs gets.
  static uint32_t part(uint32_t threads, const cpu_set_t &cpus) {
    const cpu_set_t all = usable_cpus();
    return std::max(1u, threads * static_cast<uint32_t>(CPU_COUNT(&cpus)) / static_cast<uint32_t>(CPU_COUNT(&all)));
  }

  static Pools &get() {
    static Pools *all = nullptr;
    static std::once_flag once;
    std::call_once(once, [] {
      const cpu_set_t cpus = usable_cpus();
      all = new Pools(static_cast<uint32_t>(CPU_COUNT(&cpus)));
      // A forked child has none of the threads, and its copy of a mutex may stay locked forever: give it pools of its
      // own.
      pthread_atfork(nullptr, nullptr, [] { all = new Pools(all->updates.wanted_); });
    });
    return *all;
  }
};

Pool &Pool::updates(uint32_t numa) {
  Pools &all = Pools::get();
  if (numa == 0) return all.updates;
  const cpu_set_t cpus = usable_cpus_of(numa);
  if (CPU_COUNT(&cpus) == 0) return all.updates;
  const uint32_t threads = Pools::part(all.updates.size(), cpus);
  std::lock_guard lock(all.mutex);
  return all.of_node.try_emplace(numa, threads, cpus).first->second;
}

void Pool::use_update_threads(uint32_t threads) {
  Pools &all = Pools::get();
  all.updates.resize(threads);
  std::lock_guard lock(all.mutex);
  for (auto &[numa, pool] : all.of_node) pool.resize(Pools::part(threads, *pool.cpus_));
}

Pool &Pool::io(dev_t file_system) {
  Pools &all = Pools::get();
  std::lock_guard lock(all.mutex);
  return all.io.try_emplace(file_system, CSD_IO_DEPTH).first->second;
}

}  // namespace csd
