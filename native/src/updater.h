// The CPU updater: the rules over arrays, vectorised, one pass over memory.
#pragma once
#include <atomic>

#include "csd.h"

namespace csd {

struct Span {  // n elements of one parameter
  const csd_hyper *hyper;
  uint64_t n;
  const void *grad;
  uint32_t grad_dtype;
  float *state[4];  // one per section; null where the rule updates none
  void *param;      // null: nobody wants the rounded master
  uint32_t param_dtype;
  bool unless_set;  // where `param`, of 16 bits, is not the rounded master, it is the master
};

// How many sections a tile may have whose parameters a rule updates.
struct SectionRange {
  uint32_t least, most;
  bool take(uint32_t sections) const { return least <= sections && sections <= most; }
};
SectionRange sections_of(uint32_t rule) noexcept;  // none: there is no such rule

// Returns how many gradients are inf or nan; their elements are updated all the same.
uint64_t update(const Span &span, int32_t isa);

int32_t best_isa() noexcept;
extern std::atomic<int32_t> used_isa;

}  // namespace csd
