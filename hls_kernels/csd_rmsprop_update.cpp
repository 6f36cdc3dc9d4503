// RMSprop: native/include/rmsprop.h.
#include "rmsprop.h"

using Rule = RMSprop;
#define CSD_KERNEL csd_rmsprop_update
#define CSD_SECTIONS 4
#define CSD_OPERATORS CSD_LIMIT(fmul, 88) CSD_LIMIT(fadd, 48) CSD_LIMIT(fsub, 16) CSD_LIMIT(fdiv, 8) CSD_LIMIT(fsqrt, 8)
#include "update.h"
