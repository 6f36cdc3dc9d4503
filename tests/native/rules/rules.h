// Replaces native/include/rules.h when tests/sanitize.py builds the engine: AdamW's rules, RMSprop, whose states can be
// codes without a ratio, two more that have one and two sections, and a rule of two passes.
#pragma once
#include "adamw.h"
#include "muon.h"
#include "rmsprop.h"

constexpr uint32_t kPlain = 100, kHeavy = 101;  // as values of csd_rule

// kPlain: master -= c[0] * gradient. kHeavy: momentum = c[1] * momentum + gradient; master -= c[0] * momentum.
struct Descent {
  float lr, decay, grad_scale;
  bool heavy;

  explicit Descent(const csd_hyper &h)
      : lr(h.c[0]), decay(h.c[1]), grad_scale(h.c[CSD_GRAD_SCALE]), heavy(h.rule == kHeavy) {}

  void update(float (&state)[4], float grad) const {
    float step = grad * grad_scale;
    if (heavy) step = state[1] = state[1] * decay + step;
    state[0] = state[0] - lr * step;
  }
};

#define CSD_RULES(RULE)                      \
  RULE(CSD_ADAMW, AdamW, 3, 4, CSD_8BIT)     \
  RULE(CSD_AMSGRAD, AdamW, 4, 4, CSD_8BIT)   \
  RULE(CSD_RMSPROP, RMSprop, 2, 4, CSD_ROOT) \
  RULE(kPlain, Descent, 1, 1, CSD_FP32)      \
  RULE(kHeavy, Descent, 2, 2, CSD_FP32)

#define CSD_PASSES(PASS)                   \
  PASS(CSD_MUON_MOMENTUM, MuonMomentum, 1) \
  PASS(CSD_MUON_APPLY, MuonApply, 2)
