#include "topk.h"

#include <string.h>

#include <algorithm>
#include <functional>

#include "changes.h"
#include "csd_kernel.h"
#include "float_mode.h"

namespace csd {
namespace {

// Number of elements expanded at a time, so that they are still in cache when they are used.
constexpr uint64_t kChunk = 16 * 1024;
static_assert(kBlockElems % kChunk == 0);

constexpr uint64_t kSample = 4096;

template <typename T>
T *ensure_size(std::vector<T> &scratch, uint64_t n) {
  if (scratch.size() < n) scratch.resize(n);
  return scratch.data();
}

Part part_of(const csd_piece &piece, const Tile &tile, const Work &work) {
  const csd_param &p = work.params[piece.param];
  uint16_t *const residual = p.residual ? static_cast<uint16_t *>(p.residual) + piece.param_first : nullptr;
  const uint32_t seed =
      static_cast<uint32_t>(piece.param_first) + p.seed * 0x9e3779b9u;  // 2^32 / golden ratio: steps far apart
  return {grad_at(piece, tile, work, 0),
          residual,
          piece.elems,
          topk_count(p.topk, piece.elems),
          piece.tile_first,
          p.grad_dtype,
          p.topk_dtype,
          work.hypers[p.hyper].c[CSD_GRAD_SCALE],
          seed};
}

uint64_t blocks_of(uint64_t elems) { return (elems + kBlockElems - 1) / kBlockElems; }

// Lays out entries, which must be added in ascending order of elements.
class Packer {
 public:
  explicit Packer(std::vector<uint32_t> &out) : out_(out) { out_.assign(1, 0); }
  void add(uint64_t element, uint16_t value) {
    go_to(element / kBlockElems);
    out_.push_back(static_cast<uint32_t>(element % kBlockElems) | static_cast<uint32_t>(value) << 16);
    out_[head_]++;
  }
  void end(uint64_t blocks) {
    go_to(blocks - 1);
    pad();
  }

 private:
  void pad() { out_.resize((out_.size() + kLanes - 1) / kLanes * kLanes); }
  void go_to(uint64_t block) {
    for (; block_ < block; block_++) {
      pad();
      head_ = out_.size();
      out_.push_back(0);
    }
  }
  std::vector<uint32_t> &out_;
  uint64_t block_ = 0, head_ = 0;
};

void select_for(const Tile &tile, Work &work) {
  std::vector<Part> parts;
  for (const csd_piece *p = tile.pieces; p != tile.pieces + tile.n_pieces; p++)
    if (is_sparse(work.params[p->param])) parts.push_back(part_of(*p, tile, work));
  csd::select_entries(parts.data(), parts.size(), tile.elems, work.selected);
  work.entries = work.selected.data();
  work.n_entries = work.selected.size();
}

[[noreturn]] void throw_malformed(const Tile &tile, uint64_t block, const char *what) {
  throw Failure{CSD_EINVAL, "the entries of tile " + std::to_string(tile.index) + " are malformed: in block " +
                                std::to_string(block) + ", " + what};
}

void check_entries(const Tile &tile, const Work &work) {
  const uint32_t *at = work.entries, *const end = at + work.n_entries;
  const csd_piece *piece = tile.pieces, *const last_piece = piece + tile.n_pieces;
  for (uint64_t block = 0; block < blocks_of(tile.elems); block++) {
    const uint64_t first = block * kBlockElems, elems = std::min<uint64_t>(kBlockElems, tile.elems - first),
                   left = static_cast<uint64_t>(end - at);
    const uint64_t words =
        left ? (uint64_t{*at} + kLanes) / kLanes * kLanes : 1;  // the count and the entries, in whole words
    if (words > left) throw_malformed(tile, block, "there are more entries than words");
    uint64_t next = 0;  // the smallest index that would be in order
    for (const uint32_t *entry = at + 1; entry != at + 1 + *at; entry++) {
      const uint64_t index = *entry & 0xffff;
      if (index < next || index >= elems) throw_malformed(tile, block, "an index is out of order or beyond the tile");
      while (piece != last_piece && piece->tile_first + piece->elems <= first + index) piece++;
      if (piece == last_piece || first + index < piece->tile_first || !is_sparse(work.params[piece->param]))
        throw_malformed(tile, block, "an entry is for no sparse parameter");
      next = index + 1;
    }
    at += words;
  }
  if (at != end) throw_malformed(tile, blocks_of(tile.elems) - 1, "the last one, there are more words than entries");
}

}  // namespace

uint64_t topk_count(double ratio, uint64_t n) noexcept {
  if (n == 0) return 0;
  const FloatMode mode(Subnormals::kept);
  return std::clamp<uint64_t>(static_cast<uint64_t>(std::nearbyint(ratio * static_cast<double>(n))), 1, n);
}

namespace {

// The magnitude by which values are compared. All nans are equal, because their bits depend on the hardware.
uint16_t magnitude(uint16_t value, uint32_t dtype) {
  const uint16_t nan = dtype == CSD_F16 ? 0x7c01 : 0x7f81;
  return std::min<uint16_t>(value & 0x7fff, nan);
}

}  // namespace

// Usually makes a single pass over the values: a sample gives a magnitude that slightly more than k values probably
// reach. These are collected, and the k largest of them are the k largest of all. If the sample was misleading and
// fewer than k are found, all nonzero values are collected.
uint64_t select(const Part &part, Scratch &scratch, const uint16_t **values_out) {
  const FloatMode mode(Subnormals::kept);
  const uint64_t n = part.n, k = part.k;
  const auto *values = static_cast<const uint16_t *>(part.grad);
  if (uses_residual(part) || part.grad_dtype != part.dtype) {
    round_part(part, ensure_size(scratch.values, n));
    values = scratch.values.data();
  }
  *values_out = values;
  uint16_t least = 1;
  if (n >= 8 * kSample && k < n / 4) {
    uint16_t *const sample = ensure_size(scratch.magnitudes, kSample);
    for (uint64_t i = 0; i < kSample; i++) sample[i] = magnitude(values[i * n / kSample], part.dtype);
    const double expected = static_cast<double>(k) * kSample / static_cast<double>(n);
    const auto rank = std::min(kSample - 1, static_cast<uint64_t>(expected + 3 * std::sqrt(expected) + 8));
    std::nth_element(sample, sample + rank, sample + kSample, std::greater<>());
    least = std::max(least, sample[rank]);
  }
  uint32_t *const indices = ensure_size(scratch.indices, n);
  uint64_t count = collect(values, n, least, indices);
  if (count < k && least > 1) count = collect(values, n, 1, indices);
  if (count <= k) return count;

  uint16_t *const magnitudes = ensure_size(scratch.magnitudes, count);
  for (uint64_t i = 0; i < count; i++) magnitudes[i] = magnitude(values[indices[i]], part.dtype);
  std::nth_element(magnitudes, magnitudes + k - 1, magnitudes + count, std::greater<>());
  const uint16_t bound = magnitudes[k - 1];
  uint64_t equal =
      k - static_cast<uint64_t>(std::count_if(magnitudes, magnitudes + k, [bound](uint16_t m) { return m > bound; }));
  uint64_t chosen = 0;
  for (uint64_t i = 0; i < count; i++) {
    const uint16_t own = magnitude(values[indices[i]], part.dtype);
    if (own < bound || (own == bound && equal == 0)) continue;
    if (own == bound) equal--;
    indices[chosen++] = indices[i];
  }
  return chosen;
}

void select_entries(const Part *parts, uint64_t n_parts, uint64_t elems, std::vector<uint32_t> &entries) {
  thread_local Scratch scratch;
  uint64_t most = kLanes * blocks_of(elems);  // for counts and padding
  for (const Part *part = parts; part != parts + n_parts; part++) most += part->k;
  entries.reserve(most);
  Packer packer(entries);
  for (const Part *part = parts; part != parts + n_parts; part++) {
    const uint16_t *values;
    const uint64_t n = select(*part, scratch, &values);
    for (uint64_t i = 0; i < n; i++) packer.add(part->tile_first + scratch.indices[i], values[scratch.indices[i]]);
  }
  packer.end(blocks_of(elems));
}

bool provide_entries(const Tile &tile, Work &work) {
  if (std::none_of(tile.pieces, tile.pieces + tile.n_pieces,
                   [&work](const csd_piece &p) { return is_sparse(work.params[p.param]); }))
    return false;
  if (work.entries) check_entries(tile, work);
  else select_for(tile, work);
  work.pushed += 4 * work.n_entries;
  return true;
}

void feed_back(const Tile &tile, const Work &work) {
  Entries entries(work.entries, work.n_entries);
  for (const csd_piece *p = tile.pieces; p != tile.pieces + tile.n_pieces; p++)
    if (feeds_back(work.params[p->param])) feed_back(part_of(*p, tile, work), entries);
}

void feed_back(const Part &part, Entries &entries) {
  const FloatMode mode(Subnormals::kept);
  alignas(64) uint16_t sent[kChunk];
  if (!uses_residual(part)) return;
  for (uint64_t first = 0; first < part.n; first += kChunk) {
    const uint64_t n = std::min(kChunk, part.n - first);
    entries.expand(part.tile_first + first, n, sent);
    feed_back_part(part, first, n, sent);
  }
}

void Entries::next() {
  while (at_ == block_end_) {
    if (next_block_ == end_) {
      element_ = UINT64_MAX;
      return;
    }
    at_ = next_block_ + 1;
    block_end_ = at_ + *next_block_;
    next_block_ += (uint64_t{*next_block_} + kLanes) / kLanes * kLanes;
    block_++;
  }
  element_ = block_ * kBlockElems + (*at_ & 0xffff);
  value_ = static_cast<uint16_t>(*at_ >> 16);
  at_++;
}

void Entries::expand(uint64_t first, uint64_t n, uint16_t *dense) {
  memset(dense, 0, 2 * n);
  while (element_ < first) next();
  for (; element_ < first + n; next()) dense[element_ - first] = value_;
}

}  // namespace csd
