// Gradients that are the sum of several summands, each dense or as entries (Top-K): csd_summand.
#pragma once
#include <cstdint>

#include "csd.h"

namespace csd {

// Throws CSD_EINVAL if a dtype or the runs are not valid.
void check_summands(const csd_summand *summands, uint64_t n);

// Sets sum[i] to the sum over all summands of element first + i, in fp32 and in the order of the summands. Throws
// CSD_EINVAL if entries exceed their words. Whatever indices entries have, nothing outside of `sum` is written.
void sum_up(const csd_summand *summands, uint64_t n_summands, uint64_t first, uint64_t n, float *sum, int32_t isa);

// The vectorised loop (summands_loop.h): adds `n` dense values to `sum`, or with `first`, stores them there.
void add_dense(const void *values, uint32_t dtype, uint64_t n, bool first, float *sum, int32_t isa);

}  // namespace csd
