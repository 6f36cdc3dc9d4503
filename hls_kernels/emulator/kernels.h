// A table by name of the kernels compiled by g++.
#pragma once
#include <stdint.h>

#include <string_view>

namespace csd::emulator {

// The arguments of a kernel are `buffers()` addresses followed by numbers, in the order of csd_kernel.h.
struct Kernel {
  const char *name;
  uint32_t ports;  // for the tile, in each direction
  void (*run)(void *const *buffers, const uint32_t *numbers);

  constexpr uint32_t tile_out() const { return ports + 3; }
  constexpr uint32_t param() const { return 2 * ports + 3; }
  constexpr uint32_t buffers() const { return 2 * ports + 5; }
};
constexpr uint32_t kNumbers = 7;
constexpr uint32_t kMostBuffers = 2 * 4 + 5;

const Kernel *kernel_named(std::string_view name);  // nullptr if there is none

}  // namespace csd::emulator
