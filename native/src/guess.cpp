// A speculative step (a guess): see csd.h. Nothing that the caller can see changes before the release. The update of a
// tile that is pushed early reads copies, and its new parameters stay in the memory of these copies.
#include <string.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "crc32c.h"
#include "engine.h"
#include "topk.h"

namespace csd {
namespace {

const char *bytes_at(const void *from, uint32_t dtype, uint64_t element) {
  return static_cast<const char *>(from) + dtype_bytes(dtype) * element;
}

// Are two rows equal except for the addresses of gradient and parameter?
bool same_row(const csd_param &a, csd_param b) {
  static_assert(sizeof b == 104, "csd_param has no padding");
  if (!a.grad != !b.grad || !a.param != !b.param) return false;
  b.grad = a.grad, b.param = a.param;
  return memcmp(&a, &b, sizeof b) == 0;
}

// Layout of csd_push.hold: the image of the gradients, followed by that of the parameters, which
// begins on a cache line. In each image, all elements have the width of the widest dtype.
struct StagingLayout {
  uint64_t grad_bytes = 2, param_bytes = 2, params_at, bytes;

  StagingLayout(const Tile &t, const csd_param *params) {
    for (const csd_piece *p = t.pieces; p != t.pieces + t.n_pieces; p++) {
      const csd_param &row = params[p->param];
      if (row.grad) grad_bytes = std::max(grad_bytes, dtype_bytes(row.grad_dtype));
      param_bytes = std::max(param_bytes, dtype_bytes(row.param_dtype));
    }
    params_at = (t.elems * grad_bytes + 63) / 64 * 64;
    bytes = params_at + t.elems * param_bytes;
  }
};

}  // namespace

uint64_t Engine::hold_bytes(uint32_t tile) noexcept {
  Lock lock(mutex_);
  const Job *const job = phase_ == Phase::stepping ? job_named(tile) : nullptr;
  return job && job->pass == 0 ? StagingLayout(*job->tile, params_.data()).bytes : 0;
}

// Does the update of the tile read the parameter? For codes it always does: their first section may not have been
// loaded, because the parameter has the same content.
bool Engine::reads_param(const Tile &t, const csd_param &p) const {
  if (!p.param || !lanes_[t.device].device->reaches_params()) return false;
  return t.layout.coded() || (p.grad && (p.master == CSD_FROM_PARAM || p.master == CSD_UNLESS_SET));
}

void Engine::push_early(Job &job, const csd_push &how) {
  const Tile &t = *job.tile;
  if (released_)
    throw Failure{CSD_ESTATE, "the step is released: push tile " + std::to_string(t.index) + " without csd_push.hold"};
  if (t.n_slots == 1 || lane(job).device->resident() || job.work.is_new || job.pass != 0)
    throw Failure{CSD_EINVAL, "tile " + std::to_string(t.index) +
                                  " cannot be pushed early: it is new, could not be undone, or takes two passes"};
  for (uint64_t i = 0; i < t.n_pieces; i++)
    if (const csd_param &row = params_[t.pieces[i].param]; row.grad && (!how.grads[i] || !row.param))
      throw Failure{CSD_EINVAL, "parameter " + std::to_string(t.pieces[i].param) +
                                    " has no address, or has a gradient in the step and none here"};
  // Everything that can fail comes first.
  std::list<Pool::Task> copies, publish;
  copies.push_back([this, &job] { copy_inputs(job); });
  publish.push_back([this, &job] {
    for (const csd_piece *p = job.tile->pieces; p != job.tile->pieces + job.tile->n_pieces; p++) {
      const csd_param &to = params_[p->param];
      const uint64_t bytes = dtype_bytes(to.param_dtype);
      if (to.grad)
        memcpy(static_cast<char *>(to.param) + bytes * p->param_first, param_at(*p, job.work, 0), bytes * p->elems);
    }
    Lock lock(mutex_);
    job.params_ready = true;
    n_not_ready_--;
    progress_.notify_all();
    if (--ops_in_flight_ == 0) ops_done_.notify_all();
  });
  job.publish = std::move(publish);
  const StagingLayout layout(t, params_.data());
  job.work.grad_image = how.hold;
  job.work.param_image = static_cast<char *>(how.hold) + layout.params_at;
  job.work.grad_bytes = layout.grad_bytes;
  job.work.param_bytes = layout.param_bytes;
  job.work.holds_params = true;
  job.gradients = Job::Grads::copying;
  is_guess_ = true;
  n_copying_++;
  ops_in_flight_++;
  Pool::updates().submit(std::move(copies));
}

// Copies gradients and parameters into the image. The caller may be writing to them at the same time; whatever is
// copied then, csd_engine_unchanged will find a difference.
void Engine::copy_inputs(Job &job) noexcept {
  const Tile &t = *job.tile;
  auto *const image = static_cast<char *>(const_cast<void *>(job.work.grad_image));
  uint32_t crc = 0;
  for (uint64_t i = 0; i < t.n_pieces; i++) {
    const csd_piece &p = t.pieces[i];
    const csd_param &row = job.work.params[p.param];
    if (row.grad)
      memcpy(image + job.work.grad_bytes * p.tile_first, bytes_at(job.grads[i], row.grad_dtype, p.param_first),
             dtype_bytes(row.grad_dtype) * p.elems);
    if (!reads_param(t, row)) continue;
    const uint64_t bytes = dtype_bytes(row.param_dtype) * p.elems;
    void *const param = param_at(p, job.work, 0);
    memcpy(param, bytes_at(row.param, row.param_dtype, p.param_first), bytes);
    crc = crc32c(crc, param, bytes);  // of the copy: the original may have changed by now
  }
  Lock lock(mutex_);
  job.params_crc = crc;
  job.gradients = Job::Grads::pushed;
  update_if_ready(job);
  if (--n_copying_ == 0) progress_.notify_all();
  if (--ops_in_flight_ == 0) ops_done_.notify_all();
}

bool Engine::unchanged(const csd_param *params, uint64_t n_params) {
  Lock lock(mutex_);
  if (phase_ != Phase::stepping || released_) throw Failure{CSD_ESTATE, "no guess is under way"};
  if (n_params != params_.size()) throw Failure{CSD_EINVAL, "the step began with more rows, or with fewer"};
  progress_.wait(lock, [this] { return n_copying_ == 0; });
  if (failed_) throw failure_;
  std::atomic<bool> same{true};
  uint64_t comparing = 0;
  std::list<Pool::Task> tasks;
  for (const Job &job : jobs_) {
    if (!job.is_early()) continue;
    tasks.push_back([this, &job, &same, &comparing, params] {
      if (same && !inputs_unchanged(job, params)) same = false;
      Lock lock(mutex_);
      comparing--;
      progress_.notify_all();
      if (--ops_in_flight_ == 0) ops_done_.notify_all();
    });
  }
  comparing = tasks.size();
  ops_in_flight_ += comparing;
  Pool::updates().submit(std::move(tasks));
  progress_.wait(lock, [&comparing] { return comparing == 0; });
  return same;
}

bool Engine::inputs_unchanged(const Job &job, const csd_param *params) const noexcept {
  const Tile &t = *job.tile;
  bool any = false;
  for (const csd_piece *p = t.pieces; p != t.pieces + t.n_pieces; p++) {
    const csd_param &was = job.work.params[p->param], &is = params[p->param];
    if (!same_row(was, is)) return false;
    any |= reads_param(t, was);
    if (was.grad && memcmp(grad_at(*p, t, job.work, 0), bytes_at(is.grad, is.grad_dtype, p->param_first),
                           dtype_bytes(is.grad_dtype) * p->elems) != 0)
      return false;
  }
  if (!any) return true;
  uint32_t crc = 0;
  for (const csd_piece *p = t.pieces; p != t.pieces + t.n_pieces; p++)
    if (const csd_param &is = params[p->param]; reads_param(t, is))
      crc = crc32c(crc, bytes_at(is.param, is.param_dtype, p->param_first), dtype_bytes(is.param_dtype) * p->elems);
  return crc == job.params_crc;
}

void Engine::release(const csd_param *params, uint64_t n_params, const uint32_t *order, uint32_t n_order) {
  Lock lock(mutex_);
  if (phase_ != Phase::stepping || released_) throw Failure{CSD_ESTATE, "no guess is under way"};
  if (failed_) throw failure_;
  if (n_params != params_.size() || !std::equal(params, params + n_params, params_.begin(), same_row))
    throw Failure{CSD_EINVAL, "these are not the rows that the step began with"};
  std::vector<Job *> jobs;
  jobs.reserve(jobs_.size());
  std::set<const Job *> named;
  for (uint32_t i = 0; i < n_order; i++) {
    Job *const job = job_named(order[i]);
    if (!job || (job->pass == 2 && !named.count(job->other)) || !named.insert(job).second)
      throw Failure{CSD_EINVAL, "tile " + std::to_string(order[i] & ~CSD_PASS_2) +
                                    " is not part of this step, named twice, or for pass 2 before pass 1"};
    jobs.push_back(job);
  }
  for (Job &job : jobs_)
    if (!named.count(&job)) jobs.push_back(&job);
  // Jobs that have begun keep their places at the front: the next step needs the tiles in the order in which they ran.
  std::vector<std::vector<Job *>> new_order(lanes_.size());
  for (Lane &l : lanes_)
    std::copy_if(l.jobs.begin(), l.jobs.end(), std::back_inserter(new_order[static_cast<size_t>(&l - lanes_.data())]),
                 [](const Job *job) { return job->stage != Stage::queued; });
  for (Job *job : jobs)
    if (job->stage == Stage::queued) new_order[job->tile->device].push_back(job);
  std::vector<csd_param> rows(params, params + n_params);

  // From here on nothing can fail. Tiles that were already pushed keep using the old rows.
  released_ = true;
  guess_params_ = std::move(params_);
  params_ = std::move(rows);
  for (Lane &l : lanes_) {
    l.jobs = std::move(new_order[static_cast<size_t>(&l - lanes_.data())]);
    l.next = 0;
    for (size_t place = 0; place < l.jobs.size(); place++) {
      Job &job = *l.jobs[place];
      job.place = place;
      l.to_read[place] = job.stage == Stage::queued && job.may_overtake();
    }
  }
  reorder_buffers();
  for (Job *job : jobs) {
    if (!job->is_pushed()) job->work.params = rows_of(*job);
    if (job->is_early() && job->stage >= Stage::updated) publish_params(*job);
  }
}

void Engine::publish_params(Job &job) noexcept {
  ops_in_flight_++;
  Pool::updates().submit(std::move(job.publish));
}

}  // namespace csd
