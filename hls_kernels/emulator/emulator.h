/* emulator.h -- the FPGA's kernels, compiled by the host's compiler: for tests, and for the emulated card. */
#ifndef CSD_EMULATOR_H
#define CSD_EMULATOR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: from here on this file is read by cffi as it stands. */

/* One run of a kernel, with the arguments it has on a card (csd_kernel.h). Every address is a multiple of 64 bytes.
 * Returns when the run has come to its end: NULL, or why it never would, as text that this thread's next call
 * replaces. Each stage of the kernel is a thread; runs on different memory may overlap. */
const char *csd_csim_update(const void *tile_in_0, const void *tile_in_1, const void *tile_in_2, const void *tile_in_3,
                            const void *grad, const void *entries, const void *segments, void *tile_out_0,
                            void *tile_out_1, void *tile_out_2, void *tile_out_3, void *param, void *report,
                            uint32_t n_words, uint32_t sections, uint32_t n_segments, uint32_t grad_words,
                            uint32_t entry_words, uint32_t param_words, uint32_t sum_words);
const char *csd_csim_8bit_update(const void *tile_in_0, const void *tile_in_1, const void *tile_in_2, const void *grad,
                                 const void *entries, const void *segments, void *tile_out_0, void *tile_out_1,
                                 void *tile_out_2, void *param, void *report, uint32_t n_words, uint32_t sections,
                                 uint32_t n_segments, uint32_t grad_words, uint32_t entry_words, uint32_t param_words,
                                 uint32_t sum_words);

/* The process that XRT starts in place of a card, in sw_emu. Does not return, unless somebody else starts it. */
int csd_emulator_main(void);

/* end of cdef */

#ifdef __cplusplus
}
#endif
#endif
