// AdamW: native/include/adamw.h.
#include "adamw.h"

using Rule = AdamW;
#define CSD_KERNEL csd_adamw_update
#define CSD_SECTIONS 4
#define CSD_OPERATORS CSD_LIMIT(fmul, 80) CSD_LIMIT(fadd, 32) CSD_LIMIT(fsub, 8) CSD_LIMIT(fdiv, 8) CSD_LIMIT(fsqrt, 8)
#include "update.h"
