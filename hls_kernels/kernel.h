// The kernels, as csd_kernel.h describes their arguments.
#pragma once
#include "word.h"

extern "C" void csd_adamw_update(const Word *tile_in_0, const Word *tile_in_1, const Word *tile_in_2,
                                 const Word *tile_in_3, const Word *grad, const Word *entries, const Word *segments,
                                 Word *tile_out_0, Word *tile_out_1, Word *tile_out_2, Word *tile_out_3, Word *param,
                                 Word *report, uint32_t n_words, uint32_t sections, uint32_t n_segments,
                                 uint32_t grad_words, uint32_t entry_words, uint32_t param_words, uint32_t sum_words);

extern "C" void csd_adamw_8bit_update(const Word *tile_in_0, const Word *tile_in_1, const Word *tile_in_2,
                                      const Word *grad, const Word *entries, const Word *segments, Word *tile_out_0,
                                      Word *tile_out_1, Word *tile_out_2, Word *param, Word *report, uint32_t n_words,
                                      uint32_t sections, uint32_t n_segments, uint32_t grad_words, uint32_t entry_words,
                                      uint32_t param_words, uint32_t sum_words);
