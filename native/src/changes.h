// What updates change in parameters of 16 bits: recorded, with the new values, for opt.publish(). See csd_watch.
#pragma once
#include <mutex>
#include <vector>

#include "csd.h"

namespace csd {

struct Tile;
struct Work;
struct Span;
struct CodedSpan;

// The changed elements of a span that is being updated.
struct Changes {
  uint64_t first;    // index of its first element in the watched tensor
  uint64_t *mask;    // one bit per element of the span
  uint16_t *values;  // of the changed elements
  uint64_t n_noted = 0, count = 0;
  uint32_t sum = 0;    // by how much the parameter's checksum changes
  bool whole = false;  // all elements count as changed, and as 0 before; `mask` is not used
};

// Collects records in a file. A failure to write is kept: see csd_changes_list.
class Recorder {
 public:
  explicit Recorder(int fd) : fd_(fd) {}
  void add(uint32_t param, const Changes &changes, uint64_t n) noexcept;
  void rewind(uint64_t n_records) noexcept;
  uint64_t list(csd_change *records, uint64_t n, int32_t *os_errno) const noexcept;
  uint64_t encode(const csd_change *records, uint64_t n_records, csd_block *blocks, uint64_t n_blocks,
                  char *payload) const;  // throws Failure

 private:
  void apply(const csd_change &record, uint64_t first, uint64_t elems, uint64_t *mask, uint16_t *values) const;
  void read(uint64_t at, void *to, uint64_t bytes) const;

  mutable std::mutex mutex_;
  const int fd_;
  uint64_t end_ = 0;
  int error_ = 0;
  std::vector<csd_change> records_;
};

// From now on the updates of this thread are of this tile.
void begin_updates_of(const Tile &, const Work &) noexcept;
void end_updates() noexcept;  // and now of none

// Where a span of this thread's tile is, if its parameter is watched.
struct Place {
  csd_watch *watch = nullptr;  // null: it is not watched
  uint64_t first = 0;          // index of its first element in the watched tensor
  uint64_t group = 0;          // index of its first element's group in the watch's checks
  uint64_t in_group = 0;       // and of the element in this group
};
// `in_piece`: an element of the piece, which is in this tile.
Place place_in(csd_watch &, uint32_t tile, const csd_piece &, uint64_t in_piece) noexcept;
Place place_of(const Span &) noexcept;
Place place_of(const CodedSpan &) noexcept;

// See csd_watch_note.
void note_update(csd_watch &, uint32_t tile, const csd_piece &, uint32_t dtype, const void *before,
                 const void *after) noexcept;  // in updater.cpp

// See csd_changes_sum.
uint32_t weighted_sum(const uint16_t *values, uint64_t first, uint64_t n) noexcept;  // in updater.cpp

}  // namespace csd

struct csd_changes {
  csd::Recorder recorder;
};
