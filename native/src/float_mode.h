// How the CPU computes here, whoever made the thread and whatever that one had set: rounded to nearest, nothing traps.
// A thread inherits all this from its maker, and one library linked with -ffast-math changes it for a whole program.
//
// In updates subnormal numbers are zero, as operands and as results: that is what FPGAs compute, and a moment that
// fades away (0.9 * m, rounded, stays at a few units of the last subnormal for ever) would make an update ten times
// slower. Top-K has them: its other half is torch's (compression.py), which has them on CUDA, and nothing fades there.
#pragma once
#include <cstdint>

#if defined(__FAST_MATH__)
#error "csd_optim promises the same bits everywhere: compile it without -ffast-math and -Ofast"
#endif

namespace csd {

enum class Subnormals { zero, kept };

class FloatMode {  // from here to the end of the block, in this thread
 public:
  explicit FloatMode(Subnormals subnormals) : before_(get()) {
#if defined(__x86_64__)
    set(subnormals == Subnormals::zero ? 0x9fc0 : 0x1f80);  // exceptions masked; flush to zero and denormals are zero
#elif defined(__aarch64__)
    set(subnormals == Subnormals::zero ? 1u << 24 : 0);  // FZ: both
#else
#error "say here how this CPU takes subnormal numbers for zero"
#endif
  }
  ~FloatMode() { set(before_); }
  FloatMode(const FloatMode &) = delete;

 private:
  // "memory": what is loaded after this is not computed before, what is stored before it not after.
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
