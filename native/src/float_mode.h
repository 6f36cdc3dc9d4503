// Sets the floating-point mode of the current thread: round to nearest, no traps. A thread inherits its mode from the
// thread that created it, and a single library linked with -ffast-math changes the mode of a whole program.
//
// In updates, subnormal operands and results count as zero. FPGAs compute this way, and a decaying moment would
// otherwise make an update ten times slower: 0.9 * m, rounded, stays at a few units of the smallest subnormal forever.
// Top-K keeps subnormals, because nothing decays there. So do its kernels for GPUs (native/gpu/topk.h).
#pragma once
#include <cstdint>

#if defined(__FAST_MATH__)
#error "csd_optim promises the same bits everywhere: compile it without -ffast-math and -Ofast"
#endif

namespace csd {

enum class Subnormals { zero, kept };

class FloatMode {  // for the lifetime of this object, in this thread
 public:
  explicit FloatMode(Subnormals subnormals) : before_(get()) {
#if defined(__x86_64__)
    set(subnormals == Subnormals::zero ? 0x9fc0 : 0x1f80);  // exceptions masked; flush to zero and denormals are zero
#elif defined(__aarch64__)
    set(subnormals == Subnormals::zero ? 1u << 24 : 0);  // FZ: both
#else
#error "add the mode in which this CPU treats subnormal numbers as zero"
#endif
  }
  ~FloatMode() { set(before_); }
  FloatMode(const FloatMode &) = delete;

 private:
  // "memory" keeps the compiler from moving loads to before this point, and stores to after it.
#if defined(__x86_64__)
  using Register = uint32_t;  // MXCSR
  static Register get() {
    Register mode;
    asm volatile("stmxcsr %0" : "=m"(mode));
    return mode;
  }
  static void set(Register mode) { asm volatile("ldmxcsr %0" ::"m"(mode) : "memory"); }
#elif defined(__aarch64__)
  using Register = uint64_t;  // FPCR
  static Register get() {
    Register mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(Register mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#endif
  Register before_;
};

}  // namespace csd
