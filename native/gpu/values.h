// Gradients and parameters in any of their dtypes (csd_dtype), four elements at a time.
#pragma once
#include "csd.h"
#include "float16.h"
#include "gpu.h"

constexpr int kFour = 4;

inline uint32_t bytes_of(uint32_t dtype) { return dtype == CSD_F32 ? 4 : 2; }

// Loads elements [i, i + 4) of n as fp32; elements beyond n are zero.
inline void load_values(const void *from, uint32_t dtype, uint64_t i, uint64_t n, bool whole, float (&to)[kFour]) {
  if (dtype == CSD_F32) return load((const float *)from + i, to, n - i, whole);
  uint16_t half[kFour];
  load((const uint16_t *)from + i, half, n - i, whole);
  for (int j = 0; j < kFour; j++) to[j] = dtype == CSD_F16 ? f16_to_f32(half[j]) : bf16_to_f32(half[j]);
}

inline void store_values(const float (&from)[kFour], void *to, uint32_t dtype, uint64_t i, uint64_t n, bool whole) {
  if (dtype == CSD_F32) return store(from, (float *)to + i, n - i, whole);
  uint16_t half[kFour];
  for (int j = 0; j < kFour; j++) half[j] = dtype == CSD_F16 ? f32_to_f16(from[j]) : f32_to_bf16(from[j]);
  store(half, (uint16_t *)to + i, n - i, whole);
}

// Rounds values to another dtype, as gradients are that travel in it.
inline void round_values(float (&values)[kFour], uint32_t dtype) {
  for (float &x : values) {
    if (dtype == CSD_F16) x = f16_to_f32(f32_to_f16(x));
    if (dtype == CSD_BF16) x = bf16_to_f32(f32_to_bf16(x));
  }
}

inline uint32_t nonfinite(const float (&grad)[kFour]) {
  uint32_t count = 0;
  for (const float x : grad) count += (float_bits(x) & 0x7f800000u) == 0x7f800000u;
  return count;
}
