// fp32 numbers whose operations treat subnormal numbers exactly as an x86 processor does with FTZ and DAZ set, for
// processors that flush by another definition. Compile with subnormal numbers kept (CSD_KEEPS_SUBNORMALS).
//
// x86 flushes a result that is below 2^-126 after rounding to 24 bits without a least exponent. Other definitions differ
// for products and quotients just below 2^-126: rounding to a subnormal number and then flushing gives 2^-126 where x86
// gives 0 (from 2^-126 - 2^-150 to 2^-126 - 2^-151), and flushing what is below 2^-126 before rounding gives 0 where x86
// gives 2^-126 (from there on). Sums are exact there, and roots are never that small.
#pragma once
#include <math.h>

#include "float16.h"

struct Flushed {
  float v;
  Flushed() = default;
  Flushed(float x) : v(x) {}
};

constexpr float kSmallest = 0x1p-126f;

inline float magnitude_of(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }
inline float zero_like(float x) { return bits_float(float_bits(x) & 0x80000000u); }
inline float operand(Flushed x) { return magnitude_of(x.v) < kSmallest ? zero_like(x.v) : x.v; }

// `scaled`: the result of the same operation with its first operand times 2^64, which is exact near kSmallest.
inline Flushed flushed(float result, float scaled) {
  return magnitude_of(result) <= kSmallest && magnitude_of(scaled) < 0x1p-62f ? zero_like(result) : result;
}

inline Flushed operator*(Flushed x, Flushed y) {
  const float a = operand(x), b = operand(y);
  return flushed(a * b, a * 0x1p64f * b);
}
inline Flushed operator/(Flushed x, Flushed y) {
  const float a = operand(x), b = operand(y);
  return flushed(a / b, a * 0x1p64f / b);
}
inline Flushed operator+(Flushed x, Flushed y) {
  const float sum = operand(x) + operand(y);
  return magnitude_of(sum) < kSmallest ? zero_like(sum) : sum;
}
inline Flushed operator-(Flushed x, Flushed y) { return x + Flushed(bits_float(float_bits(y.v) ^ 0x80000000u)); }
inline bool operator<(Flushed x, Flushed y) { return operand(x) < operand(y); }
inline bool operator>(Flushed x, Flushed y) { return operand(x) > operand(y); }
inline bool operator!=(Flushed x, Flushed y) { return operand(x) != operand(y); }
inline Flushed sqrtf(Flushed x) { return sqrtf(operand(x)); }
