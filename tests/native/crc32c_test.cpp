// Compares every CRC-32C implementation that this CPU supports with the bitwise definition. The address sanitizer
// checks that none reads beyond the data. tests/sanitize.py builds and runs this, for AArch64 as well.
#include "crc32c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <vector>

namespace {

using Sums = std::vector<uint32_t>;

// The checksums, by definition, of the first 0, 1, 2 ... n bytes, continuing from c.
Sums defined(uint32_t c, const uint8_t *p, uint64_t n) {
  Sums sums{c};
  for (; n; n--) {
    c ^= *p++;
    for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (c & 1 ? 0x82f63b78u : 0);
    sums.push_back(c);
  }
  return sums;
}

// A copy of n bytes at an alignment; the allocation ends right after them.
struct Copy {
  void *whole = nullptr;
  uint8_t *bytes;
  Copy(const uint8_t *from, uint64_t n, uint64_t alignment) {
    if (posix_memalign(&whole, 64, alignment + n)) abort();
    bytes = static_cast<uint8_t *>(whole) + alignment;
    if (n) memcpy(bytes, from, n);
  }
  ~Copy() { free(whole); }
  Copy(const Copy &) = delete;
};

void check(const csd::Crc32cVariant &variant, uint32_t c, const uint8_t *p, uint64_t n, uint64_t alignment,
           uint64_t cut, uint32_t expected) {
  const Copy copy(p, n, alignment);
  const uint32_t found = variant.run(variant.run(c, copy.bytes, cut), copy.bytes + cut, n - cut);
  if (found == expected) return;
  fprintf(stderr, "%s: %zu bytes at %zu, cut at %zu: %08x instead of %08x\n", variant.name, static_cast<size_t>(n),
          static_cast<size_t>(alignment), static_cast<size_t>(cut), found, expected);
  exit(1);
}

}  // namespace

int main() {
  constexpr uint64_t kBytes = 70000, kLengths = 1100;
  constexpr uint32_t kFrom = 0xffffffff, kOther = 0x12345678;
  std::mt19937 random(1);
  std::vector<uint8_t> data(kBytes);
  for (uint8_t &byte : data) byte = static_cast<uint8_t>(random());
  const Sums expected = defined(kFrom, data.data(), kBytes), other = defined(kOther, data.data(), kBytes);

  // Check the definition itself against the published check value.
  const char *const digits = "123456789";
  if (~defined(kFrom, reinterpret_cast<const uint8_t *>(digits), 9).back() != 0xe3069283) abort();

  for (const csd::Crc32cVariant &variant : csd::crc32c_variants()) {
    for (uint64_t n = 0; n <= kLengths; n++)
      for (uint64_t alignment = 0; alignment < 64; alignment++)
        check(variant, kFrom, data.data(), n, alignment, 0, expected[n]);
    for (uint64_t cut = 0; cut <= kLengths; cut++)
      check(variant, kOther, data.data(), kLengths, 0, cut, other[kLengths]);
    for (uint64_t n = 0; n <= 300; n++)
      for (uint64_t cut = 0; cut <= n; cut++) check(variant, kFrom, data.data(), n, 0, cut, expected[n]);
    // Whole blocks of every implementation, with any remainder and any cut.
    for (int i = 0; i < 2000; i++) {
      const uint64_t n = i < 20 ? kBytes - static_cast<uint64_t>(i) : random() % (kBytes + 1);
      check(variant, kOther, data.data(), n, random() % 64, random() % (n + 1), other[n]);
    }
    printf("%s, ", variant.name);
  }
  printf("crc32c as defined\n");
}
