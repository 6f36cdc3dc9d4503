// A kernel's control registers as Vitis HLS lays them out, and a call of the kernel by them: its C++ signature says
// where each argument is.
#pragma once
#include <stdint.h>
#include <string.h>

#include <tuple>

namespace csd::emulator {

// The bits of the first register (ap_ctrl_chain).
constexpr uint32_t kStart = 1, kDone = 2, kIdle = 4, kContinue = 16;

constexpr uint32_t kFirstArgument = 0x10;
constexpr uint32_t kPointerBytes = 12;  // an address of 64 bits, and a reserved word
constexpr uint32_t kScalarBytes = 8;    // 32 bits, and a reserved word

template <typename Translate, typename Scalar>
struct Argument {
  static_assert(sizeof(Scalar) == 4, "scalars of kernels have 32 bits");
  static Scalar take(const uint8_t *&at, Translate &) {
    Scalar value;
    memcpy(&value, at, sizeof value);
    at += kScalarBytes;
    return value;
  }
};

template <typename Translate, typename Pointee>
struct Argument<Translate, Pointee *> {
  static Pointee *take(const uint8_t *&at, Translate &translate) {
    uint64_t address;
    memcpy(&address, at, sizeof address);
    at += kPointerBytes;
    return static_cast<Pointee *>(translate(address));
  }
};

// `translate` turns an address of the device's memory into one of ours.
template <typename Translate, typename Result, typename... Args>
Result call(Result (*kernel)(Args...), const uint8_t *registers, Translate translate) {
  const uint8_t *at = registers + kFirstArgument;
  // Braces: evaluated from left to right.
  return std::apply(kernel, std::tuple<Args...>{Argument<Translate, Args>::take(at, translate)...});
}

}  // namespace csd::emulator
