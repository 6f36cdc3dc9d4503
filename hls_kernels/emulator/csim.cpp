// Calls the kernels as a card would: with addresses and numbers.
#include <exception>
#include <stdexcept>
#include <string>

#include "emulator.h"
#include "kernel.h"

namespace {

// What a register of the kernel holds, as the argument that it stands for. An address is one of a whole word.
const Word *argument(const void *address) {
  if ((uintptr_t)address % kWordBytes) throw std::invalid_argument("an address is not a multiple of 64 bytes");
  return static_cast<const Word *>(address);
}
Word *argument(void *address) { return const_cast<Word *>(argument(static_cast<const void *>(address))); }
uint32_t argument(uint32_t number) { return number; }

template <typename Kernel, typename... Arguments>
const char *run(Kernel kernel, Arguments... arguments) {
  static thread_local std::string why;
  try {
    kernel(argument(arguments)...);
    return nullptr;
  } catch (const std::exception &e) {
    why = e.what();
    return why.c_str();
  }
}

}  // namespace

const char *csd_csim_update(const void *tile_in_0, const void *tile_in_1, const void *tile_in_2, const void *tile_in_3,
                            const void *grad, const void *entries, const void *segments, void *tile_out_0,
                            void *tile_out_1, void *tile_out_2, void *tile_out_3, void *param, void *report,
                            uint32_t n_words, uint32_t sections, uint32_t n_segments, uint32_t grad_words,
                            uint32_t entry_words, uint32_t param_words, uint32_t sum_words) {
  return run(csd_adamw_update, tile_in_0, tile_in_1, tile_in_2, tile_in_3, grad, entries, segments, tile_out_0,
             tile_out_1, tile_out_2, tile_out_3, param, report, n_words, sections, n_segments, grad_words, entry_words,
             param_words, sum_words);
}

const char *csd_csim_8bit_update(const void *tile_in_0, const void *tile_in_1, const void *tile_in_2, const void *grad,
                                 const void *entries, const void *segments, void *tile_out_0, void *tile_out_1,
                                 void *tile_out_2, void *param, void *report, uint32_t n_words, uint32_t sections,
                                 uint32_t n_segments, uint32_t grad_words, uint32_t entry_words, uint32_t param_words,
                                 uint32_t sum_words) {
  return run(csd_adamw_8bit_update, tile_in_0, tile_in_1, tile_in_2, grad, entries, segments, tile_out_0, tile_out_1,
             tile_out_2, param, report, n_words, sections, n_segments, grad_words, entry_words, param_words, sum_words);
}
