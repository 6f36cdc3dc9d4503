// The 8-bit code of AdamW's states, element by element. It stands here and nowhere else: the CPU updater and the HLS
// kernel call it. docs/8-bit-states.md says why it is as it is; docs/store-format.md, what of it is in a file.
//
//   root        sqrt(exp_avg_sq): 4 bits of exponent and 4 of mantissa, below an exponent that a group of 64 elements
//               shares; max_exp_avg_sq likewise (its *peak*)
//   ratio       exp_avg / root: sign, 3 bits of exponent, 4 of mantissa. |exp_avg| <= c sqrt(exp_avg_sq) with a c that
//               depends on the betas alone (Cauchy and Schwarz), so it needs no scale; and a root that is too small
//               makes exp_avg smaller with it: the update stays bounded
//   correction  with the 16 bits of the parameter the fp32 master, rounded to 24 bits: in units of 1/256 of the
//               parameter's last place, away from zero. A parameter of fp32 is its own master
//
// All arithmetic is on uint32, which wraps; operations on floats are single IEEE operations, on no subnormal number.
#pragma once
#include <stdint.h>

#include "float16.h"
#include "hash.h"

constexpr uint32_t kGroup = 64;          // elements that share an exponent
constexpr uint32_t kRootInfinite = 255;  // root or moment was inf or nan
constexpr uint32_t kLeastExponent = 90;  // of a group: below, sqrt(exp_avg_sq) is 2^-51 at most

// What is added before bits are cut off, in units of the last of them, and to which side of a tie. The leading bits of
// the three are different bits of the hash.
struct Chance {
  uint32_t root, ratio;  // 19 bits
  uint32_t correction;   // 8 bits
  uint32_t side;         // 0 or 2
};

inline Chance chance_of(uint32_t hash) { return {hash >> 13, hash & 0x7ffffu, hash >> 5 & 0xffu, hash >> 3 & 2u}; }

// For states that are loaded or edited, and for peaks: to nearest.
inline Chance nearest() { return {1u << 18, 1u << 18, 0x80, 0}; }

// All bits, or none: a choice that no compiler makes a branch of, which would not be vectorised.
inline uint32_t all_if(bool condition) { return 0u - (uint32_t)condition; }

// ---- Minifloats: 4 bits of mantissa ------------------------------------------------------

// The magnitude with bits `b` of an fp32 as one whose least normal exponent is `least`, in fp32's bias.
inline uint32_t minifloat(uint32_t b, uint32_t least, uint32_t chance) {
  const uint32_t below = least - (b >> 23);
  const uint32_t normal = b - ((least - 1) << 23);
  const uint32_t subnormal = ((b & 0x7fffffu) | 0x800000u) >> (below < 31 ? below : 31);
  return (((int32_t)below > 0 ? subnormal : normal) + chance) >> 19;
}

// ---- exp_avg_sq ----------------------------------------------------------------------------

// Of a group whose largest finite root has these bits: rounding up does not leave the range.
inline uint32_t exponent_of(uint32_t largest) {
  const uint32_t exponent = (largest + 0x0fffffu) >> 23;
  return exponent > kLeastExponent ? exponent : kLeastExponent;
}

// Of a code that is not kRootInfinite.
inline float finite_root(uint32_t code, uint32_t exponent) {
  const uint32_t least = (exponent - 14) << 23, above = least + (code << 19);
  const float subnormal = bits_float(above) - bits_float(least);  // exact
  const uint32_t bits = code < 16 ? float_bits(subnormal) : above - (1u << 23);
  return bits_float(bits);
}

inline float decode_root(uint32_t code, uint32_t exponent) {
  return code == kRootInfinite ? bits_float(0x7f800000u) : finite_root(code, exponent);
}

// A root that is not zero does not become zero: exp_avg would be divided by eps. Of inf, nan and what is below zero there
// are more than 8 bits; of what is finite at most 254, see exponent_of. No choice between constants: where such a one
// decides another, compilers make paths of it, and vectorise those badly.
inline uint32_t encode_root(float root, uint32_t exponent, uint32_t chance) {
  const uint32_t b = float_bits(root), code = minifloat(b, exponent - 14, chance), least = b < 1 ? b : 1;
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

// `root` is the decoded one, and any number where the code is kRootInfinite.
inline uint32_t encode_ratio(float exp_avg, float root, uint32_t root_code, uint32_t chance) {
  const uint32_t ratio = float_bits(exp_avg / root) & 0x7fffffffu;
  const uint32_t code = minifloat(ratio, kLeastRatio, chance), most = code < 127 ? code : 127;
  const uint32_t k = most & all_if((root_code != 0) & (root_code != kRootInfinite));
  return k | ((float_bits(exp_avg) >> 31 << 7) & all_if(k != 0));
}

inline float decode_exp_avg(uint32_t ratio, float root, uint32_t root_code) {
  const float exp_avg = decode_ratio(ratio) * root;  // exact: 5 bits by 5 bits
  return root_code == kRootInfinite ? 0 : exp_avg;
}

// ---- The master of a parameter of 16 bits ----------------------------------------------------

struct SplitMaster {
  uint32_t param, correction;  // 16 and 8 bits
};

inline uint32_t signed_8(uint32_t correction) { return correction - ((correction & 0x80u) << 1); }

inline float decode_master(uint32_t param, uint32_t correction, bool is_f16) {
  const uint32_t bf16 = (param << 16) + (signed_8(correction) << 8);
  const uint32_t magnitude = ((param & 0x7fffu) << 8) + signed_8(correction);
  const float subnormal = (float)(int32_t)magnitude * 0x1p-32f;  // exact, and no subnormal of fp32
  uint32_t f16 = (magnitude << 5) + ((127u - 15u) << 23);
  f16 = (int32_t)magnitude < 1 << 18 ? float_bits(subnormal) : f16;
  f16 = (param & 0x7fffu) >= 0x7c00u ? 0x7f800000u | (param & 0x3ffu) << 13 : f16;
  return bits_float(is_f16 ? f16 | (param & 0x8000u) << 16 : bf16);
}

// The magnitude of a finite master, cut to 24 bits: in units of the correction.
inline uint32_t magnitude_of(float master, uint32_t chance, bool is_f16) {
  const uint32_t b = float_bits(master) & 0x7fffffffu;
  const uint32_t exponent = b >> 23, below = 113u - exponent;  // fp16 is normal from 2^-14 on
  const uint32_t subnormal = ((b & 0x7fffffu) | 0x800000u) >> (below < 31 ? below : 31);
  const uint32_t x = exponent >= 113 ? b - ((127u - 15u) << 23) : subnormal;
  const uint32_t f16 = (x + (chance >> 3)) >> 5, most = 0x7bff7fu;  // the last that is not rounded to inf
  return is_f16 ? (f16 < most ? f16 : most) : (b + chance) >> 8;
}

// A tie is never stored: the parameter is the nearest to the master, to even, as torch rounds, whatever side the master
// came from.
inline SplitMaster split(uint32_t magnitude, uint32_t side) {
  const uint32_t off = (magnitude & 0xffu) == 0x80 ? magnitude + side - 1 : magnitude;
  return {(off + 0x80u) >> 8, off & 0xffu};
}

// An fp16 parameter is inf from 65520 on, and the master is lost with it.
inline SplitMaster encode_master(float master, Chance chance, bool is_f16) {
  const uint32_t b = float_bits(master), magnitude = b & 0x7fffffffu, sign = b >> 16 & 0x8000u;
  const SplitMaster finite = split(magnitude_of(master, chance.correction, is_f16), chance.side);
  const bool lost = is_f16 ? magnitude >= 0x477ff000u : magnitude > 0x7f800000u;
  const uint32_t f16 = sign | (magnitude > 0x7f800000u ? 0x7e00u | (b >> 13 & 0x3ffu) : 0x7c00u);
  return {lost ? is_f16 ? f16 : 0x7fc0u : finite.param | sign, lost ? 0 : finite.correction};
}

// To nearest, a master that comes with its parameter: one that belongs to it keeps it, also where rounding the master by
// itself would give a neighbour. Another one brings its own.
inline SplitMaster join_master(float master, uint32_t param, bool is_f16) {
  const SplitMaster own = encode_master(master, nearest(), is_f16);
  const uint32_t sign = float_bits(master) >> 16 & 0x8000u, most = is_f16 ? 0x7c00u : 0x7f80u;
  const uint32_t off = magnitude_of(master, nearest().correction, is_f16) - ((param & 0x7fffu) << 8) + 0x80u;
  const uint32_t inside = off < 1 ? 1 : off > 0xff ? 0xff : off;
  const bool belongs = off <= 0x100 && (param & 0x8000u) == sign && (param & 0x7fffu) < most;
  return {belongs ? param : own.param, belongs ? (inside - 0x80u) & 0xffu : own.correction};
}
