// What went wrong: thrown inside, turned into a csd_error at the border.
#pragma once
#include <string>

#include "csd.h"

namespace csd {

struct Failure {
  int32_t status = CSD_OK;
  std::string text;
  int os_errno = 0;
  int32_t device = -1;
  int32_t tile = -1;  // that is damaged
};

// What was thrown, in a catch block: said without asking for memory, where there is none.
Failure caught() noexcept;

}  // namespace csd
