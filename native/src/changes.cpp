#include "changes.h"

#include <errno.h>
#include <string.h>

#include <algorithm>

#include "device.h"
#include "transfer.h"
#include "updater.h"

namespace csd {
namespace {

constexpr uint64_t kGroup = 64;

// The tile that this thread updates, if any of its parameters is watched.
thread_local const Tile *current_tile = nullptr;
thread_local const Work *current_work = nullptr;
thread_local uint64_t last_piece = 0;  // spans come in the order of their pieces, so the search begins here

Place place_at(const csd_piece &piece, uint64_t in_piece) {
  csd_watch *const watch = current_work->params[piece.param].watch;
  return watch ? place_in(*watch, current_tile->index, piece, in_piece) : Place{};
}

template <typename Is>
Place find(Is in_piece_of) {
  const csd_piece *const pieces = current_tile->pieces;
  const uint64_t n = current_tile->n_pieces;
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t at = (last_piece + i) % n;
    if (const uint64_t in_piece = in_piece_of(pieces[at]); in_piece < pieces[at].elems) {
      last_piece = at;
      return place_at(pieces[at], in_piece);
    }
  }
  return {};
}

// Finds the piece by the address of its parameter, or of that in an image.
Place find_param(const void *address) {
  return find([address](const csd_piece &piece) {
    const auto begin = reinterpret_cast<uintptr_t>(param_at(piece, *current_work, 0));
    const uint64_t bytes = dtype_bytes(current_work->params[piece.param].param_dtype);
    return (reinterpret_cast<uintptr_t>(address) - begin) / bytes;  // huge if the address is below
  });
}

}  // namespace

void begin_updates_of(const Tile &tile, const Work &work) noexcept {
  const bool any = std::any_of(tile.pieces, tile.pieces + tile.n_pieces,
                               [&work](const csd_piece &p) { return work.params[p.param].watch; });
  current_tile = any ? &tile : nullptr;
  current_work = &work;
  last_piece = 0;
}

void end_updates() noexcept { current_tile = nullptr; }

Place place_in(csd_watch &watch, uint32_t tile, const csd_piece &piece, uint64_t in_piece) noexcept {
  Place place{&watch, watch.first + piece.param_first + in_piece};
  if (!watch.checks) return place;
  const uint64_t element = piece.tile_first + in_piece;
  place.group = watch.groups[tile - watch.first_tile] + element / kGroup - piece.tile_first / kGroup;
  place.in_group = element % kGroup;
  return place;
}

Place place_of(const Span &span) noexcept {
  if (!current_tile) return {};
  return find_param(span.param ? span.param : span.state[0]);  // it may be its own master
}

Place place_of(const CodedSpan &span) noexcept {
  if (!current_tile) return {};
  const Tile &t = *current_tile;
  if (!t.codes) return find_param(span.param);
  // Codes in memory are where they are: the parameter's last group may be in a copy.
  const char *const begin = t.codes + (t.layout.first(t.layout.half(1).begin) - t.layout.bytes(0));
  const uint8_t *const first = span.codes.ratio ? span.codes.ratio : span.codes.root;  // passes update nothing in place
  const auto element = static_cast<uint64_t>(reinterpret_cast<const char *>(first) - begin);
  return find([element](const csd_piece &piece) { return element - piece.tile_first; });
}

// ---- Records -----------------------------------------------------------------------------------

void Recorder::add(uint32_t param, const Changes &changes, uint64_t n) noexcept {
  const uint64_t mask_bytes = changes.whole ? 0 : (n + 63) / 64 * 8;
  const uint64_t bytes = mask_bytes + 2 * changes.count;
  uint64_t at;
  {
    std::lock_guard lock(mutex_);
    if (error_) return;
    try {
      records_.push_back({param, static_cast<uint32_t>(changes.count), changes.first, n, end_});
    } catch (...) {
      error_ = ENOMEM;
      return;
    }
    at = end_;
    end_ += bytes;
  }
  iovec parts[] = {{changes.mask, mask_bytes}, {changes.values, 2 * changes.count}};
  if (const int error = write_fully(fd_, parts, 2, at)) {
    std::lock_guard lock(mutex_);
    error_ = error;
  }
}

void Recorder::rewind(uint64_t n_records) noexcept {
  std::lock_guard lock(mutex_);
  error_ = 0;
  if (n_records >= records_.size()) return;
  end_ = records_[n_records].at;
  records_.resize(n_records);
}

uint64_t Recorder::list(csd_change *records, uint64_t n, int32_t *os_errno) const noexcept {
  std::lock_guard lock(mutex_);
  *os_errno = error_;
  std::copy_n(records_.begin(), std::min<uint64_t>(n, records_.size()), records);
  return records_.size();
}

void Recorder::read(uint64_t at, void *to, uint64_t bytes) const {
  if (const int error = read_fully(fd_, to, bytes, at))
    throw Failure{CSD_EIO, "reading what steps have changed", error};
}

// Applies a record to elements [first, first + elems) of its parameter.
void Recorder::apply(const csd_change &record, uint64_t first, uint64_t elems, uint64_t *mask, uint16_t *values) const {
  const bool whole = record.count == record.elems;
  const uint64_t words = (record.elems + 63) / 64;
  std::vector<uint64_t> content((whole ? 0 : words) + (record.count + 3) / 4);
  read(record.at, content.data(), (whole ? 0 : 8 * words) + 2 * uint64_t{record.count});
  const auto *value = reinterpret_cast<const uint16_t *>(content.data() + (whole ? 0 : words));
  const uint16_t *const end = value + record.count;
  for (uint64_t w = 0; w < words; w++)
    for (uint64_t m = whole ? UINT64_MAX : content[w]; m && value != end; m &= m - 1) {
      const uint64_t i = record.first + 64 * w + static_cast<uint64_t>(__builtin_ctzll(m)) - first;
      const uint16_t v = *value++;
      if (i >= elems) continue;  // also if it is below
      mask[i / 64] |= uint64_t{1} << i % 64;
      values[i] = v;
    }
}

namespace {

// Writes the smallest form of the elements in `mask` to `payload`; returns its size.
uint64_t encode_block(const uint64_t *mask, const uint16_t *values, csd_block &block, char *payload) noexcept {
  const uint64_t words = (block.elems + 63) / 64;
  uint64_t n = 0;
  for (uint64_t w = 0; w < words; w++) n += static_cast<uint64_t>(__builtin_popcountll(mask[w]));
  block.count = static_cast<uint32_t>(n);
  const auto each = [&](auto call) {
    for (uint64_t w = 0; w < words; w++)
      for (uint64_t m = mask[w]; m; m &= m - 1) call(64 * w + static_cast<uint64_t>(__builtin_ctzll(m)));
  };
  const uint64_t sparse = 4 * n, bitmap = 8 * words + 2 * n;
  if (n == block.elems && 2 * n < std::min(sparse, bitmap)) {
    block.kind = 2;
    memcpy(payload, values, 2 * n);
    return 2 * n;
  }
  if (sparse <= bitmap) {
    block.kind = 0;
    auto *entry = reinterpret_cast<uint32_t *>(payload);
    each([&](uint64_t i) { *entry++ = static_cast<uint32_t>(i) | static_cast<uint32_t>(values[i]) << 16; });
    return sparse;
  }
  block.kind = 1;
  memcpy(payload, mask, 8 * words);
  auto *value = reinterpret_cast<uint16_t *>(payload + 8 * words);
  each([&](uint64_t i) { *value++ = values[i]; });
  return bitmap;
}

}  // namespace

uint64_t Recorder::encode(const csd_change *records, uint64_t n_records, csd_block *blocks, uint64_t n_blocks,
                          char *payload) const {
  std::vector<uint64_t> mask;
  std::vector<uint16_t> values;
  uint64_t at = 0;
  for (uint64_t b = 0; b < n_blocks; b++) {
    csd_block &block = blocks[b];
    mask.assign((block.elems + 63) / 64, 0);
    values.resize(block.elems);
    const uint64_t end = b + 1 < n_blocks ? blocks[b + 1].record : n_records;
    for (uint64_t r = block.record; r < end; r++)
      apply(records[r], block.first, block.elems, mask.data(), values.data());
    block.payload = at;
    at += encode_block(mask.data(), values.data(), block, payload + at);
    memset(payload + at, 0, -at % 8);
    at += -at % 8;
  }
  return at;
}

}  // namespace csd
