// A word, the unit that a port of the FPGA moves per cycle, and its checksum.
#pragma once
#include <hls_stream.h>
#include <hls_vector.h>
#include <stdint.h>

#include "csd_kernel.h"

using Word = hls::vector<uint32_t, kLanes>;  // lane 0 has the lowest address

// CRC-32C of 512 bits at a time. The checksum is linear over GF(2): each of its bits is the parity of certain bits of
// the word and of the previous checksum. The compiler computes here which ones, so that every mask below is a constant
// and the parities become trees of XOR gates.
constexpr uint32_t kCrcBits = 32;
struct CrcMasks {
  uint32_t lane[kLanes][kCrcBits];  // [lane][i]: the bits of this lane that bit i of the checksum depends on
};

constexpr CrcMasks make_crc_masks() {
  CrcMasks masks{};
  uint32_t effect = 1;  // effect of one bit, from the word's last to its first: one step of the bitwise checksum each
  for (uint32_t bit = 32 * kLanes; bit-- > 0;) {
    effect = (effect >> 1) ^ (effect & 1u ? 0x82f63b78u : 0u);
    for (uint32_t i = 0; i < kCrcBits; i++) masks.lane[bit / 32][i] |= (effect >> i & 1u) << (bit % 32);
  }
  return masks;
}
constexpr CrcMasks kCrcMasks = make_crc_masks();

// Bit i of the result is the parity of of[i].
inline uint32_t parities(const uint32_t of[kCrcBits]) {
#pragma HLS INLINE
  uint32_t result = 0;
PARITIES:
  for (uint32_t i = 0; i < kCrcBits; i++) {
#pragma HLS UNROLL
    uint32_t bits = of[i];
    bits ^= bits >> 16;
    bits ^= bits >> 8;
    bits ^= bits >> 4;
    bits ^= bits >> 2;
    bits ^= bits >> 1;
    result |= (bits & 1u) << i;
  }
  return result;
}

// Returns the checksum continued by one word. It begins as kCrcBegin and must be inverted at the end.
constexpr uint32_t kCrcBegin = 0xffffffffu;
inline uint32_t crc_of(uint32_t before, const Word &word) {
#pragma HLS INLINE
  uint32_t of_word[kCrcBits], of_before[kCrcBits];
CRC_BITS:
  for (uint32_t i = 0; i < kCrcBits; i++) {
#pragma HLS UNROLL
    // The previous checksum acts as if it were added to the first 32 bits of the word. Its parities are computed apart
    // from those of the word: only they are on the critical path from word to word, the others may be pipelined.
    of_before[i] = before & kCrcMasks.lane[0][i];
    of_word[i] = 0;
  }
CRC_LANES:
  for (uint32_t lane = 0; lane < kLanes; lane++) {
#pragma HLS UNROLL
  CRC_MASKS:
    for (uint32_t i = 0; i < kCrcBits; i++) {
#pragma HLS UNROLL
      of_word[i] ^= word[lane] & kCrcMasks.lane[lane][i];
    }
  }
  return parities(of_word) ^ parities(of_before);
}
