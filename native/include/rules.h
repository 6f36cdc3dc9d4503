// Every update rule that the CPU has: a line in csd.h (enum csd_rule), one here, and a header of its own.
//
// A rule is a type that is made of a step's csd_hyper, and whose `update(float (&state)[4], float grad) const` takes
// one element of each section to the next step. It touches the first sections only, the fp32 master being the first,
// and multiplies the gradient by c[CSD_GRAD_SCALE]. Numbers that share a type are variants: where a loop is compiled,
// `rule` is known, so that what depends on it costs nothing. HLS kernels compile the same type (hls_kernels/update.h).
#pragma once
#include "adagrad.h"
#include "adam.h"
#include "adamw.h"
#include "lion.h"
#include "rmsprop.h"
#include "sgd.h"

// number, type, sections that it updates, sections that a tile may have, whether codes can keep them (codec.h: there
// exp_avg is bounded by the root of exp_avg_sq)
#define CSD_RULES(RULE)                              \
  RULE(CSD_ADAMW, AdamW, 3, 4, true)                 \
  RULE(CSD_AMSGRAD, AdamW, 4, 4, true)               \
  RULE(CSD_ADAM, Adam, 3, 4, true)                   \
  RULE(CSD_ADAM_AMSGRAD, Adam, 4, 4, true)           \
  RULE(CSD_SGD, SGD, 1, 2, false)                    \
  RULE(CSD_SGD_MOMENTUM, SGD, 2, 2, false)           \
  RULE(CSD_SGD_NESTEROV, SGD, 2, 2, false)           \
  RULE(CSD_ADAGRAD, Adagrad, 2, 2, false)            \
  RULE(CSD_RMSPROP, RMSprop, 2, 4, false)            \
  RULE(CSD_RMSPROP_CENTERED, RMSprop, 3, 4, false)   \
  RULE(CSD_RMSPROP_MOMENTUM, RMSprop, 3, 3, false)   \
  RULE(CSD_RMSPROP_BOTH, RMSprop, 4, 4, false)       \
  RULE(CSD_RMSPROP_UNCENTERED, RMSprop, 4, 4, false) \
  RULE(CSD_LION, Lion, 2, 2, false)
