// Adam (Kingma & Ba, 2015, algorithm 1) as torch.optim.Adam orders it: weights decay by what is added to the gradient,
// and the rest is AdamW's.
#pragma once
#include "adamw.h"

// CSD_ADAM, CSD_ADAM_AMSGRAD: the sections of CSD_ADAMW and CSD_AMSGRAD. Constants: theirs, but c[0] is weight_decay.
// A group of an Adam may have AdamW's decay, and a tile parameters of both: so this type has AdamW's rules as well, for
// kernels. It takes one addition more.
struct Adam {
  float decay;  // weight_decay, or AdamW's
  bool decoupled;
  AdamW rest;

  explicit Adam(const csd_hyper &h) : decay(h.c[0]), decoupled(h.rule == CSD_ADAMW || h.rule == CSD_AMSGRAD), rest(h) {
    rest.amsgrad = h.rule == CSD_ADAM_AMSGRAD || h.rule == CSD_AMSGRAD;
  }

  void update(float (&state)[4], float grad) const {
    float g = grad * rest.grad_scale;
    const float decayed = decay * state[0];
    if (decoupled) state[0] = decayed;
    else if (decay != 0) g = g + decayed;  // as decayed_grad() has it
    rest.descend(state, g);
  }
};
