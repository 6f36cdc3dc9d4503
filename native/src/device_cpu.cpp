#include <string.h>

#include <algorithm>

#include "crc32c.h"
#include "device.h"

namespace csd {
namespace {

// The tile goes through in chunks that stay in the second-level cache between the update and the sum.
constexpr uint64_t kChunk = 16 * 1024;

void update_piece(const csd_piece &piece, uint64_t first, uint64_t n, float *const *sections, uint32_t n_sections,
                  Work &work) {
  const csd_param &p = work.params[piece.param];
  if (!p.grad) return;
  const uint64_t in_piece = first - piece.tile_first, in_param = piece.param_first + in_piece;
  const uint64_t grad_bytes = dtype_bytes(p.grad_dtype), param_bytes = dtype_bytes(p.param_dtype);
  const char *grad = work.grad_image
                         ? static_cast<const char *>(work.grad_image) + 4 * piece.tile_first + grad_bytes * in_piece
                         : static_cast<const char *>(p.grad) + grad_bytes * in_param;
  char *param = work.grad_image ? static_cast<char *>(work.param_image) + 4 * piece.tile_first + param_bytes * in_piece
                                : static_cast<char *>(p.param) + param_bytes * in_param;

  Span span{work.hypers + p.hyper, n, grad, p.grad_dtype, {}, param, p.param_dtype};
  for (uint32_t s = 0; s < n_sections; s++) span.state[s] = sections[s] + first;
  if (p.master == CSD_IN_PARAM) {
    span.state[CSD_MASTER] = reinterpret_cast<float *>(param);
    span.param = nullptr;
  } else if (p.master == CSD_FROM_PARAM) {
    memcpy(span.state[CSD_MASTER], param, param_bytes * n);
  }
  update(span, used_isa.load(std::memory_order_relaxed));
  work.pushed += grad_bytes * n;
  work.pulled += param_bytes * n;
  work.updated += n;
}

}  // namespace

void update_on_cpu(const Tile &tile, float *const *sections, Work &work, uint32_t *crc) {
  const csd_piece *piece = tile.pieces, *const end = tile.pieces + tile.n_pieces;
  for (uint64_t first = 0; first < tile.elems; first += kChunk) {
    const uint64_t last = std::min(first + kChunk, tile.elems);
    for (const csd_piece *p = piece; p != end && p->tile_first < last; p++) {
      const uint64_t from = std::max(first, p->tile_first), to = std::min(last, p->tile_first + p->elems);
      if (from < to) update_piece(*p, from, to - from, sections, tile.sections, work);
      if (p->tile_first + p->elems <= last) piece = p + 1;
    }
    if (crc) crc32c_sections(crc, sections, tile.sections, first, last - first);
  }
}

}  // namespace csd
