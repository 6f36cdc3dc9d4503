// Adam on 8-bit codes: native/include/adam.h, codec.h.
#include "adam.h"

using Rule = Adam;
#define CSD_KERNEL csd_adam_8bit_update
#define CSD_OPERATORS \
  CSD_LIMIT(fmul, 112) CSD_LIMIT(fadd, 32) CSD_LIMIT(fsub, 32) CSD_LIMIT(fdiv, 8) CSD_LIMIT(fsqrt, 24)
#include "coded_update.h"
