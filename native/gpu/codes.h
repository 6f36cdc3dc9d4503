// One step of a rule on 8-bit codes (codec.h) on the GPU, several parameters in one launch: 16 threads decode, update and
// encode a group of 64 elements. Compiled once per rule, like update.h; CSD_RATIO is 1 for CSD_8BIT and 0 for CSD_ROOT,
// and rules with codes of other kinds are not for this kernel.
//
// Subnormal numbers are zero, as in native/src/float_mode.h: see numbers.h. To the codec that makes no difference.
#pragma once
#include "codec.h"
#include "numbers.h"
#include "values.h"

/* cdef */
enum { kCodesRows = 28 }; /* parameters per launch: the arguments of a launch take at most 4096 bytes */

/* All sections have whole groups of 64 elements; unused elements of the last group are zero. */
typedef struct CodesRow {
  const void *grad;
  void *param; /* n elements. A value that was set from outside becomes the master */
  /* The first section of the codes, fp32 masters or 16-bit parameters: elements of `param` that differ were set from
   * outside. NULL: the parameter itself is that section */
  void *section;
  uint32_t *checks;    /* if a 16-bit parameter is the section: a checksum of each group, which reveals such values */
  uint8_t *correction; /* NULL: fp32 parameters */
  uint8_t *ratio;      /* CSD_8BIT only */
  uint8_t *root, *exponent;
  uint8_t *peak, *peak_exponent; /* NULL: the rule does not update max_exp_avg_sq */
  uint64_t n;
  csd_hyper hyper;
  uint32_t key;   /* random key of the first element, for the stochastic rounding */
  uint32_t first; /* its first block */
  uint8_t grad_dtype;
  uint8_t link_dtype; /* to which the gradient is rounded first */
  uint8_t param_dtype;
  uint8_t reserved;
} CodesRow;

typedef struct CodesArgs {
  uint64_t *nonfinite; /* gradients that are inf or nan are counted here */
  uint64_t rows;
  CodesRow row[kCodesRows];
} CodesArgs;
/* end of cdef */

constexpr int kLanesOfGroup = kGroup / kFour;

// The largest value, and the sum, of the 16 threads of a group.
inline int32_t largest_in_group(int32_t own) {
  for (int mask = kLanesOfGroup / 2; mask; mask /= 2) own = max_of(own, from_lane_xor(own, mask));
  return own;
}

inline uint32_t sum_in_group(uint32_t own) {
  for (int mask = kLanesOfGroup / 2; mask; mask /= 2) own += from_lane_xor(own, mask);
  return own;
}

// The checksum of a group's 16-bit parameters, as in native/src/codec_loop.h. `lane`: of the thread in its group.
inline uint32_t check_of_group(const uint16_t (&params)[kFour], uint32_t lane) {
  uint32_t sum = 0;
  for (uint32_t j = 0; j < kFour; j += 2)
    sum += (params[j] | (uint32_t)params[j + 1] << 16) * (mix_bits((kFour * lane + j) / 2 + 1) | 1);
  return sum_in_group(sum);
}

inline int32_t finite_bits(float value) {
  const int32_t bits = (int32_t)float_bits(value);
  return bits < 0x7f800000 ? bits : 0;
}

KERNEL update_codes(const CodesArgs a) {
  constexpr int kSquare = CSD_RATIO ? 2 : 1;  // section of the second moment
  constexpr bool kPeak = CSD_SECTIONS > 3;
  uint32_t r = 0;
  for (uint32_t half = 16; half; half /= 2)
    if (r + half < a.rows && a.row[r + half].first <= blockIdx.x) r += half;
  const CodesRow &row = a.row[r];
  const CSD_SPACE::CSD_RULE rule(hyper_of<CSD_NUMBER>(row.hyper));
  const bool is_wide = row.param_dtype == CSD_F32, is_f16 = row.param_dtype == CSD_F16;
  const bool whole = is_multiple(row.grad, kFour * bytes_of(row.grad_dtype)) &&
                     is_multiple(row.param, kFour * bytes_of(row.param_dtype));
  uint32_t bad = 0;
  const uint64_t begin = (uint64_t)(blockIdx.x - row.first) * kBlockElems;
  const uint64_t padded = (row.n + kGroup - 1) / kGroup * kGroup;
  const uint64_t end = begin + kBlockElems < padded ? begin + kBlockElems : padded;
  const uint32_t lane = threadIdx.x % kLanesOfGroup;
  // All threads make the same number of turns: a group's exchange values, and on a GPU a warp does so as a whole.
  for (uint64_t base = begin; base < end; base += kThreads * kFour) {
    const uint64_t i = base + threadIdx.x * kFour;
    const bool is_here = i < end;
    const uint64_t group = i / kGroup, left = i < row.n ? row.n - i : 0;
    float grad[kFour] = {}, wide[kFour] = {}, exp_avg[kFour] = {}, roots[kFour], peaks[kFour] = {};
    uint16_t narrow[kFour] = {};
    uint8_t correction[kFour] = {}, ratio[kFour] = {}, root[kFour] = {}, peak[kFour] = {};
    uint32_t exponent = 0, peak_exponent = 0;
    if (is_here) {
      if (left) load_values(row.grad, row.grad_dtype, i, row.n, whole, grad);
      if (is_wide) load((const float *)row.param + i, wide, left, whole);
      else load((const uint16_t *)row.param + i, narrow, left, whole);
      if (!is_wide) load(row.correction + i, correction, kFour, true);
      if (CSD_RATIO) load(row.ratio + i, ratio, kFour, true);
      load(row.root + i, root, kFour, true);
      exponent = row.exponent[group];
      if (kPeak) load(row.peak + i, peak, kFour, true), peak_exponent = row.peak_exponent[group];
    }
    if (!is_wide && row.section) {
      uint16_t stored[kFour] = {};
      if (is_here) load((const uint16_t *)row.section + i, stored, kFour, true);
      for (int j = 0; j < kFour; j++)
        if (narrow[j] != stored[j]) correction[j] = 0;
    } else if (!is_wide) {
      const uint32_t check = check_of_group(narrow, lane);
      for (int j = 0; j < kFour; j++)
        if (is_here && check != row.checks[group]) correction[j] = 0;
    }
    if (row.link_dtype != row.grad_dtype) round_values(grad, row.link_dtype);
    bad += nonfinite(grad);
    int32_t largest = 0, largest_peak = 0;
    UNROLL for (int j = 0; j < kFour; j++) {
      const float u = decode_root(root[j], exponent);
      Number state[4];
      state[0] = is_wide ? wide[j] : decode_master(narrow[j], signed_8(correction[j]), is_f16);
      if (CSD_RATIO) state[1] = decode_exp_avg(signed_8(ratio[j]), u, root[j]);
      state[kSquare] = Number(u) * Number(u);
      if (kPeak) {
        const Number p = decode_root(peak[j], peak_exponent);
        state[3] = p * p;
      }
      rule.update(state, grad[j]);
      const bool in_use = (uint64_t)j < left;
      wide[j] = in_use ? value_of(state[0]) : 0;
      exp_avg[j] = in_use && CSD_RATIO ? value_of(state[1]) : 0;
      roots[j] = in_use ? value_of(sqrtf(state[kSquare])) : 0;
      peaks[j] = in_use && kPeak ? value_of(sqrtf(state[3])) : 0;
      largest = max_of(largest, finite_bits(roots[j]));
      largest_peak = max_of(largest_peak, finite_bits(peaks[j]));
    }
    exponent = exponent_of((uint32_t)largest_in_group(largest));
    if (kPeak) peak_exponent = exponent_of((uint32_t)largest_in_group(largest_peak));
    UNROLL for (int j = 0; j < kFour; j++) {
      const RoundingBits rounding = stochastic_rounding_bits(mix_bits(row.key + (uint32_t)i + j));
      uint32_t code = encode_root(roots[j], exponent, rounding.root);
      if (CSD_RATIO) {
        code |= kRootInfinite & all_if((float_bits(exp_avg[j]) & 0x7f800000u) == 0x7f800000u);
        ratio[j] = (uint8_t)encode_ratio(exp_avg[j], finite_root(code, exponent), code, rounding.ratio);
      }
      root[j] = (uint8_t)code;
      if (kPeak) peak[j] = (uint8_t)encode_root(peaks[j], peak_exponent, round_to_nearest_bits().root);
      if (is_wide) continue;
      const SplitMaster split = encode_master(wide[j], rounding, is_f16);
      narrow[j] = (uint16_t)split.param;
      correction[j] = (uint8_t)split.correction;
    }
    const bool has_checks = !is_wide && !row.section;
    const uint32_t check = has_checks ? check_of_group(narrow, lane) : 0;
    if (!is_here) continue;
    if (is_wide) store(wide, (float *)row.param + i, left, whole);
    else store(narrow, (uint16_t *)row.param + i, left, whole), store(correction, row.correction + i, kFour, true);
    if (is_wide && row.section) store(wide, (float *)row.section + i, kFour, true);
    if (!is_wide && row.section) store(narrow, (uint16_t *)row.section + i, kFour, true);
    if (CSD_RATIO) store(ratio, row.ratio + i, kFour, true);
    store(root, row.root + i, kFour, true);
    if (kPeak) store(peak, row.peak + i, kFour, true);
    if (lane) continue;
    row.exponent[group] = (uint8_t)exponent;
    if (kPeak) row.peak_exponent[group] = (uint8_t)peak_exponent;
    if (has_checks) row.checks[group] = check;
  }
  if (bad) atomicAdd((unsigned long long *)a.nonfinite, (unsigned long long)bad);
}
