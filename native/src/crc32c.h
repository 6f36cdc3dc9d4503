#pragma once
#include <cstdint>
#include <vector>

#include "layout.h"

namespace csd {

uint32_t crc32c(uint32_t crc, const void *data, uint64_t bytes) noexcept;

// Continues the checksums of these sections `of` a tile over elements [first, first + elems). `crc` and `sections` have
// an entry for every section of the tile.
void crc32c_sections(uint32_t *crc, const char *const *sections, const Layout &layout, Sections of, uint64_t first,
                     uint64_t elems);

// The implementations that this CPU supports, from the slowest to the one in use. They omit the inversions of the CRC
// at the beginning and end.
struct Crc32cVariant {
  const char *name;
  uint32_t (*run)(uint32_t c, const uint8_t *p, uint64_t n);
};
std::vector<Crc32cVariant> crc32c_variants();

}  // namespace csd
