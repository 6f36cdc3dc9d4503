// The update rule. It stands here and nowhere else: the CPU updater and every HLS kernel call it.
//
// AdamW (Loshchilov & Hutter, 2019, algorithm 2) as torch.optim.AdamW orders it: decay, both moments, then the step.
// Every operation is rounded to nearest fp32 on its own, and subnormal numbers are zero (native/src/float_mode.h).
// Compile with -ffp-contract=off: a fused multiply-add here would give other bits on other machines.
#pragma once
#include <math.h>

#include "csd.h"

struct AdamWElement {
  float master, exp_avg, exp_avg_sq;
};

// One element. `max_exp_avg_sq` is read and written with amsgrad only.
inline AdamWElement adamw(AdamWElement e, float &max_exp_avg_sq, float grad, const csd_adamw &h, bool amsgrad) {
  const float g = grad * h.grad_scale;
  e.master = e.master * h.decay;
  // Two products rather than a lerp: with beta1 = 0 exp_avg is the gradient to the last bit.
  e.exp_avg = e.exp_avg * h.beta1 + g * h.one_minus_beta1;
  // (1 - beta2) * g first, so that a gradient of 1e20 does not overflow by being squared.
  e.exp_avg_sq = e.exp_avg_sq * h.beta2 + h.one_minus_beta2 * g * g;
  float second = e.exp_avg_sq;
  if (amsgrad) {
    // As torch.maximum: a nan on either side stays.
    max_exp_avg_sq = (second > max_exp_avg_sq || second != second) ? second : max_exp_avg_sq;
    second = max_exp_avg_sq;
  }
  const float denom = sqrtf(second) * h.inv_sqrt_bias2 + h.eps;
  e.master = e.master - h.step_size * e.exp_avg / denom;
  return e;
}
