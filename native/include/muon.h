// Muon (Jordan et al., 2024) as implemented by torch.optim.Muon: momentum whose update is orthogonalized, with AdamW's
// decoupled weight decay. The orthogonalization needs whole matrices and happens outside, so this rule takes two passes
// over a tile: see CSD_PASS_2.
//
// torch fuses multiplications with additions. These do not, so that all instruction sets and kernels compute the same
// bits; the momentum differs from torch's by 1e-7 of its size.
#pragma once
#include "csd.h"

// CSD_MUON_MOMENTUM, pass 1: momentum_buffer. Returns the matrix that is to be orthogonalized.
struct MuonMomentum {
  // In this order in csd_hyper:
  float one_minus_momentum;
  float momentum;
  bool nesterov;  // not 0: mix the momentum with the gradient once more
  float grad_scale;

  explicit MuonMomentum(const csd_hyper &h)
      : one_minus_momentum(h.c[0]), momentum(h.c[1]), nesterov(h.c[2] != 0), grad_scale(h.c[CSD_GRAD_SCALE]) {}

  void update(float (&state)[4], float grad) const {
    float &momentum_buffer = state[0];
    momentum_buffer = momentum_buffer + one_minus_momentum * (grad * grad_scale - momentum_buffer);
  }

  float emit(const float (&state)[4], float grad) const {
    const float g = grad * grad_scale, momentum_buffer = state[0];
    return nesterov ? g + momentum * (momentum_buffer - g) : momentum_buffer;
  }
};

// CSD_MUON_APPLY, pass 2: master. Its gradient is the orthogonalized matrix, which has no scale: c[CSD_GRAD_SCALE] is
// not read.
struct MuonApply {
  // In this order in csd_hyper:
  float decay;      // 1 - lr * weight_decay
  float step_size;  // lr * ratio, the ratio by which adjust_lr_fn adapts lr to the shape of the matrix

  explicit MuonApply(const csd_hyper &h) : decay(h.c[0]), step_size(h.c[1]) {}

  void update(float (&state)[4], float orthogonal) const { state[0] = state[0] * decay - step_size * orthogonal; }
};
