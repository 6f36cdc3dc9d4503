// RMSprop (Hinton, 2012, lecture 6e of "Neural Networks for Machine Learning"; centered: Graves, 2013) as implemented
// by torch.optim.RMSprop.
#pragma once
#include <math.h>

#include "csd.h"
#include "weight_decay.h"

// CSD_RMSPROP: master, square_avg. Further sections keep every bit.
// CSD_RMSPROP_CENTERED: master, square_avg, grad_avg; a fourth section, if there is one, keeps every bit.
// CSD_RMSPROP_MOMENTUM: master, square_avg, momentum_buffer.
// CSD_RMSPROP_BOTH: master, square_avg, grad_avg, momentum_buffer.
// CSD_RMSPROP_UNCENTERED: the same four sections, for `centered` turned off later: grad_avg keeps every bit.
struct RMSprop {
  // In this order in csd_hyper:
  float lr;
  float weight_decay;
  float alpha;
  float one_minus_alpha;
  float momentum;
  float eps;
  float grad_scale;
  bool centered, has_momentum;
  bool four;  // the tile has four sections

  explicit RMSprop(const csd_hyper &h)
      : lr(h.c[0]),
        weight_decay(h.c[1]),
        alpha(h.c[2]),
        one_minus_alpha(h.c[3]),
        momentum(h.c[4]),
        eps(h.c[5]),
        grad_scale(h.c[CSD_GRAD_SCALE]),
        centered(h.rule == CSD_RMSPROP_CENTERED || h.rule == CSD_RMSPROP_BOTH),
        has_momentum(h.rule != CSD_RMSPROP && h.rule != CSD_RMSPROP_CENTERED),
        four(h.rule == CSD_RMSPROP_BOTH || h.rule == CSD_RMSPROP_UNCENTERED) {}

  void update(float (&state)[4], float grad) const {
    float &master = state[0], &square_avg = state[1], &grad_avg = state[2];
    const float momentum_buffer = four ? state[3] : state[2];  // a copy: an FPGA cannot choose between references
    const float g = decayed_grad(grad * grad_scale, weight_decay, master);
    square_avg = square_avg * alpha + one_minus_alpha * g * g;
    float variance = square_avg;
    if (centered) {
      grad_avg = grad_avg * alpha + g * one_minus_alpha;
      variance = square_avg - grad_avg * grad_avg;
    }
    const float ratio = (has_momentum ? g : lr * g) / (sqrtf(variance) + eps);  // one division serves both cases
    const float moved = momentum_buffer * momentum + ratio;
    if (has_momentum && four) state[3] = moved;
    if (has_momentum && !four) state[2] = moved;
    master = master - (has_momentum ? lr * moved : ratio);
  }
};
