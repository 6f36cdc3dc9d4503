// Chance that is the same on every machine: a hash of an element's number and a key that each step has its own of.
#pragma once
#include <stdint.h>

// Wellons' "lowbias32".
constexpr uint32_t mix_bits(uint32_t hash) {
  hash = (hash ^ hash >> 16) * 0x7feb352du;
  hash = (hash ^ hash >> 15) * 0x846ca68bu;
  return hash ^ hash >> 16;
}
