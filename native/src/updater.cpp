#include "updater.h"

#include <algorithm>
#include <type_traits>

#include "adamw.h"
#include "float16.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define CSD_X86 1
#else
#define CSD_X86 0
#endif

// updater_loop.h is compiled once per instruction set. The compiler vectorises the rule; only the 16-bit
// conversions, for which it has no pattern, are spelled in intrinsics. -ffp-contract=off and IEEE division and
// square root make all of them compute the same bits.

#define CSD_SIMD 0
namespace csd::scalar {
#include "updater_loop.h"
}
#undef CSD_SIMD

#if CSD_X86
#define CSD_SIMD 2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace csd::avx2 {
#include "updater_loop.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef CSD_SIMD

#define CSD_SIMD 3
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512")
#endif
namespace csd::avx512 {
#include "updater_loop.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef CSD_SIMD
#endif

namespace csd {

int32_t best_isa() {
#if CSD_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return CSD_ISA_AVX512;
  unsigned a, b, c, d;  // not every compiler's __builtin_cpu_supports knows f16c
  if (__builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C) return CSD_ISA_AVX2;
#endif
  return CSD_ISA_SCALAR;
}

std::atomic<int32_t> used_isa{best_isa()};

uint64_t update(const Span &span, [[maybe_unused]] int32_t isa) {
#if CSD_X86
  if (isa == CSD_ISA_AVX512) return avx512::update(span);
  if (isa == CSD_ISA_AVX2) return avx2::update(span);
#endif
  return scalar::update(span);
}

}  // namespace csd
