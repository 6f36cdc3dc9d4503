// Stochastic gradient descent as implemented by torch.optim.SGD, with plain or Nesterov momentum (Sutskever et al.,
// 2013). As in torch, the learning rate multiplies the momentum buffer instead of being accumulated in it.
#pragma once
#include "csd.h"
#include "weight_decay.h"

// CSD_SGD: master. A second section, if there is one, keeps every bit.
// CSD_SGD_MOMENTUM, CSD_SGD_NESTEROV: master, momentum_buffer.
struct SGD {
  // In this order in csd_hyper:
  float lr;
  float weight_decay;
  float momentum;
  float one_minus_dampening;  // 1 in a parameter's first step, where the momentum buffer becomes the gradient
  float grad_scale;
  bool has_momentum, nesterov;

  explicit SGD(const csd_hyper &h)
      : lr(h.c[0]),
        weight_decay(h.c[1]),
        momentum(h.c[2]),
        one_minus_dampening(h.c[3]),
        grad_scale(h.c[CSD_GRAD_SCALE]),
        has_momentum(h.rule != CSD_SGD),
        nesterov(h.rule == CSD_SGD_NESTEROV) {}

  void update(float (&state)[4], float grad) const {
    float &master = state[0], &momentum_buffer = state[1];
    float step = decayed_grad(grad * grad_scale, weight_decay, master);
    if (has_momentum) {
      momentum_buffer = momentum_buffer * momentum + step * one_minus_dampening;
      step = nesterov ? step + momentum * momentum_buffer : momentum_buffer;
    }
    master = master - lr * step;
  }
};
