// Adam (Kingma & Ba, 2015, algorithm 1) as torch.optim.Adam orders it: weights decay by what is added to the gradient,
// and the rest is AdamW's.
#pragma once
#include "adamw.h"
#include "weight_decay.h"

// CSD_ADAM, CSD_ADAM_AMSGRAD: the sections of CSD_ADAMW and CSD_AMSGRAD. Constants: theirs, but c[0] is weight_decay.
struct Adam {
  float weight_decay;
  AdamW rest;

  explicit Adam(const csd_hyper &h) : weight_decay(h.c[0]), rest(h) { rest.amsgrad = h.rule == CSD_ADAM_AMSGRAD; }

  void update(float (&state)[4], float grad) const {
    rest.descend(state, decayed_grad(grad * rest.grad_scale, weight_decay, state[0]));
  }
};
