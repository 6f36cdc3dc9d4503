// SGD: native/include/sgd.h.
#include "sgd.h"

using Rule = SGD;
#define CSD_KERNEL csd_sgd_update
#define CSD_SECTIONS 2
#define CSD_OPERATORS CSD_LIMIT(fmul, 56) CSD_LIMIT(fadd, 32) CSD_LIMIT(fsub, 8)
#include "update.h"
