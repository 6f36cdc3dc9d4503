// Top-K: selects the gradients that are sent, as entries (csd_kernel.h), and turns entries back into gradients.
//
// Of the n elements of a piece, topk_count(ratio, n) are sent: those with the largest magnitude after rounding to 16
// bits, and among equal ones those that come first. Zeros are never sent. With error feedback, what is not sent is kept
// in the residual and added to the next gradient (Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Stich et
// al., "Sparsified SGD with Memory", 2018). With s the gradient's scale (CSD_GRAD_SCALE):
//
//     owed      = gradient + residual * (1 / s)   in the units of the gradient, which a loss scale may change any time
//     sent      = owed, rounded to 16 bits        finite if `owed` is finite
//     residual' = (owed - sent) * s               in the units of the update, once the step is complete; stochastically
//                                                 rounded to bf16 (see narrow_residual), because small gradients that
//                                                 are repeatedly added to a large residual would otherwise be lost
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "device.h"

namespace csd {

using Part = csd_topk_part;

// Is there a residual to add? If the scale cannot be divided by, the residual is neither used nor changed.
inline bool uses_residual(const Part &p) {
  return p.residual && p.scale != 0 && std::isfinite(p.scale) && std::isfinite(1.0f / p.scale);
}

// The vectorised loops (topk_loop.h), in the instruction set in use.
void round_part(const Part &, uint16_t *values);  // values[i] = what would be sent for element i
void feed_back_part(const Part &, uint64_t first, uint64_t n,
                    const uint16_t *sent);  // sent: values of elements [first, first + n)
uint64_t collect(const uint16_t *values, uint64_t n, uint16_t least,
                 uint32_t *indices);  // indices of the values whose magnitude is at least `least`

// Returns how many of n gradients are sent.
uint64_t topk_count(double ratio, uint64_t n) noexcept;

// Working memory of a thread that selects: at most 8 bytes per element of the largest piece.
struct Scratch {
  std::vector<uint16_t> values, magnitudes;
  std::vector<uint32_t> indices;
};

// Selects up to k of n elements. Returns their number; their indices are at the front of scratch.indices, ascending,
// and `*values` points to the rounded values of all n elements.
uint64_t select(const Part &, Scratch &, const uint16_t **values);

// Selects the entries of a tile of `elems` elements, of parts in its order.
void select_entries(const Part *parts, uint64_t n_parts, uint64_t elems, std::vector<uint32_t> &entries);

inline bool is_sparse(const csd_param &p) { return p.grad && p.topk > 0 && p.master != CSD_SUPPLIED; }

// Does the step change its residual?
inline bool feeds_back(const csd_param &p) { return is_sparse(p) && p.topk < 1 && p.residual; }

// Provides the entries of a tile with sparse pieces. Entries that were pushed with the tile are checked, and malformed
// ones throw CSD_EINVAL; otherwise they are selected here. Returns whether the tile has sparse pieces.
bool provide_entries(const Tile &, Work &);

// Updates the tile's residuals with what was not sent. Call this only when the step is complete.
void feed_back(const Tile &, const Work &);

// Reads entries in order. They must be well-formed.
class Entries {
 public:
  Entries(const uint32_t *words, uint64_t n) : at_(words), end_(words + n) { next(); }
  uint64_t element() const { return element_; }  // of the tile; UINT64_MAX: there are no more
  uint16_t value() const { return value_; }
  void next();
  // Writes elements [first, first + n) as dense values; elements without an entry are zero. Call it in ascending order.
  void expand(uint64_t first, uint64_t n, uint16_t *dense);

 private:
  const uint32_t *at_, *const end_, *block_end_ = at_;  // end of the block's entries, without padding
  const uint32_t *next_block_ = at_;
  uint64_t block_ = UINT64_MAX, element_ = 0;
  uint16_t value_ = 0;
};

// The same for one part, the next one in the order of the tile whose `entries` are read.
void feed_back(const Part &, Entries &entries);

}  // namespace csd
