// Streams, and a schedule that decides when work runs, within what CUDA allows.
//
// Work does not run when it is called but is queued in its stream. It runs in the order of the stream, after everything
// that the stream was told to wait for, and before a host that waits for it continues. All schedules are legal, so a
// program whose results depend on the schedule lacks a synchronisation.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace emulated {

constexpr int kDevices = 2;

inline std::recursive_mutex &lock() {  // guards all state here and in memory.h; leaked: tensors may outlive statics
  static auto *mutex = new std::recursive_mutex;
  return *mutex;
}
#define LOCKED const std::lock_guard<std::recursive_mutex> held(lock())

struct Queue;
struct Point {  // a point in a stream, which passes when `n` pieces of its work are done
  Queue *queue;
  uint64_t n;
  bool passed() const;
};

struct Work {
  std::function<void()> run;  // empty: only waits
  std::vector<Point> after;
};

inline std::exception_ptr failure;  // of a kernel; rethrown when the host waits, as with CUDA

struct Queue {
  int device;
  int64_t id;
  std::deque<Work> work{};
  uint64_t queued = 0, done = 0;
  bool awake = false;

  Point end() { return {this, queued}; }
  bool ready() const {
    return !work.empty() &&
           std::all_of(work.front().after.begin(), work.front().after.end(), [](const Point &p) { return p.passed(); });
  }
  void step() {
    const Work now = std::move(work.front());
    work.pop_front();
    try {
      if (now.run) now.run();
    } catch (...) {
      failure = std::current_exception();
    }
    done++;
  }
};
inline bool Point::passed() const { return queue->done >= n; }

// kLate: work runs only when something waits for it. kSideFirst, kMainFirst: work in side streams, or in the default
// stream, runs as soon as it can, other work late. kRandom: streams stall and continue at random, by a seed. kAtOnce:
// all work runs as soon as it can, as if there were no streams.
enum Order { kLate, kAtOnce, kSideFirst, kMainFirst, kRandom };
inline Order order = kLate;
inline std::mt19937_64 dice;

inline uint64_t launched = 0;   // number of kernels, copies and waits that the program has queued
inline uint64_t waited = 0;     // how often the host has waited for a stream
inline bool capturing = false;  // pretend that a graph is captured: see emu_capture

inline std::map<std::pair<int, int64_t>, Queue> &queues() {
  static auto *all = new std::map<std::pair<int, int64_t>, Queue>;
  return *all;
}

inline Queue &queue_of(int device, int64_t id) {
  LOCKED;
  return queues().try_emplace({device, id}, Queue{device, id}).first->second;
}

inline thread_local int current_device = 0;
inline thread_local std::array<int64_t, kDevices> current_stream{};
inline Queue &here(int device) { return queue_of(device, current_stream[device]); }

// Runs the work that a point depends on, and nothing else.
inline void run_to(Point p) {
  LOCKED;
  while (!p.passed()) {
    for (const Point &before : p.queue->work.front().after) run_to(before);
    p.queue->step();
  }
}

inline void check_host_may_wait() {
  if (capturing) throw std::runtime_error("emulated device: operation not permitted when stream is capturing");
}

inline void raise_failure() {
  if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
}

// Makes the host wait for a point.
inline void wait_for(Point p) {
  LOCKED;
  check_host_may_wait();
  waited++;
  run_to(p);
  raise_failure();
}

inline void progress() {
  if (order == kLate) return;
  for (auto &[key, queue] : queues()) {
    if (order != kRandom) queue.awake = order == kAtOnce || (queue.id != 0) == (order == kSideFirst);
    else if (dice() % 8 == 0) queue.awake = dice() % 2;
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (auto &[key, queue] : queues())
      for (; queue.awake && queue.ready(); moved = true) queue.step();
  }
}

// Queues work of the emulation itself, which does not count as launched by the program.
inline Point append(Queue &queue, std::function<void()> run, std::vector<Point> after = {}) {
  LOCKED;
  queue.work.push_back({std::move(run), std::move(after)});
  queue.queued++;
  const Point end = queue.end();
  progress();
  return end;
}

inline Point enqueue(Queue &queue, std::function<void()> run, std::vector<Point> after = {}) {
  LOCKED;
  launched++;
  return append(queue, std::move(run), std::move(after));
}

// Returns whether a point has passed. If not, runs some pieces of the work that it depends on, so that a host that polls
// does not do so forever.
inline bool query(Point p, unsigned pieces = 1) {
  LOCKED;
  check_host_may_wait();
  raise_failure();
  if (p.passed()) return true;
  for (; pieces && !p.passed(); pieces--) {
    Queue *queue = p.queue;
    while (!queue->ready())
      for (const Point &before : queue->work.front().after)
        if (!before.passed()) queue = before.queue;
    queue->step();
  }
  return false;
}

}  // namespace emulated
