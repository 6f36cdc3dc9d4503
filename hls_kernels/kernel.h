// Declarations of the kernels, with the arguments that csd_kernel.h describes. The compiler checks each kernel's file
// against them.
#pragma once
#include "word.h"

// For fp32 states: in each direction, as many ports for the tile as the rule's tiles may have sections.
using TwoPorts = void(const Word *tile_in_0, const Word *tile_in_1, const Word *grad, const Word *entries,
                      const Word *segments, Word *tile_out_0, Word *tile_out_1, Word *param, Word *report,
                      uint32_t n_words, uint32_t sections, uint32_t n_segments, uint32_t grad_words,
                      uint32_t entry_words, uint32_t param_words, uint32_t sum_words);
using FourPorts = void(const Word *tile_in_0, const Word *tile_in_1, const Word *tile_in_2, const Word *tile_in_3,
                       const Word *grad, const Word *entries, const Word *segments, Word *tile_out_0, Word *tile_out_1,
                       Word *tile_out_2, Word *tile_out_3, Word *param, Word *report, uint32_t n_words,
                       uint32_t sections, uint32_t n_segments, uint32_t grad_words, uint32_t entry_words,
                       uint32_t param_words, uint32_t sum_words);
extern "C" TwoPorts csd_sgd_update, csd_adagrad_update, csd_lion_update;
extern "C" FourPorts csd_adamw_update, csd_adam_update, csd_rmsprop_update;

// For codes: three ports in each direction.
using ThreePorts = void(const Word *tile_in_0, const Word *tile_in_1, const Word *tile_in_2, const Word *grad,
                        const Word *entries, const Word *segments, Word *tile_out_0, Word *tile_out_1, Word *tile_out_2,
                        Word *param, Word *report, uint32_t n_words, uint32_t sections, uint32_t n_segments,
                        uint32_t grad_words, uint32_t entry_words, uint32_t param_words, uint32_t sum_words);
extern "C" ThreePorts csd_adamw_8bit_update, csd_adam_8bit_update;
