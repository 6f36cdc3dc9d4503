#include "engine.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <tuple>
#include <utility>

#include "memory.h"
#include "pool.h"
#include "topk.h"
#include "updater.h"

namespace csd {

std::atomic<uint64_t> small_step{kSmallStep};

void BusyTime::enter() {
  if (n_active_++ == 0) since_ = Clock::now();
}

void BusyTime::leave() {
  if (--n_active_ == 0) total_ += Clock::now() - since_;
}

double BusyTime::seconds() const {
  const Clock::duration open = n_active_ > 0 ? Clock::now() - since_ : Clock::duration{};
  return std::chrono::duration<double>(total_ + open).count();
}

Engine::Engine(const csd_device *devices, uint32_t n) : lanes_(n) {
  if (n == 0) throw Failure{CSD_EINVAL, "an engine needs at least one device"};
  Pool::updates().start();
  std::shared_ptr<Pacer> pacer;
  for (uint32_t i = 0; i < n; i++) {
    lanes_[i].depth = devices[i].buffers;
    lanes_[i].cache_bytes = devices[i].cache_bytes;
    lanes_[i].device = paced(make_device(devices[i]), devices[i], pacer);
    if (!lanes_[i].device)
      throw Failure{CSD_EINVAL,
                    std::string("no such back end, or bad options for it: ") +
                        (devices[i].backend ? devices[i].backend : "(null)"),
                    0, static_cast<int32_t>(i)};
  }
}

Engine::~Engine() {
  Lock lock(mutex_);
  wait_ops(lock);
}

// ---- A step -----------------------------------------------------------------

namespace {

// Does a tile take two passes? `passes`: how many each takes.
bool any_second(const std::vector<uint32_t> &passes) {
  return std::find(passes.begin(), passes.end(), 2u) != passes.end();
}

}  // namespace

// Throws Failure if the arguments of begin() are not valid. Returns the number of passes over each tile of the engine.
std::vector<uint32_t> Engine::check_begin(const csd_param *params, uint64_t n_params, const csd_hyper *hypers,
                                          uint32_t n_hypers, const uint32_t *tiles, uint32_t n_tiles) const {
  for (uint32_t i = 0; i < n_hypers; i++)
    if (sections_of(hypers[i].rule).most == 0)
      throw Failure{CSD_EINVAL, "no update rule " + std::to_string(hypers[i].rule)};
  for (uint64_t i = 0; i < n_params; i++)
    if (params[i].grad &&
        (params[i].hyper >= n_hypers || params[i].grad_dtype > CSD_BF16 || params[i].param_dtype > CSD_BF16))
      throw Failure{CSD_EINVAL,
                    "parameter " + std::to_string(i) + " names a dtype or hyperparameters that do not exist"};
    else if (params[i].grad &&
             !(params[i].topk >= 0 && params[i].topk <= 1 &&
               (params[i].topk == 0 || params[i].topk_dtype == CSD_F16 || params[i].topk_dtype == CSD_BF16)))
      throw Failure{CSD_EINVAL, "Top-K of parameter " + std::to_string(i) +
                                    " is not a share from 0 to 1, or sends no values of 16 bits"};
  std::vector<uint32_t> passes(tiles_.size());  // over each tile
  for (uint32_t i = 0; i < n_tiles; i++) {
    const uint32_t index = tiles[i] & ~CSD_PASS_2;
    if (index >= tiles_.size() || tiles_[index].freed)
      throw Failure{CSD_EINVAL, "no tile " + std::to_string(index) + ", or it was given back"};
    const uint32_t pass = tiles[i] & CSD_PASS_2 ? 2 : 1;
    if (pass <= passes[index]) throw Failure{CSD_EINVAL, "tile " + std::to_string(index) + " is named twice"};
    if (pass != passes[index] + 1)
      throw Failure{CSD_EINVAL, "tile " + std::to_string(index) + " is listed for pass 2, and not for pass 1 before"};
    passes[index] = pass;
  }
  const bool two_rows = any_second(passes);
  if (two_rows && n_params % 2)
    throw Failure{CSD_EINVAL,
                  "with second passes, each parameter has two rows: " + std::to_string(n_params) + " is odd"};
  const uint64_t n_rows = two_rows ? n_params / 2 : n_params;  // per pass
  const auto rows_for = [&](uint32_t pass) { return params + (pass == 2 ? n_rows : 0); };
  for (uint32_t i = 0; i < n_tiles; i++) {
    const Tile &t = tiles_[tiles[i] & ~CSD_PASS_2];
    const uint32_t pass = passes[t.index] == 1 ? 0 : tiles[i] & CSD_PASS_2 ? 2 : 1;
    check_rows(t, pass, rows_for(pass), n_rows, hypers);
    if (pass != 1) is_new(t, rows_for(pass));  // throws if the CSD_NEW parameters are not valid
  }
  return passes;
}

void Engine::begin(const csd_param *params, uint64_t n_params, const csd_hyper *hypers, uint32_t n_hypers,
                   const uint32_t *tiles, uint32_t n_tiles, int32_t order) {
  TasksHere here;  // destroyed after the lock
  Lock lock(mutex_);
  if (phase_ != Phase::idle) throw Failure{CSD_ESTATE, "a step is already under way"};
  if (order < CSD_TO_AND_FRO || order > CSD_AS_PUSHED) throw Failure{CSD_EINVAL, "no order " + std::to_string(order)};
  wait_writes(lock);
  decoded_ = {};
  const std::vector<uint32_t> passes = check_begin(params, n_params, hypers, n_hypers, tiles, n_tiles);
  grow_buffers(largest_tile_, largest_section_, tiles_per_device());
  outcome_ = std::make_shared<Outcome>(Outcome::open);

  // Reserve all memory that the step needs for its records, so that callbacks need not allocate. Each tile has three
  // events: read, update, write.
  undone_.clear();
  undone_.reserve(n_tiles);
  unwritten_.reserve(n_tiles);
  to_pull_.clear();
  to_pull_.reserve(n_tiles);
  n_pulled_ = 0;
  events_.clear();
  if (traced_) events_.reserve(3 * size_t{n_tiles});
  params_.assign(params, params + n_params);
  n_params_ = any_second(passes) ? n_params / 2 : n_params;
  hypers_.assign(hypers, hypers + n_hypers);
  jobs_.clear();
  job_of_tile_.assign(tiles_.size(), nullptr);
  failed_ = is_guess_ = released_ = false;
  order_ = order;
  n_images_pending_ = 0;
  n_not_ready_ = n_tiles;
  for (Lane &l : lanes_) {
    l.jobs.clear();
    l.next = 0;
    l.to_read.clear();
    l.pushed.clear();
    const csd_stats last = std::exchange(l.counts, {});
    l.counts.buffer_bytes = last.buffer_bytes;
    l.counts.huge_bytes = last.huge_bytes;
    l.counts.numa = last.numa;
    l.counts.total_write_bytes = last.total_write_bytes;
    for (BusyTime &time : l.busy) time.reset();
  }
  for (uint32_t i = 0; i < n_tiles; i++) add_job(tiles[i], passes[tiles[i] & ~CSD_PASS_2] == 2);
  reorder_buffers();
  const auto add = [](uint64_t sum, const Job &job) { return sum + job.tile->elems; };
  is_small_ = std::accumulate(jobs_.begin(), jobs_.end(), uint64_t{0}, add) <= small_step;
  phase_ = Phase::stepping;
  // Start one tile per device in turn, so that devices on the same disk get equal shares of it.
  for (bool more = true; more;) {
    more = false;
    for (Lane &l : lanes_) more |= here.collect(runs_here(l), [&] { return pump(l); });
  }
}

// Adds a tile of the step, or one of two passes over it, to the queue of its device.
void Engine::add_job(uint32_t tile, bool two_passes) {
  const csd_param *const rows = params_.data();
  Job &job = jobs_.emplace_back();
  job.tile = &tiles_[tile & ~CSD_PASS_2];
  if (two_passes) {
    job.pass = tile & CSD_PASS_2 ? 2 : 1;
    drop_cached(*job.tile);  // a buffer keeps a whole slot
  }
  if (job.pass == 2) job.other = job_of(*job.tile), job.other->other = &job;
  else job_of_tile_[job.tile->index] = &job;
  job.work.sections = two_passes ? job.tile->layout.half(job.pass) : job.tile->layout.all();
  job.work.params = rows_of(job);
  job.work.hypers = hypers_.data();
  job.work.from_windows = job.tile->edited;
  job.work.is_new = is_new(*job.tile, rows + (two_passes ? n_params_ : 0));  // the rows that have the masters
  if (two_passes && job.work.is_new) job.tile->slots[job.tile->slot].summed = false;
  job.work.all_supplied = job.tile->n_pieces > 0 && n_supplied_pieces(*job.tile, rows) == job.tile->n_pieces;
  if (job.tile->codes) use_first_section(*job.tile, rows);
  job.next_slot_address = lane(job).device->next_slot_in_memory(*job.tile);
  job.mapped_at_begin = job.tile->mapped_slot;
  job.place = lane(job).jobs.size();
  lane(job).jobs.push_back(&job);
  lane(job).to_read.push_back(job.may_overtake());
}

// Throws Failure if the tile's rows are not valid for this pass over it (0: its only one).
void Engine::check_rows(const Tile &t, uint32_t pass, const csd_param *rows, uint64_t n_params,
                        const csd_hyper *hypers) const {
  const Device &device = *lanes_[t.device].device;
  const auto refuse = [](const std::string &why) { throw Failure{CSD_EINVAL, why}; };
  if (pass != 0) {
    const std::string lacks = t.n_slots == 1 ? "a second slot, as it could not be undone between them"
                              : t.layout.coded() && t.layout.codec() != CSD_LINEAR
                                  ? "fp32 states, or codes of a rule with passes"
                                  : device.lacks_for_passes();
    if (!lacks.empty())
      throw Failure{CSD_EINVAL, "two passes over tile " + std::to_string(t.index) + " need " + lacks + ",", 0,
                    static_cast<int32_t>(t.device)};
  }
  const uint32_t n_states = pass == 0 ? t.states : pass == 1 ? t.states - 1 : 1;
  for (uint64_t p = 0; p < t.n_pieces; p++) {
    const uint32_t param = t.pieces[p].param;
    const auto name = [param] { return "parameter " + std::to_string(param); };
    if (param >= n_params) refuse("no " + name());
    const csd_param &row = rows[param];
    if (t.layout.coded() && row.master == CSD_IN_PARAM && (!t.codes || !row.param))
      refuse(name() + " of codes cannot be its own master here");
    if (row.master == CSD_SUPPLIED && (device.resident() || !device.reaches_params() || pass != 0))
      refuse("states of " + name() + " cannot be given to this device");
    if (pass == 2 && !row.grad != !rows[param - n_params].grad) refuse(name() + " has a gradient in one pass only");
    if (!row.grad) continue;
    const uint32_t rule = hypers[row.hyper].rule;
    if (pass_of(rule) != pass)
      refuse(name() + " has update rule " + std::to_string(rule) + " in " +
             (pass == 0 ? std::string("the only pass") : "pass " + std::to_string(pass)) + " over tile " +
             std::to_string(t.index) + ": all its parameters take two passes, or none does (CSD_PASS_2)");
    if (!sections_of(rule).take(n_states))
      refuse(name() + " has " + std::to_string(n_states) + " sections, which update rule " + std::to_string(rule) +
             " does not take");
    const bool is_kept = pass == 1 || row.param_dtype == t.param_dtype;  // what a first pass returns is no parameter
    if (t.layout.coded() && (sections_of(rule).codec != t.layout.codec() || !is_kept))
      refuse(name() + " has codes of another rule or dtype");
    if (const std::string kernel = device.missing_kernel(rule, t.layout.codec()); !kernel.empty())
      throw Failure{CSD_EINVAL, "the xclbin lacks the kernel " + kernel + " (docs/smartssd.md, step 6)", 0,
                    static_cast<int32_t>(t.device)};
    if (row.master != CSD_IN_SECTION && !device.reaches_params())
      refuse(name() + " cannot be its own master on this device");
    if (pass == 1 && row.master != CSD_IN_SECTION) refuse(name() + " has a master in pass 1, which belongs to pass 2");
    if (pass != 0 && row.topk != 0) refuse(name() + " takes two passes, which cannot be sparse (Top-K)");
  }
}

// Notes whether steps write to the tile's first section. If all its parameters have become their own section again,
// frees the section's memory.
void Engine::use_first_section(Tile &t, const csd_param *params) {
  const bool used = std::any_of(t.pieces, t.pieces + t.n_pieces,
                                [params](const csd_piece &p) { return params[p.param].master != CSD_IN_PARAM; });
  if (std::exchange(t.first_is_used, used) && !used) discard_pages(t.first_section, t.layout.bytes(0));
}

bool Engine::is_new(const Tile &t, const csd_param *params) const {
  const csd_piece *const end = t.pieces + t.n_pieces;
  const auto is_new_piece = [&](const csd_piece &p) {
    return params[p.param].master == CSD_NEW && (params[p.param].grad || t.layout.coded());
  };
  if (std::none_of(t.pieces, end, is_new_piece)) return false;
  if (!std::all_of(t.pieces, end, is_new_piece) || t.edited || lanes_[t.device].device->resident())
    throw Failure{CSD_EINVAL, "tile " + std::to_string(t.index) +
                                  " cannot begin with its parameters: not all of them are new, its states were edited, "
                                  "or its device keeps no second copy"};
  return true;
}

uint64_t Engine::n_supplied_pieces(const Tile &t, const csd_param *params) const {
  return static_cast<uint64_t>(std::count_if(t.pieces, t.pieces + t.n_pieces, [params](const csd_piece &p) {
    return params[p.param].master == CSD_SUPPLIED;
  }));
}

// Starts the next tile of the device, if there is one and the device has a free buffer. Returns whether it did.
bool Engine::pump(Lane &l) {
  const bool as_pushed = order_ == CSD_AS_PUSHED;
  while (!as_pushed && l.next < l.jobs.size() && l.jobs[l.next]->stage != Stage::queued) l.next++;
  if (failed_ || (as_pushed ? l.pushed.empty() : l.next == l.jobs.size())) return false;
  Job *next = as_pushed ? l.pushed.front() : l.jobs[l.next];
  if (!l.device->resident()) {
    if (l.in_flight == l.depth) return false;
    // To keep the drive reading and writing at the same time, mix in a tile that must be read if most in flight need
    // not.
    Job *const ahead = !as_pushed && 2 * l.in_flight_read < l.in_flight ? first_to_read(l) : next;
    if (ahead != next && ahead && take_buffer(l, *ahead, true)) next = ahead;
    else if (!take_buffer(l, *next, false)) return false;
  }
  if (as_pushed) l.pushed.pop_front();
  Job &job = *next;
  l.to_read[job.place] = false;
  job.enter(Stage::begun);
  if (!job.needs_read) {
    if (!job.must_seed()) job.enter(Stage::loaded);
    update_if_ready(job);
  } else {
    start_op(job, CSD_READ, [&] {
      l.device->load(*job.tile, job.at(), job.first_to_read(), job.last_byte(),
                     [this, &job](int error) { on_loaded(job, error); });
    });
  }
  return true;
}

// Starts an operation on a job by `call`. Returns whether that succeeded; if not, the step has failed or, for a write
// of a complete step, the write is kept for a retry (on_store_failed()).
template <typename Start>
bool Engine::start_op(Job &job, csd_event_kind kind, Start call) noexcept {
  ops_in_flight_++;
  lane(job).busy[kind].enter();
  job.op_start = Clock::now();
  try {
    call();
    return true;
  } catch (...) {
    ops_in_flight_--;
    lane(job).busy[kind].leave();
    if (kind == CSD_WRITE) on_store_failed(job, caught());
    else fail(job, caught());
    return false;
  }
}

void Engine::end_op(const Job &job, csd_event_kind kind) noexcept {
  ops_in_flight_--;
  lane(job).busy[kind].leave();
  if (!traced_) return;
  const auto seconds = [](Clock::time_point t) { return std::chrono::duration<double>(t.time_since_epoch()).count(); };
  events_.push_back({job.tile->device, job.tile->index, kind, 0, seconds(job.op_start), seconds(Clock::now())});
}

void Engine::fail(const Job &job, Failure failure) noexcept {
  failure.device = static_cast<int32_t>(job.tile->device);
  if (!failed_) failure_ = std::move(failure);
  failed_ = true;
  progress_.notify_all();
}

namespace {

// A job, as the caller names it, in words.
std::string named(uint32_t tile) {
  return (tile & CSD_PASS_2 ? "pass 2 of tile " : "tile ") + std::to_string(tile & ~CSD_PASS_2);
}

Failure transfer_failure(const char *what, const Tile &tile, int os_errno) noexcept {
  try {
    return {CSD_EIO, std::string(what) + " tile " + std::to_string(tile.index), os_errno};
  } catch (...) {
    return {CSD_EIO, "a tile", os_errno};
  }
}

}  // namespace

void Engine::on_loaded(Job &job, int os_errno) noexcept {
  Lock lock(mutex_);
  end_op(job, CSD_READ);
  if (os_errno) {
    fail(job, transfer_failure("reading", *job.tile, os_errno));
  } else {
    lane(job).counts.read_bytes += job.last_byte() - job.first_to_read();
    job.enter(Stage::loaded);
    update_if_ready(job);
  }
  if (ops_in_flight_ == 0) ops_done_.notify_all();
}

void Engine::on_seeded(Job &job, int os_errno) noexcept {
  Lock lock(mutex_);
  end_op(job, CSD_WRITE);
  if (os_errno) {
    fail(job, transfer_failure("writing", *job.tile, os_errno));
  } else {
    lane(job).counts.write_bytes += job.tile->layout.bytes(0);
    lane(job).counts.total_write_bytes += job.tile->layout.bytes(0);
    job.enter(Stage::loaded);
    update_if_ready(job);
  }
  if (ops_in_flight_ == 0) ops_done_.notify_all();
}

// The job of this step that the caller names so, or null.
Engine::Job *Engine::job_named(uint32_t tile) const {
  const uint32_t index = tile & ~CSD_PASS_2;
  Job *job = index < job_of_tile_.size() ? job_of_tile_[index] : nullptr;
  return job && tile & CSD_PASS_2 ? job->other : job;
}

Engine::Job &Engine::job_to_push(uint32_t tile) {
  if (phase_ != Phase::stepping) throw Failure{CSD_ESTATE, "no step is under way"};
  Job *job = job_named(tile);
  if (!job || job->is_pushed())
    throw Failure{CSD_EINVAL, named(tile) + " is not part of this step, or was pushed before"};
  return *job;
}

void Engine::push(uint32_t tile, const csd_push &how) {
  TasksHere here;  // destroyed after the lock
  Lock lock(mutex_);
  Job &job = job_to_push(tile);
  check_push(job, how);
  if (how.grads) job.grads.assign(how.grads, how.grads + job.tile->n_pieces);
  if (how.hold) return push_early(job, how);
  if (order_ == CSD_AS_PUSHED) lane(job).pushed.push_back(&job);
  if (how.grads) job.work.grads = job.grads.data();
  job.work.grad_image = how.grad;
  job.work.param_image = how.param;
  job.work.entries = how.entries;
  job.work.n_entries = how.n_entries;
  job.work.states = static_cast<const char *>(how.states);
  if (how.grad) n_images_pending_++;
  job.gradients = Job::Grads::pushed;
  here.collect(runs_here(lane(job)), [&] {
    if (order_ == CSD_AS_PUSHED) pump(lane(job));
    else update_if_ready(job);
  });
}

// Throws Failure if this tile cannot be pushed like this.
void Engine::check_push(const Job &job, const csd_push &how) const {
  const Tile &t = *job.tile;
  const auto refuse = [&t](const std::string &why) {
    throw Failure{CSD_EINVAL, "tile " + std::to_string(t.index) + " " + why};
  };
  const csd_param *const rows = rows_of(job);
  const auto any = [&](auto is) {
    return std::any_of(t.pieces, t.pieces + t.n_pieces, [&](const csd_piece &p) { return is(rows[p.param]); });
  };
  if (is_guess_ && !released_ && !how.grad && !how.hold)
    throw Failure{CSD_ESTATE, "the step is a guess: release it before you push"};
  if (!how.grad != !how.param) refuse("has an image of gradients or of parameters, but not both");
  if (how.grads && how.grad) refuse("has gradients in an image and elsewhere");
  if (how.hold && !how.grads && t.n_pieces) refuse("is pushed early without addresses of gradients");
  if (how.grads) {
    for (uint64_t i = 0; i < t.n_pieces; i++)
      if (const csd_param &row = rows[t.pieces[i].param];
          is_sparse(row) || row.in_image || row.master == CSD_SUPPLIED || (how.grads[i] && !row.grad))
        throw Failure{CSD_EINVAL,
                      "parameter " + std::to_string(t.pieces[i].param) +
                          " has Top-K, is CSD_SUPPLIED, lies in an image, or has a gradient here and none in the step"};
  }
  if (!how.states != !n_supplied_pieces(t, rows))
    refuse(how.states ? "has no CSD_SUPPLIED parameters, so no states are supplied for it"
                      : "has CSD_SUPPLIED parameters: supply their states, as csd_push.states");
  if (!how.entries == (how.grad && any(is_sparse)))
    refuse(how.entries ? "has entries, and no sparse gradients in an image"
                       : "has sparse gradients in an image, and no entries");
  if (!how.grad && any([](const csd_param &p) { return p.in_image != 0; }))
    refuse("has parameters in an image, and no image");
}

void Engine::drop_grads(const uint32_t *params, uint32_t n) {
  Lock lock(mutex_);
  if (phase_ != Phase::stepping) throw Failure{CSD_ESTATE, "no step is under way"};
  std::vector<bool> dropped(n_params_);
  for (uint32_t i = 0; i < n; i++)
    if (params[i] >= n_params_) throw Failure{CSD_EINVAL, "no parameter " + std::to_string(params[i])};
    else dropped[params[i]] = true;
  for (const Job &job : jobs_)
    for (const csd_piece *p = job.tile->pieces; p != job.tile->pieces + job.tile->n_pieces; p++)
      if (job.is_pushed() && dropped[p->param])
        throw Failure{CSD_EINVAL, "tile " + std::to_string(job.tile->index) + " was pushed with a gradient"};
  for (uint32_t i = 0; i < n; i++)
    for (uint64_t row = params[i]; row < params_.size(); row += n_params_) params_[row].grad = nullptr;
}

void Engine::update_if_ready(Job &job) noexcept {
  if (failed_ || job.gradients != Job::Grads::pushed) return;
  if (job.stage == Stage::begun && job.must_seed()) {  // only now are all parameters there, also those in an image
    job.enter(Stage::seeding);
    // The slot may have checksums from a step that was undone. Of two passes, the first one may be reading this flag.
    if (!job.other) job.tile->slots[job.tile->slot].summed = false;
    start_op(job, CSD_WRITE, [&] {
      lane(job).device->seed(*job.tile, job.at(), job.work, [this, &job](int error) { on_seeded(job, error); });
    });
  }
  if (job.stage != Stage::loaded) return;
  job.enter(Stage::updating);
  start_op(job, CSD_UPDATE, [&] {
    lane(job).device->update(*job.tile, job.at(), job.work,
                             [this, &job](Failure failure) { on_updated(job, std::move(failure)); });
  });
}

void Engine::on_updated(Job &job, Failure failure) noexcept {
  Lock lock(mutex_);
  Lane &l = lane(job);
  end_op(job, CSD_UPDATE);
  if (failure.status != CSD_OK) {
    fail(job, std::move(failure));
  } else {
    l.counts.push_bytes += job.work.pushed;
    l.counts.pull_bytes += job.work.pulled;
    if (job.pass != 1) l.counts.updated += job.work.updated;
    if (job.pass != 2) l.counts.nonfinite += job.work.nonfinite;  // the caller has made the gradients of a second pass
    l.counts.read_bytes += job.work.read_late;
    job.enter(Stage::updated);
    if (!job.is_early()) {
      job.params_ready = true;
      n_not_ready_--;
    } else if (released_) {
      publish_params(job);
    }
    const bool feeds_back_later =
        std::any_of(job.tile->pieces, job.tile->pieces + job.tile->n_pieces,
                    [rows = rows_of(job)](const csd_piece &p) { return feeds_back(rows[p.param]); });
    if (!feeds_back_later) job.work.selected = std::vector<uint32_t>();  // {} would keep its memory
    if (job.work.grad_image && !job.is_early()) {
      n_images_pending_--;
      to_pull_.push_back(job.name());
    }
    if (!job.buffer) job.enter(Stage::stored);
    else if (!failed_) start_store(job);
    progress_.notify_all();
  }
  if (ops_in_flight_ == 0) ops_done_.notify_all();
}

void Engine::start_store(Job &job) noexcept {
  if (start_op(job, CSD_WRITE, [&] {
        lane(job).device->store(*job.tile, job.at(), job.first_byte(), job.last_byte(),
                                [this, &job](int error) { on_stored(job, error); });
      }))
    job.enter(Stage::storing);
}

void Engine::on_stored(Job &job, int os_errno) noexcept {
  Lock lock(mutex_);
  Lane &l = lane(job);
  end_op(job, CSD_WRITE);
  if (os_errno) {
    on_store_failed(job, transfer_failure("writing", *job.tile, os_errno));
  } else {
    l.counts.write_bytes += job.last_byte() - job.first_byte();
    l.counts.total_write_bytes += job.last_byte() - job.first_byte();
    job.enter(Stage::stored);
    if (!job.other || job.other->stage == Stage::stored) move_to_next_slot(job);
    // Do not keep the buffer if an open window shows the slot, as with a single slot. Nor if all parameters of the tile
    // were given: the next step will not read the tile either, so the memory is better used for other tiles. Nor if it
    // has half a slot.
    release_buffer(job, l.device->keeps_buffers() && l.cache_bytes >= 0 && !job.work.all_supplied && job.pass == 0 &&
                            !(job.tile->open && job.tile->n_slots == 1));
    pump(l);
  }
  if (ops_in_flight_ == 0) ops_done_.notify_all();
}

// The next slot of the job's tile has its whole new state: it becomes the current one.
void Engine::move_to_next_slot(Job &job) noexcept {
  Tile &t = *job.tile;
  if (job.other) {  // each pass has the checksums of its half
    const std::vector<uint32_t> &from = job.other->work.sum.sums;
    for (uint64_t chunk = 0; chunk < t.n_chunks(); chunk++)
      for (uint32_t s = job.other->work.sections.begin; s < job.other->work.sections.end; s++)
        job.work.sum.sums[chunk * t.layout.n() + s] = from[chunk * t.layout.n() + s];
  }
  t.slot = t.next_slot();
  t.slots[t.slot] = std::move(job.work.sum);
  t.mapped_slot = kNoSlot;  // even with one slot: the user may have written to the window meanwhile
}

void Engine::on_store_failed(Job &job, Failure failure) noexcept {
  if (n_not_ready_ > 0) {
    fail(job, std::move(failure));
  } else {
    // All tiles have their new parameters, and other ranks may know that, so the step must count as complete. Keep the
    // data in its buffer; the next wait_writes() retries.
    failure_ = std::move(failure);
    failure_.device = static_cast<int32_t>(job.tile->device);
    unwritten_.push_back(&job);
  }
}

uint32_t Engine::pull() {
  Lock lock(mutex_);
  if (phase_ != Phase::stepping) throw Failure{CSD_ESTATE, "no step is under way"};
  progress_.wait(lock, [this] { return is_pull_ready(); });
  if (failed_) throw failure_;
  if (n_pulled_ == to_pull_.size()) throw Failure{CSD_ESTATE, "no tile is left to be pulled"};
  return to_pull_[n_pulled_++];
}

bool Engine::would_pull() const noexcept {
  Lock lock(mutex_);
  return phase_ != Phase::stepping || is_pull_ready();
}

bool Engine::params_ready(const uint32_t *tiles, uint32_t n, bool wait) {
  Lock lock(mutex_);
  if (phase_ != Phase::stepping) throw Failure{CSD_ESTATE, "no step is under way"};
  const std::shared_ptr<const Outcome> outcome = outcome_;
  for (uint32_t i = 0; i < n; i++) {
    const Job *job = job_named(tiles[i]);
    if (!job || !job->is_pushed())
      throw Failure{CSD_EINVAL, named(tiles[i]) + " is not part of this step, or was not pushed"};
    if (wait && job->is_early() && !released_)
      throw Failure{CSD_ESTATE, named(tiles[i]) + " is part of a guess: wait for it only after the release"};
    // A thread that wakes up late may find the next step under way and this job gone, so check the outcome first.
    if (wait) progress_.wait(lock, [&] { return *outcome != Outcome::open || job->params_ready || failed_; });
    if (*outcome == Outcome::kept) return true;
    if (*outcome == Outcome::undone) throw Failure{CSD_ESTATE, "the step was undone"};
    if (failed_) throw failure_;
    if (!job->params_ready) return false;
  }
  return true;
}

void Engine::finish(bool keep) {
  Lock lock(mutex_);
  if (phase_ != Phase::stepping) throw Failure{CSD_ESTATE, "no step is under way"};
  std::list<Pool::Task> residual_tasks;
  if (keep) {
    const auto missing = std::find_if(jobs_.begin(), jobs_.end(), [](const Job &job) { return !job.is_pushed(); });
    try {
      if (missing != jobs_.end() && !failed_) throw Failure{CSD_ESTATE, named(missing->name()) + " was never pushed"};
      if (is_guess_ && !released_ && !failed_) throw Failure{CSD_ESTATE, "the step is a guess that was never released"};
      progress_.wait(lock, [this] { return n_not_ready_ == 0 || failed_; });
      if (!failed_) residual_tasks = feed_back_tasks();
    } catch (...) {
      failure_ = caught();
      failed_ = true;
    }
  }
  if (keep && !failed_) {
    phase_ = Phase::idle;
    *outcome_ = Outcome::kept;
    for (Job &job : jobs_)
      if (job.work.from_windows) job.tile->edited = false;
    n_feeding_back_ = residual_tasks.size();
    Pool::updates().submit(std::move(residual_tasks));
    progress_.notify_all();
    progress_.wait(lock, [this] { return n_feeding_back_ == 0; });
    return;
  }
  const bool broken = failed_;
  // For threads that wait. Short enough to lie in the string itself: no allocation can fail here.
  if (!broken) failure_ = {CSD_ESTATE, "it was undone"};
  failed_ = true;  // no new operation starts
  wait_ops(lock);
  const bool undone = undo();
  phase_ = Phase::idle;
  *outcome_ = Outcome::undone;
  failed_ = false;
  progress_.notify_all();
  // Moved, not copied: copying the text could fail for lack of memory.
  if (!undone && broken) throw Failure{CSD_ETORN, std::move(failure_.text), failure_.os_errno, failure_.device};
  if (!undone) throw Failure{CSD_ETORN, "the step"};
  if (broken) throw std::move(failure_);
}

// The tasks that update the residuals. They run at the end of the step: the gradients are still valid then, and
// residuals may change only if the step is complete.
std::list<Pool::Task> Engine::feed_back_tasks() {
  std::list<Pool::Task> tasks;
  for (Job &job : jobs_) {
    if (job.work.selected.empty()) continue;
    tasks.push_back([this, &job] {
      feed_back(*job.tile, job.work);
      std::lock_guard done(mutex_);
      job.work.selected = std::vector<uint32_t>();
      n_feeding_back_--;
      progress_.notify_all();
    });
  }
  return tasks;
}

// Like finish(false), except that windows may have shown the new states in the meantime.
void Engine::take_back() {
  Lock lock(mutex_);
  if (phase_ != Phase::idle || !outcome_ || *outcome_ != Outcome::kept)
    throw Failure{CSD_ESTATE, "there is no complete step to take back"};
  for (const Job &job : jobs_)
    if (job.tile->n_slots == 1 || lane(job).device->resident() || job.work.is_new || job.work.from_windows ||
        job.tile->freed)
      throw Failure{CSD_EINVAL,
                    "tile " + std::to_string(job.tile->index) + " cannot be restored to its state before the step"};
  wait_ops(lock);
  undo();
  decoded_ = {};
  for (Job &job : jobs_) {
    job.tile->edited = false;
    if (job.stage == Stage::stored) job.tile->mapped_slot = kNoSlot;
  }
  *outcome_ = Outcome::undone;
}

// All checks come first: either all tiles go back, or none.
void Engine::go_back(const uint32_t *tiles, uint32_t n) {
  Lock lock(mutex_);
  if (phase_ != Phase::idle) throw Failure{CSD_ESTATE, "a step is under way"};
  for (uint32_t i = 0; i < n; i++) {
    if (tiles[i] >= tiles_.size()) throw Failure{CSD_EINVAL, "no tile " + std::to_string(tiles[i])};
    if (const Tile &t = tiles_[tiles[i]]; t.n_slots == 1 || lanes_[t.device].device->resident() || t.freed)
      throw Failure{CSD_EINVAL, "tile " + std::to_string(t.index) + " has no other slot"};
  }
  wait_ops(lock);
  decoded_ = {};
  if (outcome_) *outcome_ = Outcome::undone;  // the last step, or part of it, is not what the tiles have
  for (uint32_t i = 0; i < n; i++) {
    Tile &t = tiles_[tiles[i]];
    const auto unwritten =
        std::find_if(unwritten_.begin(), unwritten_.end(), [&t](const Job *job) { return job->tile == &t; });
    if (unwritten != unwritten_.end()) {  // it has not moved to its next slot yet
      release_buffer(**unwritten, false);
      unwritten_.erase(unwritten);
    } else {
      drop_cached(t);
      t.slot = t.next_slot();
    }
    t.edited = false;
  }
  for (uint32_t i = 0; i < n; i++) map_windows(tiles_[tiles[i]], false);
}

// Undoes the step, and returns whether all of it could be undone.
bool Engine::undo() {
  bool all = true;
  unwritten_.clear();
  for (Job &job : jobs_) {
    Tile &t = *job.tile;
    // Parameters in an image were not taken from it unless the whole tile was updated. A first pass writes none.
    if (job.params_ready && job.pass != 1) undone_.emplace_back(t.index, t.elems);
    else if (job.work.n_params_written && !job.work.param_image && job.pass != 1)
      undone_.emplace_back(t.index, job.work.n_params_written);
    if (job.buffer) release_buffer(job, false);
    drop_cached(t);
    if (job.stage < Stage::storing || lane(job).device->resident()) continue;
    if (t.n_slots == 1) all = false;
    else if (job.stage == Stage::stored && job.pass != 1 && (!job.other || job.other->stage == Stage::stored)) {
      t.slot = t.next_slot();
      t.mapped_slot = job.mapped_at_begin;
    }
  }
  return all;
}

void Engine::wait_writes() {
  Lock lock(mutex_);
  wait_writes(lock);
}

void Engine::wait_writes(Lock &lock) {
  wait_ops(lock);
  const std::vector<Job *> retries = unwritten_;
  if (traced_) events_.reserve(events_.size() + retries.size());
  unwritten_.clear();
  for (Job *job : retries) start_store(*job);
  wait_ops(lock);
  if (!unwritten_.empty()) throw failure_;
}

void Engine::close() {
  try {
    finish(false);
  } catch (...) {
    // either no step was under way, or it had failed and is now undone
  }
  std::exception_ptr error;
  const auto attempt = [&error](auto &&call) {
    try {
      call();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  };
  attempt([&] { wait_writes(); });
  // Windows may outlive the engine; from now on, writes to them must not reach the device.
  for (Tile &t : tiles_)
    if (t.open || t.mapped_slot != t.slot) attempt([&] { map_windows(t, false); });
  if (error) std::rethrow_exception(error);
}

uint32_t Engine::undone(uint32_t *tiles, uint64_t *elems, uint32_t n) const noexcept {
  Lock lock(mutex_);
  for (size_t i = 0; i < std::min<size_t>(n, undone_.size()); i++) std::tie(tiles[i], elems[i]) = undone_[i];
  return static_cast<uint32_t>(undone_.size());
}

uint32_t Engine::events(csd_event *events, uint32_t n) noexcept {
  Lock lock(mutex_);
  traced_ = true;
  std::copy_n(events_.begin(), std::min<size_t>(n, events_.size()), events);
  return static_cast<uint32_t>(events_.size());
}

csd_stats Engine::stats(uint32_t device) {
  Lock lock(mutex_);
  if (device >= lanes_.size()) throw Failure{CSD_EINVAL, "no device " + std::to_string(device)};
  const Lane &l = lanes_[device];
  csd_stats s = l.counts;
  s.read_seconds = l.busy[CSD_READ].seconds();
  s.update_seconds = l.busy[CSD_UPDATE].seconds();
  s.write_seconds = l.busy[CSD_WRITE].seconds();
  return s;
}

}  // namespace csd
