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
// All integer arithmetic is on uint32, which wraps; each operation on floats is a single IEEE operation and involves no
// subnormal numbers.
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

// Converts the magnitude with fp32 bits `b` to a minifloat whose least normal exponent is `least`, in fp32's bias.
inline uint32_t minifloat(uint32_t b, uint32_t least, uint32_t addend) {
  const uint32_t below = least - (b >> 23);
  const uint32_t normal = b - ((least - 1) << 23);
  const uint32_t subnormal = ((b & 0x7fffffu) | 0x800000u) >> (below < 31 ? below : 31);
  return (((int32_t)below > 0 ? subnormal : normal) + addend) >> 19;
}

// ---- exp_avg_sq ----------------------------------------------------------------------------

// The exponent of a group whose largest finite root has these bits; rounding that root up stays within the range.
inline uint32_t exponent_of(uint32_t largest) {
  const uint32_t exponent = (largest + 0x0fffffu) >> 23;
  return exponent > kLeastExponent ? exponent : kLeastExponent;
}

// Decodes a root whose code is not kRootInfinite.
inline float finite_root(uint32_t code, uint32_t exponent) {
  const uint32_t least = (exponent - 14) << 23, above = least + (code << 19);
  const float subnormal = bits_float(above) - bits_float(least);  // exact
  const uint32_t bits = code < 16 ? float_bits(subnormal) : above - (1u << 23);
  return bits_float(bits);
}

inline float decode_root(uint32_t code, uint32_t exponent) {
  return code == kRootInfinite ? bits_float(0x7f800000u) : finite_root(code, exponent);
}

// A nonzero root never becomes zero, because exp_avg would then be divided by eps alone. Inf, nan and negative roots
// give more than 8 bits and are clamped to kRootInfinite; finite roots give at most 254, see exponent_of. There is no
// conditional between constants: where one such choice depends on another, compilers generate branches, which vectorise
// badly.
inline uint32_t encode_root(float root, uint32_t exponent, uint32_t addend) {
  const uint32_t b = float_bits(root), code = minifloat(b, exponent - 14, addend), least = b < 1 ? b : 1;
  const uint32_t some = code > least ? code : least;
  return some < kRootInfinite ? some : kRootInfinite;
}

// ---- exp_avg -------------------------------------------------------------------------------

constexpr uint32_t kLeastRatio = 124;  // least normal exponent: below 1/4 the steps are 1/128

inline float decode_ratio(uint32_t code) {
  const uint32_t k = code & 127u, above = (kLeastRatio << 23) + (k << 19);
  const float subnormal = bits_float(above) - bits_float(kLeastRatio << 23);
  const uint32_t bits = k < 16 ? float_bits(subnormal) : above - (1u << 23);
  return bits_float(bits | (code & 128u) << 24);
}

// `root` is the decoded root; any number if the code is kRootInfinite.
inline uint32_t encode_ratio(float exp_avg, float root, uint32_t root_code, uint32_t addend) {
  const uint32_t ratio = float_bits(exp_avg / root) & 0x7fffffffu;
  const uint32_t code = minifloat(ratio, kLeastRatio, addend), most = code < 127 ? code : 127;
  const uint32_t k = most & all_if((root_code != 0) & (root_code != kRootInfinite));
  return k | ((float_bits(exp_avg) >> 31 << 7) & all_if(k != 0));
}

inline float decode_exp_avg(uint32_t ratio, float root, uint32_t root_code) {
  const float exp_avg = decode_ratio(ratio) * root;  // exact: 5 bits by 5 bits
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

inline float decode_master(uint32_t param, uint32_t correction, bool is_f16) {
  const uint32_t bf16 = (param << 16) + (signed_8(correction) << 8);
  const uint32_t magnitude = ((param & 0x7fffu) << 8) + signed_8(correction);
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

// Splits a magnitude into parameter and correction. The parameter must be what torch rounds the decoded master to (to
// nearest even), so a tie is never stored: it is moved to one side first.
inline SplitMaster split(uint32_t magnitude, uint32_t side) {
  const uint32_t off = (magnitude & 0xffu) == 0x80 ? magnitude + side - 1 : magnitude;
  return {(off + 0x80u) >> 8, off & 0xffu};
}

// Inf and nan have no correction, nor does a master of 65520 or more with an fp16 parameter, which rounds to inf.
inline SplitMaster encode_master(float master, RoundingBits rounding, bool is_f16) {
  const uint32_t b = float_bits(master), magnitude = b & 0x7fffffffu, sign = b >> 16 & 0x8000u;
  const SplitMaster finite = split(magnitude_of(master, rounding.correction, is_f16), rounding.side);
  const bool lost = is_f16 ? magnitude >= 0x477ff000u : magnitude > 0x7f800000u;
  const uint32_t f16 = sign | (magnitude > 0x7f800000u ? 0x7e00u | (b >> 13 & 0x3ffu) : 0x7c00u);
  return {lost ? is_f16 ? f16 : 0x7fc0u : finite.param | sign, lost ? 0 : finite.correction};
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
