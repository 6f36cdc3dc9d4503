/* emulator.h -- the FPGA's kernels, compiled by the host's compiler: for tests, and for the emulated card. */
#ifndef CSD_EMULATOR_H
#define CSD_EMULATOR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: hls_kernels/build.py passes everything from here on to cffi as it stands. */

/* Runs a kernel by its name, such as "csd_lion_update", with the arguments that it has on a card (csd_kernel.h):
 * addresses, each a multiple of 64 bytes, and numbers. Returns NULL when the run has finished, or a message why it
 * cannot finish, which this thread's next call replaces. Each stage of the kernel is a thread; runs on different memory
 * may overlap. */
const char *csd_csim_run(const char *kernel, void *const *buffers, const uint32_t *numbers);

/* The main function of the process that XRT starts in place of a card, in sw_emu. Returns only if not started by
 * XRT. */
int csd_emulator_main(void);

/* end of cdef */

#ifdef __cplusplus
}
#endif
#endif
