// A gradient that is the sum of several, each of which is there as a whole or as entries (Top-K): csd_summand.
#pragma once
#include <cstdint>

#include "csd.h"

namespace csd {

// Throws CSD_EINVAL for a dtype or runs that there cannot be.
void check_summands(const csd_summand *summands, uint64_t n);

// sum[i] = that of element first + i of all of them, in fp32 and in their order. Throws CSD_EINVAL where entries run
// beyond their words; no index of theirs leads anywhere but into `sum`.
void sum_up(const csd_summand *summands, uint64_t n_summands, uint64_t first, uint64_t n, float *sum, int32_t isa);

// The vectorised loop (summands_loop.h): adds `n` dense values; of the `first` gradient they are the sum.
void add_dense(const void *values, uint32_t dtype, uint64_t n, bool first, float *sum, int32_t isa);

}  // namespace csd
