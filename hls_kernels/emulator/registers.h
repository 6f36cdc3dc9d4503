// The layout of a kernel's control registers by Vitis HLS: addresses first, then numbers.
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace csd::emulator {

// The bits of the first register (ap_ctrl_chain).
constexpr uint32_t kStart = 1, kDone = 2, kIdle = 4, kContinue = 16;

constexpr uint32_t kFirstArgument = 0x10;
constexpr uint32_t kPointerBytes = 12;  // an address of 64 bits, and a reserved word
constexpr uint32_t kScalarBytes = 8;    // 32 bits, and a reserved word

constexpr uint32_t register_of_buffer(uint32_t n) { return kFirstArgument + n * kPointerBytes; }
constexpr uint32_t register_of_number(const Kernel &kernel, uint32_t n) {
  return register_of_buffer(kernel.buffers()) + n * kScalarBytes;
}

}  // namespace csd::emulator
