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

// The weights of 64 elements in a checksum differ by these from that of the first one, before the last bit is set.
struct WeightSteps {
  uint32_t of[64];
  constexpr WeightSteps() : of() {
    for (uint32_t i = 0; i < 64; i++) of[i] = i * 0x9e3779b1u;
  }
};
static constexpr WeightSteps kSteps;

static inline uint32_t first_weight(uint64_t first) { return ((uint32_t)first + 1) * 0x9e3779b1u; }

// The sum of n <= 64 values times their weights.
static inline uint32_t weighted(const uint16_t *values, uint64_t first, uint64_t n) {
  const uint32_t base = first_weight(first);
  uint32_t sum = 0;
  if (n == 64)
    for (uint32_t i = 0; i < 64; i++) sum += values[i] * ((base + kSteps.of[i]) | 1);
  else
    for (uint64_t i = 0; i < n; i++) sum += values[i] * ((base + kSteps.of[i]) | 1);
  return sum;
}

static uint32_t weighted_sum(const uint16_t *values, uint64_t first, uint64_t n) {
  uint32_t sum = 0;
  for (uint64_t i = 0; i < n; i += 64) sum += weighted(values + i, first + i, n - i < 64 ? n - i : 64);
  return sum;
}

// Appends the values at the bits of `mask`, of n <= 64. Returns by how much the checksum changes.
static inline uint32_t take(const uint16_t *before, const uint16_t *after, uint64_t first, uint64_t n, uint64_t mask,
                            Changes &c) {
  uint16_t *to = c.values + c.count;
  const int some = __builtin_popcountll(mask);
  c.count += (uint64_t)some;
  if (some < 16) {
    const uint32_t base = first_weight(first);
    uint32_t sum = 0;
    for (; mask; mask &= mask - 1) {
      const int i = __builtin_ctzll(mask);
      *to++ = after[i];
      sum += ((uint32_t)after[i] - before[i]) * ((base + kSteps.of[i]) | 1);
    }
    return sum;
  }
  for (uint64_t i = 0; i < n; i++) {  // no branches; writes up to one element too many
    *to = after[i];
    to += mask >> i & 1;
  }
  return weighted(after, first, n) - weighted(before, first, n);
}

// Notes the next n values of a span: those before the update, and after it. All calls but the last are for a multiple
// of 64 values.
static void note(const uint16_t *before, const uint16_t *after, uint64_t n, Changes &c) {
  if (c.whole) {
    memcpy(c.values + c.count, after, 2 * n);
    c.sum += weighted_sum(after, c.first + c.n_noted, n);
    c.count += n;
    c.n_noted += n;
    return;
  }
  for (uint64_t i = 0; i < n; i += 64) {
    const uint64_t some = n - i < 64 ? n - i : 64, mask = differing(before + i, after + i, some);
    c.mask[c.n_noted / 64] = mask;
    if (mask) c.sum += take(before + i, after + i, c.first + c.n_noted, some, mask, c);
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
    if (c.whole) {
      memcpy(c.values + c.count, after + i, 2 * some);
      *new_checks = weighted(after + i, first, some);
      c.sum += *new_checks;
      c.count += some;
    } else {
      const uint32_t was = weighted(before + i, first, some);
      const uint64_t all = some == 64 ? UINT64_MAX : ((uint64_t)1 << some) - 1;
      const uint64_t mask = was == *checks ? differing(before + i, after + i, some) : all;
      c.mask[c.n_noted / 64] |= mask << c.n_noted % 64;
      if (c.n_noted % 64 && c.n_noted % 64 + some > 64) c.mask[c.n_noted / 64 + 1] |= mask >> (64 - c.n_noted % 64);
      *new_checks = was + (mask ? take(before + i, after + i, first, some, mask, c) : 0);
      c.sum += *new_checks - *checks;
    }
    new_checks++;
    checks++;
    c.n_noted += some;
  }
}
