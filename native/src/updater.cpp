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

// For what the loop over a span calls once per group: at a call, constants lose their registers. 8-bit updates are 7 %
// faster with it.
#define CSD_INLINE static inline __attribute__((always_inline))

#define CSD_SIMD 0
namespace csd::scalar {
#include "changes_loop.h"
// the next one uses it
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
#include "changes_loop.h"
// the next one uses it
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
#include "changes_loop.h"
// the next one uses it
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

#define CSD_ROW(number, Rule, updated, most, codec) {number, 0, #Rule, updated, most, codec},
#define CSD_PASS(number, Rule, pass) {number, pass, #Rule, 1, 1, CSD_LINEAR},
const csd_rule_row kRules[] = {CSD_RULES(CSD_ROW) CSD_PASSES(CSD_PASS){}};
#undef CSD_ROW
#undef CSD_PASS

// Returns the row of a rule; for an unknown one, the empty row.
static const csd_rule_row &row_of(uint32_t rule) noexcept {
  const csd_rule_row *row = kRules;
  while (row->type && row->number != rule) row++;
  return *row;
}

SectionRange sections_of(uint32_t rule) noexcept {
  const csd_rule_row &row = row_of(rule);
  return {row.updated, row.most, row.codec};
}

uint32_t pass_of(uint32_t rule) noexcept { return row_of(rule).of_pass; }

namespace {

constexpr uint64_t kMostElems = 16 * 1024;  // of a span, see device_cpu.cpp
constexpr uint64_t kPiece = 4096;           // elements that are compared while their bits before the update are in L1

// The bits of a span's parameter in the versions that are published, from element `i` on.
void copy_bits(const Span &s, uint64_t i, uint64_t n, int32_t isa, uint16_t *to) {
  CSD_IN(isa, narrow_bits(s.state[0] + i, s.param_dtype, to, n));
}
void copy_bits(const void *param, uint32_t dtype, uint64_t i, uint64_t n, int32_t isa, uint16_t *to) {
  if (dtype == CSD_F32) CSD_IN(isa, narrow_bits(static_cast<const float *>(param) + i, CSD_BF16, to, n));
  else memcpy(to, static_cast<const uint16_t *>(param) + i, 2 * n);
}
void copy_bits(const CodedSpan &s, uint64_t i, uint64_t n, int32_t isa, uint16_t *to) {
  copy_bits(s.codes.param, s.param_dtype, i, n, isa, to);
}

Span part_of(const Span &s, uint64_t i, uint64_t n) {
  Span part = s;
  part.n = n;
  part.grad = static_cast<const char *>(s.grad) + (s.grad_dtype == CSD_F32 ? 4 : 2) * i;
  for (float *&state : part.state)
    if (state) state += i;
  if (s.param) part.param = static_cast<char *>(s.param) + (s.param_dtype == CSD_F32 ? 4 : 2) * i;
  return part;
}
CodedSpan part_of(const CodedSpan &s, uint64_t i, uint64_t n) {
  CodedSpan part = s;
  const uint64_t bytes = s.param_dtype == CSD_F32 ? 4 : 2;
  part.n = n;
  part.grad = static_cast<const char *>(s.grad) + (s.grad_dtype == CSD_F32 ? 4 : 2) * i;
  part.codes = scalar::codes_from(s.codes, s.param_dtype, i);
  if (s.param) part.param = static_cast<char *>(s.param) + bytes * i;
  part.key += static_cast<uint32_t>(i);
  return part;
}

// Records what was noted of n elements. `copy_all` copies the bits of all of them.
template <typename CopyAll>
void record(csd_watch &watch, Changes &changes, uint64_t n, CopyAll copy_all) {
  // Above 15/16 it is smaller, and for the reader simpler, to record all of them.
  if (changes.count < n && 16 * changes.count > 15 * n) {
    copy_all(changes.values);
    changes.count = n;
  }
  changes.whole = changes.count == n;
  if (changes.count) watch.changes->recorder.add(watch.param, changes, n);
  __atomic_fetch_add(&watch.sum, changes.sum, __ATOMIC_RELAXED);
  __atomic_fetch_add(&watch.updated, n, __ATOMIC_RELAXED);
}

// Updates a span of a watched parameter, piece by piece if its bits have to be compared with those before.
template <typename Span>
uint64_t update_watched(const Place &place, Span span, int32_t isa) {
  alignas(64) uint64_t mask[kMostElems / 64 + 1];
  alignas(64) uint16_t values[kMostElems + 64];  // see take()
  csd_watch &watch = *place.watch;
  memset(mask, 0, sizeof mask);
  Changes changes{place.first, mask, values};
  changes.whole = watch.whole;
  uint64_t bad = 0;
  if (!watch.checks) {
    if constexpr (std::is_same_v<Span, csd::Span>) span.changes = &changes;
    bad = CSD_IN(isa, update(span));
  } else {
    alignas(64) uint16_t before[kPiece], after[kPiece];
    uint64_t group = place.group, in_group = place.in_group;
    for (uint64_t i = 0, n; i < span.n; i += n) {
      n = std::min(kPiece - in_group, span.n - i);
      const Span part = part_of(span, i, n);
      copy_bits(part, 0, n, isa, before);
      bad += CSD_IN(isa, update(part));
      copy_bits(part, 0, n, isa, after);
      CSD_IN(isa, note_checked(before, after, n, in_group, watch.checks + group, watch.new_checks + group, changes));
      group += (in_group + n + 63) / 64;
      in_group = 0;
    }
  }
  record(watch, changes, span.n, [&](uint16_t *to) { copy_bits(span, 0, span.n, isa, to); });
  return bad;
}

template <typename Span>
uint64_t update_any(const Span &span, int32_t isa) {
  const Place place = place_of(span);
  if (!place.watch) return CSD_IN(isa, update(span));
  uint64_t bad = 0;  // tools may have longer spans
  for (uint64_t i = 0; i < span.n; i += kMostElems) {
    const Span part = part_of(span, i, std::min(kMostElems, span.n - i));
    bad += update_watched(i ? place_of(part) : place, part, isa);
  }
  return bad;
}

}  // namespace

void note_update(csd_watch &watch, uint32_t tile, const csd_piece &piece, uint32_t dtype, const void *before,
                 const void *after) noexcept {
  alignas(64) uint64_t mask[kMostElems / 64 + 1];
  alignas(64) uint16_t values[kMostElems + 64], was[kPiece], is[kPiece];  // see take()
  const int32_t isa = current_isa.load();
  for (uint64_t i = 0, n; i < piece.elems; i += n) {
    const Place place = place_in(watch, tile, piece, i);
    n = std::min(kMostElems - place.in_group, piece.elems - i);
    memset(mask, 0, sizeof mask);
    Changes changes{place.first, mask, values};
    changes.whole = watch.whole;
    uint64_t group = place.group, in_group = place.in_group;
    for (uint64_t j = 0, some; j < n; j += some) {
      some = std::min(kPiece - in_group, n - j);
      if (!changes.whole) copy_bits(before, dtype, i + j, some, isa, was);
      copy_bits(after, dtype, i + j, some, isa, is);
      CSD_IN(isa, note_checked(changes.whole ? is : was, is, some, in_group, watch.checks + group,
                               watch.new_checks + group, changes));
      group += (in_group + some + 63) / 64;
      in_group = 0;
    }
    record(watch, changes, n, [&](uint16_t *to) { copy_bits(after, dtype, i, n, isa, to); });
  }
}

uint32_t weighted_sum(const uint16_t *values, uint64_t first, uint64_t n) noexcept {
  return CSD_IN(current_isa.load(), weighted_sum(values, first, n));
}

uint64_t update(const Span &span, int32_t isa) { return update_any(span, isa); }
uint64_t update(const CodedSpan &span, int32_t isa) { return update_any(span, isa); }

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

void round_part(const Part &part, uint16_t *values) { CSD_IN(current_isa.load(), round_part(part, values)); }

void feed_back_part(const Part &part, uint64_t first, uint64_t n, const uint16_t *sent) {
  CSD_IN(current_isa.load(), feed_back_part(part, first, n, sent));
}

uint64_t collect(const uint16_t *values, uint64_t n, uint16_t least, uint32_t *indices) {
  return CSD_IN(current_isa.load(), collect(values, n, least, indices));
}

}  // namespace csd
