// The CPU updater: the rules over arrays, vectorised, one pass over memory.
#pragma once
#include <atomic>

#include "csd.h"
#include "layout.h"

namespace csd {

struct Span {  // n elements of one parameter
  const csd_hyper *hyper;
  uint64_t n;
  const void *grad;
  uint32_t grad_dtype;
  float *state[4];  // one per section; null where the rule updates none
  void *param;      // null: nobody wants the rounded master
  uint32_t param_dtype;
  bool unless_set;  // where `param`, of 16 bits, is not the rounded master, it is the master
};

// Where the codes of n elements are (codec.h). They begin with a group; what the last one has beyond them is nobody's, and
// zero.
struct Codes {
  void *param;          // 16 bits; or the fp32 master, and no correction
  uint8_t *correction;  // null: fp32
  uint8_t *ratio, *root, *exponent;
  uint8_t *peak, *peak_exponent;  // null: no max_exp_avg_sq
};

inline Codes codes_at(const Layout &layout, char *const *sections, uint64_t first) {
  const auto at = [&](uint32_t s) { return reinterpret_cast<uint8_t *>(sections[s]) + layout.bytes_of(s, first); };
  const uint32_t ratio = layout.has_correction() ? 2 : 1, peak = ratio + 3;
  const bool has_peak = peak < layout.n();
  return {at(0),
          ratio == 2 ? at(1) : nullptr,
          at(ratio),
          at(ratio + 1),
          at(ratio + 2),
          has_peak ? at(peak) : nullptr,
          has_peak ? at(peak + 1) : nullptr};
}

struct CodedSpan {  // n elements of one parameter
  const csd_hyper *hyper;
  uint64_t n;
  const void *grad;
  uint32_t grad_dtype;
  uint32_t param_dtype;
  Codes codes;
  void *param;   // null: nobody wants what is in codes.param
  uint32_t key;  // of the first element's chance
};

// How many sections a tile may have whose parameters a rule updates, and whether they may be codes.
struct SectionRange {
  uint32_t least, most;
  bool codes;
  bool take(uint32_t sections) const { return least <= sections && sections <= most; }
};
SectionRange sections_of(uint32_t rule) noexcept;  // none: there is no such rule

// Returns how many gradients are inf or nan; their elements are updated all the same.
uint64_t update(const Span &span, int32_t isa);
uint64_t update(const CodedSpan &span, int32_t isa);

// Master, exp_avg, exp_avg_sq, max_exp_avg_sq of n elements. To nearest; what is null stays as it is, or is not wanted.
// A master within half a unit of the parameter in `codes` keeps that; another one brings its own.
void encode(const float *const *states, uint64_t n, uint32_t param_dtype, const Codes &codes, int32_t isa);
void decode(const Codes &codes, uint64_t n, uint32_t param_dtype, float *const *states, int32_t isa);

// Of 16-bit parameters that are kept nowhere else, a check of each group of 64: takes them; and where one differs,
// because somebody set parameters of the group, makes its corrections zero.
void take_checks(const uint16_t *params, uint64_t n, uint32_t *checks);
void forget_set(const uint16_t *params, uint64_t n, const uint32_t *checks, uint8_t *corrections);

int32_t best_isa() noexcept;
extern std::atomic<int32_t> used_isa;

}  // namespace csd
