// C-simulation: streams with the depth of the FPGA's FIFOs, between stages that are threads and, like the FPGA's
// pipelines, hold back the iterations that they have begun. Vitis uses its own header of this name, whose simulated
// streams are unbounded; a FIFO that is too shallow shows up only here, or on a card, which then hangs.
//
// A stage runs until a stream that it reads is empty or one that it writes is full. It then wakes all stages that can
// continue, and sleeps. If all stages sleep and none can continue, none ever will: deadlocks are detected reliably and
// at once, without a timeout.
//
// What an iteration writes comes out CSD_IN_FLIGHT iterations later, or when the stage ends, because a stalled pipeline
// stops with everything that is in it. An iteration uses each stream at most once: using a stream again begins the next
// iteration. As on the FPGA, subnormal numbers are zero.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "float_mode.h"

#ifndef CSD_IN_FLIGHT  // iterations in a pipeline: the longest, the update, has about 130 cycles, a word every two
#define CSD_IN_FLIGHT 64
#endif
#define CSD_DATAFLOW hls::region csd_region_;
#define CSD_STAGE(stage, ...) csd_region_.add(#stage, [&] { stage(__VA_ARGS__); });

namespace hls {

// How full a stream is. One stage writes, one reads; each counts on a cache line of its own.
struct fifo {
  const size_t depth;
  const std::string name;
  alignas(64) std::atomic<uint64_t> n_written{0};
  alignas(64) std::atomic<uint64_t> n_read{0};

  fifo(size_t depth, const char *name) : depth(depth), name(name) {}
  virtual ~fifo() = default;

  virtual void release_oldest() = 0;  // releases the oldest value that a pipeline holds for this stream

  bool ready(bool to_write) const {
    const uint64_t n = n_written.load(std::memory_order_acquire) - n_read.load(std::memory_order_acquire);
    return to_write ? n != depth : n != 0;
  }
};

// The stages of one call of a kernel. The destructor runs each of them in a thread of its own, and throws if one fails
// or they deadlock.
class region {
 public:
  void add(const char *name, std::function<void()> body) { stages_.emplace_back(name, std::move(body)); }

  ~region() noexcept(false) {
    running_ = stages_.size();
    std::vector<std::thread> threads;
    try {
      for (stage &s : stages_) threads.emplace_back([this, &s] { run(s); });
    } catch (const std::exception &e) {  // too few threads: the existing ones would wait forever for the others
      std::lock_guard<std::mutex> lock(mutex_);
      fail(e.what());
    }
    for (std::thread &t : threads) t.join();
    if (!failure_.empty()) throw std::runtime_error(failure_);
  }

  // Called by the thread of a stage: waits until the stream is ready for it.
  static void wait(const fifo &stream, bool to_write) {
    stage &self = this_stage(stream);
    this_thread().owner->wait(self, stream, to_write);
  }

  // Called by the thread of a stage when it uses a stream; `used` is the iteration in which it last did. Begins the
  // next iteration if it was this one, and releases the values that are due.
  static void step(const fifo &stream, uint64_t &used) {
    stage &self = this_stage(stream);
    if (used == self.iteration) self.iteration++;
    used = self.iteration;
    while (!self.pipeline.empty() && self.pipeline.front().due <= self.iteration) self.release_front();
  }

  // Called by the thread of a stage after a write: the value is in its pipeline from now on.
  static void enter_pipeline(fifo &stream) {
    stage &self = this_stage(stream);
    self.pipeline.push_back({&stream, self.iteration + CSD_IN_FLIGHT});
    if (CSD_IN_FLIGHT == 0) self.release_front();
  }

 private:
  struct pending_value {
    fifo *stream;
    uint64_t due;  // the iteration in which it is released
  };
  struct stage {
    const std::string name;
    const std::function<void()> body;
    uint64_t iteration = 1;
    std::deque<pending_value> pipeline;
    const fifo *waits_for = nullptr;  // while the stage sleeps
    bool to_write = false;
    std::condition_variable woken;

    stage(const char *name, std::function<void()> body) : name(name), body(std::move(body)) {}

    void release_front() {
      pipeline.front().stream->release_oldest();
      pipeline.pop_front();
    }
  };
  struct thread_stage {
    region *owner;
    stage *self;
  };
  struct aborted {};

  static thread_stage &this_thread() {
    static thread_local thread_stage here{nullptr, nullptr};
    return here;
  }

  static stage &this_stage(const fifo &stream) {
    if (!this_thread().self) throw std::logic_error("a stage that is not in a region uses " + stream.name);
    return *this_thread().self;
  }

  void run(stage &self) {
    this_thread() = {this, &self};
    const csd::FloatMode mode(csd::Subnormals::zero);
    std::string failure;
    try {
      self.body();
      while (!self.pipeline.empty()) self.release_front();
    } catch (const aborted &) {
    } catch (const std::exception &e) {
      failure = self.name + ": " + e.what();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure.empty()) fail(failure);
    wake_ready();
  }

  void wait(stage &self, const fifo &stream, bool to_write) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (stream.ready(to_write)) return;
    self.waits_for = &stream;
    self.to_write = to_write;
    wake_ready();
    self.woken.wait(lock, [&] { return !self.waits_for || !failure_.empty(); });
    if (!failure_.empty()) throw aborted();
  }

  // Called when a running stage sleeps or ends: wakes all stages that can continue, and detects deadlocks.
  void wake_ready() {
    if (!failure_.empty()) return;
    running_--;
    for (stage &s : stages_) {
      if (!s.waits_for || !s.waits_for->ready(s.to_write)) continue;
      s.waits_for = nullptr;
      running_++;
      s.woken.notify_one();
    }
    if (running_ != 0) return;
    std::string waiting;
    for (const stage &s : stages_)
      if (s.waits_for)
        waiting += " " + s.name + " waits for " + (s.to_write ? "room in " : "") + s.waits_for->name +
                   (s.pipeline.empty() ? "" : ", " + std::to_string(s.pipeline.size()) + " in its pipeline") + ";";
    if (waiting.empty()) return;  // all stages have ended
    waiting.back() = '.';
    fail("deadlock:" + waiting);
  }

  void fail(const std::string &why) {
    if (failure_.empty()) failure_ = why;
    for (stage &s : stages_) s.woken.notify_one();
  }

  std::deque<stage> stages_;
  std::mutex mutex_;  // guards everything below, and the stages' waits_for and to_write
  size_t running_ = 0;
  std::string failure_;
};

// As under Vitis, a stream of any depth can be passed as a `stream<T> &`.
template <typename T, int DEPTH = 0>
class stream;

template <typename T>
class stream<T, 0> : fifo {
 public:
  explicit stream(const char *name) : stream(2, name) {}  // Vitis' default depth of a FIFO
  stream(const stream &) = delete;
  stream &operator=(const stream &) = delete;

  void write(const T &value) {
    region::step(*this, last_write_);
    slots_[write_slot_] = value;
    if (++write_slot_ == slots_.size()) write_slot_ = 0;
    region::enter_pipeline(*this);
  }

  T read() {
    const uint64_t at = n_read.load(std::memory_order_relaxed);
    if (at == last_n_written_ && at == (last_n_written_ = load(n_written))) {
      region::wait(*this, false);
      last_n_written_ = load(n_written);
    }
    region::step(*this, last_read_);
    const T value = slots_[read_slot_];
    if (++read_slot_ == slots_.size()) read_slot_ = 0;
    n_read.store(at + 1, std::memory_order_release);
    return value;
  }

 protected:
  // A pipeline holds one value per stream for each iteration in it.
  stream(size_t depth, const char *name) : fifo(depth, name), slots_(depth + CSD_IN_FLIGHT + 1) {}

 private:
  static uint64_t load(const std::atomic<uint64_t> &count) { return count.load(std::memory_order_acquire); }

  void release_oldest() override {
    const uint64_t at = n_written.load(std::memory_order_relaxed);
    if (at - last_n_read_ == depth && at - (last_n_read_ = load(n_read)) == depth) {
      region::wait(*this, true);
      last_n_read_ = load(n_read);
    }
    n_written.store(at + 1, std::memory_order_release);
  }

  std::vector<T> slots_;
  // Private to the writer and to the reader: the next slot, the iteration of its stage that last used the stream, and
  // the other side's count as last seen.
  alignas(64) size_t write_slot_ = 0;
  uint64_t last_write_ = 0, last_n_read_ = 0;
  alignas(64) size_t read_slot_ = 0;
  uint64_t last_read_ = 0, last_n_written_ = 0;
};

template <typename T, int DEPTH>
class stream : public stream<T, 0> {
 public:
  explicit stream(const char *name) : stream<T, 0>(DEPTH, name) {}
};

}  // namespace hls
