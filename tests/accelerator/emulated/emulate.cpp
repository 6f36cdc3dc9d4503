// The kernels of one header of native/gpu/ for the emulated accelerator: does what a GPU's driver does with a module.
//
// CSD_HEADER: the header. CSD_KERNELS: RUN(name) for each of its kernels. See tests/support/emulated_kernels.py.
#include "gpu.h"
#include CSD_HEADER

#include "float_mode.h"

namespace {

#ifdef CSD_KEEPS_SUBNORMALS
constexpr auto kSubnormals = csd::Subnormals::kept;
#else
constexpr auto kSubnormals = csd::Subnormals::zero;
#endif

template <typename Args>
int run(void (*kernel)(const Args), const void *args, uint32_t blocks, uint32_t seed) {
  const csd::FloatMode mode(kSubnormals);
  Args a;
  memcpy(&a, args, sizeof a);
  for (size_t i = 0; i + sizeof(char *) <= sizeof a; i += sizeof(char *)) {  // addresses are aligned
    char *word;
    memcpy(&word, (char *)&a + i, sizeof word);
    word = reach(word);
    memcpy((char *)&a + i, &word, sizeof word);
  }
  fibers::launch(blocks, kThreads, seed, [&] { kernel(a); });
  return 0;
}

}  // namespace

// Runs a kernel to its end. Returns 0, or -1 if the header has no such kernel.
extern "C" int launch(const char *name, const void *args, uint32_t blocks, uint32_t seed, const Memory *memory) {
  device_memory = *memory;
#define RUN(kernel) \
  if (!strcmp(name, #kernel)) return run(kernel, args, blocks, seed);
  CSD_KERNELS
  return -1;
}
