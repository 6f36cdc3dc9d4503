// CRC-32C (Castagnoli, RFC 3720 appendix B.4), by the fastest implementation for the CPU, which is chosen once. Source:
// Intel, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009.
//
// A message is a polynomial over the integers modulo 2, its first bit the highest power of x. The checksum is its
// remainder modulo P, which has degree 32. Numbers are "reflected": the lowest bit is the highest power, so a 32-bit c
// is the sum of c_i x^(31 - i). The fast methods replace parts of the message by shorter ones with the same remainder.
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace csd {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read in little-endian order");

constexpr uint32_t kP = 0x82f63b78;  // without x^32

constexpr uint32_t times_x(uint32_t c) { return (c >> 1) ^ (c & 1 ? kP : 0); }

// x^n mod P
constexpr uint32_t power(uint64_t n) {
  uint32_t c = 0x80000000;  // 1
  for (; n; n--) c = times_x(c);
  return c;
}

constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t c = 0;
  for (; a; a <<= 1, b = times_x(b))
    if (a & 0x80000000) c ^= b;
  return c;
}

// kTables[k][b]: the checksum of the byte b followed by k zero bytes.
using Table = std::array<uint32_t, 256>;
constexpr std::array<Table, 8> make_tables() {
  std::array<Table, 8> tables{};
  for (uint32_t k = 0; k < 8; k++)
    for (uint32_t b = 0; b < 256; b++) {
      uint32_t c = k ? tables[k - 1][b] : b;
      for (int bit = 0; bit < 8; bit++) c = times_x(c);
      tables[k][b] = c;
    }
  return tables;
}
constexpr std::array<Table, 8> kTables = make_tables();

uint64_t word_at(const uint8_t *p) {
  uint64_t word;
  memcpy(&word, p, 8);
  return word;
}

uint32_t by_table(uint32_t c, const uint8_t *p, uint64_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    const uint64_t word = word_at(p) ^ c;
    c = 0;
    for (uint32_t k = 0; k < 8; k++) c ^= kTables[7 - k][(word >> 8 * k) & 255];
  }
  for (; n; n--) c = (c >> 8) ^ kTables[0][(c ^ *p++) & 255];
  return c;
}

#if defined(__x86_64__)
#define CSD_CRC_TARGET(more) __attribute__((target("sse4.2" more)))
CSD_CRC_TARGET("") inline uint32_t add8(uint32_t c, const uint8_t *p) {
  return static_cast<uint32_t>(_mm_crc32_u64(c, word_at(p)));
}
CSD_CRC_TARGET("") inline uint32_t add1(uint32_t c, uint8_t byte) { return _mm_crc32_u8(c, byte); }
#elif defined(__aarch64__)
#if defined(__clang__)
#define CSD_CRC_TARGET(more) __attribute__((target("crc")))
#else
#define CSD_CRC_TARGET(more) __attribute__((target("+crc")))
#endif
CSD_CRC_TARGET("") inline uint32_t add8(uint32_t c, const uint8_t *p) { return __crc32cd(c, word_at(p)); }
CSD_CRC_TARGET("") inline uint32_t add1(uint32_t c, uint8_t byte) { return __crc32cb(c, byte); }
#endif

#if defined(CSD_CRC_TARGET)
CSD_CRC_TARGET("") uint32_t one_by_one(uint32_t c, const uint8_t *p, uint64_t n) {
  for (; n >= 8; n -= 8, p += 8) c = add8(c, p);
  for (; n; n--) c = add1(c, *p++);
  return c;
}

// Streams: the CRC instruction has a latency of three cycles, but one can start in every cycle. Four parts of a block
// are therefore summed side by side, the second and later ones starting from zero, and then joined.
constexpr uint64_t kStream = 2048;
constexpr int kStreams = 4;

// kJoin[k][b]: the effect of byte k of a checksum, with value b, after kStream more bytes.
constexpr std::array<Table, 4> make_join() {
  std::array<Table, 4> join{};
  const uint32_t far = power(8 * kStream);
  for (uint32_t k = 0; k < 4; k++)
    for (uint32_t b = 0; b < 256; b++) join[k][b] = product(b << 8 * k, far);
  return join;
}
constexpr std::array<Table, 4> kJoin = make_join();

inline uint32_t join(uint32_t c, uint32_t next) {
  return next ^ kJoin[0][c & 255] ^ kJoin[1][c >> 8 & 255] ^ kJoin[2][c >> 16 & 255] ^ kJoin[3][c >> 24];
}

CSD_CRC_TARGET("") uint32_t by_instruction(uint32_t c, const uint8_t *p, uint64_t n) {
  for (; n >= kStreams * kStream; n -= kStreams * kStream, p += kStreams * kStream) {
    uint32_t s[kStreams] = {c};
    for (uint64_t i = 0; i < kStream; i += 8)
      for (int k = 0; k < kStreams; k++) s[k] = add8(s[k], p + static_cast<uint64_t>(k) * kStream + i);
    c = s[0];
    for (int k = 1; k < kStreams; k++) c = join(c, s[k]);
  }
  return one_by_one(c, p, n);
}
#endif

#if defined(__x86_64__)
// Folding: 128 bits of the message, L x^64 + H, that are followed by D more bits contribute L x^(64 + D) + H x^D. L and
// H have 64 bits each, and the powers of x, reduced modulo P, have 32. The products therefore have less than 128 bits,
// and are added to the last 128 of those D bits instead. The product of reflected numbers comes out one bit short, that
// is, multiplied by x; and a constant in the lower half of 64 bits is multiplied by x^32.
template <uint64_t bits>
struct Fold {
  static constexpr long long kLow = power(64 + bits - 33), kHigh = power(bits - 33);
};

// Prefetch distance: data from memory arrives in time only if it is prefetched a page ahead.
constexpr uint64_t kAhead = 4096;
inline void ask_for(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0); }

#define CSD_FOLD_TARGET CSD_CRC_TARGET(",pclmul")
CSD_FOLD_TARGET inline __m128i load16(const uint8_t *p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}
CSD_FOLD_TARGET inline __m128i fold16(__m128i a, __m128i by, __m128i onto) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, by, 0x00), _mm_clmulepi64_si128(a, by, 0x11)), onto);
}

// Half of a block is folded while the other half uses the CRC instruction: the two do not share an execution port.
CSD_FOLD_TARGET uint32_t by_folding(uint32_t c, const uint8_t *p, uint64_t n) {
  constexpr uint64_t kFolded = kStreams * kStream, kBlock = 2 * kFolded;
  const __m128i by = _mm_set_epi64x(Fold<512>::kHigh, Fold<512>::kLow);
  for (; n >= kBlock; n -= kBlock, p += kBlock) {
    __m128i a[4];
    uint32_t s[kStreams] = {};
    for (uint64_t i = 0; i < kFolded; i += 64) {
      for (uint64_t k = 0; k < 4; k++) a[k] = i ? fold16(a[k], by, load16(p + i + 16 * k)) : load16(p + 16 * k);
      if (i == 0) a[0] = _mm_xor_si128(a[0], _mm_cvtsi32_si128(static_cast<int>(c)));
      const uint8_t *const of_streams = p + kFolded + i / kStreams;
      for (int k = 0; k < kStreams; k++) s[k] = add8(s[k], of_streams + static_cast<uint64_t>(k) * kStream);
      for (int k = 0; k < kStreams; k++) s[k] = add8(s[k], of_streams + static_cast<uint64_t>(k) * kStream + 8);
      ask_for(p + kBlock + 2 * i);
      ask_for(p + kBlock + 2 * i + 64);
    }
    alignas(16) uint8_t rest[64];
    for (int k = 0; k < 4; k++) _mm_store_si128(reinterpret_cast<__m128i *>(rest + 16 * k), a[k]);
    c = one_by_one(0, rest, sizeof rest);
    for (const uint32_t next : s) c = join(c, next);
  }
  return by_instruction(c, p, n);
}

#define CSD_WIDE_TARGET CSD_CRC_TARGET(",avx512f,vpclmulqdq")
template <uint64_t bits>
CSD_WIDE_TARGET inline __m512i constants() {
  return _mm512_set4_epi64(Fold<bits>::kHigh, Fold<bits>::kLow, Fold<bits>::kHigh, Fold<bits>::kLow);
}
CSD_WIDE_TARGET inline __m512i fold64(__m512i a, __m512i by, __m512i onto) {
  const __m512i low = _mm512_clmulepi64_epi128(a, by, 0x00), high = _mm512_clmulepi64_epi128(a, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, onto, 0x96);  // the sum of all three
}

CSD_WIDE_TARGET uint32_t by_wide_folding(uint32_t c, const uint8_t *p, uint64_t n) {
  constexpr uint64_t kN = 4, kBlock = 64 * kN;
  if (n < kBlock) return one_by_one(c, p, n);
  __m512i a[kN];
  for (uint64_t k = 0; k < kN; k++) a[k] = _mm512_loadu_si512(p + 64 * k);
  a[0] = _mm512_xor_si512(a[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(c))));
  const __m512i by_block = constants<8 * kBlock>();
  for (p += kBlock, n -= kBlock; n >= kBlock; p += kBlock, n -= kBlock)
    for (uint64_t k = 0; k < kN; k++) {
      ask_for(p + kAhead + 64 * k);
      a[k] = fold64(a[k], by_block, _mm512_loadu_si512(p + 64 * k));
    }
  const __m512i by_one = constants<512>();
  for (uint64_t k = 1; k < kN; k++) a[k] = fold64(a[k - 1], by_one, a[k]);
  __m512i last = a[kN - 1];
  for (; n >= 64; p += 64, n -= 64) last = fold64(last, by_one, _mm512_loadu_si512(p));
  alignas(64) uint8_t rest[64];
  _mm512_store_si512(rest, last);
  return one_by_one(one_by_one(0, rest, sizeof rest), p, n);
}
#endif

const auto kRun = crc32c_variants().back().run;

}  // namespace

std::vector<Crc32cVariant> crc32c_variants() {
  std::vector<Crc32cVariant> variants{{"table", by_table}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("sse4.2")) return variants;
  variants.push_back({"instruction", by_instruction});
  if (!__builtin_cpu_supports("pclmul")) return variants;
  variants.push_back({"folding", by_folding});
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
    variants.push_back({"wide folding", by_wide_folding});
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_CRC32) variants.push_back({"instruction", by_instruction});
#endif
  return variants;
}

uint32_t crc32c(uint32_t crc, const void *data, uint64_t bytes) noexcept {
  return ~kRun(~crc, static_cast<const uint8_t *>(data), bytes);
}

void crc32c_sections(uint32_t *crc, const char *const *sections, const Layout &layout, Sections of, uint64_t first,
                     uint64_t elems) {
  for (uint32_t s = of.begin; s < of.end; s++)
    crc[s] = crc32c(crc[s], sections[s] + layout.bytes_of(s, first), layout.bytes_of(s, elems));
}

}  // namespace csd
