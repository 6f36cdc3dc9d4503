// Calls the kernels like a card, with an array of addresses and an array of numbers.
#include <exception>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "emulator.h"
#include "kernel.h"
#include "kernels.h"

namespace csd::emulator {
namespace {

// Converts the next register value to the argument that it stands for. Addresses must be aligned to words.
template <typename Argument>
Argument next_argument(void *const *&buffers, const uint32_t *&numbers) {
  if constexpr (std::is_pointer_v<Argument>) {
    if ((uintptr_t)*buffers % kWordBytes) throw std::invalid_argument("an address is not a multiple of 64 bytes");
    return static_cast<Argument>(*buffers++);
  } else {
    return *numbers++;
  }
}

template <typename... Arguments>
void call(void (*kernel)(Arguments...), void *const *buffers, const uint32_t *numbers) {
  // Braces guarantee evaluation from left to right.
  std::apply(kernel, std::tuple<Arguments...>{next_argument<Arguments>(buffers, numbers)...});
}

template <auto kernel>
void run(void *const *buffers, const uint32_t *numbers) {
  call(kernel, buffers, numbers);
}

constexpr Kernel kKernels[] = {
    {"csd_adamw_update", 4, run<csd_adamw_update>},
    {"csd_adam_update", 4, run<csd_adam_update>},
    {"csd_sgd_update", 2, run<csd_sgd_update>},
    {"csd_adagrad_update", 2, run<csd_adagrad_update>},
    {"csd_rmsprop_update", 4, run<csd_rmsprop_update>},
    {"csd_lion_update", 2, run<csd_lion_update>},
    {"csd_adamw_8bit_update", 3, run<csd_adamw_8bit_update>},
    {"csd_adam_8bit_update", 3, run<csd_adam_8bit_update>},
};

}  // namespace

const Kernel *kernel_named(std::string_view name) {
  for (const Kernel &kernel : kKernels)
    if (kernel.name == name) return &kernel;
  return nullptr;
}

}  // namespace csd::emulator

const char *csd_csim_run(const char *kernel, void *const *buffers, const uint32_t *numbers) {
  static thread_local std::string why;
  const csd::emulator::Kernel *const found = csd::emulator::kernel_named(kernel);
  if (!found) return "there is no such kernel";
  try {
    found->run(buffers, numbers);
    return nullptr;
  } catch (const std::exception &e) {
    why = e.what();
    return why.c_str();
  }
}
