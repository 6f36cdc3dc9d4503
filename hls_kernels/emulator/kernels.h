// The kernels as g++ compiled them, by their names.
#pragma once
#include <stdint.h>

#include <string_view>

namespace csd::emulator {

// Its arguments: `buffers()` addresses, then numbers, as csd_kernel.h has them.
struct Kernel {
  const char *name;
  uint32_t ports;  // for a tile, each way
  void (*run)(void *const *buffers, const uint32_t *numbers);

  constexpr uint32_t tile_out() const { return ports + 3; }
  constexpr uint32_t param() const { return 2 * ports + 3; }
  constexpr uint32_t buffers() const { return 2 * ports + 5; }
};
constexpr uint32_t kNumbers = 7;
constexpr uint32_t kMostBuffers = 2 * 4 + 5;

const Kernel *kernel_named(std::string_view name);  // nullptr: there is none

}  // namespace csd::emulator
