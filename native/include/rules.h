// The list of all update rules. Each has a line in csd.h (enum csd_rule), a line here, and a header of its own.
//
// A rule is a type constructed from a step's csd_hyper. Its `update(float (&state)[4], float grad) const` takes one
// element of each section to the next step. It uses only the first sections of the tile, beginning with the fp32
// master, and multiplies the gradient by c[CSD_GRAD_SCALE]. Rule numbers that share a type are its variants. Each CPU
// loop is compiled for one number, so branches on `rule` cost nothing there. HLS kernels use the same types
// (hls_kernels/update.h).
//
// A rule may take two passes over a tile (CSD_PASS_2). Each pass is such a type of its own, whose `state` has only the
// sections of its half of the tile. If it has an `emit(const float (&state)[4], float grad) const`, the caller receives
// what that returns after the update, in place of the first section.
#pragma once
#include "adagrad.h"
#include "adam.h"
#include "adamw.h"
#include "lion.h"
#include "muon.h"
#include "rmsprop.h"
#include "sgd.h"

// number, type, number of sections it updates, most sections that a tile may have, the csd_codec of its 8-bit states
// (CSD_FP32: it has none; CSD_8BIT requires that the root of exp_avg_sq bounds exp_avg)
#define CSD_RULES(RULE)                                 \
  RULE(CSD_ADAMW, AdamW, 3, 4, CSD_8BIT)                \
  RULE(CSD_AMSGRAD, AdamW, 4, 4, CSD_8BIT)              \
  RULE(CSD_ADAM, Adam, 3, 4, CSD_8BIT)                  \
  RULE(CSD_ADAM_AMSGRAD, Adam, 4, 4, CSD_8BIT)          \
  RULE(CSD_SGD, SGD, 1, 2, CSD_FP32)                    \
  RULE(CSD_SGD_MOMENTUM, SGD, 2, 2, CSD_FP32)           \
  RULE(CSD_SGD_NESTEROV, SGD, 2, 2, CSD_FP32)           \
  RULE(CSD_ADAGRAD, Adagrad, 2, 2, CSD_ROOT)            \
  RULE(CSD_RMSPROP, RMSprop, 2, 4, CSD_ROOT)            \
  RULE(CSD_RMSPROP_CENTERED, RMSprop, 3, 4, CSD_FP32)   \
  RULE(CSD_RMSPROP_MOMENTUM, RMSprop, 3, 3, CSD_FP32)   \
  RULE(CSD_RMSPROP_BOTH, RMSprop, 4, 4, CSD_FP32)       \
  RULE(CSD_RMSPROP_UNCENTERED, RMSprop, 4, 4, CSD_FP32) \
  RULE(CSD_LION, Lion, 2, 2, CSD_FP32)

// number, type, pass: 1 works on all sections but the master, 2 on the master. Their 8-bit states are CSD_LINEAR. No card
// has kernels for these.
#define CSD_PASSES(PASS)                   \
  PASS(CSD_MUON_MOMENTUM, MuonMomentum, 1) \
  PASS(CSD_MUON_APPLY, MuonApply, 2)
