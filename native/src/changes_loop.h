// No include guard: updater.cpp includes this before updater_loop.h, once per instruction set.

// Which of n <= 64 values differ: bit i for value i.
static inline uint64_t differing(const uint16_t *a, const uint16_t *b, uint64_t n) {
#if CSD_SIMD == 3
  if (n == 64) {
    const uint64_t low = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
    const uint64_t high = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a + 32), _mm512_loadu_si512(b + 32));
    return low | high << 32;
  }
#elif CSD_SIMD == 2
  if (n == 64) {
    const auto same = [a, b](uint64_t i) {
      return _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(a + i)),
                                _mm256_loadu_si256((const __m256i *)(b + i)));
    };
    const auto bits = [](__m256i low, __m256i high) {  // packs within each half of the registers
      return (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8));
    };
    return ~(bits(same(0), same(16)) | bits(same(32), same(48)) << 32);
  }
#endif
  if (memcmp(a, b, 2 * n) == 0) return 0;
  uint64_t mask = 0;
  for (uint64_t i = 0; i < n; i++) mask |= (uint64_t)(a[i] != b[i]) << i;
  return mask;
}

static inline uint32_t weighted(const uint16_t *values, uint64_t first, uint64_t n) {
  uint32_t sum = 0;
  for (uint64_t i = 0; i < n; i++) sum += values[i] * (((uint32_t)(first + i) + 1) * 0x9e3779b1u | 1);
  return sum;
}

// Appends the values at the bits of `mask`.
static inline void take(const uint16_t *after, uint64_t n, uint64_t mask, Changes &c) {
  uint16_t *to = c.values + c.count;
  c.count += (uint64_t)__builtin_popcountll(mask);
  if (__builtin_popcountll(mask) < 16) {
    for (; mask; mask &= mask - 1) *to++ = after[__builtin_ctzll(mask)];
  } else {
    for (uint64_t i = 0; i < n; i++) {  // no branches; writes up to one element too many
      *to = after[i];
      to += mask >> i & 1;
    }
  }
}

// Notes the next n values of a span: those before the update, and after it. All calls but the last are for a multiple
// of 64 values.
static void note(const uint16_t *before, const uint16_t *after, uint64_t n, Changes &c) {
  if (c.whole) {
    memcpy(c.values + c.count, after, 2 * n);
    c.sum += weighted(after, c.first + c.n_noted, n);
    c.count += n;
    c.n_noted += n;
    return;
  }
  for (uint64_t i = 0; i < n; i += 64) {
    const uint64_t some = n - i < 64 ? n - i : 64, mask = differing(before + i, after + i, some);
    c.mask[c.n_noted / 64] = mask;
    if (mask) {
      take(after + i, some, mask, c);
      c.sum += weighted(after + i, c.first + c.n_noted, some) - weighted(before + i, c.first + c.n_noted, some);
    }
    c.n_noted += some;
  }
}

// The same where values may have been set from outside before the update, which `before` then shows: `checks` has the
// sum of each group of 64 as the last step left it. If it is another one, the whole group counts as changed. The first
// value is number `in_group` of its group.
static void note_checked(const uint16_t *before, const uint16_t *after, uint64_t n, uint64_t in_group,
                         const uint32_t *checks, uint32_t *new_checks, Changes &c) {
  for (uint64_t i = 0, some; i < n; i += some) {
    some = 64 - in_group < n - i ? 64 - in_group : n - i;
    in_group = 0;
    const uint64_t first = c.first + c.n_noted;
    const uint32_t now = weighted(after + i, first, some);
    if (c.whole) {
      memcpy(c.values + c.count, after + i, 2 * some);
      c.sum += now;
      c.count += some;
    } else {
      const bool is_known = weighted(before + i, first, some) == *checks;
      const uint64_t all = some == 64 ? UINT64_MAX : ((uint64_t)1 << some) - 1;
      const uint64_t mask = is_known ? differing(before + i, after + i, some) : all;
      c.mask[c.n_noted / 64] |= mask << c.n_noted % 64;
      if (c.n_noted % 64 && c.n_noted % 64 + some > 64) c.mask[c.n_noted / 64 + 1] |= mask >> (64 - c.n_noted % 64);
      take(after + i, some, mask, c);
      c.sum += now - *checks;
    }
    *new_checks++ = now;
    checks++;
    c.n_noted += some;
  }
}
