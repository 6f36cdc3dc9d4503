// No include guard: updater.cpp includes this once per instruction set, inside a namespace of its own.
// CSD_SIMD selects it: 0 plain C++, 2 AVX2 + F16C, 3 AVX-512.

// Number of elements converted at a time: so few that the processor, which looks some hundred instructions ahead, loads
// the next states during the conversion. 128 was measured to be 10 % faster than 1024.
static constexpr uint64_t kBlock = 128;

static inline void widen_f16(const uint16_t *from, float *to, uint64_t n) {
  uint64_t i = 0;
#if CSD_SIMD == 3
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i))));
#elif CSD_SIMD == 2
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
  for (; i < n; i++) to[i] = f16_to_f32(from[i]);
}

static inline void widen_bf16(const uint16_t *from, float *to, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) to[i] = bf16_to_f32(from[i]);
}

static inline void narrow_f16(const float *from, uint16_t *to, uint64_t n) {
  uint64_t i = 0;
#if CSD_SIMD == 3
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif CSD_SIMD == 2
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; i++) to[i] = f32_to_f16(from[i]);
}

static inline void narrow_bf16(const float *from, uint16_t *to, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) to[i] = f32_to_bf16(from[i]);
}

// Copies with non-temporal stores if the alignment of `to` allows it: parameters are only written here, and an ordinary
// store would first read them from memory.
static inline void stream(const void *from, void *to, uint64_t bytes) {
  uint64_t i = 0;
#if CSD_SIMD
  if ((uintptr_t)to % 32 == 0)
    for (; i + 32 <= bytes; i += 32)
      _mm256_stream_si256((__m256i *)((char *)to + i), _mm256_loadu_si256((const __m256i *)((const char *)from + i)));
#endif
  memcpy((char *)to + i, (const char *)from + i, bytes - i);
}

// `emitted`: receives what the rule emits, if it does.
template <typename Rule, uint32_t sections>
static inline void apply(const Rule &rule, uint64_t n, const float *__restrict grad, float *__restrict emitted,
                         float *__restrict state_0, float *__restrict state_1, float *__restrict state_2,
                         float *__restrict state_3) {
  for (uint64_t i = 0; i < n; i++) {
    float state[4] = {state_0[i]};
    if (sections > 1) state[1] = state_1[i];
    if (sections > 2) state[2] = state_2[i];
    if (sections > 3) state[3] = state_3[i];
    rule.update(state, grad[i]);
    if constexpr (Emits<Rule>::value) emitted[i] = rule.emit(state, grad[i]);
    state_0[i] = state[0];
    if (sections > 1) state_1[i] = state[1];
    if (sections > 2) state_2[i] = state[2];
    if (sections > 3) state_3[i] = state[3];
  }
}

static inline void narrow_bits(const float *from, uint32_t dtype, uint16_t *to, uint64_t n) {
  if (dtype == CSD_F16) narrow_f16(from, to, n);
  else narrow_bf16(from, to, n);
}

// A parameter that is not its rounded master was set by the user: it becomes the master.
static inline void adopt_user_params(const uint16_t *param, uint32_t dtype, float *master, uint64_t n) {
  alignas(64) float wide[kBlock];
  alignas(64) uint16_t rounded[kBlock];
  narrow_bits(master, dtype, rounded, n);
  if (memcmp(rounded, param, 2 * n) == 0) return;
  if (dtype == CSD_F16) widen_f16(param, wide, n);
  else widen_bf16(param, wide, n);
  for (uint64_t i = 0; i < n; i++)
    if (rounded[i] != param[i]) master[i] = wide[i];
}

static inline uint32_t nonfinite(const float *grad, uint64_t n) {
  uint32_t count = 0;
  for (uint64_t i = 0; i < n; i++) count += (float_bits(grad[i]) & 0x7f800000u) == 0x7f800000u;
  return count;
}

// The same of 16 bits, for n < 2^16.
static inline uint32_t nonfinite(const uint16_t *grad, uint32_t dtype, uint64_t n) {
  const uint16_t infinity = dtype == CSD_F16 ? 0x7c00 : 0x7f80;
  uint16_t count = 0;
  for (uint64_t i = 0; i < n; i++) count = (uint16_t)(count + ((grad[i] & infinity) == infinity));
  return count;
}

template <typename Rule, uint32_t number, uint32_t sections>
static uint64_t update_by(const Span &s) {
  csd_hyper hyper = *s.hyper;
  hyper.rule = number;  // no change, but makes it a constant for the compiler
  const Rule rule(hyper);
  alignas(64) float wide[kBlock];
  alignas(64) float emitted[Emits<Rule>::value ? kBlock : 1];
  alignas(64) uint16_t narrow[kBlock], before[kBlock];
  uint64_t bad = 0;
  for (uint64_t i = 0; i < s.n; i += kBlock) {
    const uint64_t n = s.n - i < kBlock ? s.n - i : kBlock;
    const float *grad = wide;
    if (s.grad_dtype == CSD_F16) widen_f16((const uint16_t *)s.grad + i, wide, n);
    else if (s.grad_dtype == CSD_BF16) widen_bf16((const uint16_t *)s.grad + i, wide, n);
    else grad = (const float *)s.grad + i;
    bad += s.grad_dtype == CSD_F32 ? nonfinite(grad, n) : nonfinite((const uint16_t *)s.grad + i, s.grad_dtype, n);

    const auto section = [&s, i](uint32_t k) { return k < sections ? s.state[k] + i : nullptr; };
    float *const master = section(0);
    if (s.changes) narrow_bits(master, s.param_dtype, before, n);
    if (s.unless_set) adopt_user_params((const uint16_t *)s.param + i, s.param_dtype, master, n);
    apply<Rule, sections>(rule, n, grad, emitted, master, section(1), section(2), section(3));

    if (!s.param) continue;
    const float *const out = Emits<Rule>::value ? emitted : master;
    if (s.param_dtype == CSD_F32) {
      stream(out, (float *)s.param + i, 4 * n);
    } else {
      narrow_bits(out, s.param_dtype, narrow, n);
      if (s.changes) note(before, narrow, n, *s.changes);
      stream(narrow, (uint16_t *)s.param + i, 2 * n);
    }
  }
#if CSD_SIMD
  _mm_sfence();
#endif
  return bad;
}

static uint64_t update(const Span &s) {
  switch (s.hyper->rule) {
#define CSD_CASE(number, Rule, sections, most, codec) \
  case number:                                        \
    return update_by<Rule, number, sections>(s);
    CSD_RULES(CSD_CASE)
#undef CSD_CASE
#define CSD_CASE(number, Rule, pass) \
  case number:                       \
    return update_by<Rule, number, 1>(s);
    CSD_PASSES(CSD_CASE)
#undef CSD_CASE
    default:
      return 0;  // unreachable: see sections_of()
  }
}
