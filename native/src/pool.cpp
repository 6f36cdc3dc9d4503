#include "pool.h"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <map>

#include "csd.h"

namespace csd {
namespace {

uint32_t usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<uint32_t>(CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

void Pool::submit(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  // Threads start with the first work, so that importing or constructing starts none.
  while (running_ < wanted_) {
    std::thread([this] { work(); }).detach();
    running_++;
  }
  wake_.notify_one();
}

void Pool::resize(uint32_t threads) {
  std::lock_guard lock(mutex_);
  wanted_ = threads;
  wake_.notify_all();
}

uint32_t Pool::size() {
  std::lock_guard lock(mutex_);
  return wanted_;
}

void Pool::work() {
  // Signals are for the program's own threads.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return !tasks_.empty() || running_ > wanted_; });
    if (running_ > wanted_) {
      running_--;
      wake_.notify_one();
      return;
    }
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

// Pools are never destroyed: their threads may still be waiting when the process ends.
Pool &Pool::updates() {
  static Pool *pool = new Pool(usable_cpus());
  return *pool;
}

Pool &Pool::io(dev_t file_system) {
  static std::mutex mutex;
  static std::map<dev_t, Pool *> pools;
  std::lock_guard lock(mutex);
  Pool *&pool = pools[file_system];
  if (!pool) pool = new Pool(CSD_IO_DEPTH);
  return *pool;
}

}  // namespace csd
