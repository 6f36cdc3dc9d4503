// No include guard: updater.cpp includes this after updater_loop.h, once per instruction set. All loops run over a whole
// group, and are such that GCC vectorises them: no branches, maxima on integers, divisions that are done whether or not
// somebody wants them.

struct Group {  // states of kGroup elements
  alignas(64) float master[kGroup], exp_avg[kGroup], exp_avg_sq[kGroup], max_exp_avg_sq[kGroup];
};

// ---- One group -----------------------------------------------------------------------------

static inline void decode_moments(const uint8_t *__restrict ratio, const uint8_t *__restrict root, uint32_t exponent,
                                  float *__restrict exp_avg, float *__restrict exp_avg_sq) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const float u = decode_root(root[i], exponent);
    exp_avg[i] = decode_exp_avg(ratio[i], u, root[i]);
    exp_avg_sq[i] = u * u;
  }
}

static inline void decode_peak(const uint8_t *__restrict peak, uint32_t exponent, float *__restrict max_exp_avg_sq) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const float u = decode_root(peak[i], exponent);
    max_exp_avg_sq[i] = u * u;
  }
}

template <bool is_f16>
static inline void decode_masters(const uint16_t *__restrict param, const uint8_t *__restrict correction,
                                  float *__restrict master) {
  for (uint32_t i = 0; i < kGroup; i++) master[i] = decode_master(param[i], correction[i], is_f16);
}

// Of each element; `key` is that of the first.
static inline void draw(uint32_t key, uint32_t *__restrict hash) {
  for (uint32_t i = 0; i < kGroup; i++) hash[i] = mix_bits(key + i);
}

// The roots of a group, and the exponent that it needs for them.
static inline uint32_t take_roots(const float *__restrict squares, float *__restrict roots) {
  int32_t largest = 0;
  for (uint32_t i = 0; i < kGroup; i++) {
    roots[i] = sqrtf(squares[i]);
    const int32_t b = (int32_t)float_bits(roots[i]), finite = b < 0x7f800000 ? b : 0;  // -nan is below zero
    largest = largest > finite ? largest : finite;
  }
  return exponent_of((uint32_t)largest);
}

// Returns the group's exponent. `hash`: see draw(); without `by_chance`, to nearest.
template <bool by_chance>
static inline uint32_t encode_moments(const float *__restrict exp_avg, const float *__restrict exp_avg_sq,
                                      const uint32_t *__restrict hash, uint8_t *__restrict ratio,
                                      uint8_t *__restrict root) {
  alignas(64) float roots[kGroup];
  alignas(64) uint32_t codes[kGroup];
  const uint32_t exponent = take_roots(exp_avg_sq, roots);
  for (uint32_t i = 0; i < kGroup; i++) {
    const Chance chance = by_chance ? chance_of(hash[i]) : nearest();
    const uint32_t code = encode_root(roots[i], exponent, chance.root);
    codes[i] = (float_bits(exp_avg[i]) & 0x7f800000u) != 0x7f800000u ? code : kRootInfinite;
    roots[i] = decode_root(codes[i], exponent);
  }
  for (uint32_t i = 0; i < kGroup; i++) {
    const Chance chance = by_chance ? chance_of(hash[i]) : nearest();
    root[i] = (uint8_t)codes[i];
    ratio[i] = (uint8_t)encode_ratio(exp_avg[i], roots[i], codes[i], chance.ratio);
  }
  return exponent;
}

// To nearest: a maximum that has not grown keeps its code.
static inline uint32_t encode_peak(const float *__restrict max_exp_avg_sq, uint8_t *__restrict peak) {
  alignas(64) float roots[kGroup];
  const uint32_t exponent = take_roots(max_exp_avg_sq, roots);
  for (uint32_t i = 0; i < kGroup; i++) peak[i] = (uint8_t)encode_root(roots[i], exponent, nearest().root);
  return exponent;
}

template <bool is_f16>
static inline void encode_masters(const float *__restrict master, const uint32_t *__restrict hash,
                                  uint16_t *__restrict param, uint8_t *__restrict correction) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const SplitMaster split = encode_master(master[i], chance_of(hash[i]), is_f16);
    param[i] = (uint16_t)split.param;
    correction[i] = (uint8_t)split.correction;
  }
}

static inline void join_masters(const float *master, bool is_f16, uint16_t *param, uint8_t *correction) {
  for (uint32_t i = 0; i < kGroup; i++) {
    const SplitMaster split = join_master(master[i], param[i], is_f16);
    param[i] = (uint16_t)split.param;
    correction[i] = (uint8_t)split.correction;
  }
}

// ---- All of a span, group by group -------------------------------------------------------------

static inline Codes codes_from(const Codes &codes, uint32_t dtype, uint64_t i) {
  Codes at = codes;
  at.param = (char *)codes.param + (dtype == CSD_F32 ? 4 : 2) * i;
  if (at.correction) at.correction += i;
  at.ratio += i;
  at.root += i;
  at.exponent += i / kGroup;
  if (at.peak) at.peak += i, at.peak_exponent += i / kGroup;
  return at;
}

// `n` of its elements are somebody's; there may be no more of an fp32 parameter.
static inline void decode_group(const Codes &codes, uint32_t dtype, uint64_t n, Group &group) {
  if (dtype == CSD_F32) memcpy(group.master, codes.param, 4 * n);
  else if (dtype == CSD_F16) decode_masters<true>((const uint16_t *)codes.param, codes.correction, group.master);
  else decode_masters<false>((const uint16_t *)codes.param, codes.correction, group.master);
  decode_moments(codes.ratio, codes.root, *codes.exponent, group.exp_avg, group.exp_avg_sq);
  if (codes.peak) decode_peak(codes.peak, *codes.peak_exponent, group.max_exp_avg_sq);
}

// Elements from `n` on are nobody's, and zeros.
static inline void clear_from(Group &group, uint64_t n) {
  for (uint64_t i = n; i < kGroup; i++)
    group.master[i] = group.exp_avg[i] = group.exp_avg_sq[i] = group.max_exp_avg_sq[i] = 0;
}

template <typename Rule, uint32_t number, uint32_t sections>
static uint64_t update_by(const CodedSpan &s) {
  csd_hyper hyper = *s.hyper;
  hyper.rule = number;
  const Rule rule(hyper);
  const uint64_t param_bytes = s.param_dtype == CSD_F32 ? 4 : 2;
  alignas(64) float wide[kGroup];
  alignas(64) uint32_t hash[kGroup];
  Group group;
  uint64_t bad = 0;
  for (uint64_t i = 0; i < s.n; i += kGroup) {
    const uint64_t n = s.n - i < kGroup ? s.n - i : kGroup;
    if (n < kGroup) memset(wide, 0, sizeof wide);
    if (s.grad_dtype == CSD_F16) widen_f16((const uint16_t *)s.grad + i, wide, n);
    else if (s.grad_dtype == CSD_BF16) widen_bf16((const uint16_t *)s.grad + i, wide, n);
    else memcpy(wide, (const float *)s.grad + i, 4 * n);
    bad += nonfinite(wide, n);

    const Codes at = codes_from(s.codes, s.param_dtype, i);
    decode_group(at, s.param_dtype, n, group);
    apply<Rule, sections>(rule, kGroup, wide, group.master, group.exp_avg, group.exp_avg_sq, group.max_exp_avg_sq);
    if (n < kGroup) clear_from(group, n);
    draw(s.key + (uint32_t)i, hash);
    *at.exponent = (uint8_t)encode_moments<true>(group.exp_avg, group.exp_avg_sq, hash, at.ratio, at.root);
    if (sections > 3) *at.peak_exponent = (uint8_t)encode_peak(group.max_exp_avg_sq, at.peak);
    if (s.param_dtype == CSD_F32) memcpy(at.param, group.master, 4 * n);
    else if (s.param_dtype == CSD_F16) encode_masters<true>(group.master, hash, (uint16_t *)at.param, at.correction);
    else encode_masters<false>(group.master, hash, (uint16_t *)at.param, at.correction);
    if (s.param) stream(at.param, (char *)s.param + param_bytes * i, param_bytes * n);
  }
#if CSD_SIMD
  _mm_sfence();
#endif
  return bad;
}

static uint64_t update(const CodedSpan &s) {
  return s.hyper->rule == CSD_AMSGRAD ? update_by<AdamW, CSD_AMSGRAD, 4>(s) : update_by<AdamW, CSD_ADAMW, 3>(s);
}

static void decode(const Codes &codes, uint64_t n, uint32_t dtype, float *const *states) {
  Group group;
  for (uint64_t i = 0; i < n; i += kGroup) {
    const uint64_t some = n - i < kGroup ? n - i : kGroup;
    decode_group(codes_from(codes, dtype, i), dtype, some, group);
    const float *const decoded[] = {group.master, group.exp_avg, group.exp_avg_sq, group.max_exp_avg_sq};
    for (uint32_t s = 0; s < 4; s++)
      if (states[s]) memcpy(states[s] + i, decoded[s], 4 * some);
  }
}

static void encode(const float *const *states, uint64_t n, uint32_t dtype, const Codes &codes) {
  Group group;
  for (uint64_t i = 0; i < n; i += kGroup) {
    const uint64_t some = n - i < kGroup ? n - i : kGroup;
    const Codes at = codes_from(codes, dtype, i);
    decode_group(at, dtype, some, group);
    float *const decoded[] = {group.master, group.exp_avg, group.exp_avg_sq, group.max_exp_avg_sq};
    for (uint32_t s = 0; s < 4; s++)
      if (states[s]) memcpy(decoded[s], states[s] + i, 4 * some);
    if (some < kGroup) clear_from(group, some);
    *at.exponent = (uint8_t)encode_moments<false>(group.exp_avg, group.exp_avg_sq, nullptr, at.ratio, at.root);
    if (at.peak) *at.peak_exponent = (uint8_t)encode_peak(group.max_exp_avg_sq, at.peak);
    if (dtype == CSD_F32) memcpy(at.param, group.master, 4 * some);
    else join_masters(group.master, dtype == CSD_F16, (uint16_t *)at.param, at.correction);
  }
}
