// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2): the sign of an interpolation
// between momentum and gradient, with AdamW's decoupled weight decay.
#pragma once
#include "csd.h"

// CSD_LION: master, exp_avg.
struct Lion {
  // In this order in csd_hyper:
  float decay;  // 1 - lr * weight_decay
  float lr;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float grad_scale;

  explicit Lion(const csd_hyper &h)
      : decay(h.c[0]),
        lr(h.c[1]),
        beta1(h.c[2]),
        one_minus_beta1(h.c[3]),
        beta2(h.c[4]),
        one_minus_beta2(h.c[5]),
        grad_scale(h.c[CSD_GRAD_SCALE]) {}

  void update(float (&state)[4], float grad) const {
    float &master = state[0], &exp_avg = state[1];
    const float g = grad * grad_scale;
    const float between = exp_avg * beta1 + g * one_minus_beta1;
    // Like torch.sign: zero for zero and for nan.
    const float sign = between > 0 ? 1.0f : between < 0 ? -1.0f : 0.0f;
    master = master * decay - lr * sign;
    exp_avg = exp_avg * beta2 + g * one_minus_beta2;
  }
};
