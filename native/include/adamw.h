// The AdamW update rule. This is its only implementation: the CPU updater and the HLS kernels all call it.
//
// AdamW (Loshchilov & Hutter, 2019, algorithm 2) in the order of torch.optim.AdamW: decay, both moments, then the step.
// Every operation is rounded to nearest fp32 on its own, and subnormal numbers are zero (native/src/float_mode.h).
// Compile with -ffp-contract=off: a fused multiply-add would give different bits on different machines.
#pragma once
#include <math.h>

#include "csd.h"

// CSD_ADAMW: master, exp_avg, exp_avg_sq. A fourth section, if there is one, keeps every bit.
// CSD_AMSGRAD: master, exp_avg, exp_avg_sq, max_exp_avg_sq; it divides by the root of the last.
struct AdamW {
  // The caller computes the constants in double, with the bias corrections folded in, and rounds them once. In this
  // order in csd_hyper:
  float decay;  // 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;       // lr / (1 - beta1^t)
  float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float grad_scale;
  bool amsgrad;

  explicit AdamW(const csd_hyper &h)
      : decay(h.c[0]),
        beta1(h.c[1]),
        one_minus_beta1(h.c[2]),
        beta2(h.c[3]),
        one_minus_beta2(h.c[4]),
        step_size(h.c[5]),
        inv_sqrt_bias2(h.c[6]),
        eps(h.c[7]),
        grad_scale(h.c[CSD_GRAD_SCALE]),
        amsgrad(h.rule == CSD_AMSGRAD) {}

  // One element of each section.
  void update(float (&state)[4], float grad) const {
    const float g = grad * grad_scale;
    state[0] = state[0] * decay;
    descend(state, g);
  }

  // The rest of the update after the decay, shared with Adam (adam.h). `g`: the scaled gradient.
  void descend(float (&state)[4], float g) const {
    float &master = state[0], &exp_avg = state[1], &exp_avg_sq = state[2], &max_exp_avg_sq = state[3];
    // Two products rather than a lerp: with beta1 = 0 exp_avg is the gradient to the last bit.
    exp_avg = exp_avg * beta1 + g * one_minus_beta1;
    // (1 - beta2) * g first, so that a gradient of 1e20 does not overflow by being squared.
    exp_avg_sq = exp_avg_sq * beta2 + one_minus_beta2 * g * g;
    float second = exp_avg_sq;
    if (amsgrad) {
      // Like torch.maximum: nan if either operand is nan.
      max_exp_avg_sq = (second > max_exp_avg_sq || second != second) ? second : max_exp_avg_sq;
      second = max_exp_avg_sq;
    }
    const float denom = sqrtf(second) * inv_sqrt_bias2 + eps;
    master = master - step_size * exp_avg / denom;
  }
};
