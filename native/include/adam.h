// Adam (Kingma & Ba, 2015, algorithm 1) in the order of operations of torch.optim.Adam: weight decay is added to the
// gradient, and the rest is AdamW's.
#pragma once
#include "adamw.h"

// CSD_ADAM, CSD_ADAM_AMSGRAD: sections and constants of CSD_ADAMW and CSD_AMSGRAD, except that c[0] is weight_decay.
// A parameter group of Adam may use decoupled decay (AdamW's), and a tile may hold parameters of both kinds. For the
// kernels, this type therefore implements AdamW's rules as well, at the cost of one more addition.
struct Adam {
  float decay;  // weight_decay; if decoupled, AdamW's 1 - lr * weight_decay
  bool decoupled;
  AdamW rest;

  explicit Adam(const csd_hyper &h) : decay(h.c[0]), decoupled(h.rule == CSD_ADAMW || h.rule == CSD_AMSGRAD), rest(h) {
    rest.amsgrad = h.rule == CSD_ADAM_AMSGRAD || h.rule == CSD_AMSGRAD;
  }

  void update(float (&state)[4], float grad) const {
    float g = grad * rest.grad_scale;
    const float decayed = decay * state[0];
    if (decoupled) state[0] = decayed;
    else if (decay != 0) g = g + decayed;  // as in decayed_grad()
    rest.descend(state, g);
  }
};
