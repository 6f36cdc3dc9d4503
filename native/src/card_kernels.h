// The kernels that an xclbin may contain, and the tiles that each can update.
#pragma once
#include <stdint.h>

#include <string>
#include <vector>

namespace csd {

// The arguments of a kernel, in order (csd_kernel.h). tile_in and tile_out stand for as many arguments as the kernel
// has ports in each direction.
enum class KernelArg { tile_in, grad, entries, segments, tile_out, param, report, numbers };

// There is one kernel for each type of rules.h, with all its variants, and another for its codes if these are CSD_8BIT.
struct Kernel {
  std::string name;  // csd_lion_update, csd_adamw_8bit_update
  uint32_t codec;    // csd_codec
  int ports;         // for the tile, in each direction
  std::vector<uint32_t> rules;
  uint32_t sections;  // number that the first rule updates

  int index(KernelArg) const noexcept;
  bool has_rule(uint32_t rule) const noexcept;
  bool takes(uint32_t codec, uint32_t sections) const noexcept;  // can it update such a tile?
};
const std::vector<Kernel> &all_kernels();

}  // namespace csd
