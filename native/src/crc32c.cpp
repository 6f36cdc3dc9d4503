// CRC-32C (Castagnoli, RFC 3720 appendix B.4) by the CPU's instruction, by table where there is none.
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace csd {
namespace {

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (c & 1 ? 0x82f63b78u : 0);
    table[i] = c;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = make_table();

uint32_t by_table(uint32_t c, const uint8_t *p, uint64_t n) {
  for (; n; n--) c = (c >> 8) ^ kTable[(c ^ *p++) & 255];
  return c;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t c, const uint8_t *p, uint64_t n) {
  uint64_t wide = c;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  for (; n; n--) wide = _mm_crc32_u8((uint32_t)wide, *p++);
  return (uint32_t)wide;
}

// Three sums at once: the instruction takes three cycles but one can start in each. What comes from memory comes in
// time only when it is asked for, and from a page ahead.
constexpr uint64_t kAhead = 4096;
__attribute__((target("sse4.2"))) void three_by_instruction(uint32_t crc[3], const uint8_t *const p[3], uint64_t n) {
  uint64_t a = ~crc[0], b = ~crc[1], c = ~crc[2];
  a &= 0xffffffffu, b &= 0xffffffffu, c &= 0xffffffffu;
  for (uint64_t i = 0; i < n; i += 8) {
    if (i % 64 == 0)
      for (int s = 0; s < 3; s++) _mm_prefetch(reinterpret_cast<const char *>(p[s]) + i + kAhead, _MM_HINT_T0);
    uint64_t x, y, z;
    memcpy(&x, p[0] + i, 8);
    memcpy(&y, p[1] + i, 8);
    memcpy(&z, p[2] + i, 8);
    a = _mm_crc32_u64(a, x);
    b = _mm_crc32_u64(b, y);
    c = _mm_crc32_u64(c, z);
  }
  crc[0] = ~(uint32_t)a, crc[1] = ~(uint32_t)b, crc[2] = ~(uint32_t)c;
}
const bool kInstruction = (__builtin_cpu_init(), __builtin_cpu_supports("sse4.2"));
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void *data, uint64_t bytes) {
  const uint8_t *p = static_cast<const uint8_t *>(data);
#if defined(__x86_64__)
  if (kInstruction) return ~by_instruction(~crc, p, bytes);
#endif
  return ~by_table(~crc, p, bytes);
}

void crc32c_sections(uint32_t *crc, float *const *sections, uint32_t n_sections, uint64_t first, uint64_t elems) {
  uint32_t done = 0;
#if defined(__x86_64__)
  if (kInstruction && elems % 2 == 0) {
    const uint8_t *p[3];
    for (int s = 0; s < 3; s++) p[s] = reinterpret_cast<const uint8_t *>(sections[s] + first);
    three_by_instruction(crc, p, 4 * elems);
    done = 3;
  }
#endif
  for (; done < n_sections; done++) crc[done] = crc32c(crc[done], sections[done] + first, 4 * elems);
}

}  // namespace csd
