// The engine's exception type; the C API turns it into a csd_error.
#pragma once
#include <string>

#include "csd.h"

namespace csd {

struct Failure {
  int32_t status = CSD_OK;
  std::string text;
  int os_errno = 0;
  int32_t device = -1;
  int32_t tile = -1;  // the damaged tile
};

// Returns, within a catch block, the current exception as a Failure. Does not allocate if memory has run out.
Failure caught() noexcept;

}  // namespace csd
