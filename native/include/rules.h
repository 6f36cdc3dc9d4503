// Every update rule that the CPU has: a line in csd.h (enum csd_rule), one here, and a header of its own.
//
// A rule is a type that is made of a step's csd_hyper, and whose `update(float (&state)[4], float grad) const` takes
// one element of each section to the next step. It touches the first sections only, the fp32 master being the first,
// and multiplies the gradient by c[CSD_GRAD_SCALE]. Numbers that share a type are variants: where a loop is compiled,
// `rule` is known, so that what depends on it costs nothing. HLS kernels compile the same type (hls_kernels/stages.h).
#pragma once
#include "adamw.h"

// number, type, sections that it updates, sections that a tile may have
#define CSD_RULES(RULE)        \
  RULE(CSD_ADAMW, AdamW, 3, 4) \
  RULE(CSD_AMSGRAD, AdamW, 4, 4)
