// The kernels that an xclbin may have, and what each is for.
#pragma once
#include <stdint.h>

#include <string>
#include <vector>

namespace csd {

// The arguments of a kernel, in their order (csd_kernel.h). Those for a tile are as many as it has ports for one, each way.
enum class KernelArg { tile_in, grad, entries, segments, tile_out, param, report, numbers };

// There is one for each type of rules.h, with all its variants, and one for codes of its states where there may be such.
struct Kernel {
  std::string name;  // csd_lion_update, csd_adamw_8bit_update
  uint32_t codec;    // csd_codec
  int ports;         // for a tile, each way
  std::vector<uint32_t> rules;
  uint32_t sections;  // that the first of them updates

  int index(KernelArg) const noexcept;
  bool has_rule(uint32_t rule) const noexcept;
  bool takes(uint32_t codec, uint32_t sections) const noexcept;  // a tile of these
};
const std::vector<Kernel> &all_kernels();

}  // namespace csd
