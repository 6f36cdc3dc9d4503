#include <string.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <list>
#include <mutex>

#include "crc32c.h"
#include "device.h"
#include "float16.h"
#include "memory.h"
#include "pool.h"
#include "topk.h"
#include "updater.h"

namespace csd {
namespace {

// Number of elements that are updated and then summed while they are in the second-level cache.
constexpr uint64_t kBlock = 16 * 1024;

float *floats(char *section, uint64_t first) { return reinterpret_cast<float *>(section) + first; }

// Makes the span for elements [first, first + n) of the tile, which are part of `piece`: its constants, gradients and
// parameters. `scratch` receives gradients that are entries. Adds the span to `counts`.
template <typename Span>
Span span_of(const csd_piece &piece, uint64_t first, uint64_t n, const Tile &tile, const Work &work, Entries &entries,
             float *scratch, Counts &counts) {
  const csd_param &p = work.params[piece.param];
  const uint64_t in_piece = first - piece.tile_first;
  Span span{};
  span.hyper = work.hypers + p.hyper;
  span.n = n;
  span.param = param_at(piece, work, in_piece);
  span.param_dtype = p.param_dtype;
  if (is_sparse(p)) {
    auto *const dense = reinterpret_cast<uint16_t *>(scratch);
    entries.expand(first, n, dense);
    span.grad = dense;
    span.grad_dtype = p.topk_dtype;
  } else {
    span.grad = grad_at(piece, tile, work, in_piece);
    span.grad_dtype = p.grad_dtype;
    counts.pushed += dtype_bytes(p.grad_dtype) * n;
  }
  counts.pulled += dtype_bytes(p.param_dtype) * n;
  counts.updated += n;
  return span;
}

// Copies the supplied states of elements [first, first + n) of the tile. Codes come in whole groups.
void copy_supplied(uint64_t first, uint64_t n, const Tile &tile, char *const *sections, const Work &work) {
  const uint64_t in_groups = (n + 63) / 64 * 64;
  for (uint32_t s = 0; s < tile.layout.n(); s++) {
    const uint64_t at = tile.layout.coded() ? tile.layout.bytes_of(s, first) : 4 * first;
    const uint64_t bytes = tile.layout.coded() ? tile.layout.bytes_of(s, in_groups) : 4 * n;
    memcpy(sections[s] + at, work.states + tile.layout.first(s) + at, bytes);
  }
}

void update_piece(const csd_piece &piece, uint64_t first, uint64_t n, const Tile &tile, char *const *sections,
                  const Work &work, Entries &entries, Counts &counts) {
  const csd_param &p = work.params[piece.param];
  const Sections of = work.sections;
  if (is_supplied(piece, work)) return copy_supplied(first, n, tile, sections, work);
  copy_edited(p, piece.param_first + first - piece.tile_first, n, of, sections, first);
  if (!grad_of(piece, tile, work)) return;
  alignas(64) float scratch[kBlock];
  auto span = span_of<Span>(piece, first, n, tile, work, entries, scratch, counts);
  span.unless_set = p.master == CSD_UNLESS_SET;
  for (uint32_t s = of.begin; s < of.end; s++) span.state[s - of.begin] = floats(sections[s], first);
  if (p.master == CSD_IN_PARAM) {
    span.state[0] = static_cast<float *>(span.param);
    span.param = nullptr;
  } else if (p.master == CSD_FROM_PARAM) {
    memcpy(span.state[0], span.param, dtype_bytes(p.param_dtype) * n);
  }
  counts.nonfinite += update(span, current_isa.load(std::memory_order_relaxed));
}

// ---- Codes ----------------------------------------------------------------------------

// The address in host memory of the parameter or a copy of it, as it is before the update, at element `i` of a piece;
// null if host memory does not have it.
const char *host_param(const csd_piece &piece, const Work &work, uint64_t i) {
  const csd_param &p = work.params[piece.param];
  if (p.in_image || (p.param && work.holds_params)) return static_cast<const char *>(param_at(piece, work, i));
  return p.param ? static_cast<const char *>(p.param) + dtype_bytes(p.param_dtype) * (piece.param_first + i) : nullptr;
}

// Adopts parameters that the user has set: where the host's parameter differs from that of the tile, it becomes the
// master. With `unless_set`, it does so only where it is not the tile's master, rounded. A master just above a tie may
// have been rounded to 24 bits first, and so encoded with the parameter below and correction 127, although it rounds to
// the next parameter. If the host has that one, the master is kept, as a correction of it.
void adopt_user_params(const void *param, uint64_t n, const Codes &codes, bool is_f16, bool unless_set) {
  const auto *const user = static_cast<const uint16_t *>(param);
  auto *const stored = static_cast<uint16_t *>(codes.param);
  if (memcmp(user, stored, 2 * n) == 0) return;
  const uint32_t infinite = is_f16 ? 0x7c00 : 0x7f80;
  for (uint64_t i = 0; i < n; i++) {
    const bool next = user[i] == stored[i] + 1 && (user[i] & 0x7fffu) < infinite && codes.correction[i] == 127;
    if (user[i] != stored[i]) codes.correction[i] = unless_set && next ? 0x81 : 0;
    stored[i] = user[i];
  }
}

// Updates a span whose parameters at `own` are their own section. The memory behind the last one must not be touched,
// so a partial last group is copied.
uint64_t update_in_place(CodedSpan span, void *own, const Tile &tile, char *const *sections, uint64_t first) {
  const uint64_t bytes = dtype_bytes(tile.param_dtype), n = span.n;
  const uint64_t whole = tile.param_dtype == CSD_F32 ? n : n / 64 * 64;
  const int32_t isa = current_isa.load(std::memory_order_relaxed);
  span.n = whole;
  span.codes.param = own;
  uint64_t nonfinite = whole ? update(span, isa) : 0;
  if (whole == n) return nonfinite;
  alignas(64) uint16_t last[64] = {};
  char *const rest = static_cast<char *>(own) + bytes * whole;
  memcpy(last, rest, bytes * (n - whole));
  span.n = n - whole;
  span.codes = codes_at(tile.layout, sections, first + whole);
  span.codes.param = last;
  span.grad = static_cast<const char *>(span.grad) + dtype_bytes(span.grad_dtype) * whole;
  if (span.param) span.param = static_cast<char *>(span.param) + bytes * whole;
  span.key += static_cast<uint32_t>(whole);
  nonfinite += update(span, isa);
  memcpy(rest, last, bytes * (n - whole));
  return nonfinite;
}

// Encodes edited states of a parameter that is its own section. The parameter itself is written only if `is_updated`.
void encode_in_place(const csd_param &p, uint64_t first, uint64_t n, const Tile &tile, Codes codes, void *own,
                     bool is_updated) {
  alignas(64) char joined[4 * kBlock];
  const uint64_t bytes = dtype_bytes(tile.param_dtype) * n;
  memset(joined, 0, sizeof joined);
  memcpy(joined, own, bytes);
  codes.param = joined;
  encode_edited(p, first, n, tile.param_dtype, codes);
  if (is_updated) memcpy(own, joined, bytes);
}

void update_codes(const csd_piece &piece, uint64_t first, uint64_t n, const Tile &tile, char *const *sections,
                  const Work &work, Entries &entries, Counts &counts) {
  if (is_supplied(piece, work)) return copy_supplied(first, n, tile, sections, work);
  const csd_param &p = work.params[piece.param];
  const bool edited = is_edited(p), in_place = p.master == CSD_IN_PARAM, has_grad = grad_of(piece, tile, work);
  if (!has_grad && !edited) return;
  const uint64_t in_piece = first - piece.tile_first, in_param = piece.param_first + in_piece;
  const Codes codes = codes_at(tile.layout, sections, first, work.sections);
  const void *const param = codes.param ? host_param(piece, work, in_piece) : nullptr;
  const bool adopts = param && has_grad && tile.param_dtype != CSD_F32 && p.master != CSD_UNCOMPARED;
  const bool unless_set = p.master == CSD_UNLESS_SET, is_f16 = tile.param_dtype == CSD_F16;
  uint32_t *const checks = tile.checks ? tile.checks + first / 64 : nullptr;
  if (checks && in_place) drop_stale_corrections(static_cast<const uint16_t *>(param), n, checks, codes.correction);
  // The first section may be out of date, because the parameter was its own section until now. Without a gradient,
  // update it only for an edited master, which must not go to the parameter yet.
  if (p.master == CSD_FROM_PARAM && param && (has_grad || (tile.codes && p.edited[0])))
    memcpy(codes.param, param, dtype_bytes(tile.param_dtype) * n);
  if (adopts && !unless_set && !in_place) adopt_user_params(param, n, codes, is_f16, false);
  void *const own = in_place ? const_cast<void *>(param) : nullptr;
  if (edited && own) encode_in_place(p, in_param, n, tile, codes, own, has_grad);
  else if (edited) encode_edited(p, in_param, n, tile.param_dtype, codes);
  if (adopts && unless_set) adopt_user_params(param, n, codes, is_f16, true);
  if (!has_grad) {
    if (own && checks) compute_checks(static_cast<const uint16_t *>(own), n, checks);
    return;
  }
  alignas(64) float scratch[kBlock];
  auto span = span_of<CodedSpan>(piece, first, n, tile, work, entries, scratch, counts);
  span.codes = codes;
  span.key = key_of(p, in_param);
  if (own && !work.grad_image) span.param = nullptr;  // the update writes to the parameter itself
  counts.nonfinite += own ? update_in_place(span, own, tile, sections, first)
                          : update(span, current_isa.load(std::memory_order_relaxed));
  if (checks) compute_checks(static_cast<const uint16_t *>(own ? own : codes.param), n, checks);
}

// Calls `call(piece, from, n)` for each piece that overlaps elements [first, last) of the tile; [from, from + n) is the
// overlap.
template <typename Call>
void for_each_piece(const Tile &tile, uint64_t first, uint64_t last, Call call) {
  const csd_piece *const end = tile.pieces + tile.n_pieces;
  const csd_piece *p =
      std::partition_point(tile.pieces, end, [&](const csd_piece &q) { return q.tile_first + q.elems <= first; });
  for (; p != end && p->tile_first < last; p++) {
    const uint64_t from = std::max(first, p->tile_first), to = std::min(last, p->tile_first + p->elems);
    if (from < to) call(*p, from, to - from);
  }
}

// Sets elements [first, first + n) of a section to zero, and after the last ones the padding too.
void clear(const Tile &tile, uint32_t s, uint64_t first, uint64_t n, char *section) {
  const uint64_t at = tile.layout.bytes_of(s, first);
  memset(section + at, 0, first + n == tile.elems ? tile.layout.bytes(s) - at : tile.layout.bytes_of(s, n));
}

// Overwrites elements [first, last) of the section with the parameters, whose addresses `at(piece, i)` returns; gaps
// become zeros.
template <typename At>
void copy_params(const Tile &tile, uint64_t first, uint64_t last, char *section, At at) {
  const uint64_t bytes = dtype_bytes(tile.param_dtype);
  memset(section + bytes * first, 0, bytes * (last - first));
  for_each_piece(tile, first, last, [&](const csd_piece &p, uint64_t from, uint64_t n) {
    memcpy(section + bytes * from, at(p, from - p.tile_first), bytes * n);
  });
}

// ---- A tile -----------------------------------------------------------------------------

// The update of a tile, chunk by chunk. Each chunk is read from memory once, and is verified, updated and summed while
// it is in the cache. Threads that share the update each take the next chunk that none has taken.
class Updater {
 public:
  Updater(Device &device, const Tile &tile, char *buffer, Work &work, Updated done)
      : device_(device),
        tile_(tile),
        buffer_(buffer),
        work_(work),
        done_(std::move(done)),
        n_chunks_(tile.n_chunks()),
        n_left_(n_chunks_) {
    tile.find_sections(buffer, sections_);
  }

  void prepare() {
    provide_entries(tile_, work_);
    const Slot &current = tile_.slots[tile_.slot];
    const bool any_changed = std::any_of(tile_.pieces, tile_.pieces + tile_.n_pieces, [this](const csd_piece &p) {
      return grad_of(p, tile_, work_) || is_supplied(p, work_) || is_edited(work_.params[p.param]);
    });
    changes_ = any_changed || work_.from_windows || !current.summed;
    if (!changes_) work_.sum = current;  // the tile does not change
    else if (buffer_) work_.sum = {true, std::vector<uint32_t>(tile_.n_sums())};
  }

  // How many threads can help: for fewer than two chunks it takes longer to wake one. None if the update can fail,
  // because then the chunks before the one that fails have been updated, and those behind it have not.
  uint64_t most_helpers() const { return !changes_ || work_.verify || work_.from_windows ? 0 : (n_chunks_ - 1) / 2; }

  // Updates chunks until all are taken or one has failed. The thread that is the last to end reports the update as done.
  // Others may come later: when all chunks are taken, nothing outside of this object may exist any more.
  void run() {
    uint64_t chunk = next_++, n = 0;
    if (chunk >= n_chunks_) return;
    Failure failure;
    Counts counts;
    try {
      begin_updates_of(tile_, work_);
      Entries entries(work_.entries, work_.n_entries);
      for (; chunk < n_chunks_; chunk = next_++, n++) run_chunk(chunk, entries, counts);
    } catch (...) {
      failure = caught();
    }
    end(n, counts, std::move(failure));
  }

  // Reports the update as failed if it has not begun.
  void fail(Failure failure) { done_(std::move(failure)); }

 private:
  // Notes that this thread has updated n chunks, and then perhaps failed.
  void end(uint64_t n, const Counts &counts, Failure failure) {
    {
      std::lock_guard lock(mutex_);
      work_.pushed += counts.pushed;
      work_.pulled += counts.pulled;
      work_.updated += counts.updated;
      work_.nonfinite += counts.nonfinite;
      work_.n_params_written = std::min(work_.n_params_written + n * tile_.sum_elems, tile_.elems);
      n_left_ -= n;
      if (failure.status != CSD_OK) {  // nobody takes the rest
        n_left_ -= 1 + n_chunks_ - std::min(next_.exchange(n_chunks_), n_chunks_);
        failure_ = std::move(failure);
      }
      if (n_left_ > 0) return;
    }
    done_(std::move(failure_));
  }

  void run_chunk(uint64_t chunk, Entries &entries, Counts &counts) {
    const uint64_t first = chunk * tile_.sum_elems, last = std::min(first + tile_.sum_elems, tile_.elems);
    const uint32_t bad_section = begin_chunk(chunk, first, last);
    if (bad_section < tile_.layout.n()) throw damaged(tile_, bad_section);
    if (changes_)
      update_chunk(first, last, buffer_ ? &work_.sum.sums[chunk * tile_.layout.n()] : nullptr, entries, counts);
  }

  // Prepares a chunk of the buffer: the state with which the step begins, verified. Returns the section that is
  // damaged, or the number of sections if none is.
  uint32_t begin_chunk(uint64_t chunk, uint64_t first, uint64_t last) {
    const uint32_t n_sections = tile_.layout.n();
    const Sections of = work_.sections;
    if (!buffer_) return n_sections;
    // If all is supplied, gaps between parameters must be zeros. States other than the master begin as zeros, and where
    // the master is not updated, seed() has not put them there.
    if (work_.all_supplied || (work_.is_new && of.begin > 0)) {
      for (uint32_t s = of.begin; s < of.end; s++) clear(tile_, s, first, last - first, sections_[s]);
      return n_sections;
    }
    if (work_.from_windows) {
      for (uint32_t s = of.begin; s < of.end; s++) read_window(tile_, s, first, last - first, sections_[s] + 4 * first);
      return n_sections;
    }
    if (work_.param_at_host)
      copy_params(tile_, first, last, sections_[0],
                  [this](const csd_piece &p, uint64_t i) { return host_param(p, work_, i); });
    if (!work_.verify) return n_sections;
    const uint32_t bad_section = verify(chunk, first, last);
    if (bad_section != 0 || !work_.param_at_host) return bad_section;
    // The user has set a parameter, so the old ones must be read from the device after all.
    read_params(first);
    return verify(chunk, first, last);
  }

  uint32_t verify(uint64_t chunk, uint64_t first, uint64_t last) const {
    uint32_t sums[kMostSections] = {};
    crc32c_sections(sums, sections_, tile_.layout, work_.sections, first, last - first);
    return differing_section(tile_, work_.sections, chunk, sums);
  }

  void read_params(uint64_t first) {
    const HugeMemory section(tile_.layout.bytes(0));
    if (const int error = device_.read_first(tile_, tile_.layout.bytes(0), section.floats()))
      throw Failure{CSD_EIO, "reading tile " + std::to_string(tile_.index), error};
    work_.read_late = tile_.layout.bytes(0);
    work_.param_at_host = false;
    const uint64_t done = tile_.layout.bytes_of(0, first);
    memcpy(sections_[0] + done, reinterpret_cast<const char *>(section.floats()) + done, tile_.layout.bytes(0) - done);
  }

  void update_chunk(uint64_t first, uint64_t last, uint32_t *sums, Entries &entries, Counts &counts) {
    for (uint64_t next; first < last; first = next) {
      next = std::min(first + kBlock, last);
      for_each_piece(tile_, first, next, [&](const csd_piece &p, uint64_t from, uint64_t n) {
        if (tile_.layout.coded()) update_codes(p, from, n, tile_, sections_, work_, entries, counts);
        else update_piece(p, from, n, tile_, sections_, work_, entries, counts);
      });
      if (sums) crc32c_sections(sums, sections_, tile_.layout, work_.sections, first, next - first);
    }
  }

  Device &device_;
  const Tile &tile_;
  char *const buffer_;  // null on a resident device
  char *sections_[kMostSections] = {};
  Work &work_;
  const Updated done_;
  const uint64_t n_chunks_;
  bool changes_ = false;
  std::atomic<uint64_t> next_{0};  // the first chunk that no thread has taken
  std::mutex mutex_;               // guards what follows, and the results in `work_`
  uint64_t n_left_;                // chunks that are not updated yet
  Failure failure_;
};

}  // namespace

void submit_update(std::function<Failure()> update, Updated done, Pool &threads, bool low_priority) {
  auto task = [update = std::move(update), done = std::move(done)] {
    Failure failure;
    try {
      failure = update();
    } catch (...) {
      failure = caught();
    }
    done(std::move(failure));
  };
  submit_here(threads, std::move(task), low_priority);
}

void update_on_cpu(Device &device, const Tile &tile, float *buffer, Work &work, Updated done, Pool &threads,
                   bool low_priority) {
  const auto update = std::make_shared<Updater>(device, tile, reinterpret_cast<char *>(buffer), work, std::move(done));
  auto task = [update, &threads, low_priority] {
    try {
      update->prepare();
      std::list<Pool::Task> helpers;
      for (uint64_t n = std::min<uint64_t>(update->most_helpers(), idle_here(threads)); n > 0; n--)
        helpers.push_back([update] { update->run(); });
      threads.submit(std::move(helpers), low_priority);
    } catch (...) {
      return update->fail(caught());
    }
    update->run();
  };
  submit_here(threads, std::move(task), low_priority);
}

bool is_edited(const csd_param &p) {
  return std::any_of(p.edited, p.edited + 4, [](const float *states) { return states; });
}

void copy_edited(const csd_param &p, uint64_t first, uint64_t n, Sections of, char *const *sections, uint64_t at) {
  for (uint32_t s = of.begin; s < of.end; s++)
    if (p.edited[s]) memcpy(floats(sections[s], at), p.edited[s] + first, 4 * n);
}

void encode_edited(const csd_param &p, uint64_t first, uint64_t n, uint32_t param_dtype, const Codes &codes) {
  const float *states[4] = {};
  for (uint32_t s = 0; s < 4; s++) states[s] = p.edited[s] ? p.edited[s] + first : nullptr;
  encode(states, n, param_dtype, codes, current_isa.load(std::memory_order_relaxed));
}

uint32_t differing_section(const Tile &tile, Sections of, uint64_t chunk, const uint32_t *sums) {
  const uint32_t n = tile.layout.n(), *const stored = &tile.slots[tile.slot].sums[chunk * n];
  const uint32_t *const differing = std::mismatch(sums + of.begin, sums + of.end, stored + of.begin).first;
  return differing == sums + of.end ? n : static_cast<uint32_t>(differing - sums);
}

void first_state(const Tile &tile, const Work &work, char *buffer, uint64_t first, uint64_t n) {
  for (uint32_t s = work.sections.begin; s < work.sections.end; s++)
    clear(tile, s, first, n, buffer + tile.layout.first(s));
  if (tile.layout.coded())
    return copy_params(tile, first, first + n, buffer,
                       [&work](const csd_piece &p, uint64_t i) { return param_at(p, work, i); });
  for_each_piece(tile, first, first + n, [&](const csd_piece &p, uint64_t from, uint64_t some) {
    const void *const param = param_at(p, work, from - p.tile_first);
    const auto *const narrow = static_cast<const uint16_t *>(param);
    float *const master = reinterpret_cast<float *>(buffer) + from;
    switch (work.params[p.param].param_dtype) {
      case CSD_F16:
        std::transform(narrow, narrow + some, master, f16_to_f32);
        break;
      case CSD_BF16:
        std::transform(narrow, narrow + some, master, bf16_to_f32);
        break;
      default:
        memcpy(master, param, 4 * some);
    }
  });
}

void sum_tile(const Tile &tile, const char *const *sections, uint32_t *sums) {
  for (uint64_t chunk = 0; chunk < tile.n_chunks(); chunk++) {
    const uint64_t first = chunk * tile.sum_elems, last = std::min(first + tile.sum_elems, tile.elems);
    crc32c_sections(sums + chunk * tile.layout.n(), sections, tile.layout, tile.layout.all(), first, last - first);
  }
}

void check_slot(const Tile &tile, const char *slot, uint32_t n_sections, uint64_t first, uint64_t n) {
  const Slot &stored = tile.slots[tile.slot];
  if (!stored.summed) return;
  for (uint64_t chunk = first / tile.sum_elems; chunk * tile.sum_elems < first + n; chunk++) {
    const uint64_t begin = chunk * tile.sum_elems, end = std::min(begin + tile.sum_elems, tile.elems);
    for (uint32_t s = 0; s < n_sections; s++) {
      const char *const at = slot + tile.layout.first(s) + tile.layout.bytes_of(s, begin);
      if (crc32c(0, at, tile.layout.bytes_of(s, end - begin)) != stored.sums[chunk * tile.layout.n() + s])
        throw damaged(tile, s);
    }
  }
}

void read_window(const Tile &tile, uint32_t section, uint64_t first, uint64_t n, char *to) {
  if (!copy_mapped(to, tile.window[section] + first, 4 * n))
    throw Failure{CSD_EIO, "reading the window of tile " + std::to_string(tile.index), EIO};
}

int load_now(Device &device, const Tile &tile, char *buffer) {
  // Shared, because the thread that sets the promise may still be using it when this function returns.
  const auto loaded = std::make_shared<std::promise<int>>();
  device.load(tile, reinterpret_cast<float *>(buffer), 0, tile.layout.bytes(),
              [loaded](int error) { loaded->set_value(error); });
  return loaded->get_future().get();
}

Failure damaged(const Tile &tile, uint32_t section) {
  Failure failure{CSD_EDAMAGED, "section " + std::to_string(section) + " of tile " + std::to_string(tile.index) +
                                    " is not what was written there"};
  failure.tile = static_cast<int32_t>(tile.index);
  return failure;
}

}  // namespace csd
