// Lion: native/include/lion.h.
#include "lion.h"

using Rule = Lion;
#define CSD_KERNEL csd_lion_update
#define CSD_SECTIONS 2
#define CSD_OPERATORS CSD_LIMIT(fmul, 64) CSD_LIMIT(fadd, 24) CSD_LIMIT(fsub, 8)
#include "update.h"
