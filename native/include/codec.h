// The 8-bit codes of states, element by element. This is their only implementation: the CPU updater and the HLS kernels
// call it. docs/8-bit-states.md explains the design; docs/store-format.md the layout in a file.
//
//   root        sqrt(exp_avg_sq): 4 bits of exponent and 4 of mantissa, relative to an exponent that a group of 64
//               elements shares; max_exp_avg_sq likewise (its *peak*), and the second moments of other rules
//   ratio       exp_avg / root: sign, 3 bits of exponent, 4 of mantissa. |exp_avg| <= c sqrt(exp_avg_sq), where c
//               depends on the betas alone (Cauchy-Schwarz), so it needs no scale. A root that is rounded down makes
//               the decoded exp_avg smaller by the same factor, so the update stays bounded
//   linear      a momentum, which nothing bounds: an integer from -127 to 127, in units of a power of two that a group
//               shares
//   correction  extends the 16-bit parameter to the fp32 master, rounded to 24 bits; in units of 1/256 of the
//               parameter's last place, positive away from zero. An fp32 parameter is its own master
//
// All integer arithmetic is on uint32, which wraps. Each operation on floats is a single IEEE operation; whether subnormal
// numbers count as zero makes no difference. Maxima and minima stand where a choice between two values would need a
// comparison as well: with AVX-512, arithmetic alone limits the speed of the CPU updater.
#pragma once
#include <stdint.h>

#include "float16.h"
#include "hash.h"

constexpr uint32_t kGroup = 64;          // elements that share an exponent
constexpr uint32_t kRootInfinite = 255;  // code of a root that was, or whose exp_avg (if any) was, inf or nan
constexpr uint32_t kLeastExponent = 90;  // least exponent of a group; with it, roots below 2^-51 get subnormal codes

// Random addends for stochastic rounding, in units of the last bit that is cut off, and the side to which a tie of the
// correction is moved. The leading bits of the three addends come from different bits of the hash.
struct RoundingBits {
  uint32_t root, ratio;  // 19 bits; root also for linear codes
  uint32_t correction;   // 8 bits
  uint32_t side;         // 0 or 2
};

inline RoundingBits stochastic_rounding_bits(uint32_t hash) {
  return {hash >> 13, hash & 0x7ffffu, hash >> 5 & 0xffu, hash >> 3 & 2u};
}

// The addends for rounding to nearest: used for states that are loaded or edited, and for peaks.
inline RoundingBits round_to_nearest_bits() { return {1u << 18, 1u << 18, 0x80, 0}; }

// All bits set if the condition holds, else none. Compilers do not turn this into a branch, which would prevent
// vectorisation.
inline uint32_t all_if(bool condition) { return 0u - (uint32_t)condition; }

// The signed number with these 8 bits.
inline uint32_t signed_8(uint32_t code) { return code - ((code & 0x80u) << 1); }

// ---- Minifloats: 4 bits of mantissa ------------------------------------------------------

inline uint32_t min_of(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }

// Converts a magnitude, the bits of an fp32 value without a sign, to a minifloat whose least normal exponent is `least`,
// in fp32's bias. Below that exponent, `normal` is the smaller one of the two; from there on, `subnormal` is 2^23.
inline uint32_t minifloat(uint32_t magnitude, uint32_t least, uint32_t addend) {
  const int32_t normal = (int32_t)(magnitude - ((least - 1) << 23));
  const float units = bits_float(magnitude) * bits_float((277 - least) << 23);  // of the last place of 2^-(127 - least)
  const int32_t subnormal = (int32_t)bits_float(min_of(float_bits(units), float_bits(0x1p23f)));
  return ((uint32_t)max_of(normal, subnormal) + addend) >> 19;
}

// Converts the exponent and mantissa of a minifloat to fp32. If the value is normal, `subnormal` is the larger one.
inline uint32_t minifloat_bits(uint32_t code, uint32_t least) {
  const uint32_t above = (least << 23) + (code << 19), normal = above - (1u << 23);
  const float subnormal = bits_float(above) - bits_float(least << 23);  // exact
  return min_of(float_bits(subnormal), normal);
}

// ---- exp_avg_sq ----------------------------------------------------------------------------

// The exponent of a group whose largest finite root has these bits; rounding that root up stays within the range.
inline uint32_t exponent_of(uint32_t largest) {
  const uint32_t exponent = (largest + 0x0fffffu) >> 23;
  return exponent > kLeastExponent ? exponent : kLeastExponent;
}

// Decodes a root whose code is not kRootInfinite.
inline float finite_root(uint32_t code, uint32_t exponent) { return bits_float(minifloat_bits(code, exponent - 14)); }

inline float decode_root(uint32_t code, uint32_t exponent) {
  return code == kRootInfinite ? bits_float(0x7f800000u) : finite_root(code, exponent);
}

// Encodes a root that is finite and has no sign: at most 254, see exponent_of. A nonzero root never becomes zero,
// because exp_avg would then be divided by eps alone.
inline uint32_t encode_finite_root(float root, uint32_t exponent, uint32_t addend) {
  const uint32_t b = float_bits(root), code = minifloat(b, exponent - 14, addend), least = min_of(b, 1);
  return code > least ? code : least;
}

// Any root: inf, nan and negative ones are kRootInfinite. There is no conditional between constants: where one such
// choice depends on another, compilers generate branches, which vectorise badly.
inline uint32_t encode_root(float root, uint32_t exponent, uint32_t addend) {
  const uint32_t finite = all_if(float_bits(root) < 0x7f800000u);
  return (encode_finite_root(root, exponent, addend) & finite) | (kRootInfinite & ~finite);
}

// ---- exp_avg -------------------------------------------------------------------------------

constexpr uint32_t kLeastRatio = 124;  // least normal exponent: below 1/4 the steps are 1/128

// `signed_code`: signed_8() of the code.
inline float decode_ratio(uint32_t signed_code) {
  return bits_float(minifloat_bits(signed_code & 127u, kLeastRatio) | (signed_code & 0x80000000u));
}

// `root`: the decoded root, which is finite.
inline uint32_t encode_finite_ratio(float exp_avg, float root, uint32_t root_code, uint32_t addend) {
  const uint32_t ratio = float_bits(exp_avg / root) & 0x7fffffffu;
  const uint32_t k = min_of(minifloat(ratio, kLeastRatio, addend), 127) & all_if(root_code != 0);
  return k | ((float_bits(exp_avg) >> 24 & 0x80u) & all_if(k != 0));
}

// `root`: the decoded root; any number if its code is kRootInfinite.
inline uint32_t encode_ratio(float exp_avg, float root, uint32_t root_code, uint32_t addend) {
  return encode_finite_ratio(exp_avg, root, root_code, addend) & all_if(root_code != kRootInfinite);
}

// `signed_ratio`: signed_8() of the ratio's code; `root`: the decoded root.
inline float decode_exp_avg(uint32_t signed_ratio, float root, uint32_t root_code) {
  const float exp_avg = decode_ratio(signed_ratio) * root;  // exact: 5 bits by 5 bits
  return root_code == kRootInfinite ? 0 : exp_avg;
}

// ---- momentum_buffer -------------------------------------------------------------------------

constexpr uint32_t kLinearNan = 0x80;  // code of a momentum that was inf or nan: all of the matrix is nan then

// The exponent of a group whose largest finite magnitude has these bits: that of its unit, plus 126. The largest
// magnitude is 64 to 127 units, so that it stays within 127 when rounded up, and no unit is subnormal.
inline uint32_t linear_exponent_of(uint32_t largest) {
  const int32_t exponent = (int32_t)((largest + 0x1ffffu) >> 23) - 7;
  return (uint32_t)(exponent < 0 ? 0 : exponent > 247 ? 247 : exponent);
}

inline float decode_linear(uint32_t code, uint32_t exponent) {
  const float value = (float)(int32_t)signed_8(code) * bits_float((exponent + 1) << 23);  // exact
  return code == kLinearNan ? bits_float(0x7fc00000u) : value;
}

inline uint32_t encode_linear(float value, uint32_t exponent, uint32_t addend) {
  const uint32_t b = float_bits(value), magnitude = b & 0x7fffffffu, finite = all_if(magnitude < 0x7f800000u);
  const float units =
      bits_float(magnitude & finite) * bits_float((253 - exponent) << 23);  // exact, unless below 2^-126
  const uint32_t code = ((uint32_t)(int32_t)(units * 0x1p19f) + addend) >> 19, k = code < 127 ? code : 127;
  const uint32_t negative = all_if(b >> 31 != 0), q = ((k ^ negative) - negative) & 0xffu;
  return (q & finite) | (kLinearNan & ~finite);
}

// ---- The master of a parameter of 16 bits ----------------------------------------------------

struct SplitMaster {
  uint32_t param, correction;  // 16 and 8 bits
};

// `signed_correction`: signed_8() of its code.
inline float decode_master(uint32_t param, uint32_t signed_correction, bool is_f16) {
  const uint32_t bf16 = (param << 16) + (signed_correction << 8);
  const uint32_t magnitude = ((param & 0x7fffu) << 8) + signed_correction;
  const float subnormal = (float)(int32_t)magnitude * 0x1p-32f;  // exact, and no subnormal of fp32
  uint32_t f16 = (magnitude << 5) + ((127u - 15u) << 23);
  f16 = (int32_t)magnitude < 1 << 18 ? float_bits(subnormal) : f16;
  f16 = (param & 0x7fffu) >= 0x7c00u ? 0x7f800000u | (param & 0x3ffu) << 13 : f16;
  return bits_float(is_f16 ? f16 | (param & 0x8000u) << 16 : bf16);
}

// The magnitude of a finite master, cut to 24 bits, in units of the correction.
inline uint32_t magnitude_of(float master, uint32_t addend, bool is_f16) {
  const uint32_t b = float_bits(master) & 0x7fffffffu;
  const uint32_t exponent = b >> 23, below = 113u - exponent;  // fp16 is normal from 2^-14 on
  const uint32_t subnormal = ((b & 0x7fffffu) | 0x800000u) >> (below < 31 ? below : 31);
  const uint32_t x = exponent >= 113 ? b - ((127u - 15u) << 23) : subnormal;
  const uint32_t f16 = (x + (addend >> 3)) >> 5, most = 0x7bff7fu;  // the largest that is not rounded to inf
  return is_f16 ? (f16 < most ? f16 : most) : (b + addend) >> 8;
}

// Splits a magnitude, or one with its sign above it, into parameter and correction. The parameter must be what torch
// rounds the decoded master to (to nearest even), so a tie is never stored: it is moved to one side first.
inline SplitMaster split(uint32_t magnitude, uint32_t side) {
  const uint32_t off = magnitude + ((magnitude & 0xffu) == 0x80 ? side - 1 : 0);
  return {(off + 0x80u) >> 8, off & 0xffu};
}

// Inf and nan have no correction, nor does a master of 65520 or more with an fp16 parameter, which rounds to inf.
inline SplitMaster encode_master(float master, RoundingBits rounding, bool is_f16) {
  const uint32_t b = float_bits(master), magnitude = b & 0x7fffffffu, sign = b >> 16 & 0x8000u;
  const uint32_t bf16 = (b + rounding.correction) >> 8;  // no magnitude carries into the sign, unless it is nan
  const SplitMaster finite =
      split(is_f16 ? magnitude_of(master, rounding.correction, true) | sign << 8 : bf16, rounding.side);
  const bool lost = is_f16 ? magnitude >= 0x477ff000u : master != master;
  const uint32_t f16 = sign | (magnitude > 0x7f800000u ? 0x7e00u | (b >> 13 & 0x3ffu) : 0x7c00u);
  return {lost ? is_f16 ? f16 : 0x7fc0u : finite.param, lost ? 0 : finite.correction};
}

// Encodes, to nearest, a master together with a given parameter. If the master belongs to the parameter (within half a
// unit), the parameter is kept, even where rounding the master alone would give its neighbour. Otherwise the parameter
// becomes the rounded master.
inline SplitMaster join_master(float master, uint32_t param, bool is_f16) {
  const SplitMaster own = encode_master(master, round_to_nearest_bits(), is_f16);
  const uint32_t sign = float_bits(master) >> 16 & 0x8000u, most = is_f16 ? 0x7c00u : 0x7f80u;
  const uint32_t off =
      magnitude_of(master, round_to_nearest_bits().correction, is_f16) - ((param & 0x7fffu) << 8) + 0x80u;
  const uint32_t inside = off < 1 ? 1 : off > 0xff ? 0xff : off;
  const bool belongs = off <= 0x100 && (param & 0x8000u) == sign && (param & 0x7fffu) < most;
  return {belongs ? param : own.param, belongs ? (inside - 0x80u) & 0xffu : own.correction};
}
