#pragma once
#include <cstdint>

namespace csd {

uint32_t crc32c(uint32_t crc, const void *data, uint64_t bytes);

// Continues the sums of a tile's sections, each over elements [first, first + elems).
void crc32c_sections(uint32_t *crc, float *const *sections, uint32_t n_sections, uint64_t first, uint64_t elems);

}  // namespace csd
