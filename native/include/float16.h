// Conversions between fp32 and fp16 or bf16 in integer arithmetic, rounded to nearest even: the reference for the
// vector instructions of the CPU updater, and used by the HLS kernels. fp16 is IEEE 754-2008 binary16; bf16 is the
// upper half of binary32.
#pragma once
#include <stdint.h>

// g++, clang and Vitis all document that a union may be used to access the bits of a float.
union FloatBits {
  float f;
  uint32_t u;
};

inline uint32_t float_bits(float f) {
  FloatBits bits;
  bits.f = f;
  return bits.u;
}

inline float bits_float(uint32_t u) {
  FloatBits bits;
  bits.u = u;
  return bits.f;
}

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  const float subnormal = (float)magnitude * (1.0f / (1 << 24));  // exact
  uint32_t u = (magnitude << 13) + ((127u - 15u) << 23);
  if (magnitude < 0x400u) u = float_bits(subnormal);
  if (magnitude >= 0x7c00u) u = 0x7f800000u | (magnitude << 13);  // inf and nan
  if (magnitude > 0x7c00u) u |= 0x400000u;                        // a nan becomes quiet, as in hardware
  return bits_float(sign | u);
}

inline uint16_t f32_to_f16(float f) {
  const uint32_t sign = (float_bits(f) >> 16) & 0x8000u, u = float_bits(f) & 0x7fffffffu;
  const uint32_t odd = (u >> 13) & 1u;
  uint32_t h = (u - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  // Below 2^-14 the unit in the last place is 2^-24, as for an fp32 in [0.5, 1), so adding 0.5 does the rounding.
  if (u < 0x38800000u) h = float_bits(bits_float(u) + 0.5f) - 0x3f000000u;
  if (u >= 0x477ff000u) h = 0x7c00u;                        // from 65520 on: inf
  if (u > 0x7f800000u) h = 0x7e00u | ((u >> 13) & 0x3ffu);  // nan, quiet
  return (uint16_t)(sign | h);
}

inline float bf16_to_f32(uint16_t b) { return bits_float((uint32_t)b << 16); }

inline uint16_t f32_to_bf16(float f) {
  const uint32_t u = float_bits(f);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);  // the nan that torch writes
}
