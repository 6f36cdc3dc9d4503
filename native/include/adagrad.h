// Adagrad (Duchi, Hazan & Singer, 2011, with a diagonal matrix) as implemented by torch.optim.Adagrad.
#pragma once
#include <math.h>

#include "csd.h"
#include "weight_decay.h"

// CSD_ADAGRAD: master, sum.
struct Adagrad {
  // In this order in csd_hyper:
  float step_size;  // lr / (1 + (t - 1) * lr_decay)
  float weight_decay;
  float eps;
  float grad_scale;

  explicit Adagrad(const csd_hyper &h)
      : step_size(h.c[0]), weight_decay(h.c[1]), eps(h.c[2]), grad_scale(h.c[CSD_GRAD_SCALE]) {}

  void update(float (&state)[4], float grad) const {
    float &master = state[0], &sum = state[1];
    const float g = decayed_grad(grad * grad_scale, weight_decay, master);
    sum = sum + g * g;
    master = master - step_size * g / (sqrtf(sum) + eps);
  }
};
