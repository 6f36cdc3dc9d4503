// The CPU updater: adamw.h over arrays, vectorised, one pass over memory.
#pragma once
#include <atomic>

#include "csd.h"

namespace csd {

struct Span {  // n elements of one parameter
  const csd_adamw *hyper;
  uint64_t n;
  const void *grad;
  uint32_t grad_dtype;
  float *state[4];  // one per csd_section; the last is null without amsgrad
  void *param;      // null: nobody wants the rounded master
  uint32_t param_dtype;
  bool unless_set;  // where `param`, of 16 bits, is not the rounded master, it is the master
};

// Returns how many gradients are inf or nan; their elements are updated all the same.
uint64_t update(const Span &span, int32_t isa);

int32_t best_isa();
extern std::atomic<int32_t> used_isa;

}  // namespace csd
