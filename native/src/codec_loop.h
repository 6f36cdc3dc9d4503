// No include guard: updater.cpp includes this after updater_loop.h, once per instruction set. Every inner loop runs
// over a whole group and is written so that GCC vectorises it: no branches, maxima on integers, and unconditional
// divisions even if a result is not used.

struct Group {  // kGroup elements of each state, the master first
  alignas(64) float state[4][kGroup];
};

// Working memory for a step on one group. Codes are widened to 32 bits, the width of the fp32 values: a loop over bytes
// would need four vectors of everything else per vector of codes, more than there are registers.
struct Work {
  alignas(64) float grad[kGroup], master[kGroup], exp_avg[kGroup];
  alignas(64) float momentum[kGroup];
  alignas(64) float root[kGroup], peak[kGroup];  // square roots of second moments: exp_avg_sq, max_exp_avg_sq
  alignas(64) uint32_t hash[kGroup];
  struct {
    alignas(64) uint32_t param[kGroup], correction[kGroup], ratio[kGroup], root[kGroup], peak[kGroup], linear[kGroup];
  } codes;
};

#if CSD_SIMD == 3
// GCC makes about twice as many instructions of loops that widen or narrow.
static inline __m512i load_16(const uint32_t *from) { return _mm512_loadu_si512(from); }
static inline __m512i load_16(const uint16_t *from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}
static inline __m512i load_16(const uint8_t *from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}
static inline __m512i load_16(const int8_t *from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
}
#endif

// Signed numbers keep their sign.
template <typename T>
static inline void widen(const T *__restrict from, uint32_t *__restrict to) {
#if CSD_SIMD == 3
  for (uint32_t i = 0; i < kGroup; i += 16) _mm512_storeu_si512(to + i, load_16(from + i));
#else
  for (uint32_t i = 0; i < kGroup; i++) to[i] = (uint32_t)from[i];
#endif
}

// The values must fit.
static inline void narrow(const uint32_t *__restrict from, uint8_t *__restrict to) {
#if CSD_SIMD == 3
  const auto eight = [from](uint32_t i) { return _mm512_packus_epi32(load_16(from + i), load_16(from + i + 16)); };
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(eight(0), eight(32))));
#else
  for (uint32_t i = 0; i < kGroup; i++) to[i] = (uint8_t)from[i];
#endif
}

static inline void narrow(const uint32_t *__restrict from, uint16_t *__restrict to) {
#if CSD_SIMD == 3
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  for (uint32_t i = 0; i < kGroup; i += 32) {
    const __m512i packed = _mm512_packus_epi32(load_16(from + i), load_16(from + i + 16));
    // The variant with a mask, as GCC 12 warns of the other one: its header has an uninitialized operand there.
    _mm512_storeu_si512(to + i, _mm512_maskz_permutexvar_epi64(0xff, order, packed));
  }
#else
  for (uint32_t i = 0; i < kGroup; i++) to[i] = (uint16_t)from[i];
#endif
}

// Whether a code of the group is kRootInfinite.
static inline bool any_infinite(const uint8_t *root) {
#if CSD_SIMD == 3
  return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(root), _mm512_set1_epi8((char)kRootInfinite)) != 0;
#else
  return memchr(root, kRootInfinite, kGroup) != nullptr;
#endif
}

// ---- One group -----------------------------------------------------------------------------

static inline void decode_moments(const uint8_t *__restrict ratio, const uint8_t *__restrict root, uint32_t exponent,
                                  float *__restrict exp_avg, float *__restrict exp_avg_sq) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const float u = decode_root(root[i], exponent);
    exp_avg[i] = decode_exp_avg(signed_8(ratio[i]), u, root[i]);
    exp_avg_sq[i] = u * u;
  }
}

static inline void decode_squares(const uint8_t *__restrict root, uint32_t exponent, float *__restrict squares) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const float u = decode_root(root[i], exponent);
    squares[i] = u * u;
  }
}

static inline void decode_momenta(const uint8_t *__restrict linear, uint32_t exponent, float *__restrict momentum) {
  for (uint32_t i = 0; i < kGroup; i++) momentum[i] = decode_linear(linear[i], exponent);
}

template <bool is_f16>
static inline void decode_masters(const uint16_t *__restrict param, const uint8_t *__restrict correction,
                                  float *__restrict master) {
  for (uint32_t i = 0; i < kGroup; i++) master[i] = decode_master(param[i], signed_8(correction[i]), is_f16);
}

// Draws a hash for each element of the group; `key` is the random key of the first one.
static inline void draw_hashes(uint32_t key, uint32_t *__restrict hash) {
  for (uint32_t i = 0; i < kGroup; i++) hash[i] = mix_bits(key + i);
}

static inline void compute_roots(const float *__restrict squares, float *__restrict roots) {
  for (uint32_t i = 0; i < kGroup; i++) roots[i] = sqrtf(squares[i]);
}

// The largest bits of the values as unsigned numbers: below 0x7f800000, all are finite and have no sign.
static inline uint32_t largest_bits(const float *__restrict values) {
  uint32_t largest = 0;
  for (uint32_t i = 0; i < kGroup; i++) largest = largest > float_bits(values[i]) ? largest : float_bits(values[i]);
  return largest;
}

// The bits of the largest finite value.
static inline uint32_t largest_of(const float *__restrict values) {
  int32_t largest = 0;
  for (uint32_t i = 0; i < kGroup; i++) {
    // As an int32_t, -nan is negative and so does not raise the maximum.
    const int32_t b = (int32_t)float_bits(values[i]), finite = b < 0x7f800000 ? b : 0;
    largest = largest > finite ? largest : finite;
  }
  return (uint32_t)largest;
}

// The exponent that a group needs for its roots.
static inline uint32_t exponent_for(const float *__restrict roots) { return exponent_of(largest_of(roots)); }

static inline uint32_t linear_exponent_for(const float *__restrict momentum) {
  alignas(64) float magnitude[kGroup];
  for (uint32_t i = 0; i < kGroup; i++) magnitude[i] = fabsf(momentum[i]);
  return linear_exponent_of(largest_of(magnitude));
}

// `stochastic`: round stochastically with `hash` (see draw_hashes()); otherwise round to nearest.
// `finite`: all moments are, and no root has a sign.
template <bool stochastic, bool finite>
CSD_INLINE void encode_moments(const float *__restrict exp_avg, const float *__restrict roots, uint32_t exponent,
                               const uint32_t *__restrict hash, uint32_t *__restrict ratio, uint32_t *__restrict root) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const RoundingBits rounding = stochastic ? stochastic_rounding_bits(hash[i]) : round_to_nearest_bits();
    if (finite) {
      root[i] = encode_finite_root(roots[i], exponent, rounding.root);
      ratio[i] = encode_finite_ratio(exp_avg[i], finite_root(root[i], exponent), root[i], rounding.ratio);
    } else {
      const bool is_finite = (float_bits(exp_avg[i]) & 0x7f800000u) != 0x7f800000u;
      root[i] = encode_root(roots[i], exponent, rounding.root) | (kRootInfinite & all_if(!is_finite));
      ratio[i] = encode_ratio(exp_avg[i], finite_root(root[i], exponent), root[i], rounding.ratio);
    }
  }
}

// Peaks are rounded to nearest, so that a maximum that has not grown keeps its code.
template <bool stochastic>
static inline void encode_roots(const float *__restrict roots, uint32_t exponent, const uint32_t *__restrict hash,
                                uint32_t *__restrict root) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const RoundingBits rounding = stochastic ? stochastic_rounding_bits(hash[i]) : round_to_nearest_bits();
    root[i] = encode_root(roots[i], exponent, rounding.root);
  }
}

template <bool stochastic>
static inline void encode_momenta(const float *__restrict momentum, uint32_t exponent, const uint32_t *__restrict hash,
                                  uint32_t *__restrict linear) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const RoundingBits rounding = stochastic ? stochastic_rounding_bits(hash[i]) : round_to_nearest_bits();
    linear[i] = encode_linear(momentum[i], exponent, rounding.root);
  }
}

template <bool is_f16>
CSD_INLINE void encode_masters(const float *__restrict master, const uint32_t *__restrict hash,
                               uint32_t *__restrict param, uint32_t *__restrict correction) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const SplitMaster split = encode_master(master[i], stochastic_rounding_bits(hash[i]), is_f16);
    param[i] = split.param;
    correction[i] = split.correction;
  }
}

static inline void join_masters(const float *master, bool is_f16, uint16_t *param, uint8_t *correction) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const SplitMaster split = join_master(master[i], param[i], is_f16);
    param[i] = (uint16_t)split.param;
    correction[i] = (uint8_t)split.correction;
  }
}

// ---- A whole span, group by group --------------------------------------------------------------

static inline Codes codes_from(const Codes &codes, uint32_t dtype, uint64_t i) {
  Codes at = codes;
  if (at.param) at.param = (char *)codes.param + (dtype == CSD_F32 ? 4 : 2) * i;
  for (uint8_t **each : {&at.correction, &at.linear, &at.ratio, &at.root})
    if (*each) *each += i;
  if (at.exponent) at.exponent += i / kGroup;
  if (at.peak) at.peak += i, at.peak_exponent += i / kGroup;
  return at;
}

// Only the first `n` elements of the group are in use; an fp32 parameter must not be read beyond them.
static inline void decode_group(const Codes &codes, uint32_t dtype, uint64_t n, Group &group) {
  if (!codes.param) memset(group.state[0], 0, sizeof group.state[0]);
  else if (dtype == CSD_F32) memcpy(group.state[0], codes.param, 4 * n);
  else if (dtype == CSD_F16) decode_masters<true>((const uint16_t *)codes.param, codes.correction, group.state[0]);
  else decode_masters<false>((const uint16_t *)codes.param, codes.correction, group.state[0]);
  if (codes.linear) decode_momenta(codes.linear, *codes.exponent, group.state[1]);
  else if (!codes.root) memset(group.state[1], 0, sizeof group.state[1]);
  else if (codes.ratio) decode_moments(codes.ratio, codes.root, *codes.exponent, group.state[1], group.state[2]);
  else decode_squares(codes.root, *codes.exponent, group.state[1]);
  if (codes.peak) decode_squares(codes.peak, *codes.peak_exponent, group.state[3]);
}

// Sets the unused elements, from `n` on, to zero.
static inline void clear_from(Group &group, uint64_t n) {
  for (auto &state : group.state)
    for (uint64_t i = n; i < kGroup; i++) state[i] = 0;
}

template <uint32_t dtype>
static inline float master_of(const Work &work, uint32_t i) {
  return dtype == CSD_F32 ? bits_float(work.codes.param[i])
                          : decode_master(work.codes.param[i], work.codes.correction[i], dtype == CSD_F16);
}

// Decodes and updates a group. `finite`: all its roots are. The square root to be encoded is often one that the rule has
// just computed; in the same loop, the compiler computes it only once.
template <typename Rule, uint32_t sections, bool has_ratio, uint32_t dtype, bool finite>
static inline void update_group(const Rule &rule, const Codes &at, Work &work) {
  const auto &codes = work.codes;
  const uint32_t exponent = *at.exponent, peak_exponent = sections > 3 ? *at.peak_exponent : 0;
  for (uint32_t i = 0; i < kGroup; i++) {
    const float u = finite ? finite_root(codes.root[i], exponent) : decode_root(codes.root[i], exponent);
    float state[4] = {master_of<dtype>(work, i)};
    if (has_ratio)
      state[1] = finite ? decode_ratio(codes.ratio[i]) * u : decode_exp_avg(codes.ratio[i], u, codes.root[i]);
    state[has_ratio ? 2 : 1] = u * u;
    if (sections > 3) {
      const float peak = decode_root(codes.peak[i], peak_exponent);
      state[3] = peak * peak;
    }
    rule.update(state, work.grad[i]);
    work.master[i] = state[0];
    if (has_ratio) work.exp_avg[i] = state[1];
    work.root[i] = sqrtf(state[has_ratio ? 2 : 1]);
    if (sections > 3) work.peak[i] = sqrtf(state[3]);
  }
}

// Converts the gradients of the group at element `i` to fp32, and returns how many of them are inf or nan.
CSD_INLINE uint64_t load_grads(const CodedSpan &s, uint64_t i, uint64_t n, float *grad) {
  if (n < kGroup) memset(grad, 0, kGroup * sizeof *grad);
  if (s.grad_dtype == CSD_F32) {
    memcpy(grad, (const float *)s.grad + i, 4 * n);
    return nonfinite(grad, n);
  }
  const uint16_t *narrow = (const uint16_t *)s.grad + i;
  if (s.grad_dtype == CSD_F16) widen_f16(narrow, grad, n);
  else widen_bf16(narrow, grad, n);
  return nonfinite(narrow, s.grad_dtype, n);
}

template <uint32_t dtype>
static inline void load_masters(const Codes &at, uint64_t n, Work &work) {
  auto &codes = work.codes;
  if (dtype == CSD_F32) {
    if (n < kGroup) memset(codes.param, 0, sizeof codes.param);
    memcpy(codes.param, at.param, 4 * n);
  } else {
    widen((const uint16_t *)at.param, codes.param);
    widen((const int8_t *)at.correction, codes.correction);
  }
}

// Encodes the masters of the group at element `i`, and copies the parameters to the span's.
template <uint32_t dtype>
CSD_INLINE void store_masters(const CodedSpan &s, uint64_t i, const Codes &at, uint64_t n, Work &work) {
  constexpr uint64_t param_bytes = dtype == CSD_F32 ? 4 : 2;
  auto &codes = work.codes;
  if (dtype == CSD_F32) {
    memcpy(at.param, work.master, 4 * n);
  } else {
    encode_masters<dtype == CSD_F16>(work.master, work.hash, codes.param, codes.correction);
    narrow(codes.param, (uint16_t *)at.param);
    narrow(codes.correction, at.correction);
  }
  if (s.param) stream(at.param, (char *)s.param + param_bytes * i, param_bytes * n);
}

// The first of two passes: the momentum.
template <typename Rule>
static uint64_t update_momenta(const CodedSpan &s, const Rule &rule) {
  Work work;
  alignas(64) float emitted[kGroup];
  alignas(64) uint16_t narrowed[kGroup];
  uint64_t bad = 0;
  for (uint64_t i = 0; i < s.n; i += kGroup) {
    const uint64_t n = s.n - i < kGroup ? s.n - i : kGroup;
    bad += load_grads(s, i, n, work.grad);
    const Codes at = codes_from(s.codes, CSD_F32, i);
    const uint32_t before = *at.exponent;
    widen(at.linear, work.codes.linear);
    for (uint32_t k = 0; k < kGroup; k++) {
      float state[4] = {decode_linear(work.codes.linear[k], before)};
      rule.update(state, work.grad[k]);
      emitted[k] = rule.emit(state, work.grad[k]);
      work.momentum[k] = state[0];
    }
    for (uint64_t k = n; k < kGroup; k++) work.momentum[k] = 0;
    draw_hashes(s.key + (uint32_t)i, work.hash);
    const uint32_t exponent = linear_exponent_for(work.momentum);
    encode_momenta<true>(work.momentum, exponent, work.hash, work.codes.linear);
    *at.exponent = (uint8_t)exponent;
    narrow(work.codes.linear, at.linear);
    if (!s.param) continue;
    if (s.param_dtype == CSD_F32) {
      stream(emitted, (float *)s.param + i, 4 * n);
    } else {
      narrow_bits(emitted, s.param_dtype, narrowed, n);
      stream(narrowed, (uint16_t *)s.param + i, 2 * n);
    }
  }
  return bad;
}

// The second one: the master.
template <typename Rule, uint32_t dtype>
static uint64_t update_masters(const CodedSpan &s, const Rule &rule) {
  Work work;
  uint64_t bad = 0;
  for (uint64_t i = 0; i < s.n; i += kGroup) {
    const uint64_t n = s.n - i < kGroup ? s.n - i : kGroup;
    bad += load_grads(s, i, n, work.grad);
    const Codes at = codes_from(s.codes, dtype, i);
    load_masters<dtype>(at, n, work);
    for (uint32_t k = 0; k < kGroup; k++) {
      float state[4] = {master_of<dtype>(work, k)};
      rule.update(state, work.grad[k]);
      work.master[k] = state[0];
    }
    for (uint64_t k = n; k < kGroup; k++) work.master[k] = 0;
    draw_hashes(s.key + (uint32_t)i, work.hash);
    store_masters<dtype>(s, i, at, n, work);
  }
  return bad;
}

template <typename Rule, uint32_t number, uint32_t pass, uint32_t dtype>
static uint64_t update_pass(const CodedSpan &s) {
  const Rule rule(*s.hyper);
  uint64_t bad = 0;
  if constexpr (pass == 1) bad = update_momenta(s, rule);
  else bad = update_masters<Rule, dtype>(s, rule);
#if CSD_SIMD
  _mm_sfence();
#endif
  return bad;
}

template <typename Rule, uint32_t number, uint32_t sections, uint32_t codec, uint32_t dtype>
static uint64_t update_by(const CodedSpan &s) {
  constexpr bool has_ratio = codec == CSD_8BIT;
  csd_hyper hyper = *s.hyper;
  hyper.rule = number;
  const Rule rule(hyper);
  Work work;
  auto &codes = work.codes;
  uint64_t bad = 0;
  for (uint64_t i = 0; i < s.n; i += kGroup) {
    const uint64_t n = s.n - i < kGroup ? s.n - i : kGroup;
    bad += load_grads(s, i, n, work.grad);
    const Codes at = codes_from(s.codes, dtype, i);
    load_masters<dtype>(at, n, work);
    if (has_ratio) widen((const int8_t *)at.ratio, codes.ratio);
    widen(at.root, codes.root);
    if (sections > 3) widen(at.peak, codes.peak);
    const bool finite_before = !any_infinite(at.root);
    if (finite_before) update_group<Rule, sections, has_ratio, dtype, true>(rule, at, work);
    else update_group<Rule, sections, has_ratio, dtype, false>(rule, at, work);
    for (uint64_t k = n; k < kGroup; k++) work.master[k] = work.exp_avg[k] = work.root[k] = work.peak[k] = 0;

    draw_hashes(s.key + (uint32_t)i, work.hash);
    const uint32_t largest = largest_bits(work.root);
    // exp_avg is then finite, too: what makes it overflow, does so earlier to the square of the root or of the gradient.
    const bool finite = finite_before && largest < 0x7f800000u;
    const uint32_t exponent = finite ? exponent_of(largest) : exponent_for(work.root);
    if (has_ratio) {
      if (finite) encode_moments<true, true>(work.exp_avg, work.root, exponent, work.hash, codes.ratio, codes.root);
      else encode_moments<true, false>(work.exp_avg, work.root, exponent, work.hash, codes.ratio, codes.root);
      narrow(codes.ratio, at.ratio);
    } else {
      encode_roots<true>(work.root, exponent, work.hash, codes.root);
    }
    *at.exponent = (uint8_t)exponent;
    narrow(codes.root, at.root);
    if (sections > 3) {
      const uint32_t peak_exponent = exponent_for(work.peak);
      encode_roots<false>(work.peak, peak_exponent, nullptr, codes.peak);
      *at.peak_exponent = (uint8_t)peak_exponent;
      narrow(codes.peak, at.peak);
    }
    store_masters<dtype>(s, i, at, n, work);
  }
#if CSD_SIMD
  _mm_sfence();
#endif
  return bad;
}

template <uint32_t dtype>
static uint64_t update_params(const CodedSpan &s) {
  switch (s.hyper->rule) {
#define CSD_CASE(number, Rule, sections, most, codec)                                           \
  case number:                                                                                  \
    if constexpr (codec != CSD_FP32) return update_by<Rule, number, sections, codec, dtype>(s); \
    else return 0;
    CSD_RULES(CSD_CASE)
#undef CSD_CASE
#define CSD_CASE(number, Rule, pass) \
  case number:                       \
    return update_pass<Rule, number, pass, dtype>(s);
    CSD_PASSES(CSD_CASE)
#undef CSD_CASE
    default:
      return 0;  // unreachable: see sections_of()
  }
}

static uint64_t update(const CodedSpan &s) {
  if (s.param_dtype == CSD_F32) return update_params<CSD_F32>(s);
  return s.param_dtype == CSD_F16 ? update_params<CSD_F16>(s) : update_params<CSD_BF16>(s);
}

static void decode(const Codes &codes, uint64_t n, uint32_t dtype, float *const *states) {
  Group group;
  for (uint64_t i = 0; i < n; i += kGroup) {
    const uint64_t some = n - i < kGroup ? n - i : kGroup;
    decode_group(codes_from(codes, dtype, i), dtype, some, group);
    for (uint32_t s = 0; s < 4; s++)
      if (states[s]) memcpy(states[s] + i, group.state[s], 4 * some);
  }
}

static inline void encode_second_moments(const Group &group, const Codes &at, Work &work) {
  compute_roots(group.state[at.ratio ? 2 : 1], work.root);
  const uint32_t exponent = exponent_for(work.root);
  if (at.ratio) {
    encode_moments<false, false>(group.state[1], work.root, exponent, nullptr, work.codes.ratio, work.codes.root);
    narrow(work.codes.ratio, at.ratio);
  } else {
    encode_roots<false>(work.root, exponent, nullptr, work.codes.root);
  }
  *at.exponent = (uint8_t)exponent;
  narrow(work.codes.root, at.root);
}

static void encode(const float *const *states, uint64_t n, uint32_t dtype, const Codes &codes) {
  Group group;
  Work work;
  for (uint64_t i = 0; i < n; i += kGroup) {
    const uint64_t some = n - i < kGroup ? n - i : kGroup;
    const Codes at = codes_from(codes, dtype, i);
    decode_group(at, dtype, some, group);
    for (uint32_t s = 0; s < 4; s++)
      if (states[s]) memcpy(group.state[s], states[s] + i, 4 * some);
    if (some < kGroup) clear_from(group, some);
    if (at.linear) {
      const uint32_t exponent = linear_exponent_for(group.state[1]);
      encode_momenta<false>(group.state[1], exponent, nullptr, work.codes.linear);
      *at.exponent = (uint8_t)exponent;
      narrow(work.codes.linear, at.linear);
    }
    if (at.root) encode_second_moments(group, at, work);
    if (at.peak) {
      compute_roots(group.state[3], work.peak);
      const uint32_t peak_exponent = exponent_for(work.peak);
      encode_roots<false>(work.peak, peak_exponent, nullptr, work.codes.peak);
      *at.peak_exponent = (uint8_t)peak_exponent;
      narrow(work.codes.peak, at.peak);
    }
    if (!at.param) continue;
    if (dtype == CSD_F32) memcpy(at.param, group.state[0], 4 * some);
    else join_masters(group.state[0], dtype == CSD_F16, (uint16_t *)at.param, at.correction);
  }
}

// ---- Detecting parameters that the user has set ----------------------------------------------

constexpr uint32_t kPairs = kGroup / 2;

struct CheckWeights {
  uint32_t of[kPairs];
  constexpr CheckWeights() : of() {
    for (uint32_t i = 0; i < kPairs; i++) of[i] = mix_bits(i + 1) | 1;
  }
};

// A checksum of a group's parameters, weighted in pairs with odd numbers: it always changes if a single parameter does.
// If several change, it stays the same with a probability of 2^-32.
static inline uint32_t check_of(const uint16_t *params, uint64_t n) {
  static constexpr CheckWeights weights;
  alignas(64) uint32_t pairs[kPairs] = {};
  if (n == kGroup) memcpy(pairs, params, sizeof pairs);
  else memcpy(pairs, params, n * sizeof *params);
  uint32_t sum = 0;
  for (uint32_t i = 0; i < kPairs; i++) sum += pairs[i] * weights.of[i];
  return sum;
}

static void compute_checks(const uint16_t *params, uint64_t n, uint32_t *checks) {
  for (uint64_t i = 0; i < n; i += kGroup) checks[i / kGroup] = check_of(params + i, n - i < kGroup ? n - i : kGroup);
}

static void drop_stale_corrections(const uint16_t *params, uint64_t n, const uint32_t *checks, uint8_t *corrections) {
  for (uint64_t i = 0; i < n; i += kGroup) {
    const uint64_t some = n - i < kGroup ? n - i : kGroup;
    if (check_of(params + i, some) != checks[i / kGroup]) memset(corrections + i, 0, some);
  }
}
