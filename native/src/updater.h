// The CPU updater: applies the update rules to arrays, vectorised, in one pass over memory.
#pragma once
#include <atomic>
#include <type_traits>

#include "changes.h"
#include "csd.h"
#include "layout.h"

namespace csd {

struct Span {  // n elements of one parameter
  const csd_hyper *hyper;
  uint64_t n;
  const void *grad;
  uint32_t grad_dtype;
  float *state[4];  // one per section; null for sections that the rule does not update
  void *param;      // receives the rounded master, or what the rule emits; may be null
  uint32_t param_dtype;
  bool unless_set;             // an element whose 16-bit `param` is not the rounded master takes `param` as its master
  Changes *changes = nullptr;  // for 16-bit `param`: receives what changes in its rounded master
};

// The addresses of the codes of n elements (codec.h). They begin with a whole group; unused elements of the last group
// are zero. One of two passes over a tile has only those of its half: the others are null.
struct Codes {
  void *param;          // 16-bit parameters, or fp32 masters
  uint8_t *correction;  // null for fp32
  uint8_t *linear;      // CSD_LINEAR only, which has no root
  uint8_t *ratio;       // CSD_8BIT only
  uint8_t *root, *exponent;
  uint8_t *peak, *peak_exponent;  // null: no max_exp_avg_sq
};

inline Codes codes_at(const Layout &layout, char *const *sections, uint64_t first, Sections of) {
  const auto at = [&](uint32_t s) {
    return s < of.begin || s >= of.end ? nullptr : reinterpret_cast<uint8_t *>(sections[s]) + layout.bytes_of(s, first);
  };
  const bool has_ratio = layout.codec() == CSD_8BIT, is_linear = layout.codec() == CSD_LINEAR;
  const uint32_t ratio = layout.half(1).begin, root = has_ratio ? ratio + 1 : ratio, peak = root + 2;
  const bool has_peak = peak < layout.n();
  return {at(0),
          layout.has_correction() ? at(1) : nullptr,
          is_linear ? at(root) : nullptr,
          has_ratio ? at(ratio) : nullptr,
          is_linear ? nullptr : at(root),
          at(root + 1),
          has_peak ? at(peak) : nullptr,
          has_peak ? at(peak + 1) : nullptr};
}

inline Codes codes_at(const Layout &layout, char *const *sections, uint64_t first) {
  return codes_at(layout, sections, first, layout.all());
}

struct CodedSpan {  // n elements of one parameter
  const csd_hyper *hyper;
  uint64_t n;
  const void *grad;
  uint32_t grad_dtype;
  uint32_t param_dtype;  // of codes.param; in a pass without it, of what the rule emits
  Codes codes;
  void *param;   // receives a copy of codes.param, or what the rule emits; may be null
  uint32_t key;  // random key of the first element, for stochastic rounding
};

extern const csd_rule_row kRules[];  // all rows of rules.h, followed by an empty one

// How many sections a tile may have for a rule to update it, and the csd_codec of its codes; CSD_FP32: it has none.
struct SectionRange {
  uint32_t least, most;
  uint32_t codec;
  bool take(uint32_t sections) const { return least <= sections && sections <= most; }
};
SectionRange sections_of(uint32_t rule) noexcept;  // most == 0: unknown rule. Of a pass: in its half of a tile
uint32_t pass_of(uint32_t rule) noexcept;          // 1 or 2: a csd_pass_rule, for that pass; 0: any other

// Does the rule return something else than its rounded first section?
template <typename Rule, typename = void>
struct Emits : std::false_type {};
template <typename Rule>
struct Emits<Rule, std::void_t<decltype(&Rule::emit)>> : std::true_type {};

// Returns how many gradients are inf or nan; their elements are updated like all others. Records what changes in the
// parameter if begin_updates_of() was called for its tile and it is watched.
uint64_t update(const Span &span, int32_t isa);
uint64_t update(const CodedSpan &span, int32_t isa);

// Encode, rounding to nearest, and decode the states of n elements, the master first. A state that is null is left
// alone. encode() keeps the parameter in `codes` if the master is within half a unit of it; otherwise the
// parameter becomes the rounded master.
void encode(const float *const *states, uint64_t n, uint32_t param_dtype, const Codes &codes, int32_t isa);
void decode(const Codes &codes, uint64_t n, uint32_t param_dtype, float *const *states, int32_t isa);

// For 16-bit parameters that are their own section, detect whether the user has set them. compute_checks() computes a
// checksum of each group of 64; drop_stale_corrections() zeroes the corrections of groups whose checksum has changed.
void compute_checks(const uint16_t *params, uint64_t n, uint32_t *checks);
void drop_stale_corrections(const uint16_t *params, uint64_t n, const uint32_t *checks, uint8_t *corrections);

int32_t best_isa() noexcept;
extern std::atomic<int32_t> current_isa;

}  // namespace csd
