// What host and FPGA say to each other: the memory that one run of the kernel reads and writes. Shared by the back end
// (native/src/device_xrt.cpp), the kernel (hls_kernels/) and their tests. Everything is little-endian and in units of
// one *word*: 512 bits, what a port of the FPGA moves in a cycle.
//
// There is a kernel for each update rule with its variants, a type of rules.h, and for those whose states codes can keep
// (csd_codec) another one; what is said here holds for all of them. A run has segments of its kernel's rule only. Adam's
// takes AdamW's as well.
//
// One run updates one tile, whatever lies in it. Each argument is one linear array, so that the FPGA reads and writes
// long bursts:
//
//   tile      the state: `sections` sections of `n_words` words of 16 fp32 values, one after another; or of codes, which
//             are described below
//   segments  one word for each part of a parameter that has a gradient, in the order of the tile. Elements that lie in
//             no segment keep every bit
//   grad      the gradients of the dense segments in the same order, each from a new word on: 16 fp32 values a word,
//             or 32 of 16 bits
//   param     the rounded masters of all segments, in the same way, in the dtype of the parameter
//   entries   the gradients of the sparse segments (Top-K), see below
//   report    what the kernel has to say: a header, which it writes last, and its sums
#pragma once
#include <stdint.h>

#include "csd.h"

constexpr uint32_t kKernelVersion = 3;  // of all this; a kernel reports its own
constexpr uint32_t kLanes = 16;         // fp32 values in a word
constexpr uint32_t kWordBytes = 4 * kLanes;

struct csd_segment {
  uint32_t first_word;  // of fp32 values: where it begins in each section; segments neither overlap nor share a word
  uint32_t elems;       // at least 1
  uint32_t grad_dtype;  // csd_dtype
  uint32_t param_dtype;
  csd_hyper hyper;
  uint32_t sparse;  // 1: its gradients are among the entries; 16 bits each
  uint32_t key;     // of codes: of the chance of its first element (codec.h); else 0
};
static_assert(sizeof(csd_segment) == kWordBytes, "a segment is one word");

// Entries come in blocks of kBlockElems elements of the tile; every block is there, if need be empty. A block is a
// count (uint32) and that many entries (uint32 each), padded to whole words. An entry is an index into the block in its
// lower half and the 16 bits of the gradient, in the dtype of the segment, in its upper half; indices ascend. Elements
// of sparse segments without an entry have the gradient zero. An entry out of order or beyond the tile is counted in
// `bad_entries` and has no effect. So is, once, a count that runs beyond the words that there are, with all that
// follows it, and so are words after the last block. No words at all are no entries: all those gradients are zero.
constexpr uint32_t kBlockElems = 1 << 16;
constexpr uint32_t kBlockWords = kBlockElems / kLanes;

// The first word of the report.
struct csd_report {
  uint32_t version;    // kKernelVersion
  uint32_t n_words;    // as given: the run has come to its end, and all that it wrote is in memory
  uint32_t nonfinite;  // gradients that are inf or nan, before scaling; their elements were updated all the same
  uint32_t bad_entries;
  uint32_t crc_param;  // CRC-32C of all words of `param`, as they were written
  uint32_t reserved[11];
};
static_assert(sizeof(csd_report) == kWordBytes, "a report begins with one word");

// Each word after it: CRC-32C of the next `sum_words` words of each section, or of what is left of it; 0 for a section
// that there is not. Each sum begins anew.
struct csd_sums {
  uint32_t in[4];   // as it was read
  uint32_t out[4];  // and as it was written
  uint32_t reserved[8];
};
static_assert(sizeof(csd_sums) == kWordBytes, "the sums of a chunk are one word");

constexpr uint32_t kLeastSumWords = 64;  // the least `sum_words`: 4 KiB

// The kernels for fp32. `tile_in` and `tile_out` may be the same memory: a word is read before it is written. Each is
// given several times, once per section that the rule's tiles may have, because that is as many ports, which work at the
// same time; all are the tile's first byte. Those of sections that there are not are not touched.
//
//   csd_adamw_update, csd_adam_update, csd_rmsprop_update
//       (tile_in_0 .. tile_in_3, grad, entries, segments, tile_out_0 .. tile_out_3, param, report,
//        n_words, sections, n_segments, grad_words, entry_words, param_words, sum_words)
//   csd_sgd_update, csd_adagrad_update, csd_lion_update
//       (tile_in_0 .. tile_in_1, grad, entries, segments, tile_out_0 .. tile_out_1, param, report, and so on)

// ---- Codes --------------------------------------------------------------------------------
//
// A tile of codes (csd_codec, codec.h) has `n_words` words of 16 elements, too, a multiple of kPageWords: so many take a
// page of 4 KiB in a section of bytes. A word of such a section is one group of 64 elements; a section of exponents has
// one word for each page, and is filled up to whole pages, which nobody touches. The sections, one after another:
//
//   parameter | correction (16-bit parameters only) | ratio | root | exponent | peak | peak's exponent (AMSGrad only)
//
// so `sections` says all: 4 and 6 with fp32 parameters, 5 and 7 with parameters of 16 bits. A segment begins with a group,
// and has a `param_dtype` of the tile's width; groups in no segment keep every bit. What the last group of a segment has
// beyond its elements is nobody's, and zero. `param` has what the parameter section has of the segments, filled up with
// zeros to whole words.
constexpr uint32_t kPageElems = 4096, kPageWords = kPageElems / kLanes;

// The sums of a chunk of `sum_words` words of 16 elements, a multiple of kPageWords. In the order of a tile that has all
// sections; 0 for one that there is not.
struct csd_coded_sums {
  uint32_t in[8];   // as it was read; the last one is 0
  uint32_t out[8];  // and as it was written
};
static_assert(sizeof(csd_coded_sums) == kWordBytes, "the sums of a chunk are one word");

// The kernels for codes. Again `tile_in` and `tile_out` may be the same memory, and each is given once per port, as the
// tile's first byte: for the parameters, for corrections and ratios, and for all others.
//
//   csd_adamw_8bit_update, csd_adam_8bit_update
//       (tile_in_0 .. tile_in_2, grad, entries, segments, tile_out_0 .. tile_out_2, param, report, and so on)
