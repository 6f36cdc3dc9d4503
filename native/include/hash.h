// Random bits that are the same on every machine: a hash of an element's index plus a key that changes with each step.
#pragma once
#include <stdint.h>

// Wellons' "lowbias32".
constexpr uint32_t mix_bits(uint32_t hash) {
  hash = (hash ^ hash >> 16) * 0x7feb352du;
  hash = (hash ^ hash >> 15) * 0x846ca68bu;
  return hash ^ hash >> 16;
}
