// Ways to push a tile, for the programs in this directory: see csd_push.
#pragma once
#include "csd.h"

inline int push_images(csd_engine *engine, uint32_t tile, const void *grad, void *param, csd_error *error,
                       const uint32_t *entries = nullptr, uint64_t n_entries = 0) {
  const csd_push how{grad, param, entries, n_entries, nullptr, nullptr, nullptr};
  return csd_engine_push(engine, tile, &how, error);
}

// Gradients at addresses, one for each piece; early if there is memory to hold them.
inline int push_at(csd_engine *engine, uint32_t tile, const void *const *grads, csd_error *error,
                   void *hold = nullptr) {
  const csd_push how{nullptr, nullptr, nullptr, 0, grads, hold, nullptr};
  return csd_engine_push(engine, tile, &how, error);
}
