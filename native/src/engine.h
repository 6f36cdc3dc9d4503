// One pipeline per device: load a tile, wait for its gradients, update, hand out the parameters, store.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "csd.h"
#include "device.h"
#include "failure.h"
#include "memory.h"
#include "pool.h"

namespace csd {

using Clock = std::chrono::steady_clock;

struct Buffer {
  float *at;
  Tile *tile;          // that it has, which knows it as `kept`; or null
  uint64_t needed_in;  // so many tiles; as it was when the buffer became free, or the step began
  uint64_t freed;      // the how manieth to become free
};

// Free buffers: first the one to take, which is needed last; of equal ones the one that has been free for longest.
struct NeededLast {
  bool operator()(const Buffer &a, const Buffer &b) const {
    return a.needed_in != b.needed_in ? a.needed_in > b.needed_in : a.freed < b.freed;
  }
};
using FreeBuffers = std::set<Buffer, NeededLast>;

// Seconds in which at least one operation of a kind was going on.
class BusyTime {
 public:
  void enter();
  void leave();
  void reset() { total_ = {}, since_ = Clock::now(); }
  double seconds() const;

 private:
  int going_on_ = 0;
  Clock::time_point since_{};
  Clock::duration total_{};
};

class Engine {
 public:
  Engine(const csd_device *devices, uint32_t n);
  ~Engine();
  void extend(const csd_extent &, float **windows);
  void begin(const csd_param *, uint64_t, const csd_hyper *, uint32_t, const uint32_t *tiles, uint32_t n_tiles,
             int32_t order);
  void push(uint32_t tile, const void *grad, void *param, const uint32_t *entries, uint64_t n_entries);
  void give_states(uint32_t tile, const void *states);
  void push_grads(uint32_t tile, const void *const *grads);
  void drop_grads(const uint32_t *params, uint32_t n);
  uint32_t pull();
  bool given(const uint32_t *tiles, uint32_t n, bool wait);
  void finish(bool keep);
  void take_back();
  uint64_t hold_bytes(uint32_t tile) noexcept;
  void push_early(uint32_t tile, const void *const *grads, void *hold);
  bool unchanged(const csd_param *, uint64_t);
  void release(const csd_param *, uint64_t, const uint32_t *order, uint32_t n_order);
  void wait_writes();
  void remap(bool open);
  void edited(const uint32_t *tiles, uint32_t n);
  void decode(uint32_t tile, uint64_t first, uint64_t n, const void *param, float *const *states);
  void read(uint32_t tile, char *states);
  void close();
  uint32_t undone(uint32_t *tiles, uint64_t *elems, uint32_t n) const noexcept;
  void tiles(uint32_t first, uint32_t n, csd_tile_state *states, uint32_t *sums);
  csd_stats stats(uint32_t device);
  uint32_t events(csd_event *, uint32_t n) noexcept;

 private:
  // A tile on its way through a step.
  struct Job {
    Tile *tile;
    FreeBuffers::node_type buffer;  // empty on a resident device
    float *in_memory = nullptr;     // where the next slot lies: see Device::next_slot_in_memory()
    float *at() { return in_memory || !buffer ? in_memory : buffer.value().at; }
    Work work{};
    uint32_t shown = 0;         // the slot that the windows showed when the step began
    Clock::time_point began{};  // the read, update or write that is under way
    uint64_t place = 0;         // among the tiles of its device, in the order in which they flow
    uint64_t first_byte() const { return work.param_at_host ? tile->layout.bytes(0) : 0; }  // that is read
    bool must_read() const { return !tile->kept && !work.from_windows && !work.is_new && !work.all_given; }
    bool begun = false, read = false, pushed = false, seeding = false, loaded = false, given = false;
    bool storing = false, stored = false;
    // Pushed early: as a copy, which is still being made; and updated.
    bool early = false, copying = false, updated = false;
    uint32_t params_crc = 0;          // of the parameters that were copied
    std::list<Pool::Task> give;       // hands out its parameters, once
    std::vector<const void *> grads;  // pushed with it
  };
  struct Lane {  // a device and what is queued on it
    std::unique_ptr<Device> device;
    uint32_t depth = 0;          // so many tiles are on their way at once
    int64_t cache_bytes = 0;     // see csd_device
    uint64_t buffer_bytes = 0;   // of each
    uint64_t section_bytes = 0;  // of the largest section that they are for
    uint32_t n_buffers = 0;      // not fewer than `depth`
    FreeBuffers free;
    uint64_t freed = 0;             // so many times
    std::vector<Job *> jobs;        // of this step, in the order in which they flow
    size_t next = 0;                // all before it have begun
    std::vector<char> to_read;      // by place: has not begun, and must be read
    std::deque<Job *> pushed;       // CSD_AS_PUSHED: that have not begun
    uint32_t on_way = 0, read = 0;  // begun and not yet stored; those of them that had to be read
    csd_stats counts{};
    BusyTime busy[3];  // by csd_event_kind
  };

  using Lock = std::unique_lock<std::mutex>;
  bool is_new(const Tile &, const csd_param *) const;
  uint64_t given_pieces(const Tile &, const csd_param *) const;
  Lane &lane(const Job &job) { return lanes_[job.tile->device]; }
  bool pump(Lane &);
  // What runs in threads of the devices, or has begun what they end, throws nothing: it fails the step.
  void on_loaded(Job &, int os_errno) noexcept;
  void on_seeded(Job &, int os_errno) noexcept;
  void update_if_ready(Job &) noexcept;
  void on_updated(Job &, Failure) noexcept;
  void start_store(Job &) noexcept;
  void on_stored(Job &, int os_errno) noexcept;
  void not_stored(Job &, Failure) noexcept;
  template <typename Start>
  bool start(Job &, csd_event_kind, Start) noexcept;
  void ended(const Job &, csd_event_kind) noexcept;
  void fail(const Job &, Failure) noexcept;
  bool take_buffer(Lane &, Job &, bool ahead);
  void release_buffer(Job &, bool keep);
  uint64_t needed_in(const Lane &, const Tile *) const;
  Job *job_of(const Tile &) const;
  static Job *first_to_read(const Lane &);
  void reorder_buffers();
  void forget(Tile &);
  std::vector<uint64_t> tiles_on_device() const;
  void settle(Lock &lock) {
    settled_.wait(lock, [this] { return going_on_ == 0; });
  }
  bool undo();
  Job &to_push(uint32_t tile);
  void is_pushed(Job &);
  bool reads_param(const Tile &, const csd_param &) const;
  void copy(Job &, const std::vector<const void *> &grads) noexcept;
  bool is_as_copied(const Job &, const csd_param *) const noexcept;
  void give(Job &) noexcept;
  std::list<Pool::Task> feed_back_tasks();
  std::list<Pool::Task> sum_tasks();
  void wait_writes(Lock &);
  void add_tiles(const csd_extent &, const Layout &, const std::vector<uint32_t> &device, float *const *window);
  void show(Tile &, bool open);
  const char *codes_of(Tile &);
  void decode_in_param(const Tile &, char *const *sections, uint64_t first, uint64_t n, const char *param,
                       float *const *states);
  void grow_buffers(uint64_t tile, uint64_t section, const std::vector<uint64_t> &tiles);

  mutable std::mutex mutex_;  // guards everything below; never held during I/O or updates
  std::condition_variable settled_, pulled_;
  std::deque<Tile> tiles_;  // a deque: tiles never move
  std::deque<std::vector<csd_piece>> pieces_;
  static void use_first_section(Tile &, const csd_param *params);
  struct ResidentCodes {
    HugeMemory codes, first_sections, checks;
  };
  std::deque<ResidentCodes> resident_codes_;  // of tiles on resident devices, one for each extent
  struct {
    const Tile *tile = nullptr;
    HugeMemory slot;
  } decoded_;  // the codes that were read last for decode()
  std::vector<Lane> lanes_;
  uint64_t largest_tile_ = 0, largest_section_ = 0;  // bytes

  // The step
  enum class Phase { idle, stepping } phase_ = Phase::idle;
  std::vector<csd_param> params_;
  std::vector<csd_hyper> hypers_;
  std::deque<Job> jobs_;
  std::vector<Job *> job_of_tile_;
  std::vector<uint32_t> to_pull_;  // updated, pushed with an image
  size_t n_pulled_ = 0;            // of them
  uint64_t not_given_ = 0, images_out_ = 0;
  uint64_t going_on_ = 0;  // loads, updates, stores and sums of windows under way
  bool failed_ = false;
  Failure failure_{};
  enum class Outcome { open, kept, undone };
  std::shared_ptr<Outcome> outcome_;       // of this step, also for who waits until after the next one has begun
  int32_t order_ = CSD_TO_AND_FRO;         // csd_order
  bool guess_ = false, released_ = false;  // tiles were pushed early; and all that remains is as always
  std::vector<csd_param> guessed_;         // the rows of tiles that were pushed before the release
  uint64_t copying_ = 0;                   // tiles that are pushed early
  std::vector<Job *> unwritten_;           // whose write failed after the step was whole
  std::vector<std::pair<uint32_t, uint64_t>> undone_;  // tile, elements
  bool traced_ = false;
  std::vector<csd_event> events_;
  uint64_t feeding_back_ = 0;  // tiles whose residuals are being brought up to date
};

}  // namespace csd
