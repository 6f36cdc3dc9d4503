// No include guard: updater.cpp includes this after updater_loop.h, once per instruction set.

// Computes `owed` (topk.h) for elements [first, first + n) of a part; n is at most kBlock.
static inline void owed(const Part &part, uint64_t first, uint64_t n, float *to) {
  if (part.grad_dtype == CSD_F16) widen_f16((const uint16_t *)part.grad + first, to, n);
  else if (part.grad_dtype == CSD_BF16) widen_bf16((const uint16_t *)part.grad + first, to, n);
  else memcpy(to, (const float *)part.grad + first, 4 * n);
  if (!uses_residual(part)) return;
  const float inverse = 1.0f / part.scale;
  const uint16_t *const residual = part.residual + first;
  for (uint64_t i = 0; i < n; i++) to[i] = to[i] + bf16_to_f32(residual[i]) * inverse;
}

// Rounds to 16 bits such that finite values stay finite: a gradient that is large because of the loss scale, and larger
// with its residual, must not be sent as inf.
static inline void round_owed(float *from, uint16_t *to, uint64_t n, uint32_t dtype) {
  const float largest = dtype == CSD_F16 ? 65504.0f : 0x1.fep127f, inf = __builtin_inff();
  for (uint64_t i = 0; i < n; i++) {
    const float f = from[i], down = f > largest && f < inf ? largest : f;
    from[i] = down < -largest && down > -inf ? -largest : down;
  }
  if (dtype == CSD_F16) narrow_f16(from, to, n);
  else narrow_bf16(from, to, n);
}

static void round_part(const Part &part, uint16_t *values) {
  alignas(64) float wide[kBlock];
  for (uint64_t i = 0; i < part.n; i += kBlock) {
    const uint64_t some = part.n - i < kBlock ? part.n - i : kBlock;
    owed(part, i, some, wide);
    round_owed(wide, values + i, some, part.dtype);
  }
}

// Stochastic rounding: rounds to one of the two neighbours in bf16, with probabilities that make the mean exact (Gupta
// et al., "Deep Learning with Limited Numerical Precision", 2015). The random bits are a hash of element and step, the
// same on every machine.
static inline void narrow_residual(const float *from, uint16_t *to, uint64_t n, uint32_t seed) {
  for (uint64_t i = 0; i < n; i++) {
    const uint32_t hash = mix_bits(seed + (uint32_t)i);
    const uint32_t u = float_bits(from[i]), rounded = (u + (hash & 0xffffu)) >> 16;
    to[i] = (u & 0x7f800000u) == 0x7f800000u ? f32_to_bf16(from[i]) : (uint16_t)rounded;
  }
}

static void feed_back_part(const Part &part, uint64_t first, uint64_t n, const uint16_t *sent) {
  alignas(64) float wide[kBlock], was_sent[kBlock];
  for (uint64_t i = 0; i < n; i += kBlock) {
    const uint64_t some = n - i < kBlock ? n - i : kBlock;
    owed(part, first + i, some, wide);
    if (part.dtype == CSD_F16) widen_f16(sent + i, was_sent, some);
    else widen_bf16(sent + i, was_sent, some);
    for (uint64_t j = 0; j < some; j++) wide[j] = (wide[j] - was_sent[j]) * part.scale;
    narrow_residual(wide, part.residual + first + i, some, part.seed + (uint32_t)(first + i));
  }
}

static uint64_t collect(const uint16_t *values, uint64_t n, uint16_t least, uint32_t *indices) {
  uint64_t i = 0, count = 0;
#if CSD_SIMD
  for (; i + 32 <= n; i += 32) {
#if CSD_SIMD == 3
    const __m512i magnitudes = _mm512_and_si512(_mm512_loadu_si512(values + i), _mm512_set1_epi16(0x7fff));
    uint32_t found = _mm512_cmpge_epu16_mask(magnitudes, _mm512_set1_epi16((short)least));
#else
    const __m256i all = _mm256_set1_epi16(0x7fff), bound = _mm256_set1_epi16((short)least);
    const __m256i low = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(values + i)), all);
    const __m256i high = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(values + i + 16)), all);
    const __m256i both = _mm256_packs_epi16(_mm256_cmpeq_epi16(_mm256_max_epu16(low, bound), low),
                                            _mm256_cmpeq_epi16(_mm256_max_epu16(high, bound), high));
    uint32_t found = (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(both, 0xd8));
#endif
    for (; found; found &= found - 1) indices[count++] = (uint32_t)i + (uint32_t)__builtin_ctz(found);
  }
#endif
  for (; i < n; i++)
    if ((values[i] & 0x7fff) >= least) indices[count++] = (uint32_t)i;
  return count;
}
