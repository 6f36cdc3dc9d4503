// The rules, and the numbers on which they compute: fp32 numbers of the processor, or with CSD_SOFT those of soft.h.
#pragma once
#ifdef CSD_SOFT
#include "soft_rules.h"
#define CSD_SPACE soft
using Number = Flushed;
inline float value_of(Number x) { return x.v; }
#else
#include <math.h>

#include "rules.h"
#define CSD_SPACE
using Number = float;
inline float value_of(Number x) { return x; }
#endif

/* cdef */
enum { kBlockElems = 4096 }; /* elements of a parameter that a block updates */
/* end of cdef */

// The constants of a step, with the rule's number as a constant for the compiler.
template <uint32_t number>
inline CSD_SPACE::csd_hyper hyper_of(const ::csd_hyper &given) {
  CSD_SPACE::csd_hyper hyper;
  hyper.rule = number;
  for (int c = 0; c < 9; c++) hyper.c[c] = given.c[c];
  return hyper;
}
