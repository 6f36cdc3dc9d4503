#include "failure.h"

#include <errno.h>

#include <exception>
#include <new>
#include <system_error>
#include <utility>

namespace csd {

Failure caught() noexcept {
  try {
    try {
      throw;
    } catch (Failure &f) {
      return std::move(f);
    } catch (const std::bad_alloc &) {
    } catch (const std::system_error &e) {
      return {CSD_ENOMEM, std::string("no thread can be started: ") + e.what(), e.code().value()};
    } catch (const std::exception &e) {
      return {CSD_EINVAL, e.what()};
    } catch (...) {
      return {CSD_EINVAL, "unknown exception"};
    }
  } catch (...) {  // no memory for the text
  }
  return {CSD_ENOMEM, "out of memory", ENOMEM};  // short enough to lie in the string itself
}

}  // namespace csd
