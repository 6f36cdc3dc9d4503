#include <string.h>

#include <algorithm>

#include "crc32c.h"
#include "device.h"
#include "float16.h"
#include "pool.h"
#include "topk.h"
#include "updater.h"

namespace csd {
namespace {

// Elements that are updated and then summed, while the second-level cache has them.
constexpr uint64_t kBlock = 16 * 1024;

void update_piece(const csd_piece &piece, uint64_t first, uint64_t n, float *const *sections, uint32_t n_sections,
                  Work &work, Entries &entries) {
  const csd_param &p = work.params[piece.param];
  if (!p.grad) return;
  const uint64_t in_piece = first - piece.tile_first, param_bytes = dtype_bytes(p.param_dtype);
  void *param = param_at(piece, work, in_piece);
  Span span{work.hypers + p.hyper, n, nullptr, p.grad_dtype, {}, param, p.param_dtype, p.master == CSD_UNLESS_SET};
  alignas(64) uint16_t dense[kBlock];
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
    span.state[0] = static_cast<float *>(param);
    span.param = nullptr;
  } else if (p.master == CSD_FROM_PARAM) {
    memcpy(span.state[0], param, param_bytes * n);
  }
  work.nonfinite += update(span, used_isa.load(std::memory_order_relaxed));
  work.pulled += param_bytes * n;
  work.updated += n;
}

// Walks through a tile from its first element to its last.
class Updater {
 public:
  Updater(const Tile &tile, float *const *sections, Work &work)
      : tile_(tile), sections_(sections), work_(work), entries_(work.entries, work.n_entries), piece_(tile.pieces) {}

  // Updates elements [first, last), which begin where the last ones ended; adds them to `sums`, if anybody wants those.
  void update(uint64_t first, uint64_t last, uint32_t *sums) {
    const csd_piece *const end = tile_.pieces + tile_.n_pieces;
    for (uint64_t next; first < last; first = next) {
      next = std::min(first + kBlock, last);
      for (const csd_piece *p = piece_; p != end && p->tile_first < next; p++) {
        const uint64_t from = std::max(first, p->tile_first), to = std::min(next, p->tile_first + p->elems);
        if (from < to) update_piece(*p, from, to - from, sections_, tile_.sections, work_, entries_);
        if (p->tile_first + p->elems <= next) piece_ = p + 1;
      }
      if (sums) crc32c_sections(sums, sections_, tile_.sections, first, next - first);
    }
  }

 private:
  const Tile &tile_;
  float *const *const sections_;
  Work &work_;
  Entries entries_;
  const csd_piece *piece_;  // the first that has not come to its end
};

// Chunk by chunk, each of which comes from memory once: it is verified, updated and summed while the cache has it.
Failure update_tile(const Tile &tile, float *buffer, Work &work) {
  float *sections[4] = {};
  for (uint32_t s = 0; s < tile.sections; s++) sections[s] = buffer ? buffer + s * tile.elems : tile.window[s];
  provide_entries(tile, work);
  const Slot &held = tile.slots[tile.slot];
  const bool any = std::any_of(tile.pieces, tile.pieces + tile.n_pieces,
                               [&work](const csd_piece &p) { return work.params[p.param].grad; });
  const bool changes = any || work.from_windows || !held.summed;
  if (!changes) work.sum = held;  // passed through as it is
  else if (buffer) work.sum = {true, std::vector<uint32_t>(tile.n_sums())};
  Updater updater(tile, sections, work);
  for (uint64_t chunk = 0; chunk < tile.n_chunks(); chunk++) {
    const uint64_t first = chunk * tile.sum_elems, last = std::min(first + tile.sum_elems, tile.elems);
    if (buffer && work.from_windows) {
      for (uint32_t s = 0; s < tile.sections; s++)
        memcpy(sections[s] + first, tile.window[s] + first, 4 * (last - first));
    } else if (buffer && work.verify) {
      uint32_t sums[4] = {};
      crc32c_sections(sums, sections, tile.sections, first, last - first);
      const uint32_t section = differing_section(tile, chunk, sums);
      if (section < tile.sections) return damaged(tile, section);
    }
    if (changes) updater.update(first, last, buffer ? &work.sum.sums[chunk * tile.sections] : nullptr);
    work.given = last;
  }
  return {};
}

}  // namespace

void submit_update(std::function<Failure()> update, Updated done, Pool &threads) {
  threads.submit([update = std::move(update), done = std::move(done)] {
    Failure failure;
    try {
      failure = update();
    } catch (...) {
      failure = caught();
    }
    done(std::move(failure));
  });
}

void update_on_cpu(const Tile &tile, float *buffer, Work &work, Updated done, Pool &threads) {
  submit_update([&tile, buffer, &work] { return update_tile(tile, buffer, work); }, std::move(done), threads);
}

uint32_t differing_section(const Tile &tile, uint64_t chunk, const uint32_t *sums) {
  const uint32_t *const stored = &tile.slots[tile.slot].sums[chunk * tile.sections];
  return static_cast<uint32_t>(std::mismatch(sums, sums + tile.sections, stored).first - sums);
}

void first_state(const Tile &tile, const Work &work, float *buffer, uint64_t first, uint64_t n) {
  for (uint32_t s = 0; s < tile.sections; s++) memset(buffer + s * tile.elems + first, 0, 4 * n);
  const csd_piece *const end = tile.pieces + tile.n_pieces;
  const csd_piece *p =
      std::partition_point(tile.pieces, end, [&](const csd_piece &q) { return q.tile_first + q.elems <= first; });
  for (; p != end && p->tile_first < first + n; p++) {
    const uint64_t from = std::max(first, p->tile_first), to = std::min(first + n, p->tile_first + p->elems);
    if (from >= to) continue;
    const void *const param = param_at(*p, work, from - p->tile_first);
    const auto *const narrow = static_cast<const uint16_t *>(param);
    float *const master = buffer + from;
    switch (work.params[p->param].param_dtype) {
      case CSD_F16:
        std::transform(narrow, narrow + (to - from), master, f16_to_f32);
        break;
      case CSD_BF16:
        std::transform(narrow, narrow + (to - from), master, bf16_to_f32);
        break;
      default:
        memcpy(master, param, 4 * (to - from));
    }
  }
}

void sum_tile(const Tile &tile, float *const *sections, uint32_t *sums) {
  for (uint64_t chunk = 0; chunk < tile.n_chunks(); chunk++) {
    const uint64_t first = chunk * tile.sum_elems, last = std::min(first + tile.sum_elems, tile.elems);
    crc32c_sections(sums + chunk * tile.sections, sections, tile.sections, first, last - first);
  }
}

Failure damaged(const Tile &tile, uint32_t section) {
  Failure failure{CSD_EDAMAGED, "section " + std::to_string(section) + " of tile " + std::to_string(tile.index) +
                                    " is not what was written there"};
  failure.tile = static_cast<int32_t>(tile.index);
  return failure;
}

}  // namespace csd
