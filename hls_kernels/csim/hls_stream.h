// C-simulation: streams as bounded as the FPGA's FIFOs, between stages that are threads. Under Vitis its own header of
// this name is found, and its streams; there simulated ones are unbounded, so that a FIFO too shallow is found here or
// by a card that hangs.
//
// A region of which no stage can ever go on is recognised with certainty and at once, not by its taking long: every
// stage that waits notes at which version of the region it last looked in vain. The version changes whenever a stage
// begins to wait, stops waiting or ends. If all have looked in vain at the present one, then nobody has done anything
// since, and nobody will.
#pragma once
#include <sched.h>
#include <stdint.h>
#include <time.h>

#include <atomic>
#include <deque>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#define CSD_DATAFLOW hls::region csd_region_;
#define CSD_STAGE(stage, ...) csd_region_.add(#stage, [&] { stage(__VA_ARGS__); });

namespace hls {

class region;

struct stage {
  region *in;
  std::string name;
  std::function<void()> body;
  std::atomic<uint64_t> looked{0};                     // the version at which it last looked in vain
  std::atomic<const std::string *> waits_for{nullptr}; // the name of a stream
  std::atomic<bool> for_room{false};                   // in it; otherwise for something to read
  std::atomic<bool> ended{false};

  stage(region *in, const char *name, std::function<void()> body) : in(in), name(name), body(std::move(body)) {}
};

inline stage *&this_stage() {
  static thread_local stage *current = nullptr;
  return current;
}

// The stages of one call of a kernel. Its destructor runs them, each in a thread, and throws what went wrong.
class region {
 public:
  void add(const char *name, std::function<void()> body) { stages_.emplace_back(this, name, std::move(body)); }

  ~region() noexcept(false) {
    std::vector<std::thread> threads;
    try {
      for (stage &s : stages_) threads.emplace_back([this, &s] { run(s); });
    } catch (const std::exception &e) {  // no more threads: those there are wait for the others in vain
      fail(e.what());
    }
    for (std::thread &t : threads) t.join();
    if (failed_.load()) throw std::runtime_error(failure_);
  }

  // Returns when `ready` does.
  template <typename Ready>
  void wait(stage &self, const std::string &stream, bool for_room, Ready ready) {
    self.for_room.store(for_room);
    self.waits_for.store(&stream);
    version_.fetch_add(1);
    for (uint32_t tries = 0;; tries++) {
      const uint64_t version = version_.load();
      if (failed_.load()) throw given_up();
      if (ready()) break;
      self.looked.store(version);
      if (tries % 16 == 15 && all_looked(version)) fail(who_waits());
      pause(tries);
    }
    version_.fetch_add(1);
    self.waits_for.store(nullptr);
  }

 private:
  struct given_up {};

  void run(stage &self) {
    this_stage() = &self;
    try {
      self.body();
    } catch (const given_up &) {
    } catch (const std::exception &e) {
      fail(self.name + ": " + e.what());
    }
    self.ended.store(true);
    version_.fetch_add(1);
  }

  bool all_looked(uint64_t version) const {
    for (const stage &s : stages_)
      if (!s.ended.load() && s.looked.load() != version) return false;
    return version_.load() == version;
  }

  std::string who_waits() const {
    std::string text = "deadlock:";
    for (const stage &s : stages_) {
      if (s.ended.load()) continue;
      text += " " + s.name + " waits for " + (s.for_room.load() ? "room in " : "") + *s.waits_for.load() + ";";
    }
    text.back() = '.';
    return text;
  }

  void fail(const std::string &why) {
    if (!failing_.exchange(true)) {
      failure_ = why;
      failed_.store(true);
    }
  }

  // A stage that waits for long, because another has much to do, leaves it the processor.
  static void pause(uint32_t tries) {
    if (tries < 1000) {
      sched_yield();
    } else {
      const timespec a_little{0, 50000};
      nanosleep(&a_little, nullptr);
    }
  }

  std::deque<stage> stages_;
  std::atomic<uint64_t> version_{1};
  std::atomic<bool> failing_{false}, failed_{false};
  std::string failure_;  // complete when failed_
};

// One stage writes, one stage reads. As under Vitis, a stream of any depth can be passed as a `stream<T> &`.
template <typename T, int DEPTH = 0>
class stream;

template <typename T>
class stream<T, 0> {
 public:
  explicit stream(const char *name = "a stream") : stream(2, name) {}  // the depth of a FIFO of which nothing is said
  stream(const stream &) = delete;
  stream &operator=(const stream &) = delete;

  void write(const T &value) {
    const uint64_t at = written_.load(std::memory_order_relaxed);
    if (at - read_before_ == slots_.size()) {
      until(true, [&] { return at - (read_before_ = read_.load(std::memory_order_acquire)) != slots_.size(); });
    }
    slots_[write_slot_] = value;
    if (++write_slot_ == slots_.size()) write_slot_ = 0;
    written_.store(at + 1, std::memory_order_release);
  }

  T read() {
    const uint64_t at = read_.load(std::memory_order_relaxed);
    if (at == written_before_) {
      until(false, [&] { return at != (written_before_ = written_.load(std::memory_order_acquire)); });
    }
    const T value = slots_[read_slot_];
    if (++read_slot_ == slots_.size()) read_slot_ = 0;
    read_.store(at + 1, std::memory_order_release);
    return value;
  }

 protected:
  stream(size_t depth, const char *name) : slots_(depth), name_(name) {}

 private:
  template <typename Ready>
  void until(bool room, Ready ready) {
    if (ready()) return;
    if (!this_stage()) throw std::runtime_error(name_ + " is used outside of any stage");
    this_stage()->in->wait(*this_stage(), name_, room, ready);
  }

  std::vector<T> slots_;
  const std::string name_;
  // Each side on a cache line of its own, with what it last knew of the other.
  alignas(64) std::atomic<uint64_t> written_{0};
  uint64_t read_before_ = 0;
  size_t write_slot_ = 0;
  alignas(64) std::atomic<uint64_t> read_{0};
  uint64_t written_before_ = 0;
  size_t read_slot_ = 0;
};

template <typename T, int DEPTH>
class stream : public stream<T, 0> {
 public:
  explicit stream(const char *name = "a stream") : stream<T, 0>(DEPTH, name) {}
};

}  // namespace hls
