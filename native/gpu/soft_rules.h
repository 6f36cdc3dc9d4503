// The rules of rules.h on the numbers of soft.h: the same headers, in a namespace, with another type for float.
#pragma once
#include <math.h>

#include "csd.h"
#include "soft.h"

namespace soft {
struct csd_hyper {
  uint32_t rule;
  Flushed c[9];
};
#define float Flushed
#include "rules.h"
#undef float
}  // namespace soft
