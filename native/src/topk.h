// Top-K: which gradients are sent, as entries that csd_kernel.h lays out, and how they become gradients again.
//
// Of the n elements of a piece, count(ratio, n) are sent: those of the largest magnitude as sent, in 16 bits; among
// equal ones those that come first. Zeros never are. What is not sent may be fed back: it is owed, in the residual, and
// added to the next gradient (Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Stich et al., "Sparsified SGD
// with Memory", 2018). With s the gradient's scale (CSD_GRAD_SCALE):
//
//     owed      = gradient + residual * (1 / s)   in the units of the gradient, which a loss scale may change any time
//     sent      = owed, rounded to 16 bits        but finite if it is
//     residual' = (owed - sent) * s               in the units of the update, once the step is whole; rounded to bf16
//                                                 at random (see narrow_residual), for a small gradient that is added
//                                                 to a large residual again and again would otherwise be lost each time
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "device.h"

namespace csd {

// Gradients of a piece, and what is owed of them.
struct Part {
  const void *grad;
  uint32_t grad_dtype;
  uint16_t *residual;  // bf16; null: nothing is owed
  float scale;         // of the gradient
  uint32_t dtype;      // of what is sent: CSD_F16 or CSD_BF16
  uint32_t seed = 0;   // of the rounding, for element 0

  // A scale that is nothing to divide by leaves the residual alone.
  bool owes() const { return residual && scale != 0 && std::isfinite(scale) && std::isfinite(1.0f / scale); }
};

// The vectorised loops (topk_loop.h), in the instruction set in use.
void round_part(const Part &, uint64_t n, uint16_t *values);  // values[i] = what would be sent of element i
void feed_back_part(const Part &, uint64_t first, uint64_t n,
                    const uint16_t *sent);  // sent: of elements [first, first + n)
uint64_t collect(const uint16_t *values, uint64_t n, uint16_t least,
                 uint32_t *indices);  // of magnitudes from `least` on

// How many of n are sent.
uint64_t topk_count(double ratio, uint64_t n) noexcept;

// Memory of a thread that selects: at most 8 bytes per element of the largest piece.
struct Scratch {
  std::vector<uint16_t> values, magnitudes;
  std::vector<uint32_t> indices;
};

// Selects k of n: the indices, ascending, are the first in scratch.indices. Returns how many, and where the values are.
uint64_t select(const Part &, uint64_t n, uint64_t k, Scratch &, const uint16_t **values);

inline bool is_sparse(const csd_param &p) { return p.grad && p.topk > 0; }

// Does the step change its residual?
inline bool feeds_back(const csd_param &p) { return is_sparse(p) && p.topk < 1 && p.residual; }

// Gives a tile with sparse pieces its entries: selects them, unless it came with them; then they are checked, and what
// is malformed throws CSD_EINVAL. Returns whether it has sparse pieces.
bool provide_entries(const Tile &, Work &);

// When the step is whole: what was not sent of the tile is owed.
void feed_back(const Tile &, const Work &);

// Reads entries that are known to be well-formed, in their order.
class Entries {
 public:
  Entries(const uint32_t *words, uint64_t n) : at_(words), end_(words + n) { next(); }
  uint64_t element() const { return element_; }  // of the tile; UINT64_MAX: there are no more
  uint16_t value() const { return value_; }
  void next();
  void expand(uint64_t first, uint64_t n, uint16_t *dense);  // elements [first, first + n), of which none was before

 private:
  const uint32_t *at_, *const end_, *block_end_ = at_;  // of what counts in the block
  const uint32_t *next_block_ = at_;
  uint64_t block_ = UINT64_MAX, element_ = 0;
  uint16_t value_ = 0;
};

}  // namespace csd
