// Weight decay as an L2 penalty: what most rules of torch.optim add to the gradient, AdamW's and Lion's excepted.
#pragma once

// Without decay the gradient alone, as in torch: an infinite weight times 0 would be nan.
inline float decayed_grad(float g, float weight_decay, float weight) {
  return weight_decay != 0 ? g + weight_decay * weight : g;
}
