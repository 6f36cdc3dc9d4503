// Weight decay as an L2 penalty, which torch.optim's rules add to the gradient, except for decoupled decay (AdamW,
// Lion).
#pragma once

// Without decay, returns the gradient unchanged, as torch does: 0 times an infinite weight would be nan.
inline float decayed_grad(float g, float weight_decay, float weight) {
  return weight_decay != 0 ? g + weight_decay * weight : g;
}
