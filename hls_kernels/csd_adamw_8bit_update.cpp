// AdamW on 8-bit codes: native/include/adamw.h, codec.h.
#include "adamw.h"

using Rule = AdamW;
#define CSD_KERNEL csd_adamw_8bit_update
#define CSD_OPERATORS \
  CSD_LIMIT(fmul, 112) CSD_LIMIT(fadd, 24) CSD_LIMIT(fsub, 32) CSD_LIMIT(fdiv, 8) CSD_LIMIT(fsqrt, 24)
#include "coded_update.h"
