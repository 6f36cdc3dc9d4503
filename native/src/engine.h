// The engine: one pipeline per device, which loads a tile, waits for its gradients, updates it, returns the parameters
// and stores the new state.
#pragma once
#include <assert.h>

#include <atomic>
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
  Tile *tile;          // the tile that it keeps, whose `cached_buffer` points back; or null
  uint64_t needed_in;  // tiles to be processed before that one, as of when the buffer was freed or the step began
  uint64_t freed;      // serial number of its release
};

// Order of the free buffers. The first one is reused first: the one needed last, and among equals the one freed first.
struct NeededLast {
  bool operator()(const Buffer &a, const Buffer &b) const {
    return a.needed_in != b.needed_in ? a.needed_in > b.needed_in : a.freed < b.freed;
  }
};
using FreeBuffers = std::set<Buffer, NeededLast>;

// Measures the time during which at least one operation of a kind is in progress.
class BusyTime {
 public:
  void enter();
  void leave();
  void reset() { total_ = {}, since_ = Clock::now(); }
  double seconds() const;

 private:
  int n_active_ = 0;
  Clock::time_point since_{};
  Clock::duration total_{};
};

// What happens to the state of a tile in a step. Each stage says what the tile waits for; kNext lists the transitions.
enum class Stage : uint8_t {
  queued,    // its turn, and a buffer
  begun,     // its state, which is being read; or, if that begins with the parameters (CSD_NEW), its push
  seeding,   // the write of these first masters
  loaded,    // its gradients
  updating,  // its device
  updated,   // the start of its write
  storing,   // its write
  stored     // nothing: its device has the new state
};

constexpr uint32_t bit(Stage stage) { return uint32_t{1} << static_cast<uint32_t>(stage); }

constexpr uint32_t kNext[] = {
    bit(Stage::begun),                         // after queued
    bit(Stage::loaded) | bit(Stage::seeding),  // begun
    bit(Stage::loaded),                        // seeding
    bit(Stage::updating),                      // loaded
    bit(Stage::updated),                       // updating
    bit(Stage::storing) | bit(Stage::stored),  // updated; stored at once where states are updated in place
    bit(Stage::storing) | bit(Stage::stored),  // storing; a write that failed is retried
    0,                                         // stored
};

// csd_small_step_use(). By default as many as a step on a file took no longer with on 2 cores, and 5 to 15 % less CPU
// time, than with the update threads; beyond 64 Ki elements it took longer. In memory it took 40 to 80 us less up to
// 256 Ki elements.
constexpr uint64_t kSmallStep = 32 * 1024;
extern std::atomic<uint64_t> small_step;

class Engine {
 public:
  Engine(const csd_device *devices, uint32_t n);
  ~Engine();
  void extend(const csd_extent &, float **windows);
  void begin(const csd_param *, uint64_t, const csd_hyper *, uint32_t, const uint32_t *tiles, uint32_t n_tiles,
             int32_t order);
  void push(uint32_t tile, const csd_push &);
  void drop_grads(const uint32_t *params, uint32_t n);
  uint32_t pull();
  bool would_pull() const noexcept;
  bool params_ready(const uint32_t *tiles, uint32_t n, bool wait);
  void finish(bool keep);
  void take_back();
  void go_back(const uint32_t *tiles, uint32_t n);
  void free_tiles(const uint32_t *tiles, uint32_t n);
  uint64_t hold_bytes(uint32_t tile) noexcept;
  bool unchanged(const csd_param *, uint64_t);
  void release(const csd_param *, uint64_t, const uint32_t *order, uint32_t n_order);
  void wait_writes();
  void remap(bool open);
  void edited(const uint32_t *tiles, uint32_t n);
  void decode(uint32_t tile, uint64_t first, uint64_t n, const void *param, float *const *states);
  void read(uint32_t tile, uint32_t sections, uint64_t elems, char *states);
  void close();
  uint32_t undone(uint32_t *tiles, uint64_t *elems, uint32_t n) const noexcept;
  void tiles(uint32_t first, uint32_t n, csd_tile_state *states, uint32_t *sums);
  csd_stats stats(uint32_t device);
  uint32_t events(csd_event *, uint32_t n) noexcept;

 private:
  // A tile in the pipeline of a step, or one of two passes over it (CSD_PASS_2).
  struct Job {
    Tile *tile;
    uint32_t pass = 0;                                                            // 1 or 2; 0: the tile has one
    Job *other = nullptr;                                                         // the other pass over the tile
    uint32_t name() const { return tile->index | (pass == 2 ? CSD_PASS_2 : 0); }  // as the caller names it
    FreeBuffers::node_type buffer;                                                // empty on a resident device
    float *next_slot_address = nullptr;  // address of the next slot: see Device::next_slot_in_memory()
    float *at() { return next_slot_address || !buffer ? next_slot_address : buffer.value().at; }
    Work work{};
    uint32_t mapped_at_begin = 0;  // the slot that the windows showed when the step began
    Clock::time_point op_start{};  // start of the current read, update or write
    uint64_t place = 0;            // position among the tiles of its device, in processing order
    // The bytes of the slot to read, and to write: [first, last).
    uint64_t first_to_read() const { return work.param_at_host ? tile->layout.bytes(0) : first_byte(); }
    uint64_t first_byte() const { return tile->layout.first(work.sections.begin); }
    uint64_t last_byte() const { return tile->layout.first(work.sections.end); }
    bool must_read() const { return !tile->cached_buffer && !work.from_windows && !work.is_new && !work.all_supplied; }
    // A second pass waits for the first ones of other tiles, so it does not take a buffer before its turn.
    bool may_overtake() const { return must_read() && pass != 2; }
    bool must_seed() const { return work.is_new && pass != 1; }  // a first pass needs no master
    Stage stage = Stage::queued;
    void enter(Stage next) {
      assert(kNext[static_cast<uint32_t>(stage)] & bit(next));
      stage = next;
    }
    enum class Grads : uint8_t { awaited, copying, pushed } gradients = Grads::awaited;  // copying: early, into `hold`
    bool is_pushed() const { return gradients != Grads::awaited; }
    bool is_early() const { return work.holds_params; }  // it was pushed early
    bool needs_read = false;                             // its buffer did not keep its state
    bool params_ready = false;                           // its parameters have reached the caller
    uint32_t params_crc = 0;                             // CRC-32C of the copied parameters
    std::list<Pool::Task> publish;                       // the task that writes its parameters to their final addresses
    std::vector<const void *> grads;                     // the gradients it was pushed with: see csd_push.grads
  };
  struct Lane {  // a device and its queue
    std::unique_ptr<Device> device;
    uint32_t depth = 0;          // most tiles in flight at once
    int64_t cache_bytes = 0;     // see csd_device
    uint64_t buffer_bytes = 0;   // size of each buffer
    uint64_t section_bytes = 0;  // size of the largest section that fits
    uint32_t n_buffers = 0;      // at least `depth`
    FreeBuffers free;
    uint64_t freed = 0;                          // number of buffer releases so far
    std::vector<Job *> jobs;                     // of this step, in processing order
    size_t next = 0;                             // all jobs before this one have begun
    std::vector<char> to_read;                   // by place: the job has not begun, must be read, and may overtake
    std::deque<Job *> pushed;                    // CSD_AS_PUSHED: pushed jobs that have not begun
    uint32_t in_flight = 0, in_flight_read = 0;  // jobs begun and not yet stored; how many of these had to be read
    csd_stats counts{};
    BusyTime busy[3];  // by csd_event_kind
  };

  using Lock = std::unique_lock<std::mutex>;
  std::vector<uint32_t> check_extent(const csd_extent &) const;
  std::vector<uint32_t> check_begin(const csd_param *, uint64_t, const csd_hyper *, uint32_t, const uint32_t *tiles,
                                    uint32_t n_tiles) const;
  void check_rows(const Tile &, uint32_t pass, const csd_param *, uint64_t n_params, const csd_hyper *) const;
  bool is_new(const Tile &, const csd_param *) const;
  uint64_t n_supplied_pieces(const Tile &, const csd_param *) const;
  void add_job(uint32_t tile, bool two_passes);
  Lane &lane(const Job &job) { return lanes_[job.tile->device]; }
  bool pump(Lane &);
  bool runs_here(const Lane &l) const { return is_small_ && l.device->can_run_here(); }
  // These run on the devices' threads or start operations that those threads finish. They do not throw: an error fails
  // the step.
  void on_loaded(Job &, int os_errno) noexcept;
  void on_seeded(Job &, int os_errno) noexcept;
  void update_if_ready(Job &) noexcept;
  void on_updated(Job &, Failure) noexcept;
  void start_store(Job &) noexcept;
  void on_stored(Job &, int os_errno) noexcept;
  static void move_to_next_slot(Job &) noexcept;
  void on_store_failed(Job &, Failure) noexcept;
  template <typename Start>
  bool start_op(Job &, csd_event_kind, Start) noexcept;
  void end_op(const Job &, csd_event_kind) noexcept;
  void fail(const Job &, Failure) noexcept;
  bool take_buffer(Lane &, Job &, bool overtakes);
  void release_buffer(Job &, bool keep);
  uint64_t needed_in(const Lane &, const Tile *) const;
  Job *job_of(const Tile &) const;
  Job *job_named(uint32_t tile) const;
  const csd_param *rows_of(const Job &job) const { return params_.data() + (job.pass == 2 ? n_params_ : 0); }
  static Job *first_to_read(const Lane &);
  void reorder_buffers();
  void drop_cached(Tile &);
  std::vector<uint64_t> tiles_per_device() const;
  void wait_ops(Lock &lock) {
    ops_done_.wait(lock, [this] { return ops_in_flight_ == 0; });
  }
  bool is_pull_ready() const { return n_pulled_ < to_pull_.size() || failed_ || n_images_pending_ == 0; }
  bool undo();
  Job &job_to_push(uint32_t tile);
  void check_push(const Job &, const csd_push &) const;
  void push_early(Job &, const csd_push &);
  bool reads_param(const Tile &, const csd_param &) const;
  void copy_inputs(Job &) noexcept;
  bool inputs_unchanged(const Job &, const csd_param *) const noexcept;
  void publish_params(Job &) noexcept;
  std::list<Pool::Task> feed_back_tasks();
  std::list<Pool::Task> sum_tasks();
  void wait_writes(Lock &);
  void discard_freed(uint32_t extent);
  void add_tiles(const csd_extent &, const Layout &, const std::vector<uint32_t> &device, float *const *window);
  void map_windows(Tile &, bool open);
  const char *slot_of(Tile &);
  bool shown_in_window(const Tile &) const;
  void read_states(Tile &, uint64_t first, uint64_t n, float *const *states);
  void decode_in_param(const Tile &, char *const *sections, uint64_t first, uint64_t n, const char *param,
                       float *const *states);
  void grow_buffers(uint64_t tile, uint64_t section, const std::vector<uint64_t> &tiles);

  mutable std::mutex mutex_;  // guards everything below; never held during I/O or updates
  std::condition_variable ops_done_, progress_;
  std::deque<Tile> tiles_;  // a deque, so that tiles never move
  std::deque<std::vector<csd_piece>> pieces_;
  static void use_first_section(Tile &, const csd_param *params);
  struct ResidentCodes {
    HugeMemory codes, first_sections, checks;
  };
  std::deque<ResidentCodes> resident_codes_;  // codes of the tiles on resident devices, one entry per extent
  struct {
    const Tile *tile = nullptr;
    HugeMemory slot;
  } decoded_;  // the last slot that was read for decode()
  std::vector<Lane> lanes_;
  uint64_t largest_tile_ = 0, largest_section_ = 0;  // bytes

  // The step
  enum class Phase { idle, stepping } phase_ = Phase::idle;
  std::vector<csd_param> params_;
  uint64_t n_params_ = 0;  // half the rows of `params_` if there are second passes, otherwise all
  std::vector<csd_hyper> hypers_;
  std::deque<Job> jobs_;
  std::vector<Job *> job_of_tile_;  // with two passes, the first one; `other` is the second
  std::vector<uint32_t> to_pull_;   // tiles pushed with an image that are updated
  size_t n_pulled_ = 0;             // how many of them have been pulled
  // Tiles whose new parameters are not available yet; tiles pushed with an image that are not updated yet.
  uint64_t n_not_ready_ = 0, n_images_pending_ = 0;
  uint64_t ops_in_flight_ = 0;  // operations in progress: loads, updates, stores, copies, checksums of windows
  bool is_small_ = false;       // the step has at most `small_step` elements
  bool failed_ = false;
  Failure failure_{};
  enum class Outcome { open, kept, undone };
  std::shared_ptr<Outcome> outcome_;          // of this step; shared with waiters that may wake during the next step
  int32_t order_ = CSD_TO_AND_FRO;            // csd_order
  bool is_guess_ = false, released_ = false;  // tiles were pushed early; the guess was released
  std::vector<csd_param> guess_params_;       // the rows used by tiles that were pushed before the release
  uint64_t n_copying_ = 0;                    // tiles pushed early that are still being copied
  std::vector<Job *> unwritten_;              // jobs whose write failed after the step was complete
  std::vector<std::pair<uint32_t, uint64_t>> undone_;  // tile, elements
  bool traced_ = false;
  std::vector<csd_event> events_;
  uint64_t n_feeding_back_ = 0;  // tiles whose residuals are still being updated
};

}  // namespace csd
