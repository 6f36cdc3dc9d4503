// Adam: native/include/adam.h.
#include "adam.h"

using Rule = Adam;
#define CSD_KERNEL csd_adam_update
#define CSD_SECTIONS 4
#define CSD_OPERATORS CSD_LIMIT(fmul, 80) CSD_LIMIT(fadd, 40) CSD_LIMIT(fsub, 8) CSD_LIMIT(fdiv, 8) CSD_LIMIT(fsqrt, 8)
#include "update.h"
