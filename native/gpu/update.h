// One step of a rule on parameters whose fp32 states are on the GPU, several parameters in one launch. Compiled once per
// rule: CSD_NUMBER is its number, CSD_RULE its type, CSD_SECTIONS how many sections it updates (rules.h).
//
// Subnormal numbers are zero, as in native/src/float_mode.h: by the processor itself, or with CSD_SOFT by soft.h.
#pragma once
#include "numbers.h"
#include "values.h"

/* cdef */
enum { kRows = 39 }; /* parameters per launch: the arguments of a launch take at most 4096 bytes */

typedef struct UpdateRow {
  const void *grad;
  float *state[4];
  void *param; /* receives the rounded master; NULL: the master is the parameter */
  uint64_t n;
  csd_hyper hyper;
  uint32_t first; /* its first block */
  uint8_t grad_dtype;
  uint8_t link_dtype; /* to which the gradient is rounded first */
  uint8_t param_dtype;
  uint8_t reserved;
} UpdateRow;

typedef struct UpdateArgs {
  uint64_t *nonfinite; /* gradients that are inf or nan are counted here */
  uint64_t rows;
  UpdateRow row[kRows];
} UpdateArgs;
/* end of cdef */
static_assert(sizeof(UpdateArgs) <= 4096, "too many rows");

KERNEL update(const UpdateArgs a) {
  uint32_t r = 0;
  for (uint32_t half = 32; half; half /= 2)
    if (r + half < a.rows && a.row[r + half].first <= blockIdx.x) r += half;
  const UpdateRow &row = a.row[r];
  const CSD_SPACE::CSD_RULE rule(hyper_of<CSD_NUMBER>(row.hyper));
  bool whole = is_multiple(row.grad, kFour * bytes_of(row.grad_dtype)) &&
               is_multiple(row.param, kFour * bytes_of(row.param_dtype));
  for (int s = 0; s < CSD_SECTIONS; s++) whole = whole && is_multiple(row.state[s], sizeof(float) * kFour);
  uint32_t bad = 0;
  const uint64_t begin = (uint64_t)(blockIdx.x - row.first) * kBlockElems;
  const uint64_t end = begin + kBlockElems < row.n ? begin + kBlockElems : row.n;
  for (uint64_t i = begin + threadIdx.x * kFour; i < end; i += kThreads * kFour) {
    float grad[kFour], section[CSD_SECTIONS][kFour];
    load_values(row.grad, row.grad_dtype, i, row.n, whole, grad);
    for (int s = 0; s < CSD_SECTIONS; s++) load(row.state[s] + i, section[s], row.n - i, whole);
    if (row.link_dtype != row.grad_dtype) round_values(grad, row.link_dtype);
    bad += nonfinite(grad);
    UNROLL for (int j = 0; j < kFour; j++) {
      Number state[4];
      for (int s = 0; s < CSD_SECTIONS; s++) state[s] = section[s][j];
      rule.update(state, grad[j]);
      for (int s = 0; s < CSD_SECTIONS; s++) section[s][j] = value_of(state[s]);
    }
    for (int s = 0; s < CSD_SECTIONS; s++) store(section[s], row.state[s] + i, row.n - i, whole);
    if (row.param) store_values(section[0], row.param, row.param_dtype, i, row.n, whole);
  }
  if (bad) atomicAdd((unsigned long long *)a.nonfinite, (unsigned long long)bad);
}
