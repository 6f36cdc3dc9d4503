// Paced devices: emulated CSDs that take as long as other devices would. Reads, updates and writes are real, and so is
// their overlap; only the completion of an operation that was too fast is delayed.
#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "pool.h"

namespace csd {
namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

Clock::duration seconds(double s) { return std::chrono::ceil<Clock::duration>(std::chrono::duration<double>(s)); }

// Serves one transfer after another at a given rate. Used only by the pacer's thread.
struct Channel {
  double rate = 0;  // units per second; 0: takes no time
  Time free_at{};   // when the channel has served everything so far

  // Returns when `n` units that arrive at `at` are served.
  Time serve(uint64_t n, Time at) {
    if (rate == 0) return at;
    return free_at = std::max(free_at, at) + seconds(static_cast<double>(n) / rate);
  }
};

// Channels that a transfer uses at the same time: the slowest one determines its speed.
struct Path {
  std::vector<Channel *> channels;

  Time serve(uint64_t n, Time at) const {
    Time end = at;
    for (Channel *channel : channels) end = std::max(end, channel->serve(n, at));
    return end;
  }
};

struct Transfer {
  const Path *path;
  uint64_t n;
};

// An operation that takes up to three paths, one after another, and then calls `done`.
struct Operation {
  std::array<Transfer, 3> transfers;
  size_t n_transfers;
  std::function<void()> done;
  size_t n_begun = 0;
};
using Schedule = std::multimap<Time, Operation>;

}  // namespace

// The clock of an engine's paced devices, and the link that they share. It computes with the times at which events
// should have happened instead of those at which its thread woke up, so delays do not accumulate.
class Pacer {
 public:
  Pacer() : thread_([this] { run(); }) {}

  ~Pacer() {  // only after all operations have finished
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
      wake_.notify_one();
    }
    thread_.join();
  }

  // Allocates what schedule() needs before an operation begins, because schedule() is called where nothing may fail.
  static std::shared_ptr<Schedule> prepare(std::array<Transfer, 3> transfers, size_t n_transfers,
                                           std::function<void()> done) {
    auto prepared = std::make_shared<Schedule>();
    prepared->emplace(Time{}, Operation{transfers, n_transfers, std::move(done)});
    return prepared;
  }

  // Lets a prepared operation begin at time `at`. When it has taken all its paths, the pacer's thread calls `done`.
  void schedule(Time at, Schedule &prepared) {
    auto operation = prepared.extract(prepared.begin());
    operation.key() = at;
    std::lock_guard lock(mutex_);
    schedule_.insert(std::move(operation));
    wake_.notify_one();
  }

  Channel down, up;  // full duplex: gradients to the devices, parameters from them

 private:
  void run() {
    block_signals();
    pthread_setname_np(pthread_self(), "csd-pacer");
    std::unique_lock lock(mutex_);
    while (!ending_) {
      if (schedule_.empty()) {
        wake_.wait(lock);
        continue;
      }
      if (const Time next = schedule_.begin()->first; next > Clock::now()) {
        wake_.wait_until(lock, next);
        continue;
      }
      auto first = schedule_.extract(schedule_.begin());
      if (Operation &operation = first.mapped(); operation.n_begun < operation.n_transfers) {
        const auto [path, n] = operation.transfers[operation.n_begun++];
        first.key() = path->serve(n, first.key());
        schedule_.insert(std::move(first));
      } else {
        lock.unlock();
        operation.done();
        first = {};
        lock.lock();
      }
    }
  }

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  Schedule schedule_;
  bool ending_ = false;
  std::thread thread_;  // last: it uses all of the above
};

namespace {

class PacedDevice : public Device {
 public:
  PacedDevice(std::unique_ptr<Device> device, const csd_pace &pace, std::shared_ptr<Pacer> pacer)
      : device_(std::move(device)),
        pacer_(std::move(pacer)),
        host_(pace.host != 0),
        latency_(seconds(pace.latency)),
        read_{pace.read},
        write_{pace.write},
        mixed_{pace.mixed},
        update_{pace.update},
        load_{{&read_, &mixed_}},
        store_{{&write_, &mixed_}},
        apply_{{&update_}} {
    if (pace.link != 0) {  // host: state crosses the link; otherwise gradients and parameters do
      (pace.host ? load_ : pull_).channels.push_back(&pacer_->up);
      (pace.host ? store_ : push_).channels.push_back(&pacer_->down);
    }
    if (pace.flash_grads) push_ = load_;
  }

  bool resident() const override { return device_->resident(); }
  bool reaches_params() const override { return device_->reaches_params(); }
  // A CSD can only use the copy on its drive.
  bool skips_params() const override { return host_ && device_->skips_params(); }
  bool keeps_buffers() const override { return device_->keeps_buffers(); }
  std::string missing_kernel(uint32_t rule, uint32_t codec) const override {
    return device_->missing_kernel(rule, codec);
  }
  std::string lacks_for_passes() const override { return device_->lacks_for_passes(); }
  std::vector<float *> allocate(uint32_t n, uint64_t tile, uint64_t section) override {
    return device_->allocate(n, tile, section);
  }
  float *next_slot_in_memory(const Tile &tile) override { return device_->next_slot_in_memory(tile); }
  uint64_t memory_bytes() const override { return device_->memory_bytes(); }
  uint64_t huge_bytes() const override { return device_->huge_bytes(); }
  uint32_t numa() const override { return device_->numa(); }
  int map(const Tile &tile) override { return device_->map(tile); }

  void load(const Tile &tile, float *buffer, uint64_t first, uint64_t last, Done done) override {
    device_->load(tile, buffer, first, last, delayed(load_, last - first, std::move(done)));
  }

  // Not paced: this is rare, and there is no `done` to delay.
  int read_first(const Tile &tile, uint64_t bytes, void *to) override { return device_->read_first(tile, bytes, to); }

  void store(const Tile &tile, const float *buffer, uint64_t first, uint64_t last, Done done) override {
    device_->store(tile, buffer, first, last, delayed(store_, last - first, std::move(done)));
  }

  void seed(const Tile &tile, float *buffer, const Work &work, Done done) override {
    device_->seed(tile, buffer, work, delayed(store_, tile.layout.bytes(0), std::move(done)));
  }

  // The number of bytes is known only after the tile has been updated. Then the time is accounted for, starting at the
  // beginning of the update: gradients arrive, the tile is updated, parameters leave.
  void update(const Tile &tile, float *buffer, Work &work, Updated done) override {
    auto operation = Pacer::prepare({{{&push_, 0}, {&apply_, 0}, {&pull_, 0}}}, 3, [done] { done({}); });
    device_->update(tile, buffer, work, [this, &work, began = Clock::now(), operation, done](Failure failure) {
      if (failure.status != CSD_OK) return done(std::move(failure));
      std::array<Transfer, 3> &transfers = operation->begin()->second.transfers;
      transfers[0].n = work.pushed;
      transfers[1].n = work.updated;
      transfers[2].n = work.pulled;
      pacer_->schedule(began, *operation);
    });
  }

 private:
  // Delays `done` of an operation that begins now and moves `bytes` bytes along `path`. Errors are reported at once.
  Done delayed(const Path &path, uint64_t bytes, Done done) {
    auto operation = Pacer::prepare({{{&path, bytes}}}, 1, [done] { done(0); });
    return [this, began = Clock::now(), operation, done](int error) {
      if (error) return done(error);
      pacer_->schedule(began + latency_, *operation);
    };
  }

  const std::unique_ptr<Device> device_;
  const std::shared_ptr<Pacer> pacer_;
  const bool host_;
  const Clock::duration latency_;
  Channel read_, write_, mixed_, update_;
  Path load_, store_, push_, apply_, pull_;
};

}  // namespace

std::unique_ptr<Device> paced(std::unique_ptr<Device> device, const csd_device &d, std::shared_ptr<Pacer> &pacer) {
  if (!device || !d.pace) return device;
  const csd_pace &p = *d.pace;
  if (p.read == 0 && p.write == 0 && p.mixed == 0 && p.update == 0 && p.latency == 0 && p.link == 0) return device;
  for (const double rate : {p.read, p.write, p.mixed, p.update, p.link})
    if (rate != 0 && !(rate >= 1000 && std::isfinite(rate))) return nullptr;  // at lower rates the clock might overflow
  if (d.card || !(p.latency >= 0 && p.latency <= 3600)) return nullptr;
  if (!pacer) pacer = std::make_shared<Pacer>();
  if (p.link != 0) {
    double &rate = pacer->down.rate;
    if (rate != 0 && rate != p.link) return nullptr;
    rate = pacer->up.rate = p.link;
  }
  return std::make_unique<PacedDevice>(std::move(device), p, pacer);
}

}  // namespace csd
