// Adagrad: native/include/adagrad.h.
#include "adagrad.h"

using Rule = Adagrad;
#define CSD_KERNEL csd_adagrad_update
#define CSD_SECTIONS 2
#define CSD_OPERATORS CSD_LIMIT(fmul, 40) CSD_LIMIT(fadd, 32) CSD_LIMIT(fsub, 8) CSD_LIMIT(fdiv, 8) CSD_LIMIT(fsqrt, 8)
#include "update.h"
