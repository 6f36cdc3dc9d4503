// No include guard: updater.cpp includes this after updater_loop.h, once per instruction set.

static void add_dense(const void *values, uint32_t dtype, uint64_t n, bool first, float *sum) {
  alignas(64) float wide[kBlock];
  for (uint64_t i = 0; i < n; i += kBlock) {
    const uint64_t some = n - i < kBlock ? n - i : kBlock;
    float *const to = first ? sum + i : wide;
    if (dtype == CSD_F16) widen_f16((const uint16_t *)values + i, to, some);
    else if (dtype == CSD_BF16) widen_bf16((const uint16_t *)values + i, to, some);
    else memcpy(to, (const float *)values + i, 4 * some);
    if (first) continue;
    for (uint64_t j = 0; j < some; j++) sum[i + j] += wide[j];
  }
}
