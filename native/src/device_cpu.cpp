#include <string.h>

#include <algorithm>

#include "crc32c.h"
#include "device.h"
#include "pool.h"
#include "topk.h"
#include "updater.h"

namespace csd {
namespace {

// The tile goes through in chunks that stay in the second-level cache between the update and the sum.
constexpr uint64_t kChunk = 16 * 1024;

void update_piece(const csd_piece &piece, uint64_t first, uint64_t n, float *const *sections, uint32_t n_sections,
                  Work &work, Entries &entries) {
  const csd_param &p = work.params[piece.param];
  if (!p.grad) return;
  const uint64_t in_piece = first - piece.tile_first, param_bytes = dtype_bytes(p.param_dtype);
  void *param = param_at(piece, work, in_piece);
  Span span{work.hypers + p.hyper, n, nullptr, p.grad_dtype, {}, param, p.param_dtype};
  alignas(64) uint16_t dense[kChunk];
  if (is_sparse(p)) {
    entries.expand(first, n, dense);
    span.grad = dense;
    span.grad_dtype = p.topk_dtype;
  } else {
    span.grad = grad_at(piece, work, in_piece);
    work.pushed += dtype_bytes(p.grad_dtype) * n;
  }
  for (uint32_t s = 0; s < n_sections; s++) span.state[s] = sections[s] + first;
  if (p.master == CSD_IN_PARAM) {
    span.state[CSD_MASTER] = static_cast<float *>(param);
    span.param = nullptr;
  } else if (p.master == CSD_FROM_PARAM) {
    memcpy(span.state[CSD_MASTER], param, param_bytes * n);
  }
  work.nonfinite += update(span, used_isa.load(std::memory_order_relaxed));
  work.pulled += param_bytes * n;
  work.updated += n;
}

void update_pieces(const Tile &tile, float *const *sections, Work &work, uint32_t *crc) {
  const csd_piece *piece = tile.pieces, *const end = tile.pieces + tile.n_pieces;
  Entries entries(work.entries, work.n_entries);
  for (uint64_t first = 0; first < tile.elems; first += kChunk) {
    const uint64_t last = std::min(first + kChunk, tile.elems);
    for (const csd_piece *p = piece; p != end && p->tile_first < last; p++) {
      const uint64_t from = std::max(first, p->tile_first), to = std::min(last, p->tile_first + p->elems);
      if (from < to) update_piece(*p, from, to - from, sections, tile.sections, work, entries);
      if (p->tile_first + p->elems <= last) piece = p + 1;
    }
    if (crc) crc32c_sections(crc, sections, tile.sections, first, last - first);
  }
}

Failure update_tile(const Tile &tile, float *buffer, Work &work) {
  float *sections[4] = {};
  for (uint32_t s = 0; s < tile.sections; s++) sections[s] = buffer ? buffer + s * tile.elems : tile.window[s];
  if (buffer && work.from_windows) {
    for (uint32_t s = 0; s < tile.sections; s++) memcpy(sections[s], tile.window[s], tile.section_bytes());
  } else if (buffer && work.verify) {
    uint32_t crc[4] = {};
    crc32c_sections(crc, sections, tile.sections, 0, tile.elems);
    const uint32_t *const stored = tile.slots[tile.slot].crc;
    const auto section = static_cast<uint32_t>(std::mismatch(crc, crc + tile.sections, stored).first - crc);
    if (section < tile.sections) return damaged(tile, section);
  }
  provide_entries(tile, work);
  const bool any = std::any_of(tile.pieces, tile.pieces + tile.n_pieces,
                               [&work](const csd_piece &p) { return work.params[p.param].grad; });
  if (any || work.from_windows || !tile.slots[tile.slot].summed) {
    update_pieces(tile, sections, work, buffer ? work.sum.crc : nullptr);
    work.sum.summed = true;
  } else {
    work.sum = tile.slots[tile.slot];  // passed through as it is
  }
  return {};
}

}  // namespace

void submit_update(std::function<Failure()> update, Updated done) {
  Pool::updates().submit([update = std::move(update), done = std::move(done)] {
    Failure failure;
    try {
      failure = update();
    } catch (...) {
      failure = caught();
    }
    done(failure);
  });
}

void update_on_cpu(const Tile &tile, float *buffer, Work &work, Updated done) {
  submit_update([&tile, buffer, &work] { return update_tile(tile, buffer, work); }, std::move(done));
}

Failure damaged(const Tile &tile, uint32_t section) {
  static const char *const kNames[] = {"master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  Failure failure{CSD_EDAMAGED, std::string(kNames[section]) + " of tile " + std::to_string(tile.index) +
                                    " is not what was written there"};
  failure.tile = static_cast<int32_t>(tile.index);
  return failure;
}

}  // namespace csd
