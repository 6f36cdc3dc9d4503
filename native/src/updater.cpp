#include "updater.h"

#include <string.h>

#include <algorithm>
#include <type_traits>

#include "codec.h"
#include "float16.h"
#include "rules.h"
#include "topk.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define CSD_X86 1
#else
#define CSD_X86 0
#endif

// updater_loop.h, codec_loop.h and topk_loop.h are compiled once per instruction set. The compiler
// vectorises the rules; only the 16-bit conversions and the like, for which it has no pattern, are written with
// intrinsics. Because of -ffp-contract=off and IEEE division and square root, all instruction sets compute the same
// bits.

#define CSD_SIMD 0
namespace csd::scalar {
#include "updater_loop.h"
// the next ones use it
#include "codec_loop.h"
#include "topk_loop.h"
}  // namespace csd::scalar
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
// the next ones use it
#include "codec_loop.h"
#include "topk_loop.h"
}  // namespace csd::avx2
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
// the next ones use it
#include "codec_loop.h"
#include "topk_loop.h"
}  // namespace csd::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef CSD_SIMD
#endif

namespace csd {

int32_t best_isa() noexcept {
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

std::atomic<int32_t> current_isa{best_isa()};

#if CSD_X86
#define CSD_IN(isa, call) ((isa) == CSD_ISA_AVX512 ? avx512::call : (isa) == CSD_ISA_AVX2 ? avx2::call : scalar::call)
#else
#define CSD_IN(isa, call) (static_cast<void>(isa), scalar::call)
#endif

SectionRange sections_of(uint32_t rule) noexcept {
  switch (rule) {
#define CSD_CASE(number, Rule, sections, most, codes) \
  case number:                                        \
    return {sections, most, codes};
    CSD_RULES(CSD_CASE)
#undef CSD_CASE
#define CSD_CASE(number, Rule, pass) \
  case number:                       \
    return {1, 1, false};
    CSD_PASSES(CSD_CASE)
#undef CSD_CASE
    default:
      return {};
  }
}

uint32_t pass_of(uint32_t rule) noexcept {
  switch (rule) {
#define CSD_CASE(number, Rule, pass) \
  case number:                       \
    return pass;
    CSD_PASSES(CSD_CASE)
#undef CSD_CASE
    default:
      return 0;
  }
}

uint64_t update(const Span &span, int32_t isa) { return CSD_IN(isa, update(span)); }
uint64_t update(const CodedSpan &span, int32_t isa) { return CSD_IN(isa, update(span)); }

void encode(const float *const *states, uint64_t n, uint32_t param_dtype, const Codes &codes, int32_t isa) {
  CSD_IN(isa, encode(states, n, param_dtype, codes));
}

void decode(const Codes &codes, uint64_t n, uint32_t param_dtype, float *const *states, int32_t isa) {
  CSD_IN(isa, decode(codes, n, param_dtype, states));
}

void compute_checks(const uint16_t *params, uint64_t n, uint32_t *checks) {
  CSD_IN(current_isa.load(), compute_checks(params, n, checks));
}

void drop_stale_corrections(const uint16_t *params, uint64_t n, const uint32_t *checks, uint8_t *corrections) {
  CSD_IN(current_isa.load(), drop_stale_corrections(params, n, checks, corrections));
}

void round_part(const Part &part, uint64_t n, uint16_t *values) {
  CSD_IN(current_isa.load(), round_part(part, n, values));
}

void feed_back_part(const Part &part, uint64_t first, uint64_t n, const uint16_t *sent) {
  CSD_IN(current_isa.load(), feed_back_part(part, first, n, sent));
}

uint64_t collect(const uint16_t *values, uint64_t n, uint16_t least, uint32_t *indices) {
  return CSD_IN(current_isa.load(), collect(values, n, least, indices));
}

}  // namespace csd
